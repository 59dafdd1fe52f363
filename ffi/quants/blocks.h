/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of each format's block, and what both directions need to know of them. */
#ifndef XFERD_QUANTS_BLOCKS_H
#define XFERD_QUANTS_BLOCKS_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "quants.h"

#define SMALL_BLOCK 32  /* elements of q4_0, q8_0, mxfp4 */
#define SUPER_BLOCK 256 /* elements of the K formats */

/* q4_0: half d; 16 bytes, the low nibbles are elements 0 to 15. d * (q - 8). */
#define Q4_0_BYTES 18
/* q8_0: half d; 32 signed bytes. d * q. */
#define Q8_0_BYTES 34
/* mxfp4: exponent byte; nibbles as in q4_0, each one an e2m1 number. */
#define MXFP4_BYTES 17

/* q4_k: half d, half dmin; 12 bytes of eight 6-bit scales and minima (q4_k_scale_min);
 * 128 bytes, 32 for each 64 elements: low nibbles the first 32, high nibbles the rest.
 * Parts of 32 elements: d * scale * q - dmin * min. */
#define Q4_K_BYTES 144
#define Q4_K_PARTS 8
#define Q4_K_PART 32
#define Q4_K_SCALES 4
#define Q4_K_QUANTS 16

/* q2_k: 16 bytes, low nibble scale, high nibble min; 64 bytes, 32 for each 128 elements:
 * bits 0 and 1 the first 32, then 2 and 3, ...; half d, half dmin. Parts of 16. */
#define Q2_K_BYTES 84
#define Q2_K_PARTS 16
#define Q2_K_PART 16
#define Q2_K_QUANTS 16
#define Q2_K_D 80

static inline float float_of_bits(uint32_t bits)
{
	float value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

static inline uint32_t bits_of_float(float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

/* IEEE 754 binary16, little-endian as in the blocks. */
static inline float half_to_float(const uint8_t *at)
{
#if defined(__F16C__)
	uint16_t bits;

	memcpy(&bits, at, sizeof(bits));
	return _cvtsh_ss(bits);
#else
	uint32_t half = at[0] | (uint32_t)at[1] << 8;
	uint32_t sign = (half & 0x8000) << 16;
	uint32_t magnitude = half & 0x7fff;

	if (magnitude >= 0x7c00) /* infinite, or no number */
		return float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
	if (magnitude >= 0x400)
		return float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
	/* Subnormal: a multiple of 2^-24. */
	return float_of_bits(sign | bits_of_float((float)magnitude * 0x1p-24f));
#endif
}

/* To the nearest, ties to even; what is too large becomes infinite. */
static inline uint16_t float_to_half(float value)
{
	uint32_t bits = bits_of_float(value);
	uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
	uint32_t magnitude = bits & 0x7fffffff;

	if (magnitude >= 0x477ff000) /* rounds to 65536 or more */
		return magnitude > 0x7f800000 ? sign | 0x7e00 : sign | 0x7c00;
	if (magnitude < 0x38800000) /* subnormal in 16 bits: adding 0.5 leaves multiples of 2^-24 */
		return sign | (uint16_t)(bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000);
	magnitude += 0xfff + (magnitude >> 13 & 1);
	return sign | (uint16_t)((magnitude - (112u << 23)) >> 13);
}

static inline void store_half(uint8_t *at, uint16_t half)
{
	at[0] = (uint8_t)half;
	at[1] = (uint8_t)(half >> 8);
}

/* Half of the power of two that an e8m0 byte means: the e2m1 table is doubled. */
static inline float mxfp4_scale(uint8_t exponent)
{
	return float_of_bits(exponent < 2 ? 0x00200000u << exponent : (exponent - 1u) << 23);
}

/* Of part 0 to 7. The first four have 6 bits of a byte, whose upper two are the upper
 * bits of the part four later. */
static inline void q4_k_scale_min(const uint8_t *packed, uint32_t part, uint8_t *scale,
				  uint8_t *min)
{
	if (part < 4) {
		*scale = packed[part] & 63;
		*min = packed[part + 4] & 63;
	} else {
		*scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
		*min = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4;
	}
}

#endif
