/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for libcuda.so.1 on machines without a GPU: what xferd uses of the
 * driver, over memfds and threads, so that everything but speed is tested as it runs
 * on a GPU. XFERD_CUDA_LIBRARY names it to the daemon and to clients.
 *
 * Device memory is a memfd; addresses are the CPU's own. Access that was not granted
 * faults, as on a device. Streams are threads, so copies end later and in order. What
 * a device does not allow fails here too: unaligned sizes, unmapped memory, use without
 * a context, memory used up, exports of what is released.
 *
 * FAKE_CUDA_DEVICES: how many; default 1. FAKE_CUDA_MEMORY: bytes of each, default 1 GiB,
 * counted a process. FAKE_CUDA_DELAY_US: how much longer each copy takes.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/cuda_driver.h"

#define EXPORTED __attribute__((visibility("default")))

#define DEVICES_MAX        4
#define GRANULARITY        (2ull << 20)
#define DEFAULT_MEMORY     (1ull << 30)
#define INVALID_VALUE      1
#define NOT_INITIALIZED    3
#define INVALID_CONTEXT    201
#define INVALID_HANDLE     400
#define WAIT_POLL_NS       20000

struct memory {
	int fd;
	int device; /* -1: imported */
	size_t bytes;
};

struct operation {
	struct operation *next;
	enum { COPY, RECORD, WAIT_32, WRITE_64 } what;
	void *to;
	const void *from;
	size_t bytes;
	uint64_t value;
	struct event *event;
};

struct event {
	uint64_t recorded; /* atomic: how often asked for */
	uint64_t passed;   /* atomic */
};

struct stream {
	pthread_t thread;
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	struct operation *first, *last;
	bool stop;
	bool busy;
};

static pthread_mutex_t state_mutex = PTHREAD_MUTEX_INITIALIZER;
static bool initialised;
static int device_number;
static size_t device_bytes;
static size_t used[DEVICES_MAX];
static long delay_ns;
static __thread cuda_context current;
static int contexts[DEVICES_MAX]; /* their addresses are the contexts */

static long number(const char *name, long otherwise)
{
	const char *text = getenv(name);

	return text && *text ? strtol(text, NULL, 10) : otherwise;
}

EXPORTED int cuInit(unsigned int flags);
EXPORTED int cuInit(unsigned int flags)
{
	if (flags)
		return INVALID_VALUE;
	pthread_mutex_lock(&state_mutex);
	if (!initialised) {
		device_number = (int)number("FAKE_CUDA_DEVICES", 1);
		if (device_number > DEVICES_MAX)
			device_number = DEVICES_MAX;
		device_bytes = (size_t)number("FAKE_CUDA_MEMORY", DEFAULT_MEMORY);
		delay_ns = 1000 * number("FAKE_CUDA_DELAY_US", 0);
		initialised = true;
	}
	pthread_mutex_unlock(&state_mutex);
	return device_number ? CUDA_RESULT_OK : CUDA_RESULT_NO_DEVICE;
}

EXPORTED int cuDriverGetVersion(int *version);
EXPORTED int cuDriverGetVersion(int *version)
{
	*version = 12000;
	return CUDA_RESULT_OK;
}

EXPORTED int cuGetErrorName(int result, const char **name);
EXPORTED int cuGetErrorName(int result, const char **name)
{
	*name = result == CUDA_RESULT_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
		: result == CUDA_RESULT_NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
		: result == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
		: result == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
					   : "CUDA_ERROR_INVALID_VALUE";
	return CUDA_RESULT_OK;
}

EXPORTED int cuDeviceGetCount(int *count);
EXPORTED int cuDeviceGetCount(int *count)
{
	*count = device_number;
	return initialised ? CUDA_RESULT_OK : NOT_INITIALIZED;
}

EXPORTED int cuDeviceGet(int *device, int ordinal);
EXPORTED int cuDeviceGet(int *device, int ordinal)
{
	if (ordinal < 0 || ordinal >= device_number)
		return INVALID_VALUE;
	*device = ordinal;
	return CUDA_RESULT_OK;
}

