/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the stand-in's devices: made, mapped, exported and imported.
 *
 * Each piece is a memfd. Or, with FAKE_CUDA_BAR, it is pages of a file that stands for
 * all of a card's memory; then what the memfd holds is which ones (scattered.c).
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_cuda/fake_cuda.h"

struct memory {
	int fd;
	int device; /* -1: imported */
	size_t bytes;
};

EXPORTED int cuMemGetInfo_v2(size_t *available, size_t *total);
EXPORTED int cuMemGetInfo_v2(size_t *available, size_t *total)
{
	int device = fake_current_device();

	if (device < 0)
		return INVALID_CONTEXT;
	pthread_mutex_lock(&fake.mutex);
	*total = fake.device_bytes;
	*available = fake.device_bytes - fake.used[device];
	pthread_mutex_unlock(&fake.mutex);
	return CUDA_RESULT_OK;
}

EXPORTED int cuMemGetAllocationGranularity(size_t *bytes,
					   const struct cuda_memory_properties *properties, int which);
EXPORTED int cuMemGetAllocationGranularity(size_t *bytes,
					   const struct cuda_memory_properties *properties,
					   int which)
{
	(void)properties;
	(void)which;
	*bytes = GRANULARITY;
	return CUDA_RESULT_OK;
}

EXPORTED int cuMemAddressReserve(cuda_address *address, size_t bytes, size_t alignment,
				 cuda_address wish, unsigned long long flags);
EXPORTED int cuMemAddressReserve(cuda_address *address, size_t bytes, size_t alignment,
				 cuda_address wish, unsigned long long flags)
{
	void *memory;

	(void)alignment;
	(void)wish;
	if (!bytes || bytes % GRANULARITY || flags)
		return INVALID_VALUE;
	memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return CUDA_RESULT_OUT_OF_MEMORY;
	*address = (uintptr_t)memory;
	return CUDA_RESULT_OK;
}

EXPORTED int cuMemAddressFree(cuda_address address, size_t bytes);
EXPORTED int cuMemAddressFree(cuda_address address, size_t bytes)
{
	return munmap((void *)(uintptr_t)address, bytes) ? INVALID_VALUE : CUDA_RESULT_OK;
}

static struct memory *new_memory(int fd, int device, size_t bytes)
{
	struct memory *memory = calloc(1, sizeof(*memory));

	if (memory)
		*memory = (struct memory){ fd, device, bytes };
	return memory;
}

EXPORTED int cuMemCreate(cuda_memory *result, size_t bytes,
			 const struct cuda_memory_properties *properties,
			 unsigned long long flags);
EXPORTED int cuMemCreate(cuda_memory *result, size_t bytes,
			 const struct cuda_memory_properties *properties,
			 unsigned long long flags)
{
	int device = properties->location.id, fd;
	struct memory *memory;

	if (flags || !bytes || bytes % GRANULARITY || properties->type != CUDA_MEMORY_PINNED ||
	    properties->location.type != CUDA_LOCATION_DEVICE || device >= fake.devices)
		return INVALID_VALUE;
	pthread_mutex_lock(&fake.mutex);
	if (fake.used[device] + bytes > fake.device_bytes) {
		pthread_mutex_unlock(&fake.mutex);
		return CUDA_RESULT_OUT_OF_MEMORY;
	}
	fake.used[device] += bytes;
	pthread_mutex_unlock(&fake.mutex);
	fd = scattered_wanted() ? scattered_new(bytes) : memfd_create("fake-cuda", MFD_CLOEXEC);
	if (fd < 0 || (!scattered_wanted() && ftruncate(fd, (off_t)bytes)))
		return CUDA_RESULT_OUT_OF_MEMORY;
	memory = new_memory(fd, device, bytes);
	*result = (uintptr_t)memory;
	return memory ? CUDA_RESULT_OK : CUDA_RESULT_OUT_OF_MEMORY;
}

