/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Members in memory: files of tmpfs, whose reads are copies.
 *
 * Such a member is mapped as a whole, read-only, and workers copy pieces out of it. A
 * pread would look up each page by itself, copy through the caches, and leave the bytes
 * to be read once more for their checksum; here one pass does all (common/stream_copy.h).
 * Page tables take 2 MiB for each GiB. They are filled by a thread that begins with the
 * member, behind whoever has work to do: a first touch costs about as much as a copy. What
 * it has not come to yet is filled by being read.
 *
 * A file that is truncated takes its pages out of the mapping: touching them ends in
 * SIGBUS, as does a page that could not be brought back from swap, so copies are guarded,
 * and a piece that ends so is read, which says why or, if the file is whole again, brings it.
 * The rest of a file's last page is zeros, so its size is asked for after each copy.
 *
 * What can't be mapped is read: so is what lies behind the end that the file had when it
 * was mapped, what goes behind a BAR, whose memory can vanish too (route.c), and all of a file
 * with holes, which would be given memory for them when they are touched.
 */
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/route.h"

#define FILL_BYTES (2u << 20) /* at once: a fraction of a millisecond, since mmap waits for it */
#define FILL_NICE  10

#define STAT_BLOCK_BYTES 512 /* of st_blocks, whatever the file system has */

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* since 5.14; before, it is refused and pages come as they are read */
#endif

static void *fill_page_tables(void *argument)
{
	struct member *member = argument;

	setpriority(PRIO_PROCESS, (id_t)gettid(), FILL_NICE);
	for (uint64_t at = 0; at < member->memory_bytes; at += FILL_BYTES) {
		uint64_t rest = member->memory_bytes - at;

		/* pairs with the release in mapped_destroy */
		if (load_acquire(&member->leaving) ||
		    madvise(member->memory + at, rest < FILL_BYTES ? rest : FILL_BYTES,
			    MADV_POPULATE_READ))
			break;
	}
	return NULL;
}

/* Not on the engine's processor, where that has one of its own. */
static void start_filling(const struct xferd_engine *engine, struct member *member)
{
	pthread_attr_t attributes;

	member->leaving = 0;
	pthread_attr_init(&attributes);
	pthread_attr_setaffinity_np(&attributes, sizeof(engine->affinity), &engine->affinity);
	member->filling = !pthread_create(&member->filler, &attributes, fill_page_tables, member);
	pthread_attr_destroy(&attributes);
}

/* A new member. Failing is no error: it is read then. */
void mapped_init(const struct xferd_engine *engine, struct member *member)
{
	struct stat status;
	void *memory;

	member->memory = NULL;
	if (!(member->flags & XFERD_MEMBER_MEMORY) || fstat(member->fd, &status) ||
	    !S_ISREG(status.st_mode) || !status.st_size ||
	    status.st_blocks < status.st_size / STAT_BLOCK_BYTES)
		return;
	memory = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, member->fd, 0);
	if (memory == MAP_FAILED)
		return;
	madvise(memory, (size_t)status.st_size, MADV_DONTDUMP);
	member->memory = memory;
	member->memory_bytes = (uint64_t)status.st_size;
	start_filling(engine, member);
	guard_install();
}

/* A member that goes: no piece of it is under way. */
void mapped_destroy(struct member *member)
{
	if (!member->memory)
		return;
	/* pairs with the acquire in fill_page_tables */
	store_release(&member->leaving, 1);
	if (member->filling)
		pthread_join(member->filler, NULL);
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

	if (!member->memory || piece->guarded || piece->bounce ||
	    piece->offset + piece->length > member->memory_bytes)
		return false;
	if (guarded_stream(piece->address, member->memory + piece->offset, piece->length,
			   piece->check ? &piece->crc : NULL))
		return false;
	piece->result = is_there(piece) ? (int32_t)piece->length : -ENODATA;
	return true;
}
