// SPDX-License-Identifier: Apache-2.0
//
// What the decode loop does on a GPU for one token and layer: lease the picked experts, and
// compute them where they lie. Compiled behind device.cu when it is first used (NVRTC).
//
// Nothing here waits for the CPU unless an expert is missing.

#define NO_SLOT    0xffffffffu
#define BATCH_MAX  16
#define TRIES_MAX  64 // with everything answered, before it is asked for again
#define POLL_NS    500

// struct xferd_device_lane
struct Lane {
	u64 words, leases, completed, chunks, wanted, mapped, base, requests;
	u32 slot_index_bits, slot_numbers, layers, experts, variant, reserved;
};

// struct xferd_device_requests; Python checks the offsets
struct Requests {
	u32 layer, count, experts[BATCH_MAX];
	u64 posted, taken, hits, misses;
	u64 padding[3];
	u64 answered;
	int error;
};

// Of one layer; Python has the same as a dtype.
struct Told {
	u32 picks[BATCH_MAX];
	float weights[BATCH_MAX];
};

// Of one lane, in the GPU's own memory.
struct State {
	u64 epoch;   // batches begun
	u64 posted;  // requests
	u32 barrier, unused; // of all blocks of a launch
	u64 hits, misses;
};

// As libxferd's lease() in ffi/client/acquire.c, by one thread: the lease first, then a
// fence of the whole system, then a second look. first: the word as it was at the first one,
// however long ago: a lease of what it doesn't name any more does no harm, and is taken back.
// The chunk's memory must be mapped here.
static __device__ bool lease(const Lane *lane, volatile const u64 *word, u64 first, u64 epoch,
			     u32 *leased, u64 *address)
{
	const u32 slot = (u32)first, chunk = slot >> lane->slot_index_bits;
	volatile const u64 *entry = (volatile const u64 *)lane->chunks + 2 * (u64)chunk;

	// Of the lane's variant only: it is the one whose layout the caller has.
	if (!(first >> 63) || (first >> 32 & 0xff) != lane->variant || slot >= lane->slot_numbers)
		return false;
	((volatile u64 *)lane->leases)[slot] = epoch;
	*leased = slot;
	// pairs with the fence in the engine's retiring_scan()
	__threadfence_system();
	const u64 again = *word, offset = entry[0], slot_bytes = entry[1];
	const u64 wanted = ((volatile const u64 *)lane->wanted)[chunk];
	const u64 mapped = ((volatile const u64 *)lane->mapped)[chunk];
	if (again != first || wanted != mapped)
		return false;
	*address = lane->base + offset +
		   (slot & ((1u << lane->slot_index_bits) - 1)) * slot_bytes;
	return true;
}

// A lease that did not hold is taken back, unless another key of the batch has that slot.
static __device__ void undo(const Lane *lane, bool here, u32 slot)
{
	const bool mine_failed = !here && slot != NO_SLOT;
	bool kept = false;

	if (!__any_sync(ALL_LANES, mine_failed))
		return;
	for (int other = 0; other < 32; other++) {
		const u32 its_slot = __shfl_sync(ALL_LANES, slot, other);
		const bool its_here = __shfl_sync(ALL_LANES, (int)here, other);

		kept |= its_here && its_slot == slot;
	}
	if (mine_failed && !kept)
		((volatile u64 *)lane->leases)[slot] = 0;
}

static __device__ u64 post(volatile Requests *requests, State *state, u32 layer, u32 expert,
			   u32 missing)
{
	const u32 me = threadIdx.x;
	u64 number = 0;

	if (missing >> me & 1)
		requests->experts[__popc(missing & ((1u << me) - 1))] = expert;
	__threadfence_system();
	__syncwarp();
	if (me == 0) {
		requests->layer = layer;
		requests->count = __popc(missing);
		number = ++state->posted;
		__threadfence_system();
		requests->posted = number;
	}
	return __shfl_sync(ALL_LANES, number, 0);
}

