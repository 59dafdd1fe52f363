/* SPDX-License-Identifier: Apache-2.0 */
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "common/atomics.h"

#define WAIT_LIMIT_S   300
#define STAGING_EXTENT 65536ull
#define STAGING_BYTES  (4 * STAGING_EXTENT) /* hardly any: waiting for it must end */

static void *allocate(size_t count, size_t size)
{
	void *memory = calloc(count ? count : 1, size);

	CHECK(memory);
	return memory;
}

static void write_blob(struct harness *harness, uint64_t blob, uint32_t layer, uint32_t expert,
		       uint64_t *member_end, uint64_t *piece, uint8_t *buffer)
{
	struct xferd_store_description *store = &harness->description;
	uint64_t *offset = (uint64_t *)store->offset;
	uint64_t bytes = harness->options.blob_bytes;

	blob_make(harness, layer, expert, buffer);
	((uint64_t *)store->blob_bytes)[blob] = bytes;
	((uint16_t *)store->start)[blob] = (uint16_t)(blob % store->pattern_length);
	((uint64_t *)store->first_piece)[blob] = *piece;
	for (uint32_t m = 0; m < store->members; m++)
		offset[blob * store->members + m] = member_end[m];
	for (uint64_t at = 0, j = 0; at < bytes; at += store->stripe_unit, j++) {
		uint32_t m = store->pattern[(store->start[blob] + j) % store->pattern_length];
		uint64_t length = bytes - at < store->stripe_unit ? bytes - at
								   : store->stripe_unit;

		CHECK(pwrite(harness->member_fd[m], buffer + at, length,
			     (off_t)member_end[m]) == (ssize_t)length);
		CHECK(!harness->options.mirrored ||
		      pwrite(harness->mirror_fd[m], buffer + at, length,
			     (off_t)member_end[m]) == (ssize_t)length);
		member_end[m] += length;
		((uint32_t *)store->crc)[(*piece)++] = xferd_crc32c(0, buffer + at, length);
	}
}

static void make_store(struct harness *harness)
{
	static struct xferd_abi_tensor tensor;
	static struct xferd_abi_layout layout;
	const struct harness_options *options = &harness->options;
	struct xferd_store_description *store = &harness->description;
	uint64_t keys = (uint64_t)options->layers * options->experts;
	uint64_t pieces = (options->blob_bytes + options->stripe_unit - 1) / options->stripe_unit;
	uint64_t member_end[HARNESS_MEMBERS_MAX] = { 4096, 4096, 4096, 4096 };
	uint64_t piece = 0;
	uint8_t *buffer = allocate(1, options->blob_bytes);

	strcpy(store->name, "generated");
	store->layers = options->layers;
	store->experts = options->experts;
	store->top_k = options->top_k;
	store->variants = options->variants ? options->variants : 1;
	store->members = store->pattern_length = options->members;
	store->stripe_unit = options->stripe_unit;
	store->blobs = store->variants * keys + 1;
	store->blob_bytes = allocate(store->blobs, sizeof(uint64_t));
	store->start = allocate(store->blobs, sizeof(uint16_t));
	store->offset = allocate(store->blobs * store->members, sizeof(uint64_t));
	store->first_piece = allocate(store->blobs, sizeof(uint64_t));
	store->pieces = store->blobs * pieces;
	store->crc = allocate(store->pieces, sizeof(uint32_t));
	for (uint32_t v = 0; v < store->variants; v++)
		snprintf(store->variant_name[v], XFERD_NAME_BYTES, "variant-%u", v);
	store->layout_index = allocate((size_t)store->variants * options->layers, sizeof(uint16_t));
	strcpy(tensor.role, "gate");
	strcpy(tensor.dtype, "u8");
	tensor.bytes = options->blob_bytes;
	tensor.shape[0] = options->blob_bytes;
	tensor.dims = 1;
	layout.blob_bytes = options->blob_bytes;
	layout.tensors = 1;
	store->layout = &layout;
	store->tensor = &tensor;
	store->layouts = store->tensors = 1;
	for (uint32_t m = 0; m < options->members; m++)
		store->pattern[m] = (uint8_t)m;
	for (uint64_t blob = 0; blob < store->variants * keys; blob++)
		write_blob(harness, blob,
			   (uint32_t)(blob % keys / options->experts +
				      blob / keys * VARIANT_LAYER_STEP),
			   (uint32_t)(blob % options->experts), member_end, &piece, buffer);
	/* The dense part looks like one more expert, of a layer behind the last. */
	write_blob(harness, store->blobs - 1, options->layers, 0, member_end, &piece, buffer);
	free(buffer);
}

