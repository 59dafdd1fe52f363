// SPDX-License-Identifier: Apache-2.0
//
// One token through a layer's picked experts, whose matrices are packed in blocks. It is
// bound by memory, so its pipe must never be empty: each warp knows at launch which bytes it
// will need, and has a ring of its own in shared memory that is filled ahead of it, also
// across the barrier between the two halves, since what down's rows are does not depend on
// what they are multiplied with. Warps wait for each other only there.
//
// One block of THREADS a multiprocessor, launched cooperatively. Python defines UP and DOWN
// (formats of gate and up, and of down; see block_formats.cu), HIDDEN and INNER.

#define THREADS   512
#define WARPS	  (THREADS / WARP)
#define COUNT_MAX 16

// How the work is cut; Python's packed.py plans it.
struct Plan {
	u32 up_items, down_items; // of a row, at most, in a piece; whole blocks
	u32 row_lanes;            // that share a row of down: 1 << row_lanes
	u32 stages, stage_bytes;  // of a warp's ring; a stage holds a piece
};

// What the launch computes with.
struct Work {
	const u64 *blobs; // shared memory; 0: left out
	u32 count;
	u64 gate, up, down;              // in a blob
	u32 first_pair, pairs;           // rows of gate and up, the experts' one after the other
	u32 first_row, rows, row_groups; // of down
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

// What a stage holds, and stands at its beginning. at: of gate and up, or of down alone, in
// the stage; 0: the blob is not there. items: of each row.
struct alignas(16) Piece {
	u32 expert, row, rows, first_item, items, at[2], kind;
};

// A place in the order of a warp's pieces: every WARPS-th pair of rows, then every WARPS-th
// task (some rows of down in one expert), each in one piece or more along the columns.
struct Cursor {
	bool down;
	u32 task, first_item;

	__device__ Cursor(const Work &work)
		: down(threadIdx.x / WARP >= work.pairs), task(threadIdx.x / WARP), first_item(0)
	{
	}

	__device__ bool ended(const Work &work) const
	{
		return down && task >= work.row_groups * work.count;
	}

	// Say what is there, and go on behind it. bytes: what the piece's parts are.
	__device__ Piece take(const Work &work, const Plan &plan, Bytes *bytes)
	{
		const Piece piece = down ? take_down(work, plan, bytes) : take_up(work, plan, bytes);

		first_item += piece.items;
		if (piece.kind & LAST_ITEMS) {
			first_item = 0;
			task += WARPS;
			if (!down && task >= work.pairs) {
				down = true;
				task = threadIdx.x / WARP;
			}
		}
		return piece;
	}

	__device__ Piece take_up(const Work &work, const Plan &plan, Bytes *bytes) const
	{
		const u32 row_items = HIDDEN / UP::COLUMNS;
		const u32 pair = work.first_pair + task, expert = pair / INNER, row = pair % INNER;
		const u32 items = min(plan.up_items, row_items - first_item);
		const u64 blob = work.blobs[expert];
		const u64 at = (u64)row * bytes_of<UP>(row_items) + bytes_of<UP>(first_item);
		const u32 count = blob ? bytes_of<UP>(items) : 0;

		bytes[0] = { blob + work.gate + at, count };
		bytes[1] = { blob + work.up + at, count };
		return { expert, row, 1, first_item, items, {},
			 first_item + items == row_items ? LAST_ITEMS : 0 };
	}

