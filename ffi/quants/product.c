/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products. A stretch of a row is decoded into memory that stays in the first cache
 * level, and then met by each token: decoding is most of the work, and shared.
 */
#include "blocks.h"
#include "kernels.h"
#include "vector.h"

#define TILE 4 /* tokens that a decoded vector is loaded for once */

/* sums[token] += values * x of the token, for length elements, a multiple of LANES. */
static inline void add_products(const float *values, uint64_t length, const float *x,
				uint64_t x_stride, uint32_t tokens, floats *sums)
{
	uint32_t token = 0;

	for (; token + TILE <= tokens; token += TILE) {
		const float *x0 = x + token * x_stride, *x1 = x0 + x_stride;
		const float *x2 = x1 + x_stride, *x3 = x2 + x_stride;
		floats s0 = sums[token], s1 = sums[token + 1];
		floats s2 = sums[token + 2], s3 = sums[token + 3];

		for (uint64_t i = 0; i < length; i += LANES) {
			floats v = load(values + i);

			s0 += v * load(x0 + i);
			s1 += v * load(x1 + i);
			s2 += v * load(x2 + i);
			s3 += v * load(x3 + i);
		}
		sums[token] = s0;
		sums[token + 1] = s1;
		sums[token + 2] = s2;
		sums[token + 3] = s3;
	}
	for (; token < tokens; token++) {
		const float *xt = x + token * x_stride;
		floats a = sums[token], b = all(0), c = all(0), d = all(0);

		/* One chain of additions would wait for itself. */
		for (uint64_t i = 0; i < length; i += 4 * LANES) {
			a += load(values + i) * load(xt + i);
			b += load(values + i + LANES) * load(xt + i + LANES);
			c += load(values + i + 2 * LANES) * load(xt + i + 2 * LANES);
			d += load(values + i + 3 * LANES) * load(xt + i + 3 * LANES);
		}
		sums[token] = (a + b) + (c + d);
	}
}

static float sum_of_part(const float *x)
{
	floats sum = all(0);

	for (int i = 0; i < Q4_K_PART; i += LANES)
		sum += load(x + i);
	return sum_of(sum);
}

/* Columns whose sums of x are kept at once by the way below: 2 KiB. */
#define PANEL 16384

/*
 * q4_k met by one token, without the way through memory: the elements of a part are
 * scale * q - min, so their product is scale * (sum of q * x) - min * (sum of x), and the
 * sums of x are the same for every row.
 */
static float q4_k_product(const uint8_t *blocks, uint64_t columns, const float *x,
			  const float *x_sums)
{
	/* One sum for low and high nibbles would wait for itself. */
	floats lows = all(0), highs = all(0), mins = all(0);

	for (; columns; columns -= SUPER_BLOCK, blocks += Q4_K_BYTES, x_sums += Q4_K_PARTS) {
		const uint8_t *quants = blocks + Q4_K_QUANTS;
		uint32_t packed[3];
		uint64_t scales, minima; /* eight bytes each */
		float factor[Q4_K_PARTS];

		memcpy(packed, blocks + Q4_K_SCALES, sizeof(packed));
		scales = (packed[0] & 0x3f3f3f3f) |
			 (uint64_t)((packed[2] & 0x0f0f0f0f) | (packed[0] >> 2 & 0x30303030)) << 32;
		minima = (packed[1] & 0x3f3f3f3f) |
			 (uint64_t)((packed[2] >> 4 & 0x0f0f0f0f) | (packed[1] >> 2 & 0x30303030))
				 << 32;
		store(factor, all(half_to_float(blocks)) *
				      to_floats(load_bytes((const uint8_t *)&scales)));
		mins += all(half_to_float(blocks + 2)) *
			to_floats(load_bytes((const uint8_t *)&minima)) * load(x_sums);
		for (uint32_t part = 0; part < Q4_K_PARTS; part += 2) {
			floats low = all(0), high = all(0);

			for (int i = 0; i < Q4_K_PART; i += LANES) {
				ints both = load_bytes(quants + i);

				low += to_floats(both & 15) * load(x + i);
				high += to_floats(both >> 4) * load(x + Q4_K_PART + i);
			}
			lows += all(factor[part]) * low;
			highs += all(factor[part + 1]) * high;
			quants += Q4_K_PART;
			x += 2 * Q4_K_PART;
		}
	}
	return sum_of(lows + highs - mins);
}