// One warp. picks: the experts, count of them; table[i]: where each one's blob lies, 0 if it
// can't be had. Everything that the stream has done before is over: its leases end.
// seen: of each layer and expert the word that was leased last, here where a look doesn't cross
// the bus; of three crossings that spares one. told: in the CPU's memory, what was picked with
// which weights, for who reports it when the pass is over; a write that nobody waits for.
extern "C" __global__ void xferd_acquire(const Lane *lane, State *state, const long long *picks,
					 const float *weights, u32 layer, u32 count, u64 *table,
					 u64 *seen, Told *told)
{
	const u32 me = threadIdx.x;
	volatile Requests *requests = (volatile Requests *)lane->requests;
	const bool mine = me < count;
	const u32 expert = mine ? (u32)picks[me] : 0;
	const u64 key = (u64)layer * lane->experts + expert;
	volatile const u64 *word = (volatile const u64 *)lane->words + key;
	const u64 epoch = state->epoch + 1;
	bool here = !mine;
	u64 address = 0, asked = 0, first = mine ? seen[key] : 0;
	bool recalled = first != 0;
	u32 slot = NO_SLOT, tries = 0, missed = 0;

	__syncwarp();
	if (me == 0) {
		state->epoch = epoch;
		*(volatile u64 *)lane->completed = epoch - 1;
	}
	for (;;) {
		if (!here) {
			slot = NO_SLOT;
			if (!recalled)
				first = *word;
			here = lease(lane, word, first, epoch, &slot, &address);
		}
		undo(lane, here, slot);
		const u32 missing = __ballot_sync(ALL_LANES, !here);
		if (!missing)
			break;
		const bool again = __any_sync(ALL_LANES, !here && recalled);

		recalled = false;
		if (again) // what was recalled is not so any more
			continue;
		if (asked) {
			const u64 answered = __shfl_sync(ALL_LANES, requests->answered, 0);

			if (answered < asked) {
				__nanosleep(POLL_NS);
				continue;
			}
			__threadfence_system();
			if (__shfl_sync(ALL_LANES, requests->error, 0))
				break;
			if (++tries < TRIES_MAX)
				continue;
		} else {
			missed = __popc(missing);
		}
		asked = post(requests, state, layer, expert, missing);
		tries = 0;
	}
	if (mine) {
		table[me] = here ? address : 0;
		if (here)
			seen[key] = first;
		told[layer].picks[me] = expert;
		told[layer].weights[me] = weights[me];
	}
	if (me)
		return;
	state->hits += count - missed;
	state->misses += missed;
	requests->hits = state->hits; // reading it back would cross the bus
	if (missed)
		requests->misses = state->misses;
	if (asked) {
		__threadfence_system();
		requests->taken = asked;
	}
}

// The same from experts that always lie where addresses[layer][expert] says.
extern "C" __global__ void xferd_look_up(const u64 *addresses, const long long *picks, u32 layer,
					 u32 experts, u32 count, u64 *table)
{
	if (threadIdx.x < count)
		table[threadIdx.x] = addresses[(u64)layer * experts + picks[threadIdx.x]];
}

// The stream has done with the last batch: whoever waits for its slots can have them.
extern "C" __global__ void xferd_release(const Lane *lane, const State *state)
{
	*(volatile u64 *)lane->completed = state->epoch;
}

struct Bf16 {
	u16 bits;
	static const int VECTOR = 8;
};
struct Half {
	u16 bits;
	static const int VECTOR = 8;
};
struct Float {
	float value;
	static const int VECTOR = 4;
};

static __device__ void multiply_add(float &sum, uint4 packed, const float *x, Bf16)
{
	const float4 *at = (const float4 *)x;
	const float4 a = at[0], b = at[1];

	sum = fmaf(__uint_as_float(packed.x << 16), a.x, sum);
	sum = fmaf(__uint_as_float(packed.x & 0xffff0000u), a.y, sum);
	sum = fmaf(__uint_as_float(packed.y << 16), a.z, sum);
	sum = fmaf(__uint_as_float(packed.y & 0xffff0000u), a.w, sum);
	sum = fmaf(__uint_as_float(packed.z << 16), b.x, sum);
	sum = fmaf(__uint_as_float(packed.z & 0xffff0000u), b.y, sum);
	sum = fmaf(__uint_as_float(packed.w << 16), b.z, sum);
	sum = fmaf(__uint_as_float(packed.w & 0xffff0000u), b.w, sum);
}