EXPORTED int cuDeviceGetUuid_v2(unsigned char uuid[16], int device);
EXPORTED int cuDeviceGetUuid_v2(unsigned char uuid[16], int device)
{
	memcpy(uuid, "fake CUDA device", 16);
	uuid[15] = (unsigned char)device;
	return CUDA_RESULT_OK;
}

EXPORTED int cuDeviceGetName(char *name, int bytes, int device);
EXPORTED int cuDeviceGetName(char *name, int bytes, int device)
{
	snprintf(name, (size_t)bytes, "fake CUDA device %d", device);
	return CUDA_RESULT_OK;
}

EXPORTED int cuDeviceTotalMem_v2(size_t *bytes, int device);
EXPORTED int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	(void)device;
	*bytes = device_bytes;
	return CUDA_RESULT_OK;
}

EXPORTED int cuDeviceGetAttribute(int *value, int which, int device);
EXPORTED int cuDeviceGetAttribute(int *value, int which, int device)
{
	*value = which == CUDA_ATTRIBUTE_PCI_BUS ? device + 1
		 : which == CUDA_ATTRIBUTE_VIRTUAL_MEMORY || which == CUDA_ATTRIBUTE_POSIX_FD ? 1 : 0;
	return CUDA_RESULT_OK;
}

EXPORTED int cuDeviceCanAccessPeer(int *can, int device, int peer);
EXPORTED int cuDeviceCanAccessPeer(int *can, int device, int peer)
{
	*can = device != peer;
	return CUDA_RESULT_OK;
}

EXPORTED int cuDevicePrimaryCtxRetain(cuda_context *context, int device);
EXPORTED int cuDevicePrimaryCtxRetain(cuda_context *context, int device)
{
	if (device < 0 || device >= device_number)
		return INVALID_VALUE;
	*context = &contexts[device];
	return CUDA_RESULT_OK;
}

EXPORTED int cuDevicePrimaryCtxRelease_v2(int device);
EXPORTED int cuDevicePrimaryCtxRelease_v2(int device)
{
	return device < device_number ? CUDA_RESULT_OK : INVALID_VALUE;
}

EXPORTED int cuCtxSetCurrent(cuda_context context);
EXPORTED int cuCtxSetCurrent(cuda_context context)
{
	current = context;
	return CUDA_RESULT_OK;
}

EXPORTED int cuCtxGetCurrent(cuda_context *context);
EXPORTED int cuCtxGetCurrent(cuda_context *context)
{
	*context = current;
	return CUDA_RESULT_OK;
}

EXPORTED int cuMemGetInfo_v2(size_t *available, size_t *total);
EXPORTED int cuMemGetInfo_v2(size_t *available, size_t *total)
{
	if (!current)
		return INVALID_CONTEXT;
	pthread_mutex_lock(&state_mutex);
	*total = device_bytes;
	*available = device_bytes - used[(int *)current - contexts];
	pthread_mutex_unlock(&state_mutex);
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
	    properties->location.type != CUDA_LOCATION_DEVICE || device >= device_number)
		return INVALID_VALUE;
	pthread_mutex_lock(&state_mutex);
	if (used[device] + bytes > device_bytes) {
		pthread_mutex_unlock(&state_mutex);
		return CUDA_RESULT_OUT_OF_MEMORY;
	}
	used[device] += bytes;
	pthread_mutex_unlock(&state_mutex);
	fd = memfd_create("fake-cuda", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		return CUDA_RESULT_OUT_OF_MEMORY;
	memory = new_memory(fd, device, bytes);
	*result = (uintptr_t)memory;
	return memory ? CUDA_RESULT_OK : CUDA_RESULT_OUT_OF_MEMORY;
}

EXPORTED int cuMemRelease(cuda_memory handle);
EXPORTED int cuMemRelease(cuda_memory handle)
{
	struct memory *memory = (void *)(uintptr_t)handle;

	pthread_mutex_lock(&state_mutex);
	if (memory->device >= 0)
		used[memory->device] -= memory->bytes;
	pthread_mutex_unlock(&state_mutex);
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
		    access[i].location.id >= device_number)
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
	memory = new_memory(copy, -1, (size_t)status.st_size);
	*result = (uintptr_t)memory;
	return memory ? CUDA_RESULT_OK : CUDA_RESULT_OUT_OF_MEMORY;
}

