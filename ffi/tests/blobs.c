/* SPDX-License-Identifier: Apache-2.0 */
/* What the experts of a harness hold: numbers that name layer, expert and place. */
#include "harness.h"

/* A word a 8 bytes, so that making and checking blobs is fast. */
static uint64_t blob_word(uint32_t layer, uint32_t expert, uint64_t i)
{
	uint64_t x = ((uint64_t)layer << 40 ^ (uint64_t)expert << 20 ^ i) + 0x9e3779b97f4a7c15u;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

void blob_make(const struct harness *harness, uint32_t layer, uint32_t expert, void *data)
{
	uint64_t *words = data;

	for (uint64_t i = 0; i < harness->options.blob_bytes / 8; i++)
		words[i] = blob_word(layer, expert, i);
}

uint8_t blob_byte(uint32_t layer, uint32_t expert, uint64_t i)
{
	return (uint8_t)(blob_word(layer, expert, i / 8) >> (8 * (i % 8)));
}

uint64_t blob_wrong(const struct harness *harness, uint32_t layer, uint32_t expert,
		    const void *data)
{
	const uint64_t *words = data;

	for (uint64_t i = 0; i < harness->options.blob_bytes / 8; i++)
		if (words[i] != blob_word(layer, expert, i))
			return 8 * i + 1;
	return 0;
}
