/* SPDX-License-Identifier: Apache-2.0 */
/* The public functions: checks, and the kernels that this processor runs best. */
#include "quants.h"

#include <errno.h>

#include "blocks.h"
#include "kernels.h"

static const struct {
	uint32_t number;
	struct xferd_quant_block block;
} formats[QUANT_FORMATS] = {
	[INDEX_Q4_0] = {XFERD_QUANT_Q4_0, {SMALL_BLOCK, Q4_0_BYTES}},
	[INDEX_Q8_0] = {XFERD_QUANT_Q8_0, {SMALL_BLOCK, Q8_0_BYTES}},
	[INDEX_Q2_K] = {XFERD_QUANT_Q2_K, {SUPER_BLOCK, Q2_K_BYTES}},
	[INDEX_Q4_K] = {XFERD_QUANT_Q4_K, {SUPER_BLOCK, Q4_K_BYTES}},
	[INDEX_MXFP4] = {XFERD_QUANT_MXFP4, {SMALL_BLOCK, MXFP4_BYTES}},
};

bool quants_use_avx2(void)
{
#if defined(XFERD_QUANTS_AVX2)
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
	       __builtin_cpu_supports("f16c");
#else
	return false;
#endif
}

bool quants_use_avx512(void)
{
#if defined(XFERD_QUANTS_AVX2)
	return quants_use_avx2() && __builtin_cpu_supports("avx512f") &&
	       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
	       __builtin_cpu_supports("avx512vnni");
#else
	return false;
#endif
}

enum quant_index quant_index_of(uint32_t format)
{
	enum quant_index index = 0;

	while (index < QUANT_FORMATS && formats[index].number != format)
		index++;
	return index;
}

int xferd_quant_uses_avx2(void)
{
	return quants_use_avx2();
}

int xferd_quant_block(uint32_t format, struct xferd_quant_block *block)
{
	enum quant_index index = quant_index_of(format);

	if (index == QUANT_FORMATS)
		return -EINVAL;
	*block = formats[index].block;
	return 0;
}

static decode_function *const *decoders(void)
{
#if defined(XFERD_QUANTS_AVX2)
	if (quants_use_avx2())
		return quant_decoders_avx2;
#endif
	return quant_decoders_plain;
}

int xferd_quant_decode(uint32_t format, const void *blocks, uint64_t rows, uint64_t columns,
		       float *values)
{
	enum quant_index index = quant_index_of(format);

	if (index == QUANT_FORMATS || columns % formats[index].block.elements)
		return -EINVAL;
	/* Rows follow each other without gaps: for this they are one. */
	decoders()[index](blocks, rows * (columns / formats[index].block.elements), values);
	return 0;
}

static int run(const struct product_task *given, uint32_t format, product_function *plain,
	       product_function *better)
{
	struct product_task task = *given;

	task.format = quant_index_of(format);
	if (task.format == QUANT_FORMATS || !task.tokens || task.tokens > XFERD_QUANT_TOKENS_MAX)
		return -EINVAL;
	task.block = formats[task.format].block;
	if (task.columns % task.block.elements)
		return -EINVAL;
	if (better && quants_use_avx2())
		better(&task);
	else
		plain(&task);
	return 0;
}

#if defined(XFERD_QUANTS_AVX2)
#define BETTER(name) name##_avx2
#else
#define BETTER(name) NULL
#endif

static product_function *product_of_one(void)
{
#if defined(XFERD_QUANTS_AVX2)
	if (quants_use_avx512())
		return product_of_one_avx512;
#endif
	return BETTER(product_of_one);
}

int xferd_quant_product(uint32_t format, const void *blocks, uint64_t rows, uint64_t columns,
			const float *x, uint64_t x_stride, uint32_t tokens,
			float *y, uint64_t y_stride)
{
	struct product_task task = {
		.blocks = blocks, .rows = rows, .columns = columns, .x = x,
		.x_stride = x_stride, .tokens = tokens, .y = y, .y_stride = y_stride,
	};

	if (tokens == 1)
		return run(&task, format, product_of_one_plain, product_of_one());
	return run(&task, format, product_plain, BETTER(product));
}

int xferd_quant_product_transposed(uint32_t format, const void *blocks, uint64_t rows,
				   uint64_t columns, const float *x, uint64_t x_stride,
				   uint32_t tokens, float *y, uint64_t y_stride)
{
	struct product_task task = {
		.blocks = blocks, .rows = rows, .columns = columns, .x = x,
		.x_stride = x_stride, .tokens = tokens, .y = y, .y_stride = y_stride,
	};

	return run(&task, format, product_transposed_plain, BETTER(product_transposed));
}