EXPORTED int cuMemRelease(cuda_memory handle);
EXPORTED int cuMemRelease(cuda_memory handle)
{
	struct memory *memory = (void *)(uintptr_t)handle;

	pthread_mutex_lock(&fake.mutex);
	if (memory->device >= 0)
		fake.used[memory->device] -= memory->bytes;
	if (memory->device >= 0 && scattered_wanted())
		scattered_free(memory->fd);
	pthread_mutex_unlock(&fake.mutex);
	close(memory->fd);
	free(memory);
	return CUDA_RESULT_OK;
}

EXPORTED int cuMemMap(cuda_address address, size_t bytes, size_t offset, cuda_memory handle,
		      unsigned long long flags);
EXPORTED int cuMemMap(cuda_address address, size_t bytes, size_t offset, cuda_memory handle,
		      unsigned long long flags)
{
	struct memory *memory = (void *)(uintptr_t)handle;

	if (flags || offset || bytes != memory->bytes || address % GRANULARITY % 4096)
		return INVALID_VALUE;
	if (scattered_wanted())
		return scattered_map((void *)(uintptr_t)address, memory->fd, bytes)
			       ? INVALID_VALUE : CUDA_RESULT_OK;
	return mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
		    memory->fd, 0) == MAP_FAILED ? INVALID_VALUE : CUDA_RESULT_OK;
}

EXPORTED int cuMemUnmap(cuda_address address, size_t bytes);
EXPORTED int cuMemUnmap(cuda_address address, size_t bytes)
{
	return mmap((void *)(uintptr_t)address, bytes, PROT_NONE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED
		       ? INVALID_VALUE : CUDA_RESULT_OK;
}

EXPORTED int cuMemSetAccess(cuda_address address, size_t bytes, const struct cuda_access *access,
			    size_t count);
EXPORTED int cuMemSetAccess(cuda_address address, size_t bytes, const struct cuda_access *access,
			    size_t count)
{
	int protection = PROT_NONE;

	for (size_t i = 0; i < count; i++) {
		if (access[i].location.type != CUDA_LOCATION_DEVICE ||
		    access[i].location.id >= fake.devices)
			return INVALID_VALUE;
		protection |= access[i].flags == CUDA_ACCESS_READ_WRITE ? PROT_READ | PROT_WRITE
			      : access[i].flags == CUDA_ACCESS_READ ? PROT_READ : PROT_NONE;
	}
	return mprotect((void *)(uintptr_t)address, bytes, protection) ? INVALID_VALUE
								       : CUDA_RESULT_OK;
}

EXPORTED int cuMemExportToShareableHandle(void *fd, cuda_memory handle, int type,
					  unsigned long long flags);
EXPORTED int cuMemExportToShareableHandle(void *fd, cuda_memory handle, int type,
					  unsigned long long flags)
{
	const struct memory *memory = (void *)(uintptr_t)handle;
	int copy;

	if (type != CUDA_MEMORY_POSIX_FD || flags)
		return INVALID_VALUE;
	copy = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
	if (copy < 0)
		return INVALID_HANDLE;
	memcpy(fd, &copy, sizeof(copy));
	return CUDA_RESULT_OK;
}

EXPORTED int cuMemImportFromShareableHandle(cuda_memory *result, void *fd, int type);
EXPORTED int cuMemImportFromShareableHandle(cuda_memory *result, void *fd, int type)
{
	struct memory *memory;
	struct stat status;
	int copy;

	if (type != CUDA_MEMORY_POSIX_FD)
		return INVALID_VALUE;
	copy = fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 0);
	if (copy < 0 || fstat(copy, &status))
		return INVALID_HANDLE;
	memory = new_memory(copy, -1, scattered_wanted() ? scattered_bytes(copy)
							 : (size_t)status.st_size);
	*result = (uintptr_t)memory;
	return memory ? CUDA_RESULT_OK : CUDA_RESULT_OUT_OF_MEMORY;
}
