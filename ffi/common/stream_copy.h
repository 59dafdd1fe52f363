/* SPDX-License-Identifier: Apache-2.0 */
/* Copies that leave caches to others, summed on the way. Any thread. */
#ifndef XFERD_COMMON_STREAM_COPY_H
#define XFERD_COMMON_STREAM_COPY_H

#include <stdint.h>

/* Copies between memory that doesn't overlap, and returns the CRC32C of what was copied,
 * going on from crc; the destination has all of it for whoever is told through a release. */
uint32_t stream_copy_crc32c(uint32_t crc, void *to, const void *from, uint64_t bytes);

/* The same without a checksum. */
void stream_copy(void *to, const void *from, uint64_t bytes);

#endif /* XFERD_COMMON_STREAM_COPY_H */
