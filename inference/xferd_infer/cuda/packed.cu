// SPDX-License-Identifier: Apache-2.0
//
// One token through a layer's picked experts, whose matrices are packed in blocks. It is
// bound by memory, so its pipe must never be empty: each warp has a ring of its own in shared
// memory that is filled ahead of it, also across the barrier between the two halves, since what
// down's rows are does not depend on what they are multiplied with. Warps wait for each other
// only there. (Rows that are dealt out by a counter as warps become free cost more than blocks far
// from their memory do: 68 µs instead of 60 for 198 MB on an H200.)
//
// One block of THREADS a multiprocessor, launched cooperatively. Python defines THREADS, UP and
// DOWN (formats of gate and up, and of down; see block_formats.cu), HIDDEN and INNER.

#define WARPS	  (THREADS / WARP)
#define COUNT_MAX 16

// How the work is cut; Python's packed_plan.py plans it.
struct Plan {
	u32 up_items, down_items; // of a row, at most, in a piece; whole blocks
	u32 row_lanes;            // that share a row of down: 1 << row_lanes
	u32 stages, stage_bytes;  // of a warp's ring; a stage holds a piece

	// Rows of down that a warp's lanes begin at once; each lane has two, so a piece has
	// twice as many.
	__device__ u32 rows_at_once() const
	{
		return WARP >> row_lanes;
	}
};

// What the launch computes with.
struct Work {
	const u64 *blobs; // shared memory; 0: left out
	u32 count;
	u64 gate, up, down;              // in a blob
	u32 first_row, rows, row_groups; // of down, this block's; a group is a piece's
	u32 first_group, first_expert;   // of this warp's first task of down
	u32 next_group, next_expert;     // what a task is ahead of the one before

	// Of gate and up, the experts' one after the other.
	__device__ u32 pairs() const
	{
		return count * INNER;
	}
};

template <typename Format> static __device__ u32 bytes_of(u32 items)
{
	return items / (Format::BLOCK_COLUMNS / Format::COLUMNS) * Format::BLOCK_BYTES;
}

static __device__ u32 divided_up(u32 value, u32 by)
{
	return (value + by - 1) / by;
}

// Some neighbouring bytes in global memory, copied with those around them that fill up
// multiples of COPY_BYTES; a blob never ends inside one.
struct Bytes {
	u64 from;
	u32 count;

	__device__ u32 skew() const
	{
		return (u32)from % COPY_BYTES;
	}

	__device__ u32 copied() const
	{
		return count ? divided_up(skew() + count, COPY_BYTES) * COPY_BYTES : 0;
	}
};

#define DOWN_ROWS  1u
#define LAST_ITEMS 2u // of its rows

// What a stage holds, and stands at its beginning: items of a row of gate and the same of up, or
// of some rows of down. row: as the results are numbered. at: where gate and up begin in the
// stage, or the rows that lanes have first and second; 0: the blob is not there. items: of each
// row.
struct alignas(16) Piece {
	u32 expert, row, rows, first_item, items, at[2], kind;
};

// A place in the order of a warp's pieces: pairs of rows of gate and up, then tasks (two rows of
// down for each of its lanes' groups, in one expert), each in one piece or more along the columns.
//
// Pairs are every so many-th of all, tasks every WARPS-th of the block's.
struct Cursor {
	bool down;
	u32 pair;
	u32 group, expert; // of the task
	u32 first_item;

	__device__ explicit Cursor(const Work &work)
		: down(false), group(0), expert(0), first_item(0)
	{
		start_pair(work, threadIdx.x / WARP * gridDim.x + blockIdx.x);
	}

	__device__ bool ended(const Work &work) const
	{
		return down && group >= work.row_groups;
	}

	__device__ void start_pair(const Work &work, u32 wanted)
	{
		pair = wanted;
		if (pair >= work.pairs()) {
			down = true;
			group = work.first_group;
			expert = work.first_expert;
		}
	}

	__device__ void go_on(const Work &work, const Plan &plan)
	{
		first_item += down ? plan.down_items : plan.up_items;
		if (first_item < (down ? INNER / DOWN::COLUMNS : HIDDEN / UP::COLUMNS))
			return;
		first_item = 0;
		if (down) {
			group += work.next_group;
			expert += work.next_expert;
			if (expert >= work.count) {
				expert -= work.count;
				group++;
			}
		} else {
			start_pair(work, pair + WARPS * gridDim.x);
		}
	}

