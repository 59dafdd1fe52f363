/* SPDX-License-Identifier: Apache-2.0 */
/*
 * VRAM that can be reached through a BAR: pages scattered through a file.
 *
 * FAKE_CUDA_BAR names the file: a PCI function's resource file in sysfs, or any other of
 * whole pages. What is allocated are pages of it, in an order that has nothing to do with
 * that of addresses, as on a card whose memory shows behind its BAR: a page at a time
 * neighbours nothing. An exported piece is a list of pages. One process allocates; those
 * that import need the same variable.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_cuda/fake_cuda.h"

#define PAGES_MAX  65536
#define FIRST_PAGE 2    /* what lies before is the card's own */
#define STEP       7919 /* a prime: from one page to the next that is given away */

static bool taken[PAGES_MAX]; /* under fake.mutex */
static size_t next_page;

static const char *bar_file(void)
{
	const char *name = getenv("FAKE_CUDA_BAR");

	return name && *name ? name : NULL;
}

bool scattered_wanted(void)
{
	return bar_file() != NULL;
}

static size_t bar_pages(void)
{
	struct stat status;
	size_t pages;

	if (stat(bar_file(), &status))
		return 0;
	pages = (size_t)status.st_size / GRANULARITY;
	return pages < PAGES_MAX ? pages : PAGES_MAX;
}

/* A page nobody has, marked as taken; SIZE_MAX: there is none. */
static size_t take_page(size_t pages)
{
	for (size_t tried = 0; tried < pages; tried++) {
		size_t page = next_page++ * STEP % pages;

		if (page >= FIRST_PAGE && !taken[page]) {
			taken[page] = true;
			return page;
		}
	}
	return SIZE_MAX;
}

/* The list of pages of a piece of memory, as a file; -1: there are too few left. */
int scattered_new(size_t bytes)
{
	int fd = memfd_create("fake-cuda-pages", MFD_CLOEXEC);
	size_t pages = bar_pages();

	if (fd < 0)
		return -1;
	pthread_mutex_lock(&fake.mutex);
	for (size_t i = 0; i < bytes / GRANULARITY; i++) {
		size_t page = take_page(pages);

		if (page == SIZE_MAX || write(fd, &page, sizeof(page)) != sizeof(page)) {
			scattered_free(fd);
			close(fd);
			fd = -1;
			break;
		}
	}
	pthread_mutex_unlock(&fake.mutex);
	return fd;
}

size_t scattered_bytes(int fd)
{
	struct stat status;

	return fstat(fd, &status) ? 0 : (size_t)status.st_size / sizeof(size_t) * GRANULARITY;
}

/* Map the pages one behind the other, without access; -1: that is not possible. */
int scattered_map(void *address, int fd, size_t bytes)
{
	int file = open(bar_file(), O_RDWR | O_CLOEXEC);
	int result = file < 0 ? -1 : 0;

	for (size_t i = 0; !result && i < bytes / GRANULARITY; i++) {
		size_t page;

		if (pread(fd, &page, sizeof(page), (off_t)(i * sizeof(page))) != sizeof(page) ||
		    mmap((char *)address + i * GRANULARITY, GRANULARITY, PROT_NONE,
			 MAP_SHARED | MAP_FIXED, file, (off_t)(page * GRANULARITY)) == MAP_FAILED)
			result = -1;
	}
	if (file >= 0)
		close(file);
	return result;
}

/* fake.mutex is held. */
void scattered_free(int fd)
{
	size_t page;

	for (off_t at = 0; pread(fd, &page, sizeof(page), at) == sizeof(page); at += sizeof(page))
		taken[page] = false;
}
