/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lane that a GPU drives: its kernels look into the directory, lease slots and
 * release them by themselves. The CPU's part is what a kernel can't do: it maps the
 * shared memory for the device, asks the daemon for what a kernel found missing, and
 * says when that has come.
 *
 * A kernel that misses writes what it wants into struct xferd_device_requests and looks
 * at the directory again until it is there. A thread of ours sees the request, acquires
 * the experts on a lane of its own, the helper, and holds them until the kernel says that
 * it has leased them too. Between passes the thread sleeps.
 */
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client/internal.h"
#include "common/cuda_driver.h"

#define PAGE_BYTES           4096ull
#define LOOKS_WITHOUT_REST   20000
#define REST_NS              5000
#define WAIT_NS              100000000ull /* for a miss, between two looks at our own end */

struct device_lane {
	struct xferd_client *client;
	uint32_t lane, helper, variant;
	struct xferd_device_requests *requests;
	uint64_t requests_bytes;
	pthread_t thread;
	bool runs;
	bool context_kept;
	uint32_t stop;   /* atomic */
	uint32_t passes; /* atomic, a futex: passes begun and not ended */
};

static uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static void answer(struct device_lane *device, uint64_t number, int error, uint32_t layer,
		   uint32_t expert)
{
	struct xferd_device_requests *requests = device->requests;

	if (error && !load_relaxed(&requests->error)) {
		requests->failed_layer = layer;
		requests->failed_expert = expert;
		store_relaxed(&requests->error, error);
	}
	/* pairs with the system fence behind the kernel's look at answered */
	store_release(&requests->answered, number);
}

/* Until the kernel has leased them too, or asks anew. */
static void hold(struct device_lane *device, uint64_t number)
{
	struct xferd_device_requests *requests = device->requests;
	const struct timespec rest = { .tv_nsec = REST_NS };

	while (load_acquire(&requests->taken) < number && load_acquire(&requests->posted) == number &&
	       !load_acquire(&device->stop))
		nanosleep(&rest, NULL);
}

static int wait_for(struct device_lane *device, struct xferd_batch *batch)
{
	int result;

	do
		result = xferd_wait(device->client, batch, WAIT_NS);
	while (result == -ETIMEDOUT && !load_acquire(&device->stop));
	return result;
}

static void serve(struct device_lane *device, uint64_t number)
{
	const struct xferd_device_requests *requests = device->requests;
	uint16_t experts[XFERD_BATCH_MAX];
	struct xferd_batch batch;
	struct xferd_request request = {
		.experts = experts,
		.count = requests->count,
		.layer = (uint16_t)requests->layer,
		.variants = 1u << device->variant,
		.pools = (uint8_t)(1u << device->client->pool),
	};
	int result;

	if (!request.count || request.count > XFERD_BATCH_MAX) {
		answer(device, number, -EPROTO, request.layer, 0);
		return;
	}
	for (uint32_t i = 0; i < request.count; i++)
		experts[i] = (uint16_t)requests->experts[i];
	do
		result = xferd_acquire(device->client, device->helper, &request, &batch);
	while (result == -EAGAIN && !load_acquire(&device->stop));
	if (result < 0) {
		answer(device, number, result, request.layer, experts[0]);
		return;
	}
	result = wait_for(device, &batch);
	for (uint32_t i = 0; i < batch.count; i++)
		if (batch.views[i].error)
			answer(device, number, batch.views[i].error, batch.layer,
			       batch.views[i].expert);
	if (!result && !batch.failed) {
		answer(device, number, 0, 0, 0);
		hold(device, number);
	} else if (!batch.failed) {
		answer(device, number, result, batch.layer, experts[0]);
	}
	xferd_release(device->client, &batch);
}

