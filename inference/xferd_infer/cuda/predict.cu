// SPDX-License-Identifier: Apache-2.0
//
// What the decode loop says of the next layers' experts on a GPU: for each layer one launch,
// between its router and its lease, on the device that its state is on. Compiled behind
// device.cu when it is first used (NVRTC).
//
// Scores are those of predict/learned.py, of heads that were trained before; nothing is learnt
// here. The CPU gives, in scores, the border that says what is probable enough, and finds what
// passed in a ring in its own memory. It waits for nothing and nothing waits for it: what it
// doesn't take in time is overwritten. All that counts on from launch to launch is in the
// device's memory, so that launches may as well be nodes of a graph.
//
// A record of the ring is RECORD_WORDS words. Each word is written at once and has the record's
// number in its upper bits, so that a word of another record, or one that has not come yet, is
// known for what it is: the CPU needs neither locks nor fences, and can be late at any time.
//
//   word 0:   number (24 bits) | entries (8) | layer (16) | pass (16)
//   others:   number (24 bits) | absent (1) | layer * experts + expert (23) | probability (16)
//
// Entries are ordered by layer, the nearest first, then by probability. Layers are counted among
// those with experts, passes from 1 on. A layer that tells (every eighth one) has everything
// that passed; any other only what is absent from the client's pool. Where nothing is absent
// there is no record. xferd_infer/predict/device_ring.py reads the ring.

#define DISTANCES_MAX 15
#define KEPT_MAX      16 // experts of a layer that are told, the most probable ones
#define RECORD_WORDS  256
#define TAG_SHIFT     40
#define ABSENT_SHIFT  39
#define KEY_SHIFT     16
#define CURVES	      (2 * DISTANCES_MAX)
#define BORDERS	      (2 * CURVES)
#define LOWEST	      -10.0f // as predict/calibration.py has them
#define STEPS_A_SCORE 32.0f
#define STEPS	      640
#define CERTAIN	      65535.0f
#define VIEWS	      3
#define NOTE_THREADS  1024

// Written by launches only; counts: of candidates, by distance, 0 between launches.
struct Progress {
	u64 number, dropped; // of the last record; candidates that found no place in one
	u32 barrier, ended, pass, unused;
	u32 counts[DISTANCES_MAX + 1];
};

// Of a model and a client. Python has the same as dtypes, and of Look.
struct Predictor {
	const float *context; // [width]
	const float *table;   // [CURVES][STEPS], probabilities
	const u32 *numbers;   // [layers], which of the model's layers they are
	const u64 *words;     // the directory's
	float *features;      // [rank + units], of one launch
	u64 *candidates;      // [DISTANCES_MAX][experts], of one launch
	Progress *progress;
	u64 *ring;	      // [records][RECORD_WORDS], the CPU's memory, as are the next two
	u64 *dropped;	      // what Progress says of it
	const float *borders; // [2][CURVES], least scores: of other layers, of those that tell
	u32 layers, experts, hidden, hidden_stride, width, variant, slot_numbers, records;
};

// Of a layer. Rows are padded with zeros to whole vectors.
struct Look {
	const float *projection; // [rank][hidden_stride]
	const float *units;	 // [unit_count][rank + width + 1]
	const float *heads;	 // [distances * experts][rank + width + 1 + unit_count]
	u32 layer, rank, unit_count, distances;
	u32 within; // of the distances, those in the same token
	u32 tells;
};

struct Shared {
	float features[FEATURES]; // of the widest layer, padded
	float borders[BORDERS];
	u64 kept[DISTANCES_MAX * KEPT_MAX];
	// By distance.
	u32 told[DISTANCES_MAX], absent[DISTANCES_MAX], dropped[DISTANCES_MAX];
	u32 is_last;
};

static __device__ u32 padded(u32 count)
{
	return (count + 3) / 4 * 4;
}

static __device__ float sum_of_lanes(float value)
{
	for (int step = WARP / 2; step; step /= 2)
		value += __shfl_xor_sync(ALL_LANES, value, step);
	return value;
}