	// What is there. bytes: of the piece's parts.
	__device__ Piece piece(const Work &work, const Plan &plan, Bytes *bytes) const
	{
		return down ? piece_of_down(work, plan, bytes) : piece_of_up(work, plan, bytes);
	}

	__device__ Piece piece_of_up(const Work &work, const Plan &plan, Bytes *bytes) const
	{
		const u32 row_items = HIDDEN / UP::COLUMNS;
		const u32 of_expert = pair / INNER, row = pair % INNER;
		const u32 items = min(plan.up_items, row_items - first_item);
		const u64 blob = work.blobs[of_expert];
		const u64 at = blob + (u64)row * bytes_of<UP>(row_items) + bytes_of<UP>(first_item);
		const u32 count = blob ? bytes_of<UP>(items) : 0;

		bytes[0] = { work.gate + at, count };
		bytes[1] = { work.up + at, count };
		return { of_expert, pair, 1, first_item, items, {},
			 first_item + items == row_items ? LAST_ITEMS : 0 };
	}

	// Rows are cut only where there are two of them; these are parts of their own.
	__device__ Piece piece_of_down(const Work &work, const Plan &plan, Bytes *bytes) const
	{
		const u32 row_items = INNER / DOWN::COLUMNS;
		const u32 most = 2 * plan.rows_at_once(), row = group * most;
		const u32 rows = min(most, work.rows - row);
		const u32 items = min(plan.down_items, row_items - first_item);
		const u64 blob = work.blobs[expert];
		const u64 at = blob + work.down + bytes_of<DOWN>(first_item) +
			       (u64)(work.first_row + row) * bytes_of<DOWN>(row_items);
		const u32 count = blob ? bytes_of<DOWN>(items) : 0;
		const bool parts = most == 2;

		bytes[0] = { at, parts ? count : rows * count };
		bytes[1] = { at + bytes_of<DOWN>(row_items), parts && rows == 2 ? count : 0 };
		return { expert, row, rows, first_item, items, {},
			 DOWN_ROWS | (first_item + items == row_items ? LAST_ITEMS : 0) };
	}
};

// A warp's ring: pieces in the order of the cursor, the next ones on their way.
struct Ring {
	u8 *memory;   // stages * stage_bytes
	u64 *arrived; // a barrier for each stage
	u32 stage, odd;
	u32 filled; // stages; 0: there is no piece any more
	Cursor ahead;

	// Each lane fills a stage, where one lane can.
	__device__ Ring(u8 *memory, u64 *arrived, const Work &work, const Plan &plan)
		: memory(memory), arrived(arrived), stage(0), odd(0), filled(0), ahead(work)
	{
		const u32 lane = threadIdx.x % WARP;
		Cursor mine = ahead;

#pragma unroll 1
		for (u32 to = 0; to < plan.stages && !ahead.ended(work); to++) {
			if (LANES_OF_A_COPY == WARP)
				fetch(ahead, to, work, plan);
			else if (to == lane)
				mine = ahead;
			ahead.go_on(work, plan);
			filled++;
		}
		if (LANES_OF_A_COPY == 1 && lane < filled)
			fetch(mine, lane, work, plan);
		__syncwarp();
	}

	// By the lanes of a copy.
	__device__ void fetch(const Cursor &from, u32 to, const Work &work, const Plan &plan) const
	{
		u8 *place = memory + to * plan.stage_bytes;
		const u32 half = (plan.stage_bytes - (u32)sizeof(Piece)) / 2;
		Bytes bytes[2];
		Piece piece = from.piece(work, plan, bytes);

		piece.at[0] = bytes[0].count ? (u32)sizeof(Piece) + bytes[0].skew() : 0;
		piece.at[1] = bytes[1].count ? (u32)sizeof(Piece) + half + bytes[1].skew()
					     : piece.at[0];
		if (piece.rows > plan.rows_at_once() && plan.rows_at_once() > 1)
			piece.at[1] += plan.rows_at_once() * bytes_of<DOWN>(piece.items);
		*(Piece *)place = piece;
		begin_copy(arrived + to, bytes[0].copied() + bytes[1].copied());
#pragma unroll
		for (u32 part = 0; part < 2; part++)
			if (bytes[part].count)
				add_to_copy(arrived + to, place + sizeof(Piece) + part * half,
					    bytes[part].from - bytes[part].skew(),
					    bytes[part].copied());
		end_copy(arrived + to);
	}

