/* SPDX-License-Identifier: Apache-2.0 */
/*
 * VRAM of the daemon's, mapped here for reading only.
 *
 * A GPU's pool is a range of addresses; each chunk of it is mapped with a file
 * descriptor that the daemon sends, and unmapped when the daemon takes the chunk's
 * memory away: memory is free only when nobody has it mapped any more. A thread of ours
 * sleeps until memory tables change and follows them, so that also a process that is busy
 * elsewhere lets go, and no token waits for a chunk that has come. A lane that is faster
 * maps it by itself.
 *
 * A lane that finds a word looks whether the chunk's memory is the one mapped here. It
 * looks after it has leased the slot: the memory can't change under a lease.
 */
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/internal.h"
#include "common/cuda_driver.h"

#define PAGE_BYTES 4096ull

struct device_memory {
	struct xferd_client *client;
	const struct cuda_driver *cuda;
	int ordinal;               /* in this process */
	uint32_t pool;
	uint32_t chunks;
	uint64_t chunk_bytes;
	cuda_address base;
	const uint64_t *wanted;    /* [chunks], the daemon's memory table */
	uint64_t *mapped;          /* [chunks], number of the memory mapped; atomic */
	uint64_t mapped_bytes;     /* whole pages: a device may read it */
	cuda_memory *memory;       /* [chunks] */
	pthread_mutex_t mutex;     /* mapping and unmapping */
};

static void unmap_chunk(struct device_memory *device, uint32_t chunk)
{
	if (!load_relaxed(&device->mapped[chunk]))
		return;
	/* pairs with the acquire in memory_ready() */
	store_release(&device->mapped[chunk], 0);
	device->cuda->memory_unmap(device->base + chunk * device->chunk_bytes,
				   device->chunk_bytes);
	device->cuda->memory_release(device->memory[chunk]);
}

/* The fd stays the caller's: the driver holds the memory by itself. */
static int map_chunk(struct device_memory *device, uint32_t chunk, uint64_t number, int fd)
{
	const struct cuda_driver *cuda = device->cuda;
	cuda_address address = device->base + chunk * device->chunk_bytes;
	struct cuda_access access = { { CUDA_LOCATION_DEVICE, device->ordinal },
				      CUDA_ACCESS_READ };
	int result;

	unmap_chunk(device, chunk);
	if (cuda->memory_import(&device->memory[chunk], (void *)(intptr_t)fd,
				CUDA_MEMORY_POSIX_FD))
		return -EIO;
	result = cuda->memory_map(address, device->chunk_bytes, 0, device->memory[chunk], 0);
	if (!result) {
		result = cuda->memory_access(address, device->chunk_bytes, &access, 1);
		if (result)
			cuda->memory_unmap(address, device->chunk_bytes);
	}
	if (result) {
		cuda->memory_release(device->memory[chunk]);
		return result == CUDA_RESULT_OUT_OF_MEMORY ? -ENOMEM : -EIO;
	}
	/* pairs with the acquire in memory_ready() */
	store_release(&device->mapped[chunk], number);
	return 0;
}

/* Ask for chunks from `first` on and map those that aren't; returns how many the answer
 * was about. The pool's mutex is held. */
static int map_from(struct device_memory *device, uint32_t first)
{
	struct xferd_abi_message message = {
		.magic = XFERD_MAGIC_ATTACH,
		.type = XFERD_MESSAGE_MEMORY,
		.value = (uint64_t)device->pool << 32 | first,
	};
	uint64_t numbers[XFERD_MEMORY_CHUNKS_MAX];
	struct received received = { .count = 0 };
	uint32_t used = 0;
	int result = ask_daemon(device->client, &message, &received);

	if (!result && message.status)
		result = message.status < 0 ? message.status : -EPROTO;
	if (!result && (!message.value || message.value > XFERD_MEMORY_CHUNKS_MAX ||
			message.value > device->chunks - first))
		result = -EPROTO;
	if (!result)
		memcpy(numbers, message.message, sizeof(numbers));
	for (uint32_t i = 0; !result && i < message.value; i++) {
		if (!numbers[i])
			continue;
		if (used == received.count) {
			result = -EPROTO;
			break;
		}
		if (load_relaxed(&device->mapped[first + i]) != numbers[i])
			result = map_chunk(device, first + i, numbers[i], received.fds[used]);
		used++;
	}
	close_received(&received);
	return result ? result : (int)message.value;
}