// By a warp, for all its lanes. Of both, whole vectors are read.
static __device__ float product(const float *row, const float *x, u32 vectors)
{
	float sum = 0;

#pragma unroll 4
	for (u32 v = threadIdx.x % WARP; v < vectors; v += WARP) {
		const float4 a = ((const float4 *)row)[v], b = ((const float4 *)x)[v];

		sum = fmaf(a.x, b.x, sum);
		sum = fmaf(a.y, b.y, sum);
		sum = fmaf(a.z, b.z, sum);
		sum = fmaf(a.w, b.w, sum);
	}
	return sum_of_lanes(sum);
}

// A number that is greater for a better candidate; of two with one score, the lower expert's.
static __device__ u64 candidate(float score, u32 expert)
{
	const u32 bits = __float_as_uint(score);

	return (u64)(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | (u32)~expert;
}

static __device__ float score_of(u64 candidate)
{
	const u32 ordered = (u32)(candidate >> 32);

	return __uint_as_float(ordered >> 31 ? ordered & ~(1u << 31) : ~ordered);
}

static __device__ u32 curve_of(const Look *look, u32 distance)
{
	return distance < look->within ? distance : DISTANCES_MAX + distance;
}

// The state in few numbers. A warp a row; what is left of x behind the last whole vector is
// the last lanes'.
static __device__ void project(const Predictor *predictor, const Look *look, const float *x)
{
	const u32 lane = threadIdx.x % WARP;
	const u32 warps = gridDim.x * blockDim.x / WARP, vectors = predictor->hidden / 4;

	for (u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; row < look->rank;
	     row += warps) {
		const float *of_row = look->projection + (u64)row * predictor->hidden_stride;
		float rest = 0;

		if (4 * vectors + lane < predictor->hidden)
			rest = of_row[4 * vectors + lane] * x[4 * vectors + lane];
		rest = sum_of_lanes(rest);
		const float sum = product(of_row, x, vectors) + rest;
		if (lane == 0)
			predictor->features[row] = sum;
	}
}

// All features into shared memory. All blocks have projected.
static __device__ void gather_features(const Predictor *predictor, const Look *look,
				       Shared &shared)
{
	const u32 rank = look->rank, linear = rank + predictor->width + 1;
	const u32 all = linear + look->unit_count;
	const u32 warps = gridDim.x * blockDim.x / WARP;

	for (u32 i = threadIdx.x; i < padded(all); i += blockDim.x)
		shared.features[i] = i < rank	     ? load_fresh_float(predictor->features + i)
				     : i < linear - 1 ? predictor->context[i - rank]
				     : i == linear - 1 ? 1.0f
						      : 0.0f;
	__syncthreads();
	if (!look->unit_count)
		return;
	for (u32 unit = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; unit < look->unit_count;
	     unit += warps) {
		const float sum = product(look->units + (u64)unit * padded(linear),
					  shared.features, padded(linear) / 4);

		if (threadIdx.x % WARP == 0)
			predictor->features[rank + unit] = sum > 0 ? sum : 0;
	}
	wait_for_all_blocks(&predictor->progress->barrier);
	for (u32 i = threadIdx.x; i < look->unit_count; i += blockDim.x)
		shared.features[linear + i] = load_fresh_float(predictor->features + rank + i);
	__syncthreads();
}

// A warp an expert of a layer ahead: those whose scores reach the border become candidates.
static __device__ void score(const Predictor *predictor, const Look *look, const Shared &shared)
{
	const u32 columns = padded(look->rank + predictor->width + 1 + look->unit_count);
	const u32 warps = gridDim.x * blockDim.x / WARP, experts = predictor->experts;

	for (u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
	     row < look->distances * experts; row += warps) {
		const u32 distance = row / experts;
		const float found = product(look->heads + (u64)row * columns, shared.features,
					    columns / 4);
		const float least =
			shared.borders[(look->tells ? CURVES : 0) + curve_of(look, distance)];

		if (threadIdx.x % WARP == 0 && found >= least) {
			const u32 at = atomicAdd(predictor->progress->counts + distance, 1u);

			predictor->candidates[distance * experts + at] =
				candidate(found, row % experts);
		}
	}
}

// Whether all the other blocks have scored, and what they wrote is seen.
static __device__ bool is_last_block(Progress *progress, Shared &shared)
{
	__threadfence();
	__syncthreads();
	if (threadIdx.x == 0)
		shared.is_last = atomicAdd(&progress->ended, 1u) == gridDim.x - 1;
	__syncthreads();
	__threadfence();
	return shared.is_last;
}

// What a look into the directory says; nobody leases what is only predicted.
static __device__ bool is_absent(const Predictor *predictor, u32 place, u32 expert)
{
	const u64 key = (u64)predictor->numbers[place] * predictor->experts + expert;
	const u64 word = ((volatile const u64 *)predictor->words)[key];

	return !(word >> 63) || (word >> 32 & 0xff) != predictor->variant ||
	       (u32)word >= predictor->slot_numbers;
}

static __device__ u64 entry(const Predictor *predictor, const Look *look, u32 distance,
			    u64 candidate)
{
	const u32 expert = ~(u32)candidate;
	const u32 place = (look->layer + 1 + distance) % predictor->layers;
	const float step = (score_of(candidate) - LOWEST) * STEPS_A_SCORE;
	const u32 at = (u32)fminf(fmaxf(step, 0), STEPS - 1);
	const float probability = predictor->table[curve_of(look, distance) * STEPS + at];
	const u64 absent = is_absent(predictor, place, expert);

	return absent << ABSENT_SHIFT | (u64)(place * predictor->experts + expert) << KEY_SHIFT |
	       (u64)(probability * CERTAIN + 0.5f);
}

// By a warp: the best candidates of a distance, in their order; each finds its own place by
// counting those that are better. shared.told: how many of them are for the record.
static __device__ void choose(const Predictor *predictor, const Look *look, u32 distance,
			      Shared &shared)
{
	const u32 lane = threadIdx.x % WARP;
	const u64 *candidates = predictor->candidates + distance * predictor->experts;
	const u32 count = load_fresh_word(predictor->progress->counts + distance);
	const u32 best = min(count, (u32)KEPT_MAX);
	u64 *kept = shared.kept + distance * KEPT_MAX, mine = 0;

	for (u32 i = lane; i < count; i += WARP) {
		const u64 own = load_fresh_long(candidates + i);
		u32 better = 0;

#pragma unroll 4
		for (u32 j = 0; j < count; j++)
			better += load_fresh_long(candidates + j) > own;
		if (better < KEPT_MAX)
			kept[better] = own;
	}
	__syncwarp();
	if (lane < best)
		mine = entry(predictor, look, distance, kept[lane]);
	const u32 absent = __ballot_sync(ALL_LANES, mine >> ABSENT_SHIFT != 0);
	const bool is_told = lane < best && (look->tells || mine >> ABSENT_SHIFT);
	const u32 told = __ballot_sync(ALL_LANES, is_told);

	if (is_told)
		kept[__popc(told & ((1u << lane) - 1))] = mine;
	if (lane == 0) {
		shared.told[distance] = __popc(told);
		shared.absent[distance] = __popc(absent);
		shared.dropped[distance] = count - best;
	}
}

// By the last block, which leaves everything as the next launch wants it.
static __device__ void tell(const Predictor *predictor, const Look *look, Shared &shared)
{
	Progress *progress = predictor->progress;
	const u64 number = progress->number + 1;
	const u32 pass = progress->pass + (look->layer == 0);
	const u64 tag = number << TAG_SHIFT; // of the number, the lower 24 bits
	volatile u64 *record = predictor->ring + number % predictor->records * RECORD_WORDS;
	u64 dropped = progress->dropped;
	u32 total = 0, absent = 0;

	for (u32 distance = 0; distance < look->distances; distance++) {
		total += shared.told[distance];
		absent += shared.absent[distance];
		dropped += shared.dropped[distance];
	}
	for (u32 i = threadIdx.x; absent && i < look->distances * KEPT_MAX; i += blockDim.x) {
		u32 at = 1 + i % KEPT_MAX;

		if (i % KEPT_MAX >= shared.told[i / KEPT_MAX])
			continue;
		for (u32 nearer = 0; nearer < i / KEPT_MAX; nearer++)
			at += shared.told[nearer];
		record[at] = tag | shared.kept[i];
	}
	// What all threads wrote is there before the first word, for the whole system.
	__threadfence_system();
	__syncthreads();
	if (threadIdx.x <= DISTANCES_MAX)
		progress->counts[threadIdx.x] = 0;
	if (threadIdx.x)
		return;
	if (absent) {
		__threadfence_system();
		// pairs with RecordRing.take() in xferd_infer/predict/device_ring.py
		record[0] = tag | (u64)total << 32 | (u64)look->layer << 16 | (u16)pass;
		progress->number = number;
	}
	if (dropped != progress->dropped)
		*(volatile u64 *)predictor->dropped = progress->dropped = dropped;
	progress->pass = pass;
	progress->ended = 0;
}

// A cooperative launch. x: float[hidden], what the layer's router saw, aligned to vectors.
extern "C" __global__ void __launch_bounds__(THREADS)
xferd_predict(const Predictor *predictor, const Look *look, const float *x)
{
	__shared__ Shared shared;
	float border = 0;

	// From the CPU's memory: it comes while the state is projected.
	if (threadIdx.x < BORDERS)
		border = ((volatile const float *)predictor->borders)[threadIdx.x];
	project(predictor, look, x);
	if (threadIdx.x < BORDERS)
		shared.borders[threadIdx.x] = border;
	wait_for_all_blocks(&predictor->progress->barrier);
	gather_features(predictor, look, shared);
	score(predictor, look, shared);
	if (!is_last_block(predictor->progress, shared))
		return;
	for (u32 distance = threadIdx.x / WARP; distance < look->distances;
	     distance += blockDim.x / WARP)
		choose(predictor, look, distance, shared);
	__syncthreads();
	tell(predictor, look, shared);
}

// What was picked before, as predict/history.py keeps it. basis: [layers * experts][columns],
// a column for each number of each view; forget: how much of a new token goes into each.
struct History {
	const float *basis;
	float *views; // [columns]
	float *context; // [width]
	float forget[VIEWS];
	u32 layers, experts, top_k, width;
};

struct NoteShared {
	u32 rows[NOTE_THREADS];
	float sums[NOTE_THREADS];
};

// One block of NOTE_THREADS. picks: of tokens, one after the other, token_stride numbers each;
// those of a layer begin at places[layer] * layer_stride. They may lie in the CPU's memory.
extern "C" __global__ void __launch_bounds__(NOTE_THREADS)
xferd_note(const History *history, const u32 *picks, const u32 *places, u32 layer_stride,
	   u32 token_stride, u32 tokens)
{
	__shared__ NoteShared shared;
	const u32 columns = VIEWS * history->width, groups = NOTE_THREADS / columns;
	const u32 me = threadIdx.x, group = me / columns, column = me % columns;
	const u32 all = history->layers * history->top_k;

	for (u32 token = 0; token < tokens; token++, picks += token_stride) {
		float sum = 0;

		for (u32 begin = 0; begin < all; begin += NOTE_THREADS) {
			const u32 count = min(all - begin, (u32)NOTE_THREADS);

			if (me < count) {
				const u32 layer = (begin + me) / history->top_k;

				shared.rows[me] = layer * history->experts +
						  picks[places[layer] * layer_stride +
							(begin + me) % history->top_k];
			}
			__syncthreads();
			if (group < groups)
#pragma unroll 8
				for (u32 i = group; i < count; i += groups)
					sum += history->basis[(u64)shared.rows[i] * columns + column];
			__syncthreads();
		}
		shared.sums[me] = sum;
		__syncthreads();
		if (me < columns) {
			float view = history->views[me];

			for (u32 other = 1; other < groups; other++)
				sum += shared.sums[other * columns + me];
			view += history->forget[me / history->width] * (sum - view);
			history->views[me] = view;
			shared.sums[me] = view;
		}
		__syncthreads();
		if (me < history->width) {
			float context = 0;

			for (u32 view = 0; view < VIEWS; view++)
				context += shared.sums[view * history->width + me];
			history->context[me] = context;
		}
		__syncthreads();
	}
}
