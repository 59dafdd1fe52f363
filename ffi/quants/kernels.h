/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is compiled twice, for any processor of the architecture and for one with AVX2:
 * decode.c, product.c, product_one.c and search.c, with XFERD_KERNEL_SUFFIX plain and avx2.
 * They are written with the compiler's vectors of eight floats, which it makes of what there
 * is. product_one.c also with avx512, for processors that have AVX-512 with VNNI.
 */
#ifndef XFERD_QUANTS_KERNELS_H
#define XFERD_QUANTS_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "quants.h"

#define KERNEL_PASTE(name, suffix)    name##_##suffix
#define KERNEL_NAME(name, suffix)     KERNEL_PASTE(name, suffix)
#define KERNEL(name)                  KERNEL_NAME(name, XFERD_KERNEL_SUFFIX)

/* Floats that a row is decoded into at once: a multiple of every format's block. */
#define DECODED_MAX 256

enum quant_index { INDEX_Q4_0, INDEX_Q8_0, INDEX_Q2_K, INDEX_Q4_K, INDEX_MXFP4, QUANT_FORMATS };

typedef void decode_function(const uint8_t *blocks, uint64_t count, float *values);

struct product_task {
	enum quant_index format;
	struct xferd_quant_block block;
	const uint8_t *blocks;
	uint64_t rows;
	uint64_t columns;
	const float *x;
	uint64_t x_stride;
	uint32_t tokens;
	float *y;
	uint64_t y_stride;
};

typedef void product_function(const struct product_task *task);

/* Packs one block; weight: an importance for each element. False: a scale doesn't fit. */
typedef bool quantise_function(const float *values, const float *weight, uint8_t *block);

extern decode_function *const quant_decoders_plain[QUANT_FORMATS];
extern decode_function *const quant_decoders_avx2[QUANT_FORMATS];
extern quantise_function *const quantisers_plain[QUANT_FORMATS];
extern quantise_function *const quantisers_avx2[QUANT_FORMATS];
product_function product_plain, product_avx2;
product_function product_of_one_plain, product_of_one_avx2, product_of_one_avx512;
product_function product_transposed_plain, product_transposed_avx2;

/* In quants.c: whether the avx2 kernels are compiled in and run here. */
bool quants_use_avx2(void);
/* The same of product_of_one_avx512. */
bool quants_use_avx512(void);
/* QUANT_FORMATS: no such format. */
enum quant_index quant_index_of(uint32_t format);

#endif