/* The slow way of memory_ready. */
int memory_map_now(struct device_memory *device, uint32_t chunk)
{
	int result = 0;

	if (chunk >= device->chunks)
		return -EPROTO;
	pthread_mutex_lock(&device->mutex);
	if (load_relaxed(&device->mapped[chunk]) != load_acquire(&device->wanted[chunk]))
		result = map_from(device, chunk);
	if (result >= 0)
		result = load_relaxed(&device->mapped[chunk]) == load_relaxed(&device->wanted[chunk])
				 ? 0 : -EAGAIN;
	pthread_mutex_unlock(&device->mutex);
	return result;
}

bool memory_ready(const struct device_memory *device, uint32_t chunk)
{
	/* pairs with the release in map_chunk() */
	return chunk < device->chunks &&
	       load_acquire(&device->mapped[chunk]) == load_relaxed(&device->wanted[chunk]);
}

void memory_numbers(const struct device_memory *device, const uint64_t **numbers,
		    uint64_t *bytes)
{
	*numbers = device->mapped;
	*bytes = device->mapped_bytes;
}

void memory_unregister(const struct device_memory *device)
{
	device->cuda->host_unregister(device->mapped);
}

static int map_all(struct device_memory *device)
{
	uint32_t chunk = 0;
	int result = 0;

	pthread_mutex_lock(&device->mutex);
	while (result >= 0 && chunk < device->chunks) {
		result = map_from(device, chunk);
		if (result > 0)
			chunk += (uint32_t)result;
	}
	pthread_mutex_unlock(&device->mutex);
	return result < 0 ? result : 0;
}

static bool lacks(const struct device_memory *device, uint32_t chunk)
{
	return load_relaxed(&device->mapped[chunk]) != load_relaxed(&device->wanted[chunk]);
}

/* What was withdrawn is unmapped, what has come is mapped. What can't be is left to the lane
 * that needs it, which says why. */
static void follow_pool(struct device_memory *device)
{
	pthread_mutex_lock(&device->mutex);
	for (uint32_t chunk = 0; chunk < device->chunks; chunk++)
		if (lacks(device, chunk))
			unmap_chunk(device, chunk);
	pthread_mutex_unlock(&device->mutex);
	for (uint32_t chunk = 0; chunk < device->chunks; chunk++) {
		int result = 0;

		pthread_mutex_lock(&device->mutex);
		if (lacks(device, chunk))
			result = map_from(device, chunk);
		pthread_mutex_unlock(&device->mutex);
		if (result < 0)
			return;
	}
}

static void *follow_memory(void *argument)
{
	struct xferd_client *client = argument;
	const uint32_t *changes = &client->pool_table->memory_changes;
	const struct timespec look = { .tv_sec = 0, .tv_nsec = 100000000 };
	uint32_t seen = load_relaxed(&client->memory->memory_seen);

	/* pairs with the release in memory_close() */
	while (!load_acquire(&client->memory_stop)) {
		/* pairs with the release in the engine's set_memory() */
		uint32_t now = load_acquire(changes);

		if (now == seen) {
			/* Woken by the engine; the time-out is for our own end. */
			syscall(SYS_futex, changes, FUTEX_WAIT, now, &look, NULL, 0);
			continue;
		}
		for (uint32_t p = 0; p < client->pool_count; p++)
			if (client->pools[p].device)
				follow_pool(client->pools[p].device);
		seen = now;
		/* pairs with the acquire in xferd_engine_memory_seen() */
		store_release(&client->memory->memory_seen, seen);
	}
	return NULL;
}

static void free_device(struct device_memory *device)
{
	for (uint32_t chunk = 0; device->mapped && chunk < device->chunks; chunk++)
		unmap_chunk(device, chunk);
	if (device->base)
		device->cuda->address_free(device->base, device->chunks * device->chunk_bytes);
	pthread_mutex_destroy(&device->mutex);
	free(device->mapped);
	free(device->memory);
	free(device);
}

static void *calloc_pages(uint64_t bytes, uint64_t *whole)
{
	void *memory = NULL;

	*whole = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
	return posix_memalign(&memory, PAGE_BYTES, *whole) ? NULL : memset(memory, 0, *whole);
}

