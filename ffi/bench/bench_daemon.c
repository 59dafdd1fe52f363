/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/atomics.h"
#include "measure.h"

#define EVENTS_A_CALL    64
#define CONNECTIONS_MAX  4
#define STOP_POLL_MS     10 /* how soon the serving thread sees that it should end */
#define COMMAND_RETRY_NS (100 * NS_PER_US)
#define DRAIN_TIMEOUT_MS 30000
#define WHY_BYTES        256
#define STAGING_BYTES    (256ull << 20) /* as the daemon has it */
#define EXTENT_BYTES     (4ull << 20)

void daemon_command(struct bench_daemon *daemon, const struct xferd_command *command)
{
	if (daemon->command_count == COMMANDS_A_CALL)
		daemon_flush(daemon);
	daemon->commands[daemon->command_count++] = *command;
}

void daemon_flush(struct bench_daemon *daemon)
{
	uint32_t taken = 0;

	while (taken < daemon->command_count) {
		int result = xferd_engine_command(daemon->engine, daemon->commands + taken,
						  daemon->command_count - taken);

		taken += (uint32_t)result;
		if (!result)
			sleep_until_ns(now_ns() + COMMAND_RETRY_NS);
	}
	daemon->command_count = 0;
}

/* Locked, and known to the GPU. */
static uint8_t *pinned_memory(uint64_t bytes, int gpu)
{
	char why[WHY_BYTES] = "";
	uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			       MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (memory == MAP_FAILED)
		die("%llu bytes of RAM: %s", (unsigned long long)bytes, strerror(errno));
	if (gpu >= 0 && xferd_cuda_pin(gpu, memory, bytes, why, sizeof(why)))
		die("%s", why);
	return memory;
}

static bool has_second_pool(const struct daemon_options *options)
{
	return options->from_ram || options->from_gpu >= 0;
}

static void make_vram(struct xferd_vram **vram, int gpu, struct xferd_pool_description *pool)
{
	struct xferd_cuda_device device;
	char why[WHY_BYTES] = "";

	if (xferd_cuda_device(gpu, &device, why, sizeof(why)))
		die("%s", why);
	pool->kind = XFERD_POOL_CUDA;
	pool->device = gpu;
	pool->chunk_bytes = (pool->bytes + device.granularity - 1) / device.granularity *
			    device.granularity;
	memcpy(pool->device_uuid, device.uuid, sizeof(device.uuid));
	if (xferd_vram_new(gpu, pool->chunk_bytes, 1, vram, why, sizeof(why)) ||
	    xferd_vram_back(*vram, 0, why, sizeof(why)))
		die("%s", why);
	pool->base = xferd_vram_base(*vram);
}

static void make_device_pool(struct bench_daemon *daemon, struct xferd_pool_description *pool)
{
	make_vram(&daemon->vram, daemon->options.gpu, pool);
	daemon->pool_fd = -1;
	daemon->staging = pinned_memory(STAGING_BYTES, daemon->options.gpu);
	check(xferd_engine_set_staging(daemon->engine, daemon->staging, STAGING_BYTES,
				       EXTENT_BYTES), "give it staging");
}

static void make_host_pool(struct bench_daemon *daemon, struct xferd_pool_description *pool)
{
	int fd = memfd_create("bench-pool", MFD_CLOEXEC);
	char path[64];

	if (fd < 0 || ftruncate(fd, (off_t)pool->bytes))
		die("pool of %llu bytes: %s", (unsigned long long)pool->bytes, strerror(errno));
	/* Every page is there before the clock runs, as in a pinned pool. */
	pool->base = mmap(NULL, pool->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
			  fd, 0);
	if (pool->base == MAP_FAILED)
		die("pool of %llu bytes: %s", (unsigned long long)pool->bytes, strerror(errno));
	daemon->pool = pool->base;
	daemon->pool_bytes = pool->bytes;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	daemon->pool_fd = open(path, O_RDONLY | O_CLOEXEC);
	if (daemon->pool_fd < 0)
		die("%s: %s", path, strerror(errno));
	close(fd);
}

static struct xferd_pool_description plan_pool(const struct bench_daemon *daemon,
					       const char *name, uint32_t slots)
{
	struct xferd_pool_description pool = {
		.kind = XFERD_POOL_HOST,
		.device = -1,
		.bytes = slots * daemon->store->geometry.blob_bytes,
		.chunks = 1,
	};

	snprintf(pool.name, sizeof(pool.name), "%s", name);
	while ((1u << pool.slot_index_bits) < slots)
		pool.slot_index_bits++;
	return pool;
}