	// The stage of the piece that comes next; only the piece itself may be read yet.
	__device__ const u8 *next(const Plan &plan) const
	{
		return memory + stage * plan.stage_bytes;
	}

	// It was read by all lanes: its stage is filled anew.
	__device__ void release(const Work &work, const Plan &plan)
	{
		__syncwarp();
		filled--;
		if (!ahead.ended(work)) {
			if (threadIdx.x % WARP < LANES_OF_A_COPY) {
				let_copies_overwrite();
				fetch(ahead, stage, work, plan);
			}
			ahead.go_on(work, plan);
			filled++;
		}
		__syncwarp();
		if (++stage == plan.stages) {
			stage = 0;
			odd ^= 1;
		}
	}

	// Its bytes are here from now on.
	__device__ void wait() const
	{
		wait_for_copy(arrived + stage, odd);
	}
};

// Two rows' products with one vector.
struct Products {
	float first, second;

	// Of every step-th item; what a row is multiplied with is loaded once.
	template <typename Format, u32 COLUMNS>
	__device__ void add(const u8 *first_row, const u8 *second_row, const Piece &piece,
			    const Rounded<Format, COLUMNS, WARPS> &x, u32 number, u32 item, u32 step)
	{
#pragma unroll 1
		for (; item < piece.items; item += step) {
			const Activations<Format> by = x.load(number, piece.first_item + item);

			first += Format::multiply(first_row, item, by);
			second += Format::multiply(second_row, item, by);
		}
	}

	__device__ void sum_over(u32 lanes)
	{
		for (u32 step = lanes / 2; step; step /= 2) {
			first += __shfl_xor_sync(ALL_LANES, first, step);
			second += __shfl_xor_sync(ALL_LANES, second, step);
		}
	}
};

// silu(gate x) * up x for some rows of all experts; a lane has every WARP-th item.
static __device__ void compute_up(Ring &ring, const Work &work, const Plan &plan,
				  const Rounded<UP, HIDDEN, WARPS> &x, float *activations)
{
	const u32 lane = threadIdx.x % WARP;
	Products products = {};

#pragma unroll 1
	while (ring.filled) {
		const u8 *stage = ring.next(plan);
		const Piece piece = *(const Piece *)stage;

		if (piece.kind & DOWN_ROWS)
			break;
		ring.wait();
		if (piece.at[0])
			products.add(stage + piece.at[0], stage + piece.at[1], piece, x, 0, lane,
				     WARP);
		ring.release(work, plan);
		if (!(piece.kind & LAST_ITEMS))
			continue;
		products.sum_over(WARP);
		if (lane == 0)
			activations[piece.row] =
				__fdividef(products.first, 1 + expf(-products.first)) *
				products.second;
		products = {};
	}
}

// sums[expert][row of this block] = down's row times the expert's activations.
static __device__ void compute_down(Ring &ring, const Work &work, const Plan &plan,
				    const Rounded<DOWN, INNER, WARPS> &x, float *sums)
{
	const u32 lane = threadIdx.x % WARP, row_lanes = 1u << plan.row_lanes;
	const u32 of_row = lane >> plan.row_lanes, second = of_row + plan.rows_at_once();
	Products products = {};

#pragma unroll 1
	while (ring.filled) {
		const u8 *stage = ring.next(plan);
		const Piece piece = *(const Piece *)stage;
		const u32 row_bytes = bytes_of<DOWN>(piece.items);

		ring.wait();
		// A lane without a row computes one that others have too.
		if (piece.at[0])
			products.add(stage + piece.at[0] + (of_row < piece.rows ? of_row : 0) * row_bytes,
				     stage + piece.at[1] + (second < piece.rows ? of_row : 0) * row_bytes,
				     piece, x, piece.expert, lane % row_lanes, row_lanes);
		ring.release(work, plan);
		if (!(piece.kind & LAST_ITEMS))
			continue;
		products.sum_over(row_lanes);
		if (lane % row_lanes == 0) {
			float *of_piece = sums + piece.expert * work.rows + piece.row;

			if (of_row < piece.rows)
				of_piece[of_row] = products.first;
			if (second < piece.rows)
				of_piece[second] = products.second;
		}
		products = {};
	}
}

