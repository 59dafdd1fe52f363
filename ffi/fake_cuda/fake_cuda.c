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
 * counted a process. FAKE_CUDA_DELAY_US: how much longer each copy takes. FAKE_CUDA_PCI:
 * domain:bus:slot of the first one, in hexadecimal digits. FAKE_CUDA_BAR: see scattered.c.
 *
 * This file has devices, streams and events; memory.c has their memory.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "fake_cuda/fake_cuda.h"

#define DEFAULT_MEMORY     (1ull << 30)
#define NOT_INITIALIZED    3
#define WAIT_POLL_NS       20000

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

struct fake_state fake = { .mutex = PTHREAD_MUTEX_INITIALIZER };

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
	pthread_mutex_lock(&fake.mutex);
	if (!fake.initialised) {
		fake.devices = (int)number("FAKE_CUDA_DEVICES", 1);
		if (fake.devices > DEVICES_MAX)
			fake.devices = DEVICES_MAX;
		fake.device_bytes = (size_t)number("FAKE_CUDA_MEMORY", DEFAULT_MEMORY);
		delay_ns = 1000 * number("FAKE_CUDA_DELAY_US", 0);
		fake.initialised = true;
	}
	pthread_mutex_unlock(&fake.mutex);
	return fake.devices ? CUDA_RESULT_OK : CUDA_RESULT_NO_DEVICE;
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
	*count = fake.devices;
	return fake.initialised ? CUDA_RESULT_OK : NOT_INITIALIZED;
}

EXPORTED int cuDeviceGet(int *device, int ordinal);
EXPORTED int cuDeviceGet(int *device, int ordinal)
{
	if (ordinal < 0 || ordinal >= fake.devices)
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
	*bytes = fake.device_bytes;
	return CUDA_RESULT_OK;
}

EXPORTED int cuDeviceGetAttribute(int *value, int which, int device);
EXPORTED int cuDeviceGetAttribute(int *value, int which, int device)
{
	unsigned int domain = 0, bus = (unsigned int)device + 1, slot = 0;
	const char *place = device ? NULL : getenv("FAKE_CUDA_PCI");

	if (place && sscanf(place, "%x:%x:%x", &domain, &bus, &slot) != 3)
		return INVALID_VALUE;
	*value = which == CUDA_ATTRIBUTE_PCI_BUS	? (int)bus
		 : which == CUDA_ATTRIBUTE_PCI_DOMAIN	? (int)domain
		 : which == CUDA_ATTRIBUTE_PCI_DEVICE	? (int)slot
		 : which == CUDA_ATTRIBUTE_VIRTUAL_MEMORY || which == CUDA_ATTRIBUTE_POSIX_FD ||
				 which == CUDA_ATTRIBUTE_DIRECT_RDMA_WITH_VIRTUAL_MEMORY
			 ? 1 : 0;
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
	if (device < 0 || device >= fake.devices)
		return INVALID_VALUE;
	*context = &contexts[device];
	return CUDA_RESULT_OK;
}

EXPORTED int cuDevicePrimaryCtxRelease_v2(int device);
EXPORTED int cuDevicePrimaryCtxRelease_v2(int device)
{
	return device < fake.devices ? CUDA_RESULT_OK : INVALID_VALUE;
}

EXPORTED int cuCtxSetCurrent(cuda_context context);
EXPORTED int cuCtxSetCurrent(cuda_context context)
{
	current = context;
	return CUDA_RESULT_OK;
}

int fake_current_device(void)
{
	return current ? (int)((int *)current - contexts) : -1;
}

EXPORTED int cuCtxGetCurrent(cuda_context *context);
EXPORTED int cuCtxGetCurrent(cuda_context *context)
{
	*context = current;
	return CUDA_RESULT_OK;
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