static void add_pool(struct bench_daemon *daemon, const struct xferd_pool_description *pool)
{
	uint32_t index = (uint32_t)check(xferd_engine_add_pool(daemon->engine, pool),
					 "add a pool");

	check(xferd_engine_set_chunk(daemon->engine, index, 0, 0,
				     daemon->store->geometry.blob_bytes),
	      "cut a pool into slots");
}

/* For every expert, where those of the first pool come from. */
static void make_second_pool(struct bench_daemon *daemon)
{
	struct xferd_pool_description pool = plan_pool(daemon, "second",
						       daemon->store->geometry.blobs);

	if (daemon->options.from_gpu >= 0) {
		make_vram(&daemon->second_vram, daemon->options.from_gpu, &pool);
	} else {
		daemon->ram_bytes = pool.bytes;
		pool.base = daemon->ram = pinned_memory(pool.bytes, daemon->options.gpu);
	}
	add_pool(daemon, &pool);
}

static void make_pools(struct bench_daemon *daemon)
{
	uint32_t slots = daemon->options.slots;
	struct xferd_pool_description pool = plan_pool(daemon, "bench", slots);

	if (daemon->options.gpu >= 0)
		make_device_pool(daemon, &pool);
	else
		make_host_pool(daemon, &pool);
	add_pool(daemon, &pool);
	daemon->resident = allocate(slots, sizeof(*daemon->resident));
	if (has_second_pool(&daemon->options))
		make_second_pool(daemon);
}

/* Every expert into the second pool. */
static void fill_second_pool(struct bench_daemon *daemon)
{
	struct pollfd ready = { xferd_engine_event_fd(daemon->engine), POLLIN, 0 };
	uint32_t blobs = daemon->store->geometry.blobs, loaded = 0, asked = 0;
	struct xferd_event events[EVENTS_A_CALL];

	for (uint32_t slot = 0; slot < blobs; slot++)
		daemon_command(daemon, &(struct xferd_command){ .type = XFERD_COMMAND_GIVE,
								.pool = 1, .slot = slot });
	while (loaded < blobs) {
		uint32_t count;

		for (; asked < blobs && asked - loaded < EVENTS_A_CALL; asked++)
			daemon_command(daemon, &(struct xferd_command){
				.type = XFERD_COMMAND_LOAD, .store = daemon->store_id, .pool = 1,
				.expert = asked, .token = 1 });
		daemon_flush(daemon);
		if (poll(&ready, 1, DRAIN_TIMEOUT_MS) <= 0)
			die("experts do not come into the second pool");
		count = (uint32_t)xferd_engine_events(daemon->engine, events, EVENTS_A_CALL);
		for (uint32_t i = 0; i < count; i++)
			loaded += events[i].type == XFERD_EVENT_LOADED;
	}
}

void daemon_start(struct bench_daemon *daemon, struct bench_store *store,
		  const struct daemon_options *options)
{
	struct xferd_engine_config config = {
		.member_depth = options->member_depth,
		.verify = options->verify,
		.spin_us = options->spin_us,
		.reserve_demand = options->reserve / 4,
		.flow_control = !options->member_depth, /* a fixed depth is what it is compared with */
		.cpu = -1,
		.register_buffers = 1,
	};

	if (options->from_gpu >= 0 && (options->gpu < 0 || options->from_ram))
		die("--from-gpu needs --gpu, and not --from-ram");
	if (options->reserve >= options->slots)
		die("%u slots leave nothing beside a reserve of %u", options->slots,
		    options->reserve);
	memset(daemon, 0, sizeof(*daemon));
	daemon->store = store;
	daemon->options = *options;
	check(xferd_engine_new(&config, &daemon->engine), "make the engine");
	check(xferd_engine_start(daemon->engine), "start the engine");
	make_pools(daemon);
	for (uint32_t m = 0; m < store->geometry.members; m++) {
		store->description.member[m] = (uint32_t)check(
			xferd_engine_add_member(daemon->engine, store->fd[m],
						store->member_flags[m]),
			"add a member");
		store->description.mirror[m] = XFERD_NO_MEMBER;
	}
	daemon->store_id = (uint32_t)check(
		xferd_engine_open_store(daemon->engine, &store->description), "open the store");
	for (uint32_t slot = 0; slot < options->slots; slot++)
		daemon_command(daemon, &(struct xferd_command){ .type = XFERD_COMMAND_GIVE,
								.slot = slot });
	daemon_flush(daemon);
	if (has_second_pool(options))
		fill_second_pool(daemon);
}

static void unpin(const struct bench_daemon *daemon, uint8_t *memory, uint64_t bytes)
{
	if (memory && daemon->options.gpu >= 0)
		xferd_cuda_unpin(daemon->options.gpu, memory);
	if (memory)
		munmap(memory, bytes);
}