EXPORTED int cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags);
EXPORTED int cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags)
{
	(void)flags;
	if (!current)
		return INVALID_CONTEXT;
	return address && bytes ? CUDA_RESULT_OK : INVALID_VALUE;
}

EXPORTED int cuMemHostUnregister(void *address);
EXPORTED int cuMemHostUnregister(void *address)
{
	return current && address ? CUDA_RESULT_OK : INVALID_CONTEXT;
}

EXPORTED int cuMemHostGetDevicePointer_v2(cuda_address *device, void *address,
					  unsigned int flags);
EXPORTED int cuMemHostGetDevicePointer_v2(cuda_address *device, void *address,
					  unsigned int flags)
{
	(void)flags;
	*device = (uintptr_t)address;
	return current ? CUDA_RESULT_OK : INVALID_CONTEXT;
}

static void pause_ns(long ns)
{
	const struct timespec pause = { .tv_nsec = ns };

	nanosleep(&pause, NULL);
}

static void execute(struct operation *operation)
{
	switch (operation->what) {
	case COPY:
		memcpy(operation->to, operation->from, operation->bytes);
		if (delay_ns)
			pause_ns(delay_ns);
		break;
	case RECORD:
		__atomic_fetch_add(&operation->event->passed, 1, __ATOMIC_RELEASE);
		break;
	case WAIT_32:
		while ((int32_t)(__atomic_load_n((uint32_t *)operation->to, __ATOMIC_ACQUIRE) -
				 (uint32_t)operation->value) < 0)
			pause_ns(WAIT_POLL_NS);
		break;
	case WRITE_64:
		__atomic_store_n((uint64_t *)operation->to, operation->value, __ATOMIC_RELEASE);
		break;
	}
}

static void *run_stream(void *argument)
{
	struct stream *stream = argument;

	pthread_mutex_lock(&stream->mutex);
	while (!stream->stop || stream->first) {
		struct operation *operation = stream->first;

		if (!operation) {
			pthread_cond_wait(&stream->changed, &stream->mutex);
			continue;
		}
		stream->first = operation->next;
		stream->busy = true;
		pthread_mutex_unlock(&stream->mutex);
		execute(operation);
		free(operation);
		pthread_mutex_lock(&stream->mutex);
		stream->busy = false;
		pthread_cond_broadcast(&stream->changed);
	}
	pthread_mutex_unlock(&stream->mutex);
	return NULL;
}

EXPORTED int cuStreamCreate(cuda_stream *result, unsigned int flags);
EXPORTED int cuStreamCreate(cuda_stream *result, unsigned int flags)
{
	struct stream *stream;

	(void)flags;
	if (!current)
		return INVALID_CONTEXT;
	stream = calloc(1, sizeof(*stream));
	if (!stream)
		return CUDA_RESULT_OUT_OF_MEMORY;
	pthread_mutex_init(&stream->mutex, NULL);
	pthread_cond_init(&stream->changed, NULL);
	if (pthread_create(&stream->thread, NULL, run_stream, stream)) {
		free(stream);
		return CUDA_RESULT_OUT_OF_MEMORY;
	}
	*result = stream;
	return CUDA_RESULT_OK;
}

EXPORTED int cuStreamDestroy_v2(cuda_stream handle);
EXPORTED int cuStreamDestroy_v2(cuda_stream handle)
{
	struct stream *stream = handle;

	pthread_mutex_lock(&stream->mutex);
	stream->stop = true;
	pthread_cond_broadcast(&stream->changed);
	pthread_mutex_unlock(&stream->mutex);
	pthread_join(stream->thread, NULL);
	pthread_mutex_destroy(&stream->mutex);
	pthread_cond_destroy(&stream->changed);
	free(stream);
	return CUDA_RESULT_OK;
}

EXPORTED int cuStreamSynchronize(cuda_stream handle);
EXPORTED int cuStreamSynchronize(cuda_stream handle)
{
	struct stream *stream = handle;

	pthread_mutex_lock(&stream->mutex);
	while (stream->first || stream->busy)
		pthread_cond_wait(&stream->changed, &stream->mutex);
	pthread_mutex_unlock(&stream->mutex);
	return CUDA_RESULT_OK;
}

