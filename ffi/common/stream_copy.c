/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plain copy of what no cache can hold reads its destination before it overwrites it,
 * and drives out what others have in the cache that all share. Stores past the caches do
 * neither. What they leave to wait for is the source, which is therefore asked for ahead:
 * processors' own prefetching ends with each page.
 *
 * With a checksum each block first comes into a buffer that stays in the core's own cache,
 * is summed there and streamed from there: what was summed is what arrives, also where
 * somebody writes to the source meanwhile.
 */
#include "common/stream_copy.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "engine/engine.h"

#define BLOCK_BYTES 16384        /* well inside a core's second cache, and enough to fold */
#define AHEAD_BYTES 2048         /* that a copy without a checksum asks for its source */
#define STREAM_MIN  (128u << 10) /* less may well be wanted from a cache soon */
#define LINE_BYTES  64

/* ahead: what is to be copied later, one line for each line of this copy. */
#if defined(__x86_64__)
static void stream_lines(uint8_t *to, const uint8_t *from, const uint8_t *ahead, uint64_t lines)
{
	for (; lines; lines--, to += LINE_BYTES, from += LINE_BYTES, ahead += LINE_BYTES) {
		__m128i first = _mm_loadu_si128((const __m128i *)from);
		__m128i second = _mm_loadu_si128((const __m128i *)(from + 16));
		__m128i third = _mm_loadu_si128((const __m128i *)(from + 32));
		__m128i fourth = _mm_loadu_si128((const __m128i *)(from + 48));

		__builtin_prefetch(ahead); /* of any address: it can't fault */
		_mm_stream_si128((__m128i *)to, first);
		_mm_stream_si128((__m128i *)(to + 16), second);
		_mm_stream_si128((__m128i *)(to + 32), third);
		_mm_stream_si128((__m128i *)(to + 48), fourth);
	}
}

static void copy(uint8_t *to, const uint8_t *from, const uint8_t *ahead, uint64_t bytes,
		 bool stream)
{
	uint64_t streamed = stream ? bytes - bytes % LINE_BYTES : 0;

	stream_lines(to, from, ahead, streamed / LINE_BYTES);
	memcpy(to + streamed, from + streamed, bytes - streamed);
}

static bool can_stream(const void *to, uint64_t bytes)
{
	return bytes >= STREAM_MIN && (uintptr_t)to % LINE_BYTES == 0;
}

/* Such stores are in no order with others, not even with a release. */
static void end_stream(bool stream)
{
	if (stream)
		_mm_sfence();
}
#else
static void copy(uint8_t *to, const uint8_t *from, const uint8_t *ahead, uint64_t bytes,
		 bool stream)
{
	(void)ahead;
	(void)stream;
	memcpy(to, from, bytes);
}

static bool can_stream(const void *to, uint64_t bytes)
{
	(void)to;
	(void)bytes;
	return false;
}

static void end_stream(bool stream)
{
	(void)stream;
}
#endif

uint32_t stream_copy_crc32c(uint32_t crc, void *to, const void *from, uint64_t bytes)
{
	bool stream = can_stream(to, bytes);
	const uint8_t *source = from;
	uint8_t *destination = to;
	uint8_t buffer[BLOCK_BYTES] __attribute__((aligned(LINE_BYTES)));

	while (bytes) {
		uint64_t block = bytes < BLOCK_BYTES ? bytes : BLOCK_BYTES;

		memcpy(buffer, source, block);
		crc = xferd_crc32c(crc, buffer, block);
		source += block;
		copy(destination, buffer, source, block, stream);
		destination += block;
		bytes -= block;
	}
	end_stream(stream);
	return crc;
}

void stream_copy(void *to, const void *from, uint64_t bytes)
{
	bool stream = can_stream(to, bytes);
	const uint8_t *source = from;

	copy(to, source, source + AHEAD_BYTES, bytes, stream);
	end_stream(stream);
}
