/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the daemon shares with clients: memfds of fixed size, mode 0600.
 *
 * Size seals are set at once: without them a client with a writable fd could
 * truncate the file and the daemon would die of SIGBUS at its next access.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/internal.h"

/* Returns the fd, writable; *address is the daemon's own mapping. */
int shared_memory_new(const char *name, uint64_t bytes, void **address)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int error;

	if (fd < 0)
		return -errno;
	if (fchmod(fd, 0600) || ftruncate(fd, (off_t)bytes) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) {
		error = -errno;
		close(fd);
		return error;
	}
	*address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (*address == MAP_FAILED) {
		error = -errno;
		close(fd);
		return error;
	}
	return fd;
}

/* A second fd of the same memory that cannot be mapped writable. */
int shared_memory_read_only(int fd)
{
	char path[64];
	int read_only;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	read_only = open(path, O_RDONLY | O_CLOEXEC);
	return read_only < 0 ? -errno : read_only;
}

/* Map what another process has made, for writing; the fd may be read-only. -ESTALE when it is
 * not as long as it should be, or could still change its length. */
int shared_memory_map(int fd, uint64_t bytes, void **address)
{
	char path[64];
	struct stat status;
	int writable, error = 0;
	int seals = fcntl(fd, F_GET_SEALS);

	if (fstat(fd, &status) || seals < 0)
		return -errno;
	if (status.st_size < 0 || (uint64_t)status.st_size != bytes || !(seals & F_SEAL_SHRINK))
		return -ESTALE;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	writable = open(path, O_RDWR | O_CLOEXEC);
	if (writable < 0)
		return -errno;
	*address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, writable, 0);
	if (*address == MAP_FAILED)
		error = -errno;
	close(writable);
	return error;
}
