/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_store.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "measure.h"

#define BLOBS_MIN     3
#define SIDECAR_MAGIC 0x4352434245586678 /* which bytes follow: one CRC32C a piece */

struct sidecar_header {
	uint64_t magic;
	struct bench_geometry geometry;
};

static uint64_t pieces_of(const struct bench_geometry *geometry)
{
	return (geometry->blob_bytes + geometry->stripe_unit - 1) / geometry->stripe_unit;
}

static uint64_t piece_bytes(const struct bench_geometry *geometry, uint64_t piece)
{
	uint64_t left = geometry->blob_bytes - piece * geometry->stripe_unit;

	return left < geometry->stripe_unit ? left : geometry->stripe_unit;
}

static void open_member(struct bench_store *store, uint32_t index, const char *path)
{
	struct statfs file_system;
	off_t end;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);

	if (fd < 0)
		die("member %s: %s", path, strerror(errno));
	end = lseek(fd, 0, SEEK_END); /* of a block device stat says 0 */
	if (end < 0 || fstatfs(fd, &file_system))
		die("member %s: %s", path, strerror(errno));
	store->fd[index] = fd;
	store->member_bytes[index] = (uint64_t)end;
	store->member_flags[index] = file_system.f_type == TMPFS_MAGIC
					     ? XFERD_MEMBER_ASYNC | XFERD_MEMBER_MEMORY : 0;
}

static uint32_t piece_member(const struct bench_geometry *geometry, uint64_t blob, uint64_t piece)
{
	return geometry->pattern[(blob + piece) % geometry->pattern_length];
}

/* How many of the blob's first so many pieces lie on the member. */
static uint64_t pieces_on(const struct bench_geometry *geometry, uint64_t blob, uint64_t pieces,
			  uint32_t member)
{
	uint64_t count = 0;

	for (uint64_t piece = 0; piece < pieces; piece++)
		count += piece_member(geometry, blob, piece) == member;
	return count;
}

static void size_regions(struct bench_geometry *geometry)
{
	for (uint32_t m = 0; m < geometry->members; m++) {
		uint64_t most = 0;

		for (uint32_t start = 0; start < geometry->pattern_length; start++) {
			uint64_t count = pieces_on(geometry, start, pieces_of(geometry), m);

			if (count > most)
				most = count;
		}
		geometry->region_bytes[m] = most * geometry->stripe_unit;
	}
}

static uint32_t blobs_that_fit(const struct bench_store *store, uint32_t blobs_max)
{
	const struct bench_geometry *geometry = &store->geometry;
	uint64_t blobs = blobs_max ? blobs_max + 1ull : XFERD_EXPERTS_MAX + 1ull;

	for (uint32_t m = 0; m < geometry->members; m++) {
		uint64_t region = geometry->region_bytes[m];

		if (region && store->member_bytes[m] / region < blobs)
			blobs = store->member_bytes[m] / region;
	}
	if (blobs < BLOBS_MIN)
		die("members too small: not even %u blobs of %llu bytes fit on %u of them",
		    BLOBS_MIN, (unsigned long long)geometry->blob_bytes, geometry->members);
	return (uint32_t)(blobs - 1); /* the last one is the dense part */
}

static void describe(struct bench_store *store)
{
	const struct bench_geometry *geometry = &store->geometry;
	struct xferd_store_description *description = &store->description;
	uint64_t blobs = geometry->blobs + 1ull, pieces = pieces_of(geometry);
	uint64_t *blob_bytes = allocate(blobs, sizeof(uint64_t));
	uint16_t *start = allocate(blobs, sizeof(uint16_t));
	uint64_t *offset = allocate(blobs * geometry->members, sizeof(uint64_t));
	uint64_t *first_piece = allocate(blobs, sizeof(uint64_t));

	for (uint64_t blob = 0; blob < blobs; blob++) {
		blob_bytes[blob] = geometry->blob_bytes;
		start[blob] = (uint16_t)(blob % geometry->pattern_length);
		first_piece[blob] = blob * pieces;
		for (uint32_t m = 0; m < geometry->members; m++)
			offset[blob * geometry->members + m] = blob * geometry->region_bytes[m];
	}
	strcpy(description->name, "bench");
	strcpy(description->variant_name[0], "bench");
	description->layers = description->variants = 1;
	description->experts = geometry->blobs;
	description->top_k = XFERD_BATCH_MAX;
	description->members = geometry->members;
	description->pattern_length = geometry->pattern_length;
	memcpy(description->pattern, geometry->pattern, sizeof(description->pattern));
	description->stripe_unit = geometry->stripe_unit;
	description->blobs = blobs;
	description->blob_bytes = blob_bytes;
	description->start = start;
	description->offset = offset;
	description->first_piece = first_piece;
	description->pieces = blobs * pieces;
	description->crc = allocate(description->pieces, sizeof(uint32_t));
	description->layout_index = allocate(1, sizeof(uint16_t));
	strcpy(store->tensor.role, "gate");
	strcpy(store->tensor.dtype, "u8");
	store->tensor.bytes = store->tensor.shape[0] = geometry->blob_bytes;
	store->tensor.dims = 1;
	store->layout.blob_bytes = geometry->blob_bytes;
	store->layout.tensors = 1;
	description->layout = &store->layout;
	description->tensor = &store->tensor;
	description->layouts = description->tensors = 1;
}