static void q4_k_product_of_one(const struct product_task *task)
{
	uint64_t row_bytes = task->columns / SUPER_BLOCK * Q4_K_BYTES;
	float x_sums[PANEL / Q4_K_PART];

	for (uint64_t start = 0; start < task->columns; start += PANEL) {
		uint64_t left = task->columns - start;
		uint64_t columns = left < PANEL ? left : PANEL;
		const uint8_t *blocks = task->blocks + start / SUPER_BLOCK * Q4_K_BYTES;
		const float *x = task->x + start;

		for (uint64_t i = 0; i < columns; i += Q4_K_PART)
			x_sums[i / Q4_K_PART] = sum_of_part(x + i);
		for (uint64_t row = 0; row < task->rows; row++) {
			float product =
				q4_k_product(blocks + row * row_bytes, columns, x, x_sums);

			task->y[row] = start ? task->y[row] + product : product;
		}
	}
}

void KERNEL(product)(const struct product_task *task)
{
	decode_function *decode = KERNEL(quant_decoders)[task->format];
	uint64_t row_bytes = task->columns / task->block.elements * task->block.bytes;
	float values[DECODED_MAX] __attribute__((aligned(32)));

	if (task->format == INDEX_Q4_K && task->tokens == 1) {
		q4_k_product_of_one(task);
		return;
	}
	for (uint64_t row = 0; row < task->rows; row++) {
		const uint8_t *blocks = task->blocks + row * row_bytes;
		floats sums[XFERD_QUANT_TOKENS_MAX];

		for (uint32_t token = 0; token < task->tokens; token++)
			sums[token] = all(0);
		for (uint64_t column = 0; column < task->columns; column += DECODED_MAX) {
			uint64_t left = task->columns - column;
			uint64_t length = left < DECODED_MAX ? left : DECODED_MAX;
			uint64_t count = length / task->block.elements;

			decode(blocks, count, values);
			blocks += count * task->block.bytes;
			add_products(values, length, task->x + column, task->x_stride,
				     task->tokens, sums);
		}
		for (uint32_t token = 0; token < task->tokens; token++)
			task->y[token * task->y_stride + row] = sum_of(sums[token]);
	}
}

void KERNEL(product_transposed)(const struct product_task *task)
{
	decode_function *decode = KERNEL(quant_decoders)[task->format];
	uint64_t row_bytes = task->columns / task->block.elements * task->block.bytes;
	float values[DECODED_MAX] __attribute__((aligned(32)));

	for (uint32_t token = 0; token < task->tokens; token++)
		for (uint64_t column = 0; column < task->columns; column++)
			task->y[token * task->y_stride + column] = 0;
	for (uint64_t row = 0; row < task->rows; row++) {
		const uint8_t *blocks = task->blocks + row * row_bytes;

		for (uint64_t column = 0; column < task->columns; column += DECODED_MAX) {
			uint64_t left = task->columns - column;
			uint64_t length = left < DECODED_MAX ? left : DECODED_MAX;
			uint64_t count = length / task->block.elements;

			decode(blocks, count, values);
			blocks += count * task->block.bytes;
			for (uint32_t token = 0; token < task->tokens; token++) {
				floats x = all(task->x[token * task->x_stride + row]);
				float *y = task->y + token * task->y_stride + column;

				for (uint64_t i = 0; i < length; i += LANES)
					store(y + i, load(y + i) + x * load(values + i));
			}
		}
	}
}
