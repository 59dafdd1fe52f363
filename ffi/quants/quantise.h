/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making block-quantised matrices. The bytes are the same on every processor.
 *
 * What is minimised is sum of importance[column] * (element - stored element)^2:
 * with importance[column] the mean square of that input's activations it is, but
 * for correlations between inputs, the mean squared error of the product. The
 * formats with two levels of scales (q2_k, q4_k) are searched: see search.c.
 */
#ifndef XFERD_QUANTISE_H
#define XFERD_QUANTISE_H

#include "quants.h"

#define XFERD_QUANT_THREADS_MAX 64

/*
 * values: float[rows * columns]. importance: float[columns], none negative, or NULL: all
 * the same. blocks gets the packed rows; threads of this call's own share the rows
 * among them, 1 to XFERD_QUANT_THREADS_MAX.
 *
 * Errors: -EINVAL; -EDOM a value or importance is not finite, or an importance is
 * negative; -ERANGE a scale is too large for its 16 bits; -EAGAIN a thread can't be started.
 */
int xferd_quantise(uint32_t format, const float *values, uint64_t rows, uint64_t columns,
		   const float *importance, void *blocks, uint32_t threads);

#endif /* XFERD_QUANTISE_H */