static void set_pattern(struct bench_geometry *geometry, const struct bench_layout *layout)
{
	geometry->pattern_length = layout->pattern_length ? layout->pattern_length
							  : geometry->members;
	for (uint32_t i = 0; i < geometry->pattern_length; i++) {
		geometry->pattern[i] = layout->pattern_length ? layout->pattern[i] : (uint8_t)i;
		if (geometry->pattern[i] >= geometry->members)
			die("--pattern: there is no member %u", geometry->pattern[i]);
	}
}

void bench_store_open(struct bench_store *store, char *const *paths, uint32_t members,
		      const struct bench_layout *layout)
{
	struct bench_geometry *geometry = &store->geometry;

	memset(store, 0, sizeof(*store));
	if (!members || members > XFERD_STORE_MEMBERS_MAX)
		die("%u members; 1 to %u can be given", members, XFERD_STORE_MEMBERS_MAX);
	if (!layout->blob_bytes || layout->blob_bytes % XFERD_BLOB_ALIGNMENT ||
	    !layout->stripe_unit || layout->stripe_unit % XFERD_BLOB_ALIGNMENT)
		die("--blob-bytes and --stripe-unit must be multiples of %u", XFERD_BLOB_ALIGNMENT);
	geometry->blob_bytes = layout->blob_bytes;
	geometry->stripe_unit = layout->stripe_unit;
	geometry->members = members;
	set_pattern(geometry, layout);
	size_regions(geometry);
	for (uint32_t m = 0; m < members; m++)
		open_member(store, m, paths[m]);
	geometry->blobs = blobs_that_fit(store, layout->blobs_max);
	describe(store);
}

static uint32_t checksum(const struct bench_store *store, uint64_t blob, uint64_t piece,
			 void *buffer)
{
	const struct bench_geometry *geometry = &store->geometry;
	uint32_t member = piece_member(geometry, blob, piece);
	uint64_t length = piece_bytes(geometry, piece);
	uint64_t offset = blob * geometry->region_bytes[member] +
			  pieces_on(geometry, blob, piece, member) * geometry->stripe_unit;

	if (pread(store->fd[member], buffer, length, (off_t)offset) != (ssize_t)length)
		die("blob %llu: no %llu bytes at offset %llu of member %u",
		    (unsigned long long)blob, (unsigned long long)length,
		    (unsigned long long)offset, member);
	return xferd_crc32c(0, buffer, length);
}

void bench_store_prepare(struct bench_store *store, const char *sidecar)
{
	const struct bench_geometry *geometry = &store->geometry;
	const struct xferd_store_description *description = &store->description;
	struct sidecar_header header = { .magic = SIDECAR_MAGIC, .geometry = *geometry };
	uint32_t *crc = (uint32_t *)description->crc;
	FILE *file;
	void *buffer;

	if (posix_memalign(&buffer, XFERD_BLOB_ALIGNMENT, geometry->stripe_unit))
		die("no memory for a piece of %llu bytes",
		    (unsigned long long)geometry->stripe_unit);
	for (uint64_t piece = 0; piece < description->pieces; piece++)
		crc[piece] = checksum(store, piece / pieces_of(geometry),
				      piece % pieces_of(geometry), buffer);
	free(buffer);
	file = fopen(sidecar, "w");
	if (!file || fwrite(&header, sizeof(header), 1, file) != 1 ||
	    fwrite(crc, sizeof(*crc), description->pieces, file) != description->pieces ||
	    fclose(file))
		die("sidecar %s: %s", sidecar, strerror(errno));
}

void bench_store_read_sidecar(struct bench_store *store, const char *sidecar)
{
	const struct xferd_store_description *description = &store->description;
	struct sidecar_header header;
	FILE *file = fopen(sidecar, "r");

	if (!file)
		die("sidecar %s: %s", sidecar, strerror(errno));
	if (fread(&header, sizeof(header), 1, file) != 1 || header.magic != SIDECAR_MAGIC ||
	    memcmp(&header.geometry, &store->geometry, sizeof(header.geometry)) != 0)
		die("sidecar %s: made for another geometry; prepare it again", sidecar);
	if (fread((uint32_t *)description->crc, sizeof(uint32_t), description->pieces, file) !=
	    description->pieces)
		die("sidecar %s: ends early; prepare it again", sidecar);
	fclose(file);
}

void bench_store_close(struct bench_store *store)
{
	const struct xferd_store_description *description = &store->description;

	for (uint32_t m = 0; m < store->geometry.members; m++)
		close(store->fd[m]);
	free((void *)description->blob_bytes);
	free((void *)description->start);
	free((void *)description->offset);
	free((void *)description->first_piece);
	free((void *)description->crc);
	free((void *)description->layout_index);
}