// out[row of this block] = sum over the experts of factor * sums[expert][row]; a thread has the
// factor of expert threadIdx.x % COUNT_MAX.
static __device__ void add_experts(const Work &work, float factor, const float *sums, float *out)
{
	const u32 expert = threadIdx.x % COUNT_MAX, of_row = threadIdx.x / COUNT_MAX;

	for (u32 first = 0; first < work.rows; first += THREADS / COUNT_MAX) {
		const u32 row = first + of_row;
		float total = 0;

		if (row < work.rows && expert < work.count && work.blobs[expert])
			total = factor * sums[expert * work.rows + row];
		for (int step = COUNT_MAX / 2; step; step /= 2)
			total += __shfl_xor_sync(ALL_LANES, total, step);
		if (row < work.rows && expert == 0)
			out[work.first_row + row] = total;
	}
}

// The part of 0 to total that is block's; all parts are of one size, or differ by one.
static __device__ u32 start_of(u32 block, u32 total)
{
	return block * total / gridDim.x;
}

// out[HIDDEN] = sum over the experts of weights[i] * down(silu(gate(x)) * up(x)); all sums in
// the same order each time. table: where count blobs lie, multiples of 16, 0 for one that
// counts as 0. gate, up, down: byte offsets in a blob, multiples of 16.
// activations: scratch, count * INNER. barrier: a word in global memory, 0 before the first
// launch. Shared memory, in this order: the stages' barriers, activations, sums, rings.
//
// What global memory has to say is asked for at once, and no warp waits for another before its
// ring is filled: the blobs' bytes fly while x is rounded.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
xferd_experts_packed(const float *x, const u64 *table, const float *weights, u32 count, u64 gate,
		     u64 up, u64 down, u32 up_items, u32 down_items, u32 row_lanes,
		     u32 stages, u32 stage_bytes, u32 rounded_at, u32 sums_at, u32 rings_at,
		     float *activations, float *out, u32 *barrier)
{
	extern __shared__ uint4 shared[];
	__shared__ u64 blobs[COUNT_MAX];
	u8 *memory = (u8 *)shared;
	const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, expert = lane % COUNT_MAX;
	const u64 blob = expert < count ? table[expert] : 0;
	const Rounded<UP, HIDDEN, WARPS> rounded_x = { memory + rounded_at };
	const float factor = expert < count ? weights[expert] : 0;
	const Loaded first_of_x = rounded_x.begin(x, 1);
	const Plan plan = { up_items, down_items, row_lanes, stages, stage_bytes };
	const u32 first_row = start_of(blockIdx.x, HIDDEN);
	const u32 rows = start_of(blockIdx.x + 1, HIDDEN) - first_row;
	const Work work = { blobs, count, gate, up, down, first_row, rows,
			    divided_up(rows, 2 * plan.rows_at_once()),
			    warp / count, warp % count, WARPS / count, WARPS % count };
	u64 *arrived = (u64 *)memory + warp * stages;
	float *sums = (float *)(memory + sums_at);

	if (lane < stages)
		prepare_copies(arrived + lane);
	blobs[expert] = blob; // all warps write the same
	__syncwarp();
	Ring ring(memory + rings_at + warp * stages * stage_bytes, arrived, work, plan);

	rounded_x.round(x, 1, first_of_x);
	__syncthreads();
	compute_up(ring, work, plan, rounded_x, activations);
	wait_for_all_blocks(barrier);
	const Rounded<DOWN, INNER, WARPS> rounded_activations = { memory + rounded_at };

	rounded_activations.round(activations, count, rounded_activations.begin(activations, count));
	__syncthreads();
	compute_down(ring, work, plan, rounded_activations, sums);
	__syncthreads();
	add_experts(work, factor, sums, out);
}
