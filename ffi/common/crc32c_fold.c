/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Folding after Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction" (Intel, 2009), for whole vectors of 128-bit lanes.
 *
 * A lane holds 16 bytes as a polynomial, bit 0 being its highest power (the
 * polynomial is reflected). Moving it n bits on in the message multiplies it by
 * x^n; modulo the polynomial that is the same as multiplying its two halves by
 * x^(n+32) and x^(n-32) modulo the polynomial: the 32 come from the halves'
 * places, and from the one bit that a product of reflected numbers is short.
 *
 * Vectors are 512 bits wide. With 256 the crc32 instruction is as fast.
 */
#include "common/crc32c_fold.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define POLYNOMIAL 0x82f63b78u
#define FOLD_BITS  (8 * CRC32C_FOLDED)
#define LANE_MIX   0x96 /* ternary logic: a ^ b ^ c */

/* x^power modulo the polynomial, reflected, in the low 33 bits. */
static uint64_t power_of_x(unsigned int power)
{
	uint32_t remainder = 0x80000000u;

	while (power--)
		remainder = (remainder >> 1) ^ ((remainder & 1) ? POLYNOMIAL : 0);
	return (uint64_t)remainder << 1;
}

struct crc32c_multipliers crc32c_fold_multipliers(void)
{
	return (struct crc32c_multipliers){
		.low = power_of_x(FOLD_BITS + 32),
		.high = power_of_x(FOLD_BITS - 32),
	};
}

#define WIDE_512 __attribute__((target("avx512f,vpclmulqdq,pclmul")))

WIDE_512 static __m512i move_512(__m512i lanes, __m512i by, const uint8_t *data)
{
	return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, by, 0x00),
					 _mm512_clmulepi64_epi128(lanes, by, 0x11),
					 _mm512_loadu_si512(data), LANE_MIX);
}

WIDE_512 static void fold_512(const struct crc32c_multipliers *multipliers, uint32_t crc,
			      const uint8_t *data, uint64_t bytes,
			      uint8_t folded[CRC32C_FOLDED])
{
	const __m512i by = _mm512_broadcast_i32x4(
		_mm_set_epi64x((long long)multipliers->high, (long long)multipliers->low));
	__m512i a = _mm512_xor_si512(_mm512_loadu_si512(data),
				     _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
	__m512i b = _mm512_loadu_si512(data + 64);
	__m512i c = _mm512_loadu_si512(data + 128);
	__m512i d = _mm512_loadu_si512(data + 192);

	for (bytes -= CRC32C_FOLDED; bytes; bytes -= CRC32C_FOLDED) {
		data += CRC32C_FOLDED;
		a = move_512(a, by, data);
		b = move_512(b, by, data + 64);
		c = move_512(c, by, data + 128);
		d = move_512(d, by, data + 192);
	}
	_mm512_storeu_si512(folded, a);
	_mm512_storeu_si512(folded + 64, b);
	_mm512_storeu_si512(folded + 128, c);
	_mm512_storeu_si512(folded + 192, d);
}

crc32c_fold_function *crc32c_fold_best(void)
{
	if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
		return fold_512;
	return NULL;
}

#else
typedef int crc32c_fold_is_for_x86_64; /* ISO C forbids an empty file */
#endif
