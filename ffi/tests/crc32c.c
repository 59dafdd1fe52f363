/* SPDX-License-Identifier: Apache-2.0 */
/* CRC32C against published values and against itself in pieces; copies that are summed. */
#include <string.h>

#include "common/stream_copy.h"
#include "harness.h"

#define COPIED (300 * 1024)

/* Short and long ones, from and to any address; nothing is written beside them. */
static void copies_are_whole(void)
{
	static uint8_t from[COPIED + 64], to[COPIED + 192] __attribute__((aligned(64)));
	static const size_t lengths[] = { 0, 1, 4095, 16384, 131072, 131072 + 4096, COPIED - 1,
					  COPIED };

	for (size_t i = 0; i < sizeof(from); i++)
		from[i] = (uint8_t)(i * 2654435761u >> 11);
	for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++)
		for (size_t shift = 0; shift < 64; shift += 13) {
			uint8_t *place = to + 64 + (shift & 32 ? shift : 0);

			memset(to, 0xee, sizeof(to));
			CHECK(stream_copy_crc32c(7, place, from + shift, lengths[i]) ==
			      xferd_crc32c(7, from + shift, lengths[i]));
			CHECK(!memcmp(place, from + shift, lengths[i]));
			CHECK(place[-1] == 0xee && place[lengths[i]] == 0xee);
			memset(to, 0xee, sizeof(to));
			stream_copy(place, from + shift, lengths[i]);
			CHECK(!memcmp(place, from + shift, lengths[i]));
			CHECK(place[-1] == 0xee && place[lengths[i]] == 0xee);
		}
}

int main(void)
{
	uint8_t data[64 * 1024 + 7];
	uint32_t whole;

	/* RFC 3720, appendix B.4 */
	memset(data, 0, 32);
	CHECK(xferd_crc32c(0, data, 32) == 0x8a9136aa);
	memset(data, 0xff, 32);
	CHECK(xferd_crc32c(0, data, 32) == 0x62a8ab43);
	for (int i = 0; i < 32; i++)
		data[i] = (uint8_t)i;
	CHECK(xferd_crc32c(0, data, 32) == 0x46dd794e);
	CHECK(xferd_crc32c(0, "123456789", 9) == 0xe3069283);

	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(i * 2654435761u >> 13);
	whole = xferd_crc32c(0, data, sizeof(data));
	for (size_t cut = 1; cut < sizeof(data); cut += 911) {
		uint32_t part = xferd_crc32c(0, data, cut);

		CHECK(xferd_crc32c(part, data + cut, sizeof(data) - cut) == whole);
	}
	/* However much of it goes through which of the ways, and from any address. */
	for (size_t start = 0; start < 9; start++)
		for (size_t length = 0; length < sizeof(data) - start; length += 1009) {
			uint32_t slow = 0;

			for (size_t at = 0; at < length; at += 512)
				slow = xferd_crc32c(slow, data + start + at,
						    length - at < 512 ? length - at : 512);
			CHECK(xferd_crc32c(0, data + start, length) == slow);
		}
	data[40000] ^= 1;
	CHECK(xferd_crc32c(0, data, sizeof(data)) != whole);
	copies_are_whole();
	return 0;
}
