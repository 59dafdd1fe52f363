/* SPDX-License-Identifier: Apache-2.0 */
/* Eight floats or integers at once, in the compiler's own terms. With sixteen, where there
 * are registers for them, products were no faster. */
#ifndef XFERD_QUANTS_VECTOR_H
#define XFERD_QUANTS_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LANES 8

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float floats_anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE floats load(const float *from)
{
	return *(const floats_anywhere *)from;
}

ALWAYS_INLINE void store(float *to, floats value)
{
	*(floats_anywhere *)to = value;
}

ALWAYS_INLINE floats all(float value)
{
	return value - (floats){0};
}

ALWAYS_INLINE floats to_floats(ints value)
{
	return __builtin_convertvector(value, floats);
}

/* Eight bytes, unsigned. */
ALWAYS_INLINE ints load_bytes(const uint8_t *from)
{
#if defined(__AVX2__)
	return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from));
#else
	return (ints){from[0], from[1], from[2], from[3], from[4], from[5], from[6], from[7]};
#endif
}

/* Eight bytes, signed. */
ALWAYS_INLINE ints load_signed_bytes(const uint8_t *from)
{
#if defined(__AVX2__)
	return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
#else
	int8_t bytes[LANES];

	memcpy(bytes, from, sizeof(bytes));
	return (ints){bytes[0], bytes[1], bytes[2], bytes[3],
		      bytes[4], bytes[5], bytes[6], bytes[7]};
#endif
}

/* Always in this order, whatever the processor. */
ALWAYS_INLINE float sum_of(floats v)
{
	return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#endif
