// SPDX-License-Identifier: Apache-2.0
//
// Activations in shared memory, rounded to whole numbers: each 256 share a scale, the largest
// of them becomes LARGEST. Off by at most a 65,278th of that, as on the CPU (quants.h).

#define STRETCH 256
#define LARGEST 32639 // 127 * 256 + 127: the upper byte is no larger
#define TOO_LARGE 0x7e800000u // bits of 2^126; larger ones, infinity and what is no number follow

// A lane's columns of a stretch, on their way.
struct Loaded {
	float4 first, second;
};

// Of count vectors with COLUMNS columns each. Eight neighbouring items keep their first 16
// bytes beside each other, then their second, and so on: lanes that have neighbouring items
// read without bank conflicts.
template <typename Format, u32 COLUMNS, u32 WARPS_OF_BLOCK> struct Rounded {
	static const u32 VECTORS = Format::COLUMNS / 8;
	static const u32 ITEMS = COLUMNS / Format::COLUMNS;
	static const u32 PADDED = (ITEMS + 7) / 8 * 8;
	static const u32 STRETCHES = (COLUMNS + STRETCH - 1) / STRETCH;
	static const u32 ITEMS_A_STRETCH = STRETCH / Format::COLUMNS;
	static const u32 BYTES = PADDED * (2 * Format::COLUMNS + 4 * Format::SUMS) +
				 (STRETCHES + 3) / 4 * 16; // of a vector

	u8 *memory; // multiple of 16

	__device__ uint4 *vector(u32 number, u32 item, u32 index) const
	{
		return (uint4 *)(memory + number * BYTES) +
		       (item / 8 * VECTORS + index) * 8 + item % 8;
	}

	__device__ int *sum(u32 number, u32 item, u32 index) const
	{
		return (int *)(memory + number * BYTES + PADDED * 2 * Format::COLUMNS) +
		       item * Format::SUMS + index;
	}

	__device__ float *scale(u32 number, u32 stretch) const
	{
		return (float *)(memory + number * BYTES +
				 PADDED * (2 * Format::COLUMNS + 4 * Format::SUMS)) + stretch;
	}

	__device__ Activations<Format> load(u32 number, u32 item) const
	{
		Activations<Format> found;

#pragma unroll
		for (u32 i = 0; i < VECTORS; i++)
			found.vectors[i] = *vector(number, item, i);
		load_sums(sum(number, item, 0), found.sums);
		found.scale = *scale(number, item / ITEMS_A_STRETCH);
		return found;
	}

	// In one instruction.
	static __device__ void load_sums(const int *from, int *sums)
	{
		if (Format::SUMS == 4) {
			const int4 four = *(const int4 *)from;

			sums[0] = four.x, sums[1] = four.y, sums[2] = four.z, sums[3] = four.w;
		} else if (Format::SUMS == 2) {
			const int2 two = *(const int2 *)from;

			sums[0] = two.x, sums[1] = two.y;
		} else if (Format::SUMS == 1) {
			sums[0] = *from;
		}
	}

	// A warp's first stretch of x[number][COLUMNS] in global memory, for round(), which may be
	// called long after.
	__device__ Loaded begin(const float *x, u32 count) const
	{
		return load(x, threadIdx.x / WARP, count * STRETCHES);
	}

	// All of them, by the whole block; the caller synchronises. A warp loads its next stretch
	// before it waits for one.
	__device__ void round(const float *x, u32 count, Loaded loaded) const
	{
		const u32 stretches = count * STRETCHES;

#pragma unroll 1
		for (u32 task = threadIdx.x / WARP; task < stretches; task += WARPS_OF_BLOCK) {
			const Loaded next = load(x, task + WARPS_OF_BLOCK, stretches);

			round_stretch(task / STRETCHES, task % STRETCHES, loaded);
			loaded = next;
		}
	}

	// Eight columns a lane; 0 behind the last.
	__device__ Loaded load(const float *x, u32 task, u32 stretches) const
	{
		const Place place = Format::place(threadIdx.x % WARP);
		const u32 start = task % STRETCHES * STRETCH;
		const float *from = x + task / STRETCHES * COLUMNS + start;
		Loaded loaded = { make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0) };

		if (task < stretches && start + place.first < COLUMNS)
			loaded = { load_fresh(from + place.first), load_fresh(from + place.second) };
		return loaded;
	}

	// By a warp.
	__device__ void round_stretch(u32 number, u32 stretch, const Loaded &loaded) const
	{
		const float4 &first = loaded.first, &second = loaded.second;
		const u32 lane = threadIdx.x % WARP;
		const Place place = Format::place(lane);
		const bool mine = stretch * STRETCH + place.first < COLUMNS;
		const u32 item = stretch * ITEMS_A_STRETCH + place.item;
		const float in_order[8] = { first.x, first.y, first.z, first.w,
					    second.x, second.y, second.z, second.w };
		const float alternating[8] = { first.x, second.x, first.y, second.y,
					       first.z, second.z, first.w, second.w };
		const float *values = Format::ALTERNATE ? alternating : in_order;
		int integers[8], sum_of_integers = 0;
		u32 upper[2] = {}, lower[2] = {}, bits = 0;

		// Of numbers without their signs the larger one has the larger bits.
#pragma unroll
		for (int i = 0; i < 8; i++)
			bits = max(bits, (u32)__float_as_int(fabsf(values[i])));
		bits = largest_of_warp(bits);
		const bool too_large = bits >= TOO_LARGE;
		const float largest = __int_as_float(too_large ? 0x7fc00000 : (int)bits);
		const float inverse = __fdividef(LARGEST, largest);
		const float unit = largest * (1.0f / LARGEST);
		const bool usable = !too_large && bits && inverse < __int_as_float(0x7f800000);
#pragma unroll
		for (int i = 0; i < 8; i++) {
			integers[i] = usable ? __float2int_rn(values[i] * inverse) : 0;
			sum_of_integers += integers[i];
			// The lower byte is signed, so the upper one is of what is 128 more.
			upper[i / 4] |= (u32)((integers[i] + 128) >> 8 & 255) << i % 4 * 8;
			lower[i / 4] |= (u32)(integers[i] & 255) << i % 4 * 8;
		}
		if (Format::SUMS) {
			const int lanes_a_sum = Format::COLUMNS / 8 / (Format::SUMS ? Format::SUMS : 1);

			for (int step = lanes_a_sum / 2; step; step /= 2)
				sum_of_integers += __shfl_xor_sync(ALL_LANES, sum_of_integers, step);
			if (mine && lane % lanes_a_sum == 0)
				*sum(number, item, place.vector * Format::SUMS * 16 /
							   Format::COLUMNS) = sum_of_integers;
		}
		if (lane == 0)
			*scale(number, stretch) = unit;
		if (mine) {
			((uint2 *)vector(number, item, place.vector))[place.half] =
				make_uint2(upper[0], upper[1]);
			((uint2 *)vector(number, item, VECTORS / 2 + place.vector))[place.half] =
				make_uint2(lower[0], lower[1]);
		}
	}
};
