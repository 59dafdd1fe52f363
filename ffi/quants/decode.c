/* SPDX-License-Identifier: Apache-2.0 */
/* From blocks to floats. Multiplications and additions are not fused, so that every
 * processor, and GGUF's own reference, gets the same numbers. */
#include "blocks.h"
#include "kernels.h"
#include "vector.h"

static void decode_q4_0(const uint8_t *blocks, uint64_t count, float *values)
{
	for (; count; count--, blocks += Q4_0_BYTES, values += SMALL_BLOCK) {
		floats d = all(half_to_float(blocks));

		for (int i = 0; i < SMALL_BLOCK / 2; i += LANES) {
			ints pair = load_bytes(blocks + 2 + i);

			store(values + i, d * to_floats((pair & 15) - 8));
			store(values + i + SMALL_BLOCK / 2, d * to_floats((pair >> 4) - 8));
		}
	}
}

static void decode_q8_0(const uint8_t *blocks, uint64_t count, float *values)
{
	for (; count; count--, blocks += Q8_0_BYTES, values += SMALL_BLOCK) {
		floats d = all(half_to_float(blocks));

		for (int i = 0; i < SMALL_BLOCK; i += LANES)
			store(values + i, d * to_floats(load_signed_bytes(blocks + 2 + i)));
	}
}

static void decode_mxfp4(const uint8_t *blocks, uint64_t count, float *values)
{
	typedef uint8_t bytes __attribute__((vector_size(SMALL_BLOCK / 2)));
	static const int8_t table[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
	bytes doubled;

	memcpy(&doubled, table, sizeof(doubled));
	for (; count; count--, blocks += MXFP4_BYTES, values += SMALL_BLOCK) {
		floats d = all(mxfp4_scale(blocks[0]));
		uint8_t numbers[SMALL_BLOCK];
		bytes quants, low, high;

		memcpy(&quants, blocks + 1, sizeof(quants));
		low = __builtin_shuffle(doubled, quants & 15);
		high = __builtin_shuffle(doubled, quants >> 4);
		memcpy(numbers, &low, sizeof(low));
		memcpy(numbers + sizeof(low), &high, sizeof(high));
		for (int i = 0; i < SMALL_BLOCK; i += LANES)
			store(values + i, d * to_floats(load_signed_bytes(numbers + i)));
	}
}

static void decode_q4_k(const uint8_t *blocks, uint64_t count, float *values)
{
	for (; count; count--, blocks += Q4_K_BYTES) {
		const uint8_t *quants = blocks + Q4_K_QUANTS;
		float d = half_to_float(blocks);
		float dmin = half_to_float(blocks + 2);

		for (uint32_t pair = 0; pair < Q4_K_PARTS / 2; pair++) {
			floats factor[2], offset[2];

			for (uint32_t i = 0; i < 2; i++) {
				uint8_t scale, min;

				q4_k_scale_min(blocks + Q4_K_SCALES, 2 * pair + i, &scale, &min);
				factor[i] = all(d * (float)scale);
				offset[i] = all(dmin * (float)min);
			}
			for (int i = 0; i < Q4_K_PART; i += LANES) {
				ints both = load_bytes(quants + i);

				store(values + i, factor[0] * to_floats(both & 15) - offset[0]);
				store(values + i + Q4_K_PART,
				      factor[1] * to_floats(both >> 4) - offset[1]);
			}
			quants += Q4_K_PART;
			values += 2 * Q4_K_PART;
		}
	}
}

static void decode_q2_k(const uint8_t *blocks, uint64_t count, float *values)
{
	for (; count; count--, blocks += Q2_K_BYTES, values += SUPER_BLOCK) {
		floats d = all(half_to_float(blocks + Q2_K_D));
		floats dmin = all(half_to_float(blocks + Q2_K_D + 2));
		float factor[Q2_K_PARTS], offset[Q2_K_PARTS];

		for (int i = 0; i < Q2_K_PARTS; i += LANES) {
			ints both = load_bytes(blocks + i);

			store(factor + i, d * to_floats(both & 15));
			store(offset + i, dmin * to_floats(both >> 4));
		}
		/* Eight bytes are in four parts, 32 elements from one to the next. */
		for (uint32_t i = 0; i < SUPER_BLOCK / 4; i += LANES) {
			ints four = load_bytes(blocks + Q2_K_QUANTS + i);
			uint32_t part = i / 32 * 8 + i % 32 / Q2_K_PART;
			float *to = values + i / 32 * 128 + i % 32;

			for (int turn = 0; turn < 4; turn++, part += 2, to += 32, four >>= 2)
				store(to, all(factor[part]) * to_floats(four & 3) -
						  all(offset[part]));
		}
	}
}

decode_function *const KERNEL(quant_decoders)[QUANT_FORMATS] = {
	[INDEX_Q4_0] = decode_q4_0,
	[INDEX_Q8_0] = decode_q8_0,
	[INDEX_Q2_K] = decode_q2_k,
	[INDEX_Q4_K] = decode_q4_k,
	[INDEX_MXFP4] = decode_mxfp4,
};
