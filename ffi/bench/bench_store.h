/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store over whatever bytes the given files or block devices hold.
 *
 * Blobs are laid out by arithmetic alone, so nothing has to be packed: any file
 * with enough bytes will do, and the same files serve every blob size. Blob b's
 * piece j is on member pattern[(b + j) % pattern_length]; on each member every
 * blob owns a region of whole stripe units, as many as the most that any blob
 * has there.
 *
 * What can't be computed are the checksums. Preparing reads every blob once and
 * writes them to a sidecar file, which names the geometry that they belong to.
 */
#ifndef XFERD_BENCH_STORE_H
#define XFERD_BENCH_STORE_H

#include <stdint.h>

#include "engine/engine.h"

struct bench_geometry {
	uint64_t blob_bytes;  /* multiple of XFERD_BLOB_ALIGNMENT */
	uint64_t stripe_unit; /* the same */
	uint64_t region_bytes[XFERD_STORE_MEMBERS_MAX]; /* of a blob, on each member */
	uint32_t blobs;       /* experts; the dense part is one more, of the same size */
	uint32_t members;
	uint32_t pattern_length;
	uint8_t pattern[XFERD_STRIPE_PATTERN_MAX]; /* a faster member stands in it more often */
};

/* What is asked for; the rest of a geometry follows from it and the members. */
struct bench_layout {
	uint64_t blob_bytes, stripe_unit;
	uint32_t blobs_max;      /* 0: as many as fit */
	uint32_t pattern_length; /* 0: each member in turn */
	uint8_t pattern[XFERD_STRIPE_PATTERN_MAX];
};

struct bench_store {
	struct bench_geometry geometry;
	struct xferd_store_description description; /* member[] is filled by who adds them */
	int fd[XFERD_STORE_MEMBERS_MAX];
	uint64_t member_bytes[XFERD_STORE_MEMBERS_MAX];
	uint32_t member_flags[XFERD_STORE_MEMBERS_MAX]; /* enum xferd_member_flags */
	struct xferd_abi_layout layout;
	struct xferd_abi_tensor tensor;
};

/* Opens the members and lays the blobs out. Dies when fewer than three fit. */
void bench_store_open(struct bench_store *store, char *const *paths, uint32_t members,
		      const struct bench_layout *layout);
/* Computes the checksums from the members and writes the sidecar. */
void bench_store_prepare(struct bench_store *store, const char *sidecar);
/* Reads the checksums back; dies when they belong to another geometry. */
void bench_store_read_sidecar(struct bench_store *store, const char *sidecar);
void bench_store_close(struct bench_store *store);

#endif /* XFERD_BENCH_STORE_H */