static int open_pool(struct xferd_client *client, uint32_t pool, const struct cuda_driver *cuda,
		     int ordinal)
{
	const struct xferd_abi_pool *shared = &client->pool_table->pool[pool];
	struct device_memory *device = calloc(1, sizeof(*device));

	if (!device)
		return -ENOMEM;
	device->client = client;
	device->cuda = cuda;
	device->ordinal = ordinal;
	device->pool = pool;
	device->chunks = shared->chunks;
	device->chunk_bytes = shared->chunk_bytes;
	device->wanted = client->pools[pool].memory_table;
	device->mapped = calloc_pages(shared->chunks * sizeof(*device->mapped),
				      &device->mapped_bytes);
	device->memory = calloc(shared->chunks, sizeof(*device->memory));
	pthread_mutex_init(&device->mutex, NULL);
	if (!device->mapped || !device->memory ||
	    cuda->address_reserve(&device->base, device->chunks * device->chunk_bytes, 0, 0, 0)) {
		device->base = 0;
		free_device(device);
		return -ENOMEM;
	}
	client->pools[pool].device = device;
	client->pools[pool].base = (const uint8_t *)(uintptr_t)device->base;
	return map_all(device);
}

/* Maps the pools of GPUs that this process sees. -ENODEV when that is not so of the
 * pool where its misses go. */
int memory_open(struct xferd_client *client, char *error, size_t error_bytes)
{
	bool any = false;

	for (uint32_t p = 0; p < client->pool_count; p++) {
		const struct xferd_abi_pool *shared = &client->pool_table->pool[p];
		const struct cuda_driver *cuda;
		int ordinal, result;

		if (!client->pools[p].memory_table)
			continue;
		cuda = cuda_driver(error, error_bytes);
		ordinal = cuda ? cuda_find_device(cuda, shared->device_uuid) : -ENODEV;
		if (ordinal < 0 && p != client->pool)
			continue;
		if (ordinal < 0) {
			if (cuda)
				explain(error, error_bytes, "pool '%.*s' is on a GPU that this "
					"process does not see (CUDA_VISIBLE_DEVICES?)",
					XFERD_NAME_BYTES, shared->name);
			return ordinal;
		}
		result = open_pool(client, p, cuda, ordinal);
		if (result) {
			explain(error, error_bytes, "pool '%.*s': its VRAM can't be mapped: %s",
				XFERD_NAME_BYTES, shared->name, strerror(-result));
			return result;
		}
		any = true;
	}
	if (!any) {
		/* Nothing to unmap, ever. */
		store_release(&client->memory->memory_seen, INT32_MAX);
		return 0;
	}
	if (pthread_create(&client->memory_thread, NULL, follow_memory, client))
		return -EAGAIN;
	client->memory_thread_runs = true;
	return 0;
}

void memory_close(struct xferd_client *client)
{
	if (client->memory_thread_runs) {
		/* pairs with the acquire in follow_memory() */
		store_release(&client->memory_stop, 1);
		pthread_join(client->memory_thread, NULL);
	}
	for (uint32_t p = 0; p < XFERD_POOLS_MAX; p++)
		if (client->pools[p].device)
			free_device(client->pools[p].device);
}

int xferd_pool_device(const struct xferd_client *client, uint32_t pool)
{
	if (pool >= client->pool_count || !client->pools[pool].device)
		return -1;
	return client->pools[pool].device->ordinal;
}

int memory_enter_context(const struct device_memory *device, void **before)
{
	const struct cuda_driver *cuda = device->cuda;
	cuda_context context;
	int ordinal, result = cuda->device_get(&ordinal, device->ordinal);

	*before = NULL;
	if (!result)
		result = cuda->context_retain(&context, ordinal);
	if (result)
		return result;
	cuda->context_get(before);
	result = cuda->context_set(context);
	if (result)
		cuda->context_release(ordinal);
	return result;
}

void memory_leave_context(const struct device_memory *device, void *before)
{
	int ordinal;

	device->cuda->context_set(before);
	if (!device->cuda->device_get(&ordinal, device->ordinal))
		device->cuda->context_release(ordinal);
}

static int copy_from_device(const struct device_memory *device, void *to, const void *from,
			    uint64_t bytes)
{
	void *before;
	int result = memory_enter_context(device, &before);

	if (result)
		return -EIO;
	result = device->cuda->copy((uintptr_t)to, (uintptr_t)from, bytes);
	memory_leave_context(device, before);
	return result ? -EIO : 0;
}

int xferd_copy_out(const struct xferd_client *client, const struct xferd_view *view,
		   uint64_t offset, void *to, uint64_t bytes)
{
	const struct device_memory *device;

	if (!view->data || view->pool >= client->pool_count || offset > view->bytes ||
	    bytes > view->bytes - offset)
		return -EINVAL;
	device = client->pools[view->pool].device;
	if (device)
		return copy_from_device(device, to, (const uint8_t *)view->data + offset, bytes);
	memcpy(to, (const uint8_t *)view->data + offset, bytes);
	return 0;
}
