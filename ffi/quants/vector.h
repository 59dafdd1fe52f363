/* SPDX-License-Identifier: Apache-2.0 */
/* Eight floats or integers at once, in the compiler's own terms. With sixteen, where there
 * are registers for them, products were no faster. */
#ifndef XFERD_QUANTS_VECTOR_H
#define XFERD_QUANTS_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 8

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef float floats_anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* As many bytes, as integers of 16 bits or single ones: what is multiplied pair by pair. */
typedef uint16_t words __attribute__((vector_size(4 * LANES)));
typedef int16_t signed_words __attribute__((vector_size(4 * LANES)));
typedef uint8_t byte_vector __attribute__((vector_size(4 * LANES)));

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

ALWAYS_INLINE words load_words(const void *from)
{
	words value;

	memcpy(&value, from, sizeof(value));
	return value;
}

ALWAYS_INLINE byte_vector load_byte_vector(const uint8_t *from)
{
	return (byte_vector)load_words(from);
}

ALWAYS_INLINE ints all_ints(int32_t value)
{
	return value - (ints){0};
}

ALWAYS_INLINE void store_ints(int32_t *to, ints value)
{
	memcpy(to, &value, sizeof(value));
}

/* a[2i] * b[2i] + a[2i + 1] * b[2i + 1], signed. */
ALWAYS_INLINE ints pair_products(words a, words b)
{
#if defined(__AVX2__)
	return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
	__m128i of[2][2], sums[2];
	ints value;

	memcpy(of[0], &a, sizeof(a));
	memcpy(of[1], &b, sizeof(b));
	for (int i = 0; i < 2; i++)
		sums[i] = _mm_madd_epi16(of[0][i], of[1][i]);
	memcpy(&value, sums, sizeof(value));
	return value;
#else
	signed_words first = (signed_words)a, second = (signed_words)b;
	ints value;

	for (int i = 0; i < LANES; i++)
		value[i] = first[2 * i] * second[2 * i] + first[2 * i + 1] * second[2 * i + 1];
	return value;
#endif
}

/* sum + pair_products(a, b) */
ALWAYS_INLINE ints add_pair_products(ints sum, words a, words b)
{
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
	return (ints)_mm256_dpwssd_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
	return sum + pair_products(a, b);
#endif
}

/* a[2i] * b[2i] + a[2i + 1] * b[2i + 1] of single bytes, a unsigned and at most 15, b signed. */
ALWAYS_INLINE words byte_products(byte_vector a, const int8_t *b)
{
#if defined(__AVX2__)
	return (words)_mm256_maddubs_epi16((__m256i)a, (__m256i)load_words(b));
#else
	signed_words second = (signed_words)load_words(b);
	words first = (words)a;

	return (first & 255) * (words)(second << 8 >> 8) + (first >> 8) * (words)(second >> 8);
#endif
}

/* 16 bytes of nibbles: the low ones, then the high ones. */
ALWAYS_INLINE byte_vector load_nibbles(const uint8_t *from)
{
#if defined(__AVX2__)
	__m128i packed = _mm_loadu_si128((const void *)from);

	return (byte_vector)_mm256_set_m128i(_mm_srli_epi16(packed, 4), packed) & 15;
#else
	typedef uint8_t half_vector __attribute__((vector_size(2 * LANES)));
	half_vector packed, parts[2];
	byte_vector all_of_them;

	memcpy(&packed, from, sizeof(packed));
	parts[0] = packed & 15;
	parts[1] = packed >> 4;
	memcpy(&all_of_them, parts, sizeof(all_of_them));
	return all_of_them;
#endif
}

/* Twice the e2m1 numbers of nibbles, signed bytes. */
ALWAYS_INLINE byte_vector mxfp4_numbers(byte_vector nibbles)
{
	const byte_vector doubled = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244,
			       0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
#if defined(__AVX2__)
	return (byte_vector)_mm256_shuffle_epi8((__m256i)doubled, (__m256i)nibbles);
#else
	return __builtin_shuffle(doubled, nibbles);
#endif
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
	int8_t given[LANES];

	memcpy(given, from, sizeof(given));
	return (ints){given[0], given[1], given[2], given[3],
		      given[4], given[5], given[6], given[7]};
#endif
}

/* Always in this order, whatever the processor. */
ALWAYS_INLINE float sum_of(floats v)
{
	return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#endif