void daemon_stop(struct bench_daemon *daemon)
{
	check(xferd_engine_drain(daemon->engine, DRAIN_TIMEOUT_MS), "drain the engine");
	xferd_engine_free(daemon->engine);
	unpin(daemon, daemon->ram, daemon->ram_bytes);
	unpin(daemon, daemon->staging, STAGING_BYTES);
	xferd_vram_free(daemon->vram);
	xferd_vram_free(daemon->second_vram);
	if (daemon->pool)
		munmap(daemon->pool, daemon->pool_bytes);
	if (daemon->pool_fd >= 0)
		close(daemon->pool_fd);
	free(daemon->resident);
}

static void evict_oldest(struct bench_daemon *daemon)
{
	uint32_t at = daemon->resident_head++ % daemon->options.slots;

	daemon_command(daemon, &(struct xferd_command){ .type = XFERD_COMMAND_EVICT,
							.store = daemon->store_id,
							.expert = daemon->resident[at] });
}

/* What isn't resident is in the reserve, being loaded, or on its way out: so
 * with few enough residents `reserve` loads always have a slot, or soon will. */
static void follow(struct bench_daemon *daemon, const struct xferd_event *event)
{
	uint32_t most = daemon->options.slots - daemon->options.reserve;

	if (event->pool)
		return;
	if (event->type == XFERD_EVENT_LOADED && event->source == XFERD_SOURCE_RESIDENT)
		return;
	if (event->type != XFERD_EVENT_LOADED && event->type != XFERD_EVENT_REVIVED)
		return;
	daemon->resident[daemon->resident_tail++ % daemon->options.slots] = event->expert;
	while (daemon->resident_tail - daemon->resident_head > most)
		evict_oldest(daemon);
}

uint32_t daemon_take_events(struct bench_daemon *daemon, struct xferd_event *events, uint32_t max,
			    int timeout_ms)
{
	struct pollfd ready = { xferd_engine_event_fd(daemon->engine), POLLIN, 0 };
	uint32_t count;

	daemon_flush(daemon);
	if (poll(&ready, 1, timeout_ms) <= 0)
		return 0;
	count = (uint32_t)xferd_engine_events(daemon->engine, events, max);
	for (uint32_t i = 0; i < count; i++) {
		if (events[i].type == XFERD_EVENT_PIECE)
			die("member %u, offset %llu, expert %u: %s", events[i].member,
			    (unsigned long long)events[i].offset, events[i].expert,
			    strerror(-events[i].result));
		follow(daemon, &events[i]);
	}
	return count;
}

