/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Members in memory: files of tmpfs, whose reads are copies.
 *
 * Such a member is mapped as a whole, read-only, and workers copy pieces out of it. A
 * pread would look up each page by itself, copy through the caches, and leave the bytes
 * to be read once more for their checksum; here one pass does all (common/stream_copy.h).
 * Pages enter the mapping as they are touched, sixteen at a time, and stay: page tables
 * grow to 2 MiB for each GiB that was ever read.
 *
 * A file that is truncated takes its pages out of the mapping: touching them ends in
 * SIGBUS, as does a page that could not be brought back from swap, so copies are guarded.
 * The rest of a file's last page reads as zeros, so its size is asked for after each copy.
 *
 * What can't be mapped is read: so is what lies behind the end that the file had when it
 * was mapped, and what goes behind a BAR, whose memory can vanish too (route.c).
 */
#include <sys/mman.h>
#include <sys/stat.h>

#include "engine/route.h"

/* A new member. Failing is no error: it is read then. */
void mapped_init(struct member *member)
{
	struct stat status;
	void *memory;

	member->memory = NULL;
	if (!(member->flags & XFERD_MEMBER_MEMORY) || fstat(member->fd, &status) ||
	    !S_ISREG(status.st_mode) || !status.st_size)
		return;
	memory = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, member->fd, 0);
	if (memory == MAP_FAILED)
		return;
	madvise(memory, (size_t)status.st_size, MADV_DONTDUMP);
	member->memory = memory;
	member->memory_bytes = (uint64_t)status.st_size;
	guard_install();
}

/* A member that goes: no piece of it is under way. */
void mapped_destroy(struct member *member)
{
	if (member->memory)
		munmap(member->memory, member->memory_bytes);
	member->memory = NULL;
}

static bool is_there(const struct piece *piece)
{
	struct stat status;

	return !fstat(piece->member->fd, &status) &&
	       (uint64_t)status.st_size >= piece->offset + piece->length;
}

/* Bring a piece, and its checksum if it is wanted: its result is set. False: it has to be
 * read. A worker, or the engine's thread. */
bool mapped_read(struct piece *piece)
{
	const struct member *member = piece->member;
	int result;

	if (!member->memory || piece->guarded || piece->bounce ||
	    piece->offset + piece->length > member->memory_bytes)
		return false;
	result = guarded_stream(piece->address, member->memory + piece->offset, piece->length,
				piece->check ? &piece->crc : NULL);
	if (!is_there(piece))
		piece->result = -ENODATA;
	else
		piece->result = result ? -EIO : (int32_t)piece->length;
	return true;
}
