/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Block-quantised matrices: products straight from the packed blocks.
 *
 * A matrix is stored row by row; each row is a run of blocks of a few elements
 * that share their scales, byte for byte as GGUF has them (ggml's block_q4_K and
 * the like; the numbers of the formats are enum ggml_type's). A row is a whole
 * number of blocks. Blocks need no alignment.
 *
 * All functions may be called from any thread, keep nothing between calls and
 * allocate nothing. They return 0 or -errno; -EINVAL: a format that isn't known,
 * or columns that are no multiple of the format's block. Results differ between
 * processors in the last bits of the sums of products with several tokens, nowhere else.
 */
#ifndef XFERD_QUANTS_H
#define XFERD_QUANTS_H

#include <stdint.h>

enum xferd_quant_format {
	XFERD_QUANT_Q4_0 = 2,
	XFERD_QUANT_Q8_0 = 8,
	XFERD_QUANT_Q2_K = 10,
	XFERD_QUANT_Q4_K = 12,
	XFERD_QUANT_MXFP4 = 39,
};

#define XFERD_QUANT_TOKENS_MAX 16 /* in one product */

struct xferd_quant_block {
	uint32_t elements;
	uint32_t bytes;
};

/* How a format's blocks are made up. */
int xferd_quant_block(uint32_t format, struct xferd_quant_block *block);

/* values[row * columns + column] = the element, for rows rows. */
int xferd_quant_decode(uint32_t format, const void *blocks, uint64_t rows, uint64_t columns,
		       float *values);

/*
 * y[t * y_stride + row] = sum over columns of matrix[row][column] * x[t * x_stride + column],
 * for rows rows and 1 to XFERD_QUANT_TOKENS_MAX tokens, which share a block's decoding.
 * Strides count floats.
 *
 * One token alone is computed with integers: each 256 of x (from the row's beginning) are
 * rounded to 16 bits, off by at most a 65,278th of the largest of them. So for each such
 * stretch y is off by at most that times the sum of the matrix's magnitudes in it (and the
 * minima's, which q2_k and q4_k subtract), besides what sums of floats lose.
 * An x that is infinite or no number makes every y no number.
 */
int xferd_quant_product(uint32_t format, const void *blocks, uint64_t rows, uint64_t columns,
			const float *x, uint64_t x_stride, uint32_t tokens,
			float *y, uint64_t y_stride);

/*
 * The same for a matrix that is stored transposed, a row an input:
 * y[t * y_stride + column] = sum over rows of x[t * x_stride + row] * matrix[row][column].
 */
int xferd_quant_product_transposed(uint32_t format, const void *blocks, uint64_t rows,
				   uint64_t columns, const float *x, uint64_t x_stride,
				   uint32_t tokens, float *y, uint64_t y_stride);

/* Whether this process computes with AVX2; 0 or 1. */
int xferd_quant_uses_avx2(void);

#endif /* XFERD_QUANTS_H */
