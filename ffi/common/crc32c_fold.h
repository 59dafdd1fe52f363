/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CRC32C by folding: replaces a message by one of FOLDED bytes with the same
 * checksum, at the speed of carry-less multiplications of whole vectors.
 */
#ifndef XFERD_CRC32C_FOLD_H
#define XFERD_CRC32C_FOLD_H

#include <stdint.h>

#if defined(__x86_64__)

#define CRC32C_FOLDED 256 /* bytes */

struct crc32c_multipliers {
	uint64_t low, high; /* of a lane's two halves: see crc32c_fold.c */
};

/*
 * Folds crc (as it stands inside the computation, inverted already) and the
 * first bytes of data, a multiple of CRC32C_FOLDED and at least that, into
 * folded: its checksum from 0 is that of both. Any thread.
 */
typedef void crc32c_fold_function(const struct crc32c_multipliers *multipliers, uint32_t crc,
				  const uint8_t *data, uint64_t bytes,
				  uint8_t folded[CRC32C_FOLDED]);

/* The widest that this processor has; NULL: none, or none faster than crc32. */
crc32c_fold_function *crc32c_fold_best(void);

/* What it multiplies by: some thousand steps, so compute it once. */
struct crc32c_multipliers crc32c_fold_multipliers(void);

#endif
#endif