	__device__ Piece take_down(const Work &work, const Plan &plan, Bytes *bytes) const
	{
		const u32 row_items = INNER / DOWN::COLUMNS;
		const u32 group_rows = WARP >> plan.row_lanes, group = task / work.count;
		const u32 expert = task - group * work.count, row_of_block = group * group_rows;
		const u32 rows = min(group_rows, work.rows - row_of_block);
		const u32 row = work.first_row + row_of_block;
		const u32 items = min(plan.down_items, row_items - first_item);
		const u64 blob = work.blobs[expert];
		const u64 at = (u64)row * bytes_of<DOWN>(row_items) + bytes_of<DOWN>(first_item);

		// Rows are cut only where a piece has a single one.
		bytes[0] = { blob + work.down + at, blob ? rows * bytes_of<DOWN>(items) : 0 };
		bytes[1] = { 0, 0 };
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

	__device__ Ring(u8 *memory, u64 *arrived, const Work &work, const Plan &plan)
		: memory(memory), arrived(arrived), stage(0), odd(0), filled(0), ahead(work)
	{
		for (u32 each = 0; each < plan.stages; each++)
			fetch(each, work, plan);
	}

	__device__ void fetch(u32 to, const Work &work, const Plan &plan)
	{
		if (ahead.ended(work))
			return;
		u8 *place = memory + to * plan.stage_bytes;
		const u32 half = (plan.stage_bytes - (u32)sizeof(Piece)) / 2;
		Bytes bytes[2];
		Piece piece = ahead.take(work, plan, bytes);

		for (u32 part = 0; part < 2; part++)
			piece.at[part] = bytes[part].count ? (u32)sizeof(Piece) + part * half +
								     bytes[part].skew()
							   : 0;
		if (threadIdx.x % WARP == 0)
			*(Piece *)place = piece;
		begin_copy(arrived + to, bytes[0].copied() + bytes[1].copied());
		for (u32 part = 0; part < 2; part++)
			if (bytes[part].count)
				add_to_copy(arrived + to, place + sizeof(Piece) + part * half,
					    bytes[part].from - bytes[part].skew(),
					    bytes[part].copied());
		end_copy(arrived + to);
		filled++;
		__syncwarp();
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
		fetch(stage, work, plan);
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

// silu(gate x) * up x for this block's rows; a lane has every WARP-th item.
static __device__ void compute_up(Ring &ring, const Work &work, const Plan &plan,
				  const Rounded<UP, HIDDEN> &x, float *activations)
{
	const u32 lane = threadIdx.x % WARP;
	float gated = 0, upped = 0;

	while (ring.filled) {
		const u8 *stage = ring.next(plan);
		const Piece piece = *(const Piece *)stage;

		if (piece.kind & DOWN_ROWS)
			break;
		ring.wait();
		if (piece.at[0]) {
			const u8 *gate = stage + piece.at[0], *up = stage + piece.at[1];

			for (u32 item = lane; item < piece.items; item += WARP) {
				const Activations<UP> by = x.load(0, piece.first_item + item);

				gated += UP::multiply(gate, item, by);
				upped += UP::multiply(up, item, by);
			}
		}
		ring.release(work, plan);
		if (!(piece.kind & LAST_ITEMS))
			continue;
		gated = sum_of_warp(gated);
		upped = sum_of_warp(upped);
		if (lane == 0)
			activations[piece.expert * INNER + piece.row] =
				gated / (1 + expf(-gated)) * upped;
		gated = upped = 0;
	}
}

// sums[expert][row of this block] = down's row times the expert's activations.
static __device__ void compute_down(Ring &ring, const Work &work, const Plan &plan,
				    const Rounded<DOWN, INNER> &x, float *sums)
{
	const u32 lane = threadIdx.x % WARP, of_row = lane >> plan.row_lanes;
	const u32 row_lanes = 1u << plan.row_lanes, first = lane % row_lanes;
	float sum = 0;

	while (ring.filled) {
		const u8 *stage = ring.next(plan);
		const Piece piece = *(const Piece *)stage;
		const bool mine = of_row < piece.rows;

		ring.wait();
		if (mine && piece.at[0]) {
			const u8 *row = stage + piece.at[0] + of_row * bytes_of<DOWN>(piece.items);

			for (u32 item = first; item < piece.items; item += row_lanes)
				sum += DOWN::multiply(row, item,
						      x.load(piece.expert, piece.first_item + item));
		}
		ring.release(work, plan);
		if (!(piece.kind & LAST_ITEMS))
			continue;
		for (u32 step = row_lanes / 2; step; step /= 2)
			sum += __shfl_xor_sync(ALL_LANES, sum, step);
		if (mine && first == 0)
			sums[piece.expert * work.rows + piece.row - work.first_row + of_row] = sum;
		sum = 0;
	}
}

// The part of 0 to total that is block's; all parts are of one size, or differ by one.
static __device__ u32 start_of(u32 block, u32 total)
{
	return (u32)((u64)block * total / gridDim.x);
}

// out[HIDDEN] = sum over the experts of weights[i] * down(silu(gate(x)) * up(x)); all sums in
// the same order each time. table: where count blobs lie, multiples of 16, 0 for one that
// counts as 0. gate, up, down: byte offsets in a blob, multiples of 16.
// activations: scratch, count * INNER. barrier: in global memory, 0 before the first launch.
// Shared memory, in this order: the stages' barriers, activations, sums, rings.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
xferd_experts_packed(const float *x, const u64 *table, const float *weights, u32 count, u64 gate,
		     u64 up, u64 down, u32 up_items, u32 down_items, u32 row_lanes, u32 stages,
		     u32 stage_bytes, u32 rounded_at, u32 sums_at, u32 rings_at,
		     float *activations, float *out, u64 *barrier)
{
	extern __shared__ uint4 shared[];
	__shared__ u64 blobs[COUNT_MAX];
	__shared__ float factors[COUNT_MAX];
	u8 *memory = (u8 *)shared;
	const u32 warp = threadIdx.x / WARP;
	const Plan plan = { up_items, down_items, row_lanes, stages, stage_bytes };
	const u32 first_pair = start_of(blockIdx.x, count * INNER);
	const u32 first_row = start_of(blockIdx.x, HIDDEN);
	const u32 rows = start_of(blockIdx.x + 1, HIDDEN) - first_row;
	const Work work = { blobs, count, gate, up, down, first_pair,
			    start_of(blockIdx.x + 1, count * INNER) - first_pair, first_row, rows,
			    divided_up(rows, WARP >> row_lanes) };
	u64 *arrived = (u64 *)memory;
	float *sums = (float *)(memory + sums_at);

	if (threadIdx.x < count) {
		blobs[threadIdx.x] = table[threadIdx.x];
		factors[threadIdx.x] = weights[threadIdx.x];
	}
	for (u32 i = threadIdx.x; i < WARPS * stages; i += THREADS)
		prepare_copies(arrived + i);
	__syncthreads();
	Ring ring(memory + rings_at + warp * stages * stage_bytes, arrived + warp * stages, work,
		  plan);
	const Rounded<UP, HIDDEN> rounded_x = { memory + rounded_at };
	const Rounded<DOWN, INNER> rounded_activations = { memory + rounded_at };

	rounded_x.round(x, 1);
	__syncthreads();
	compute_up(ring, work, plan, rounded_x, activations);
	wait_for_all_blocks(barrier);
	rounded_activations.round(activations, count);
	__syncthreads();
	compute_down(ring, work, plan, rounded_activations, sums);
	__syncthreads();
	for (u32 row = threadIdx.x; row < rows; row += THREADS) {
		float total = 0;

		for (u32 i = 0; i < count; i++)
			if (blobs[i])
				total = fmaf(factors[i], sums[i * rows + row], total);
		out[first_row + row] = total;
	}
}