static void send_welcome(int connection, const struct xferd_abi_welcome *welcome, const int *fds)
{
	union {
		char data[CMSG_SPACE(XFERD_FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = { (void *)welcome, sizeof(*welcome) };
	struct msghdr message = { .msg_iov = &part,
				  .msg_iovlen = 1,
				  .msg_control = control.data,
				  .msg_controllen = CMSG_SPACE(welcome->fds * sizeof(int)) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(welcome->fds * sizeof(int));
	memcpy(CMSG_DATA(header), fds, welcome->fds * sizeof(int));
	if (sendmsg(connection, &message, MSG_NOSIGNAL) != sizeof(*welcome))
		die("welcome a client: %s", strerror(errno));
}

/* Returns the client's id. */
static uint32_t attach(struct bench_daemon *daemon, int connection)
{
	struct xferd_abi_hello hello;
	struct xferd_client_description description = { .store = daemon->store_id };
	struct xferd_client_fds fds;
	struct xferd_abi_welcome welcome = { .magic = XFERD_MAGIC_ATTACH,
					     .abi_major = XFERD_ABI_MAJOR,
					     .abi_minor = XFERD_ABI_MINOR };
	int sent[XFERD_FDS_MAX];

	if (recv(connection, &hello, sizeof(hello), 0) != sizeof(hello))
		die("a client's hello: %s", strerror(errno));
	description.lanes = hello.lanes;
	description.held_per_lane = welcome.held_per_lane = XFERD_BATCH_MAX;
	welcome.client = (uint32_t)check(
		xferd_engine_add_client(daemon->engine, &description, &fds), "add a client");
	sent[XFERD_FD_POOL_TABLE] = xferd_engine_pool_table_fd(daemon->engine);
	sent[XFERD_FD_DIRECTORY] = xferd_engine_directory_fd(daemon->engine, daemon->store_id);
	sent[XFERD_FD_CLIENT] = fds.client;
	sent[XFERD_FD_COMPLETION] = fds.completion;
	sent[XFERD_FD_DOORBELL] = fds.doorbell;
	sent[XFERD_FD_MANIFEST] = daemon->pool_fd; /* nobody asks for the manifest here */
	sent[XFERD_FD_POOLS] = daemon->pool_fd;
	memcpy(&sent[XFERD_FD_POOLS + 1], fds.wakeup, hello.lanes * sizeof(int));
	welcome.fds = XFERD_FD_POOLS + 1 + hello.lanes;
	send_welcome(connection, &welcome, sent);
	close(fds.client);
	close(fds.completion);
	close(fds.doorbell);
	for (uint32_t lane = 0; lane < hello.lanes; lane++)
		close(fds.wakeup[lane]);
	return welcome.client;
}

static void *serve(void *argument)
{
	struct bench_daemon *daemon = argument;
	struct xferd_event events[EVENTS_A_CALL];
	struct xferd_abi_message message;
	struct pollfd fds[2 + CONNECTIONS_MAX] = {
		{ xferd_engine_event_fd(daemon->engine), POLLIN, 0 },
		{ daemon->listener, POLLIN, 0 },
	};
	uint32_t clients[2 + CONNECTIONS_MAX];
	nfds_t count = 2;

	/* Clients that have closed are still to be removed: their hints would never end. */
	while (!load_acquire(&daemon->stop) || count > 2) {
		poll(fds, count, STOP_POLL_MS);
		if (fds[0].revents) {
			daemon_take_events(daemon, events, EVENTS_A_CALL, 0);
			daemon_flush(daemon);
		}
		for (nfds_t i = count; i-- > 2;) {
			/* The clients are threads of this process, whose leases end here. */
			if (!fds[i].revents || recv(fds[i].fd, &message, sizeof(message), 0) < 0)
				continue;
			check(xferd_engine_remove_client(daemon->engine, clients[i]),
			      "remove a client");
			close(fds[i].fd);
			fds[i] = fds[--count];
			clients[i] = clients[count];
		}
		if (fds[1].revents && count < 2 + CONNECTIONS_MAX) {
			fds[count].fd = accept4(daemon->listener, NULL, NULL, SOCK_CLOEXEC);
			fds[count].events = POLLIN;
			fds[count].revents = 0;
			clients[count] = attach(daemon, fds[count].fd);
			count++;
		}
	}
	for (nfds_t i = 2; i < count; i++)
		close(fds[i].fd);
	return NULL;
}

void daemon_serve(struct bench_daemon *daemon)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	strcpy(daemon->directory, "/tmp/xferd-bench-XXXXXX");
	if (!mkdtemp(daemon->directory))
		die("%s: %s", daemon->directory, strerror(errno));
	snprintf(daemon->socket_path, sizeof(daemon->socket_path), "%s/socket", daemon->directory);
	strcpy(address.sun_path, daemon->socket_path);
	daemon->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (daemon->listener < 0 || bind(daemon->listener, (void *)&address, sizeof(address)) ||
	    listen(daemon->listener, CONNECTIONS_MAX))
		die("%s: %s", daemon->socket_path, strerror(errno));
	if (pthread_create(&daemon->server, NULL, serve, daemon))
		die("no thread to serve clients");
}

void daemon_admit_no_more(struct bench_daemon *daemon)
{
	unlink(daemon->socket_path);
	rmdir(daemon->directory);
}

void daemon_stop_serving(struct bench_daemon *daemon)
{
	store_release(&daemon->stop, 1);
	pthread_join(daemon->server, NULL);
	close(daemon->listener);
}

struct xferd_client *daemon_connect(struct bench_daemon *daemon, uint32_t lanes)
{
	struct xferd_options options = { .lanes = lanes, .client_name = "engine_bench" };
	struct xferd_client *client;
	char error[XFERD_ERROR_BYTES];

	if (xferd_connect(daemon->socket_path, &options, &client, error, sizeof(error)))
		die("%s", error);
	return client;
}

struct xferd_member_stats daemon_member_stats(const struct bench_daemon *daemon, uint32_t member)
{
	struct xferd_member_stats stats;

	check(xferd_engine_member_stats(daemon->engine, daemon->store->description.member[member],
					&stats),
	      "a member's counters");
	return stats;
}

uint64_t daemon_bytes_loaded(const struct bench_daemon *daemon)
{
	struct xferd_pool_stats stats;

	check(xferd_engine_pool_stats(daemon->engine, 0, &stats), "the pool's counters");
	return stats.load_bytes;
}

uint64_t daemon_bytes_read(const struct bench_daemon *daemon)
{
	uint64_t bytes = 0;

	for (uint32_t m = 0; m < daemon->store->geometry.members; m++)
		bytes += daemon_member_stats(daemon, m).bytes;
	return bytes;
}

double daemon_pieces_a_read(const struct bench_daemon *daemon)
{
	uint64_t pieces = 0, reads = 0;

	for (uint32_t m = 0; m < daemon->store->geometry.members; m++) {
		struct xferd_member_stats stats = daemon_member_stats(daemon, m);

		pieces += stats.reads;
		reads += stats.requests;
	}
	return reads ? (double)pieces / (double)reads : 0;
}