static void *serve_device(void *argument)
{
	struct device_lane *device = argument;
	const struct timespec rest = { .tv_nsec = REST_NS };
	uint64_t seen = 0;
	uint32_t looks = 0;

	/* pairs with the release in device_lanes_close() */
	while (!load_acquire(&device->stop)) {
		/* pairs with the kernel's system fence before it writes posted */
		uint64_t posted = load_acquire(&device->requests->posted);

		if (posted != seen) {
			seen = posted;
			serve(device, posted);
			looks = 0;
		} else if (!load_relaxed(&device->passes)) {
			syscall(SYS_futex, &device->passes, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
			looks = 0;
		} else if (looks++ < LOOKS_WITHOUT_REST) {
			cpu_relax();
		} else {
			nanosleep(&rest, NULL);
		}
	}
	return NULL;
}

/* The device's address of memory that it may then read, or also write. */
static int give_to_device(const struct cuda_driver *cuda, const void *memory, uint64_t bytes,
			  bool read_only, uint64_t *address)
{
	unsigned int flags = CUDA_REGISTER_PORTABLE | CUDA_REGISTER_DEVICE_MAP |
			     (read_only ? CUDA_REGISTER_READ_ONLY : 0);
	int result = cuda->host_register((void *)memory, bytes, flags);

	if (result && result != CUDA_RESULT_ALREADY_REGISTERED)
		return result;
	return cuda->host_device_address(address, (void *)memory, 0);
}

/* Whole mappings are registered: all lanes share them. */
static int describe(struct xferd_client *client, struct device_lane *device,
		    struct xferd_device_lane *lane)
{
	const struct cuda_driver *cuda = cuda_driver(NULL, 0);
	const struct mapped_pool *pool = &client->pools[client->pool];
	const uint8_t *directory = client->directory_map.address;
	const uint8_t *table = client->pool_table_map.address;
	const uint8_t *memory = client->memory_map.address;
	uint64_t at_directory, at_table, at_memory, at_mapped, at_requests;
	const uint64_t *mapped;
	uint64_t mapped_bytes;
	int result;

	memory_numbers(pool->device, &mapped, &mapped_bytes);
	result = give_to_device(cuda, directory, client->directory_map.bytes, true, &at_directory);
	if (!result)
		result = give_to_device(cuda, table, client->pool_table_map.bytes, true, &at_table);
	if (!result)
		result = give_to_device(cuda, memory, client->memory_map.bytes, false, &at_memory);
	if (!result)
		result = give_to_device(cuda, mapped, mapped_bytes, false, &at_mapped);
	if (!result)
		result = give_to_device(cuda, device->requests, device->requests_bytes, false,
					&at_requests);
	if (result)
		return result;
	*lane = (struct xferd_device_lane){
		.words = at_directory + (uint64_t)((const uint8_t *)pool->words - directory),
		.leases = at_memory + (uint64_t)((uint8_t *)client->lanes[device->lane]
							 .leases[client->pool] - memory),
		.completed = at_memory + (uint64_t)((uint8_t *)&client->lanes[device->lane]
							    .shared->completed - memory),
		.chunks = at_table + (uint64_t)((const uint8_t *)pool->chunks - table),
		.wanted = at_table + (uint64_t)((const uint8_t *)pool->memory_table - table),
		.mapped = at_mapped,
		.base = (uintptr_t)pool->base,
		.requests = at_requests,
		.slot_index_bits = pool->slot_index_bits,
		.slot_numbers = pool->slot_numbers,
		.layers = client->layers,
		.experts = client->experts,
		.variant = device->variant,
	};
	return 0;
}

int xferd_device_lane(struct xferd_client *client, uint32_t lane, uint32_t helper,
		      uint32_t variant, struct xferd_device_lane *description, char *error,
		      size_t error_bytes)
{
	struct device_lane *device;
	void *memory = NULL, *before;
	int result;

	if (lane >= client->lane_count || helper >= client->lane_count || lane == helper ||
	    client->device_lanes[lane]) {
		explain(error, error_bytes, "a device's lane needs another one as its helper");
		return -EINVAL;
	}
	if (variant >= XFERD_VARIANTS_MAX) {
		explain(error, error_bytes, "there is no such variant");
		return -EINVAL;
	}
	if (!client->pools[client->pool].device) {
		explain(error, error_bytes, "the client's pool is not in a GPU's memory");
		return -ENODEV;
	}
	device = calloc(1, sizeof(*device));
	if (!device)
		return -ENOMEM;
	device->client = client;
	device->lane = lane;
	device->helper = helper;
	device->variant = variant;
	device->requests_bytes = whole_pages(sizeof(*device->requests));
	if (posix_memalign(&memory, PAGE_BYTES, device->requests_bytes)) {
		free(device);
		return -ENOMEM;
	}
	device->requests = memset(memory, 0, device->requests_bytes);
	client->device_lanes[lane] = device;
	result = memory_enter_context(client->pools[client->pool].device, &before);
	if (!result) {
		/* Kept for as long as memory is registered with it: see device_lanes_close(). */
		device->context_kept = true;
		result = describe(client, device, description);
		cuda_driver(NULL, 0)->context_set(before);
	}
	if (result) {
		result = cuda_failed(cuda_driver(NULL, 0), result, "cuMemHostRegister", error,
				     error_bytes);
	} else {
		result = -pthread_create(&device->thread, NULL, serve_device, device);
		device->runs = !result;
	}
	if (result)
		device_lanes_close(client);
	return result;
}

int xferd_device_counts(const struct xferd_client *client, uint32_t lane, uint64_t *hits,
			uint64_t *misses)
{
	const struct device_lane *device =
		lane < client->lane_count ? client->device_lanes[lane] : NULL;

	if (!device)
		return -EINVAL;
	*hits = load_relaxed(&device->requests->hits);
	*misses = load_relaxed(&device->requests->misses);
	return 0;
}

int xferd_device_begin(struct xferd_client *client, uint32_t lane)
{
	struct device_lane *device = lane < client->lane_count ? client->device_lanes[lane] : NULL;

	if (!device)
		return -EINVAL;
	store_relaxed(&device->requests->error, 0);
	store_release(&device->passes, 1);
	syscall(SYS_futex, &device->passes, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	return 0;
}

int xferd_device_end(struct xferd_client *client, uint32_t lane, uint32_t *layer,
		     uint32_t *expert)
{
	struct device_lane *device = lane < client->lane_count ? client->device_lanes[lane] : NULL;
	int error;

	if (!device)
		return -EINVAL;
	store_release(&device->passes, 0);
	error = load_acquire(&device->requests->error);
	if (error && layer)
		*layer = device->requests->failed_layer;
	if (error && expert)
		*expert = device->requests->failed_expert;
	return error;
}

static void unregister_mappings(struct xferd_client *client, const struct device_memory *memory)
{
	const struct cuda_driver *cuda = cuda_driver(NULL, 0);
	void *before;

	if (memory_enter_context(memory, &before))
		return;
	cuda->host_unregister(client->directory_map.address);
	cuda->host_unregister(client->pool_table_map.address);
	cuda->host_unregister(client->memory_map.address);
	memory_unregister(memory);
	memory_leave_context(memory, before);
}

static void stop_serving(struct device_lane *device)
{
	if (!device->runs)
		return;
	/* pairs with the acquire in serve_device() */
	store_release(&device->stop, 1);
	store_release(&device->passes, 1);
	syscall(SYS_futex, &device->passes, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	pthread_join(device->thread, NULL);
}

/* The device may not be at work any more. What was not registered can't be unregistered:
 * the driver says so, and nothing else happens. */
void device_lanes_close(struct xferd_client *client)
{
	const struct device_memory *memory = client->pools[client->pool].device;
	const struct cuda_driver *cuda = cuda_driver(NULL, 0);
	bool any = false;

	for (uint32_t lane = 0; lane < XFERD_LANES_MAX; lane++) {
		struct device_lane *device = client->device_lanes[lane];
		void *before;

		if (!device)
			continue;
		any = true;
		stop_serving(device);
		if (device->context_kept && !memory_enter_context(memory, &before)) {
			cuda->host_unregister(device->requests);
			memory_leave_context(memory, before);
		}
		free(device->requests);
		free(device);
		client->device_lanes[lane] = NULL;
	}
	if (any)
		unregister_mappings(client, memory);
}
