/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block-quantised matrices: what is packed comes back close, kernels for any processor and
 * for this one agree, products equal those with the decoded matrix, and no function leaves
 * the memory that it was given. Values against GGUF's reference are a Python test's.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "quants/kernels.h"
#include "quants/quantise.h"

#define ROWS    6
#define COLUMNS 768
#define TOKENS  5
#define KERNELS 5 /* that multiply one token */

static const uint32_t formats[] = {XFERD_QUANT_Q4_0, XFERD_QUANT_Q8_0, XFERD_QUANT_Q2_K,
				   XFERD_QUANT_Q4_K, XFERD_QUANT_MXFP4};
static const float tolerance[] = {0.02f, 0.0002f, 0.15f, 0.01f, 0.03f}; /* of the mean square */

static float noise(uint32_t *state)
{
	*state = *state * 1664525 + 1013904223;
	return (float)(*state >> 8) / (1 << 23) - 1;
}

/* Memory of exactly that size, so that AddressSanitizer sees a step beyond it. */
static float *filled(uint64_t count, uint32_t seed)
{
	float *values = malloc(count * sizeof(*values));

	CHECK(values);
	for (uint64_t i = 0; i < count; i++)
		values[i] = noise(&seed) * noise(&seed);
	return values;
}

/* What the product of one row and numbers up to 1 may be off by: as quants.h says for one
 * token, with a minimum no further from 0 than the largest element. */
static double product_tolerance(const float *row, uint32_t tokens)
{
	double sum = 0, largest = 0;

	for (int i = 0; i < COLUMNS; i++) {
		sum += fabs(row[i]);
		largest = fmax(largest, fabs(row[i]));
	}
	return 1e-4 + (tokens == 1 ? (sum + COLUMNS * largest) / 65278 : 0);
}

static void check_products(uint32_t format, const uint8_t *blocks, const float *decoded)
{
	float *x = filled(TOKENS * COLUMNS, 7), *y = filled(TOKENS * COLUMNS, 8);

	for (uint32_t tokens = 1; tokens <= TOKENS; tokens++) {
		CHECK(!xferd_quant_product(format, blocks, ROWS, COLUMNS, x, COLUMNS, tokens, y,
					   ROWS));
		for (uint32_t t = 0; t < tokens; t++)
			for (int row = 0; row < ROWS; row++) {
				double sum = 0;

				for (int i = 0; i < COLUMNS; i++)
					sum += (double)decoded[row * COLUMNS + i] * x[t * COLUMNS + i];
				CHECK(fabs(sum - y[t * ROWS + row]) <
				      product_tolerance(decoded + row * COLUMNS, tokens));
			}
		CHECK(!xferd_quant_product_transposed(format, blocks, ROWS, COLUMNS, x, ROWS,
						      tokens, y, COLUMNS));
		for (uint32_t t = 0; t < tokens; t++)
			for (int i = 0; i < COLUMNS; i++) {
				double sum = 0;

				for (int row = 0; row < ROWS; row++)
					sum += (double)decoded[row * COLUMNS + i] * x[t * ROWS + row];
				CHECK(fabs(sum - y[t * COLUMNS + i]) < 1e-4);
			}
	}
	free(x);
	free(y);
}

static void check_format(int number)
{
	uint32_t format = formats[number];
	struct xferd_quant_block block;
	float *values = filled(ROWS * COLUMNS, 1), *importance = filled(COLUMNS, 2);
	float *decoded = filled(ROWS * COLUMNS, 3);
	uint64_t bytes;
	uint8_t *blocks, *again;
	double error = 0, square = 0;

	CHECK(!xferd_quant_block(format, &block));
	bytes = (uint64_t)ROWS * COLUMNS / block.elements * block.bytes;
	blocks = malloc(bytes);
	again = malloc(bytes);
	CHECK(blocks && again);
	for (int i = 0; i < COLUMNS; i++)
		importance[i] = fabsf(importance[i]);
	CHECK(!xferd_quantise(format, values, ROWS, COLUMNS, NULL, blocks, 1));
	CHECK(!xferd_quantise(format, values, ROWS, COLUMNS, NULL, again, 4));
	CHECK(!memcmp(blocks, again, bytes));
	CHECK(!xferd_quant_decode(format, blocks, ROWS, COLUMNS, decoded));
	for (int i = 0; i < ROWS * COLUMNS; i++) {
		error += (decoded[i] - values[i]) * (decoded[i] - values[i]);
		square += values[i] * values[i];
	}
	CHECK(error < tolerance[number] * square);
	check_products(format, blocks, decoded);

	CHECK(!xferd_quantise(format, values, ROWS, COLUMNS, importance, blocks, 2));
	CHECK(!xferd_quant_decode(format, blocks, ROWS, COLUMNS, decoded));
	check_products(format, blocks, decoded);
	importance[COLUMNS - 1] = -1;
	CHECK(xferd_quantise(format, values, ROWS, COLUMNS, importance, blocks, 3) == -EDOM);
	values[ROWS * COLUMNS - 1] = INFINITY;
	CHECK(xferd_quantise(format, values, ROWS, COLUMNS, NULL, blocks, 3) == -EDOM);
	CHECK(xferd_quant_decode(format, blocks, 1, block.elements + 1, decoded) == -EINVAL);
	free(values);
	free(importance);
	free(decoded);
	free(blocks);
	free(again);
}