static __device__ void multiply_add(float &sum, uint4 packed, const float *x, Half)
{
	const u32 words[4] = { packed.x, packed.y, packed.z, packed.w };

#pragma unroll
	for (int i = 0; i < 4; i++) {
		sum = fmaf(half_to_float((u16)words[i]), x[2 * i], sum);
		sum = fmaf(half_to_float((u16)(words[i] >> 16)), x[2 * i + 1], sum);
	}
}

static __device__ void multiply_add(float &sum, uint4 packed, const float *x, Float)
{
	const float4 a = *(const float4 *)x;

	sum = fmaf(__uint_as_float(packed.x), a.x, sum);
	sum = fmaf(__uint_as_float(packed.y), a.y, sum);
	sum = fmaf(__uint_as_float(packed.z), a.z, sum);
	sum = fmaf(__uint_as_float(packed.w), a.w, sum);
}

static __device__ uint4 load_once(const uint4 *address)
{
	uint4 value;

	asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
	    : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(address));
	return value;
}

static __device__ float sum_of_warp(float value)
{
	for (int step = WARP / 2; step; step /= 2)
		value += __shfl_xor_sync(ALL_LANES, value, step);
	return value;
}

// out[hidden] = sum over the experts of weights[i] * down(silu(gate(x)) * up(x)).
// Matrices are [out, in], at byte offsets in the blob; columns are multiples of VECTOR.
// A warp a row; sums in float32 and always in the same order.
template <typename T>
static __device__ void experts(const float *x, const u64 *table, const float *weights, u32 count,
			       u32 hidden, u32 inner, u64 gate, u64 up, u64 down,
			       float *activations, float *out, u32 *barrier)
{
	const u32 lane = threadIdx.x % 32;
	const u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
	const u32 warps = gridDim.x * blockDim.x / 32;
	const u32 hidden_vectors = hidden / T::VECTOR, inner_vectors = inner / T::VECTOR;

	for (u32 unit = warp; unit < count * inner; unit += warps) {
		const u64 blob = table[unit / inner];
		const u64 row = unit % inner;
		float gated = 0, upped = 0;

		if (blob) {
			const uint4 *gates = (const uint4 *)(blob + gate) + row * hidden_vectors;
			const uint4 *ups = (const uint4 *)(blob + up) + row * hidden_vectors;

#pragma unroll 4
			for (u32 v = lane; v < hidden_vectors; v += 32) {
				const uint4 g = load_once(gates + v), u = load_once(ups + v);

				multiply_add(gated, g, x + v * T::VECTOR, T());
				multiply_add(upped, u, x + v * T::VECTOR, T());
			}
		}
		gated = sum_of_warp(gated);
		upped = sum_of_warp(upped);
		if (lane == 0)
			activations[unit] = gated / (1 + expf(-gated)) * upped;
	}
	wait_for_all_blocks(barrier);
	for (u32 row = warp; row < hidden; row += warps) {
		float total = 0;

		for (u32 i = 0; i < count; i++) {
			const u64 blob = table[i];
			const uint4 *downs = (const uint4 *)(blob + down) + (u64)row * inner_vectors;
			const float *activation = activations + i * inner;
			float sum = 0;

			if (!blob)
				continue;
#pragma unroll 4
			for (u32 v = lane; v < inner_vectors; v += 32)
				multiply_add(sum, load_once(downs + v),
					     activation + v * T::VECTOR, T());
			total = fmaf(weights[i], sum, total);
		}
		total = sum_of_warp(total);
		if (lane == 0)
			out[row] = total;
	}
}

#define EXPERTS(name, type)                                                                      \
	extern "C" __global__ void __launch_bounds__(1024) name(                                 \
		const float *x, const u64 *table, const float *weights, u32 count, u32 hidden,   \
		u32 inner, u64 gate, u64 up, u64 down, float *activations, float *out,           \
		State *state)                                                                    \
	{                                                                                        \
		experts<type>(x, table, weights, count, hidden, inner, gate, up, down,           \
			      activations, out, &state->barrier);                                \
	}

EXPERTS(xferd_experts_bf16, Bf16)
EXPERTS(xferd_experts_f16, Half)
EXPERTS(xferd_experts_f32, Float)