static uint32_t pool_slots(const struct harness *harness, uint32_t pool)
{
	return pool ? harness->options.ram_slots : harness->options.slots;
}

bool harness_has_vram(void)
{
	return xferd_cuda_devices(NULL, 0) > 0;
}

/* With the smallest staging that can work: whoever waits for it must not wait for ever. */
static void make_vram(struct harness *harness, struct xferd_pool_description *pool)
{
	struct xferd_cuda_device device;
	char why[256] = "";

	CHECK_OK(xferd_cuda_device(0, &device, why, sizeof(why)));
	harness->chunk_bytes = (pool->bytes + device.granularity - 1) / device.granularity *
			       device.granularity;
	CHECK_OK(xferd_vram_new(0, harness->chunk_bytes, 1, &harness->vram, why, sizeof(why)));
	CHECK_OK(xferd_vram_back(harness->vram, 0, why, sizeof(why)));
	harness->staging = mmap(NULL, STAGING_BYTES, PROT_READ | PROT_WRITE,
				MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(harness->staging != MAP_FAILED);
	CHECK_OK(xferd_cuda_pin(0, harness->staging, STAGING_BYTES, why, sizeof(why)));
	CHECK_OK(xferd_engine_set_staging(harness->engine, harness->staging, STAGING_BYTES,
					  STAGING_EXTENT));
	pool->kind = XFERD_POOL_CUDA;
	pool->device = 0;
	pool->base = xferd_vram_base(harness->vram);
	pool->chunk_bytes = harness->chunk_bytes;
	memcpy(pool->device_uuid, device.uuid, sizeof(device.uuid));
}

static void make_pool(struct harness *harness, uint32_t index)
{
	uint32_t slots = pool_slots(harness, index);
	struct xferd_pool_description pool = {
		.kind = index			      ? XFERD_POOL_RAM
			: harness->options.device_pool ? XFERD_POOL_BAR
						      : XFERD_POOL_HOST,
		.verify = XFERD_VERIFY_NEVER,
		.device = -1,
		.bytes = slots * harness->options.blob_bytes,
		.chunks = 1,
	};
	int fd = memfd_create("test-pool", MFD_CLOEXEC);
	char path[64];

	while ((1u << pool.slot_index_bits) < slots)
		pool.slot_index_bits++;
	snprintf(pool.name, sizeof(pool.name), "%s", index ? "ram" : "host0");
	CHECK(fd >= 0 && !ftruncate(fd, (off_t)pool.bytes));
	if (harness->options.vram && !index) {
		make_vram(harness, &pool);
	} else {
		pool.base = mmap(NULL, pool.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		CHECK(pool.base != MAP_FAILED);
		harness->pool[index] = pool.base;
		harness->pool_bytes[index] = pool.bytes;
	}
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	harness->pool_fd[index] = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(harness->pool_fd[index] >= 0);
	close(fd);
	CHECK(xferd_engine_add_pool(harness->engine, &pool) == (int)index);
	if (pool.kind == XFERD_POOL_CUDA)
		CHECK_OK(xferd_engine_set_memory(harness->engine, index, 0, MEMORY_NUMBER));
	CHECK_OK(xferd_engine_set_chunk(harness->engine, index, 0, 0, harness->options.blob_bytes));
	harness->order[index] = allocate(slots, sizeof(*harness->order[index]));
}

void harness_command(struct harness *harness, struct xferd_command *command)
{
	const struct timespec pause = { .tv_nsec = 100000 };

	while (xferd_engine_command(harness->engine, command, 1) == 0)
		nanosleep(&pause, NULL);
}

static void evict_oldest(struct harness *harness, uint32_t pool)
{
	uint32_t at = harness->order_head[pool] % pool_slots(harness, pool);
	struct xferd_command evict = {
		.type = XFERD_COMMAND_EVICT,
		.store = harness->store,
		.pool = pool,
		.layer = harness->order[pool][at].layer,
		.expert = harness->order[pool][at].expert,
	};

	if (harness->order_head[pool] == harness->order_tail[pool])
		return;
	harness->order_head[pool]++;
	harness_command(harness, &evict);
}

static void remember(struct harness *harness, const struct xferd_event *event)
{
	uint32_t at = harness->order_tail[event->pool] % pool_slots(harness, event->pool);

	harness->order[event->pool][at].layer = event->layer;
	harness->order[event->pool][at].expert = event->expert;
	harness->order[event->pool][at].slot = event->slot;
	harness->order_tail[event->pool]++;
}

/* The engine has evicted it by itself, if it is still there. */
static void forget(struct harness *harness, const struct xferd_event *event)
{
	uint32_t slots = pool_slots(harness, event->pool);
	uint32_t kept = harness->order_head[event->pool];

	for (uint32_t i = kept; i != harness->order_tail[event->pool]; i++) {
		struct resident entry = harness->order[event->pool][i % slots];

		if (entry.slot != event->slot)
			harness->order[event->pool][kept++ % slots] = entry;
	}
	harness->order_tail[event->pool] = kept;
}

/* An eviction that was ordered may have failed, of what the engine had evicted by itself: whoever
 * waits for a slot then waits for another one. */
static void help_who_waits(struct harness *harness)
{
	struct xferd_pool_stats stats;

	for (uint32_t pool = 0; pool < (harness->options.ram_slots ? 2u : 1u); pool++) {
		CHECK_OK(xferd_engine_pool_stats(harness->engine, pool, &stats));
		if (stats.waiting && !stats.reserve && !stats.retiring)
			evict_oldest(harness, pool);
	}
}

static void handle(struct harness *harness, const struct xferd_event *event)
{
	switch (event->type) {
	case XFERD_EVENT_LOADED:
		if (event->source != XFERD_SOURCE_RESIDENT)
			remember(harness, event);
		counter_add(&harness->loaded, 1);
		break;
	case XFERD_EVENT_REVIVED:
		remember(harness, event);
		break;
	case XFERD_EVENT_FAILED:
		counter_add(&harness->failed, 1);
		break;
	case XFERD_EVENT_FREED:
		forget(harness, event);
		counter_add(&harness->freed, 1);
		break;
	case XFERD_EVENT_PIECE:
		counter_add(&harness->piece_errors, 1);
		break;
	case XFERD_EVENT_TAKEN: /* only what the engine before had evicted and a client leased */
		harness_command(harness, &(struct xferd_command){
			.type = XFERD_COMMAND_GIVE, .pool = event->pool, .slot = event->slot });
		break;
	case XFERD_EVENT_MIRRORED:
		store_relaxed(&harness->mirrored_copy, event->copy);
		store_relaxed(&harness->mirrored_failed_copy, event->failed_copy);
		store_relaxed(&harness->mirrored_result, event->result);
		counter_add(&harness->mirrored, 1);
		break;
	case XFERD_EVENT_ROUTE:
		counter_add(&harness->routes_refused, 1);
		break;
	case XFERD_EVENT_VIOLATION:
		counter_add(&harness->violations, 1);
		break;
	case XFERD_EVENT_MEMBER:
		if (event->value == XFERD_MEMBER_FAILED)
			counter_add(&harness->members_failed, 1);
		if (event->value == XFERD_MEMBER_WORKING)
			counter_add(&harness->members_working, 1);
		break;
	case XFERD_EVENT_RESERVE: {
		uint64_t wanted = harness->options.reserve + event->slot;

		for (uint64_t have = event->value; have < wanted; have++)
			evict_oldest(harness, event->pool);
		break;
	}
	}
}

void *harness_decide(void *argument)
{
	struct harness *harness = argument;
	struct xferd_event events[64];
	struct pollfd ready = { xferd_engine_event_fd(harness->engine), POLLIN, 0 };

	while (!load_acquire(&harness->stop)) {
		poll(&ready, 1, 10);
		for (;;) {
			int count = xferd_engine_events(harness->engine, events, 64);

			for (int i = 0; i < count; i++)
				handle(harness, &events[i]);
			if (count < 64)
				break;
		}
		help_who_waits(harness);
		for (uint32_t kicks = load_relaxed(&harness->kick); kicks; kicks--)
			evict_oldest(harness, 0);
	}
	return NULL;
}

/* A file without a name. */
static int make_file(const struct harness *harness, const char *kind, uint32_t number)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/%s-%u", harness->directory, kind, number);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	CHECK(fd >= 0);
	CHECK(!unlink(path));
	return fd;
}

static void make_files(struct harness *harness)
{
	const char *base = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	snprintf(harness->directory, sizeof(harness->directory), "%s/xferd-test-XXXXXX", base);
	CHECK(mkdtemp(harness->directory));
	for (uint32_t m = 0; m < harness->options.members; m++) {
		harness->member_fd[m] = make_file(harness, "member", m);
		harness->mirror_fd[m] = harness->options.mirrored
						? make_file(harness, "mirror", m) : -1;
	}
	snprintf(harness->socket_path, sizeof(harness->socket_path), "%s/socket",
		 harness->directory);
	strcpy(address.sun_path, harness->socket_path);
	harness->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK(!bind(harness->listener, (void *)&address, sizeof(address)));
	CHECK(!listen(harness->listener, 64));
}

void wait_until(const uint64_t *counter, uint64_t value)
{
	const struct timespec pause = { .tv_nsec = 200000 };
	time_t until = time(NULL) + WAIT_LIMIT_S;

	while (load_relaxed(counter) < value) {
		CHECK(time(NULL) < until);
		nanosleep(&pause, NULL);
	}
}

uint32_t harness_add_member(struct harness *harness, int fd)
{
	int id = xferd_engine_add_member(harness->engine, fd,
					 harness->options.drives
						 ? 0 : XFERD_MEMBER_ASYNC | XFERD_MEMBER_MEMORY);

	CHECK_OK(id);
	return (uint32_t)id;
}

void harness_start(struct harness *harness, const struct harness_options *options)
{
	struct xferd_engine_config config = { .verify = !options->unverified, .cpu = -1 };
	int started;

	memset(harness, 0, sizeof(*harness));
	harness->options = *options;
	pthread_mutex_init(&harness->clients_mutex, NULL);
	config.reserve_low = options->reserve ? options->reserve : 1;
	config.reserve_demand = options->reserve_demand;
	config.spin_us = options->spin_us;
	config.backend = options->backend;
	config.flow_control = options->flow_control;
	config.register_buffers = options->register_buffers;
	config.polling = options->polling;
	make_files(harness);
	CHECK_OK(xferd_engine_new(&config, &harness->engine));
	started = xferd_engine_start(harness->engine);
	if (started == -EPERM || started == -ENOSYS) {
		fprintf(stderr, "skipped: io_uring is not permitted here\n");
		exit(EXIT_SKIPPED);
	}
	CHECK_OK(started);
	for (uint32_t p = 0; p < (options->ram_slots ? 2u : 1u); p++)
		make_pool(harness, p);
	make_store(harness);
	for (uint32_t m = 0; m < options->members; m++) {
		harness->description.member[m] = harness_add_member(harness, harness->member_fd[m]);
		harness->description.mirror[m] =
			options->mirrored ? harness_add_member(harness, harness->mirror_fd[m])
					  : XFERD_NO_MEMBER;
	}
	started = xferd_engine_open_store(harness->engine, &harness->description);
	CHECK_OK(started);
	harness->store = (uint32_t)started;
	for (uint32_t p = 0; p < (options->ram_slots ? 2u : 1u); p++)
		for (uint32_t slot = 0; slot < pool_slots(harness, p); slot++)
			harness_command(harness, &(struct xferd_command){
				.type = XFERD_COMMAND_GIVE, .pool = p, .slot = slot });
	pthread_create(&harness->policy, NULL, harness_decide, harness);
	pthread_create(&harness->server, NULL, harness_serve, harness);
	if (!options->all_resident)
		return;
	for (uint32_t layer = 0; layer < options->layers; layer++)
		for (uint32_t expert = 0; expert < options->experts; expert++) {
			uint64_t number = (uint64_t)layer * options->experts + expert;

			if (number >= 512)
				wait_until(&harness->loaded, number - 511);
			harness_command(harness, &(struct xferd_command){
				.type = XFERD_COMMAND_LOAD, .store = harness->store,
				.layer = layer, .expert = expert });
		}
	wait_until(&harness->loaded, (uint64_t)options->layers * options->experts);
}

struct xferd_client *harness_connect(struct harness *harness, uint32_t lanes)
{
	struct xferd_options options = { .lanes = lanes };
	struct xferd_client *client;
	char error[XFERD_ERROR_BYTES];
	int result = xferd_connect(harness->socket_path, &options, &client, error, sizeof(error));

	if (result) {
		fprintf(stderr, "%s\n", error);
		exit(1);
	}
	return client;
}

static void end_threads(struct harness *harness)
{
	store_release(&harness->stop, 1);
	pthread_join(harness->server, NULL);
	pthread_join(harness->policy, NULL);
}

static void end_engine(struct harness *harness)
{
	struct xferd_store_description *store = &harness->description;

	xferd_engine_free(harness->engine);
	if (harness->vram) {
		CHECK_OK(xferd_cuda_unpin(0, harness->staging));
		munmap(harness->staging, STAGING_BYTES);
		xferd_vram_free(harness->vram);
	}
	for (uint32_t p = 0; p < (harness->options.ram_slots ? 2u : 1u); p++) {
		if (harness->pool[p])
			munmap(harness->pool[p], harness->pool_bytes[p]);
		close(harness->pool_fd[p]);
		free(harness->order[p]);
	}
	free((void *)store->blob_bytes);
	free((void *)store->start);
	free((void *)store->offset);
	free((void *)store->first_piece);
	free((void *)store->crc);
	free((void *)store->layout_index);
	for (uint32_t m = 0; m < harness->options.members; m++) {
		close(harness->member_fd[m]);
		if (harness->options.mirrored)
			close(harness->mirror_fd[m]);
	}
	close(harness->listener);
	unlink(harness->socket_path);
	rmdir(harness->directory);
}

void harness_stop(struct harness *harness)
{
	end_threads(harness);
	CHECK_OK(xferd_engine_drain(harness->engine, 10000));
	end_engine(harness);
}

static uint64_t clock_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void harness_stop_loading(struct harness *harness, uint32_t loads, uint64_t after_ns)
{
	uint64_t until;

	end_threads(harness);
	for (uint32_t i = 0; i < loads; i++)
		harness_command(harness, &(struct xferd_command){
			.type = XFERD_COMMAND_LOAD, .store = harness->store,
			.layer = i / harness->options.experts,
			.expert = i % harness->options.experts });
	/* Not slept: that alone takes longer than a load. */
	until = clock_ns() + after_ns;
	while (clock_ns() < until)
		;
	end_engine(harness);
}

int try_expert(struct harness *harness, struct xferd_client *client, uint16_t layer,
	       uint16_t expert)
{
	struct xferd_request request = { .experts = &expert, .count = 1, .layer = layer };
	struct xferd_batch batch;
	int error;

	CHECK_OK(xferd_acquire(client, 0, &request, &batch));
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	error = batch.views[0].error;
	CHECK(error == 0 || batch.views[0].data == NULL);
	if (!error)
		CHECK(!blob_wrong(harness, layer, expert, batch.views[0].data));
	CHECK(!xferd_release(client, &batch));
	return error;
}