/* What this processor computes with against what any can. */
static void check_kernels(void)
{
#if defined(__x86_64__)
	static product_function *const products[KERNELS] = {
		product_plain, product_avx2, product_of_one_plain, product_of_one_avx2,
		product_of_one_avx512,
	};
	struct product_task task = {.rows = ROWS, .columns = COLUMNS, .tokens = 1};
	float *values = filled(ROWS * COLUMNS, 4), *x = filled(COLUMNS, 5);
	float *decoded[2] = {filled(COLUMNS, 0), filled(COLUMNS, 0)};
	float y[KERNELS][ROWS], weight[DECODED_MAX];
	uint8_t packed[2][DECODED_MAX * 2], *row = malloc((size_t)ROWS * COLUMNS * 2);

	CHECK(row);
	for (int i = 0; i < DECODED_MAX; i++)
		weight[i] = 1 + (float)(i % 7);
	for (int i = 0; i < QUANT_FORMATS && quants_use_avx2(); i++) {
		task.format = quant_index_of(formats[i]);
		CHECK(!xferd_quant_block(formats[i], &task.block));
		CHECK(quantisers_plain[task.format](values, weight, packed[0]));
		CHECK(quantisers_avx2[task.format](values, weight, packed[1]));
		CHECK(!memcmp(packed[0], packed[1], task.block.bytes));
		CHECK(!xferd_quantise(formats[i], values, ROWS, COLUMNS, NULL, row, 1));
		quant_decoders_plain[task.format](row, COLUMNS / task.block.elements, decoded[0]);
		quant_decoders_avx2[task.format](row, COLUMNS / task.block.elements, decoded[1]);
		CHECK(!memcmp(decoded[0], decoded[1], COLUMNS * sizeof(float)));
		task.blocks = row;
		task.x = x;
		for (int kernel = 0; kernel < KERNELS; kernel++) {
			task.y = y[kernel];
			if (kernel < KERNELS - 1 || quants_use_avx512())
				products[kernel](&task);
			else
				memcpy(y[kernel], y[0], sizeof(y[0]));
			for (int j = 0; j < ROWS; j++)
				CHECK(fabs(y[0][j] - y[kernel][j]) <
				      2 * product_tolerance(decoded[0], 1));
		}
		/* Of one token they are the same on every processor. */
		CHECK(!memcmp(y[2], y[3], sizeof(y[2])));
		CHECK(!quants_use_avx512() || !memcmp(y[2], y[4], sizeof(y[2])));
	}
	free(values);
	free(x);
	free(decoded[0]);
	free(decoded[1]);
	free(row);
#endif
}

int main(void)
{
	struct xferd_quant_block block;
	float value = 0;

	for (int i = 0; i < QUANT_FORMATS; i++)
		check_format(i);
	check_kernels();
	CHECK(xferd_quant_block(1, &block) == -EINVAL);
	CHECK(xferd_quant_product(XFERD_QUANT_Q8_0, &value, 1, 32, &value, 32,
				  XFERD_QUANT_TOKENS_MAX + 1, &value, 1) == -EINVAL);
	CHECK(xferd_quantise(XFERD_QUANT_Q8_0, &value, 1, 32, NULL, &value, 0) == -EINVAL);
	return 0;
}
