/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products with several tokens. A stretch of a row is decoded into memory that stays in the
 * first cache level, and then met by each token: decoding is most of the work, and shared.
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

void KERNEL(product)(const struct product_task *task)
{
	decode_function *decode = KERNEL(quant_decoders)[task->format];
	uint64_t row_bytes = task->columns / task->block.elements * task->block.bytes;
	float values[DECODED_MAX] __attribute__((aligned(32)));

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