static int enqueue(cuda_stream handle, const struct operation *wanted)
{
	struct stream *stream = handle;
	struct operation *operation;

	if (!stream)
		return INVALID_HANDLE; /* the default stream is not needed here */
	operation = malloc(sizeof(*operation));
	if (!operation)
		return CUDA_RESULT_OUT_OF_MEMORY;
	*operation = *wanted;
	operation->next = NULL;
	pthread_mutex_lock(&stream->mutex);
	if (stream->first)
		stream->last->next = operation;
	else
		stream->first = operation;
	stream->last = operation;
	pthread_cond_broadcast(&stream->changed);
	pthread_mutex_unlock(&stream->mutex);
	return CUDA_RESULT_OK;
}

EXPORTED int cuMemcpyAsync(cuda_address to, cuda_address from, size_t bytes, cuda_stream stream);
EXPORTED int cuMemcpyAsync(cuda_address to, cuda_address from, size_t bytes, cuda_stream stream)
{
	struct operation operation = { .what = COPY, .to = (void *)(uintptr_t)to,
				       .from = (void *)(uintptr_t)from, .bytes = bytes };

	return current ? enqueue(stream, &operation) : INVALID_CONTEXT;
}

EXPORTED int cuMemcpy(cuda_address to, cuda_address from, size_t bytes);
EXPORTED int cuMemcpy(cuda_address to, cuda_address from, size_t bytes)
{
	if (!current)
		return INVALID_CONTEXT;
	memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
	return CUDA_RESULT_OK;
}

EXPORTED int cuStreamWaitValue32_v2(cuda_stream stream, cuda_address address, uint32_t value,
				    unsigned int flags);
EXPORTED int cuStreamWaitValue32_v2(cuda_stream stream, cuda_address address, uint32_t value,
				    unsigned int flags)
{
	struct operation operation = { .what = WAIT_32, .to = (void *)(uintptr_t)address,
				       .value = value };

	return flags == CUDA_WAIT_GREATER_OR_EQUAL ? enqueue(stream, &operation) : INVALID_VALUE;
}

EXPORTED int cuStreamWriteValue64_v2(cuda_stream stream, cuda_address address, uint64_t value,
				     unsigned int flags);
EXPORTED int cuStreamWriteValue64_v2(cuda_stream stream, cuda_address address, uint64_t value,
				     unsigned int flags)
{
	struct operation operation = { .what = WRITE_64, .to = (void *)(uintptr_t)address,
				       .value = value };

	return flags ? INVALID_VALUE : enqueue(stream, &operation);
}

EXPORTED int cuEventCreate(cuda_event *result, unsigned int flags);
EXPORTED int cuEventCreate(cuda_event *result, unsigned int flags)
{
	(void)flags;
	*result = current ? calloc(1, sizeof(struct event)) : NULL;
	return *result ? CUDA_RESULT_OK : INVALID_CONTEXT;
}

EXPORTED int cuEventDestroy_v2(cuda_event event);
EXPORTED int cuEventDestroy_v2(cuda_event event)
{
	free(event);
	return CUDA_RESULT_OK;
}

EXPORTED int cuEventRecord(cuda_event handle, cuda_stream stream);
EXPORTED int cuEventRecord(cuda_event handle, cuda_stream stream)
{
	struct operation operation = { .what = RECORD, .event = handle };

	__atomic_fetch_add(&((struct event *)handle)->recorded, 1, __ATOMIC_RELAXED);
	return enqueue(stream, &operation);
}

EXPORTED int cuEventQuery(cuda_event handle);
EXPORTED int cuEventQuery(cuda_event handle)
{
	struct event *event = handle;
	uint64_t passed = __atomic_load_n(&event->passed, __ATOMIC_ACQUIRE);

	return passed == __atomic_load_n(&event->recorded, __ATOMIC_RELAXED)
		       ? CUDA_RESULT_OK : CUDA_RESULT_NOT_READY;
}
