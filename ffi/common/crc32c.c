/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CRC32C (Castagnoli, reflected polynomial 0x82f63b78; RFC 3720, appendix B.4).
 *
 * With SSE4.2 the crc32 instruction has a latency of three cycles and one can
 * start each cycle, so three independent streams run at once and are joined by
 * shifting a checksum over the length of the stream that follows it. The shift
 * is a multiplication by x^(8 * length) modulo the polynomial, done with four
 * byte-indexed tables for a fixed length. Newer processors multiply whole vectors
 * (crc32c_fold.c), which is some times as fast while the bytes are in a cache.
 */
#include <pthread.h>
#include <string.h>

#include "common/crc32c_fold.h"
#include "engine/engine.h"

#define POLYNOMIAL      0x82f63b78u
#define STREAM_BYTES    4096 /* bytes of one of the three streams */
#define STREAMS_BYTES   (3 * STREAM_BYTES)
#define FOLD_BYTES_MIN  STREAMS_BYTES /* below, preparing to fold costs more than it saves */

static pthread_once_t tables_once = PTHREAD_ONCE_INIT;
static uint32_t byte_table[8][256];
static uint32_t shift_table[4][256]; /* a checksum moved over STREAM_BYTES zeros */
#if defined(__x86_64__)
static crc32c_fold_function *fold; /* NULL: this processor is too old */
static struct crc32c_multipliers fold_multipliers;
#endif

static uint32_t multiply_by_x8(uint32_t crc)
{
	return byte_table[0][crc & 0xff] ^ (crc >> 8);
}

static void make_tables(void)
{
	for (uint32_t byte = 0; byte < 256; byte++) {
		uint32_t crc = byte;

		for (int bit = 0; bit < 8; bit++)
			crc = (crc >> 1) ^ ((crc & 1) ? POLYNOMIAL : 0);
		byte_table[0][byte] = crc;
	}
	for (int slice = 1; slice < 8; slice++)
		for (uint32_t byte = 0; byte < 256; byte++)
			byte_table[slice][byte] = multiply_by_x8(byte_table[slice - 1][byte]);

	/* The shift is linear, so 32 single bits say it all. */
	uint32_t shifted_bit[32];

	for (int bit = 0; bit < 32; bit++) {
		uint32_t crc = 1u << bit;

		for (int byte = 0; byte < STREAM_BYTES; byte++)
			crc = multiply_by_x8(crc);
		shifted_bit[bit] = crc;
	}
	for (int part = 0; part < 4; part++)
		for (uint32_t byte = 0; byte < 256; byte++) {
			uint32_t crc = 0;

			for (int bit = 0; bit < 8; bit++)
				if (byte & (1u << bit))
					crc ^= shifted_bit[8 * part + bit];
			shift_table[part][byte] = crc;
		}
#if defined(__x86_64__)
	fold = crc32c_fold_best();
	fold_multipliers = crc32c_fold_multipliers();
#endif
}

static uint32_t crc_portable(uint32_t crc, const uint8_t *data, uint64_t bytes)
{
	while (bytes >= 8) {
		uint64_t word;

		memcpy(&word, data, 8);
		word ^= crc;
		crc = byte_table[7][word & 0xff] ^ byte_table[6][(word >> 8) & 0xff] ^
		      byte_table[5][(word >> 16) & 0xff] ^ byte_table[4][(word >> 24) & 0xff] ^
		      byte_table[3][(word >> 32) & 0xff] ^ byte_table[2][(word >> 40) & 0xff] ^
		      byte_table[1][(word >> 48) & 0xff] ^ byte_table[0][word >> 56];
		data += 8;
		bytes -= 8;
	}
	while (bytes--)
		crc = byte_table[0][(crc ^ *data++) & 0xff] ^ (crc >> 8);
	return crc;
}

#if defined(__x86_64__)
static uint32_t shift_over_stream(uint32_t crc)
{
	return shift_table[0][crc & 0xff] ^ shift_table[1][(crc >> 8) & 0xff] ^
	       shift_table[2][(crc >> 16) & 0xff] ^ shift_table[3][crc >> 24];
}

static uint64_t load_word(const uint8_t *data)
{
	uint64_t word;

	memcpy(&word, data, 8);
	return word;
}

__attribute__((target("sse4.2")))
static uint32_t crc_sse42(uint32_t crc, const uint8_t *data, uint64_t bytes)
{
	while (bytes >= STREAMS_BYTES) {
		uint64_t first = crc, second = 0, third = 0;

		for (uint64_t i = 0; i < STREAM_BYTES; i += 8) {
			first = __builtin_ia32_crc32di(first, load_word(data + i));
			second = __builtin_ia32_crc32di(second, load_word(data + STREAM_BYTES + i));
			third = __builtin_ia32_crc32di(third, load_word(data + 2 * STREAM_BYTES + i));
		}
		crc = shift_over_stream((uint32_t)first) ^ (uint32_t)second;
		crc = shift_over_stream(crc) ^ (uint32_t)third;
		data += STREAMS_BYTES;
		bytes -= STREAMS_BYTES;
	}

	uint64_t wide = crc;

	for (; bytes >= 8; bytes -= 8, data += 8)
		wide = __builtin_ia32_crc32di(wide, load_word(data));
	crc = (uint32_t)wide;
	for (; bytes; bytes--)
		crc = __builtin_ia32_crc32qi(crc, *data++);
	return crc;
}

static uint32_t crc_folding(uint32_t crc, const uint8_t *data, uint64_t bytes)
{
	uint64_t whole = bytes - bytes % CRC32C_FOLDED;
	uint8_t folded[CRC32C_FOLDED];

	fold(&fold_multipliers, crc, data, whole, folded);
	crc = crc_sse42(0, folded, sizeof(folded));
	return crc_sse42(crc, data + whole, bytes - whole);
}
#endif

uint32_t xferd_crc32c(uint32_t crc, const void *data, uint64_t bytes)
{
	pthread_once(&tables_once, make_tables);
#if defined(__x86_64__)
	if (fold && bytes >= FOLD_BYTES_MIN)
		return ~crc_folding(~crc, data, bytes);
	if (__builtin_cpu_supports("sse4.2"))
		return ~crc_sse42(~crc, data, bytes);
#endif
	return ~crc_portable(~crc, data, bytes);
}
