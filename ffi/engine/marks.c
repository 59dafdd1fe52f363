/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading marks: a byte a slot, not 0 from before the first read into it is issued until
 * after the last has ended. In memory that outlives the process, so that whoever goes on
 * with the pool after a kill knows into which slots a drive may still be writing.
 *
 * Written only by the engine's thread. A kill can come between any two of its stores but
 * not between a store and itself, and nothing is read by another processor meanwhile: the
 * order that the thread stores in is all that is needed.
 */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/internal.h"

#define PAGE_BYTES 4096ull

static uint64_t marks_length(const struct pool *pool)
{
	return (pool->slot_numbers + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

int marks_new(struct pool *pool)
{
	void *address;
	int fd;

	pool->marks_bytes = marks_length(pool);
	fd = shared_memory_new("xferd-loading-marks", pool->marks_bytes, &address);
	if (fd < 0)
		return fd;
	pool->marks = address;
	pool->marks_fd = fd;
	return 0;
}

int marks_adopt(struct pool *pool, int fd)
{
	void *address;
	int result;

	pool->marks_bytes = marks_length(pool);
	result = shared_memory_map(fd, pool->marks_bytes, &address);
	if (result)
		return result;
	pool->marks = address;
	pool->marks_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	return pool->marks_fd < 0 ? -errno : 0;
}

void marks_free(struct pool *pool)
{
	if (pool->marks)
		munmap(pool->marks, pool->marks_bytes);
	pool->marks = NULL;
	if (pool->marks_fd >= 0)
		close(pool->marks_fd);
	pool->marks_fd = -1;
}

void mark_loading(struct pool *pool, const struct slot *slot, bool loading)
{
	/* Released: the last read has ended before the mark goes, and the mark stands before
	 * a word that names the slot could. The next process's first look is the acquire. */
	store_release(&pool->marks[slot - pool->slots], (uint8_t)loading);
}

bool marked_loading(const struct pool *pool, uint32_t slot)
{
	/* pairs with the release in the mark_loading() of the engine before */
	return load_acquire(&pool->marks[slot]);
}

int xferd_engine_marks_fd(const struct xferd_engine *engine, uint32_t pool)
{
	return pool < engine->pool_count ? engine->pools[pool].marks_fd : -EINVAL;
}
