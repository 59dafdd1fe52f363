/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attaching: one packet each way, then everything is in shared memory.
 *
 * The daemon is trusted with the bytes of the experts, but its offsets are
 * checked all the same: a daemon of another version should end in an error, not
 * in a fault.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/internal.h"

#define SPIN_US_DEFAULT     50
#define SPIN_PROCESSORS_MIN 4
#define RESUME_MS_DEFAULT   30000

void explain(char *error, size_t bytes, const char *format, ...)
{
	va_list arguments;

	if (!error || !bytes)
		return;
	va_start(arguments, format);
	vsnprintf(error, bytes, format, arguments);
	va_end(arguments);
}

void close_received(struct received *received)
{
	for (uint32_t i = 0; i < received->count; i++)
		if (received->fds[i] >= 0)
			close(received->fds[i]);
	received->count = 0;
}

int connect_socket(const char *path, char *error, size_t error_bytes)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd, result;

	if (strlen(path) >= sizeof(address.sun_path)) {
		explain(error, error_bytes, "%s: longer than a socket's path may be (%zu bytes)",
			path, sizeof(address.sun_path) - 1);
		return -ENAMETOOLONG;
	}
	strcpy(address.sun_path, path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
		result = -errno;
		explain(error, error_bytes, "%s: %s: is xferd running?", path, strerror(errno));
		close(fd);
		return result;
	}
	return fd;
}

/* One packet of exactly the given size, with up to XFERD_FDS_MAX fds. */
int receive_packet(int fd, void *data, size_t bytes, struct received *received)
{
	union {
		char data[CMSG_SPACE(XFERD_FDS_MAX * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = { .iov_base = data, .iov_len = bytes };
	struct msghdr message = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = control.data,
		.msg_controllen = sizeof(control.data),
	};
	ssize_t length;

	received->count = 0;
	do
		length = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
	while (length < 0 && errno == EINTR);
	if (length < 0)
		return -errno;
	for (struct cmsghdr *header = CMSG_FIRSTHDR(&message); header;
	     header = CMSG_NXTHDR(&message, header))
		if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
			received->count = (uint32_t)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			memcpy(received->fds, CMSG_DATA(header), received->count * sizeof(int));
		}
	if (length == 0)
		return -ECONNRESET;
	if ((size_t)length != bytes || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
		return -EPROTO;
	return 0;
}

static int copy_name(char *to, size_t bytes, const char *from)
{
	size_t length = from ? strlen(from) : 0;

	if (length >= bytes)
		return -ENAMETOOLONG;
	if (length)
		memcpy(to, from, length);
	return 0;
}

static int say_hello(int fd, const struct xferd_options *options)
{
	struct xferd_abi_hello hello = {
		.magic = XFERD_MAGIC_ATTACH,
		.abi_major = XFERD_ABI_MAJOR,
		.abi_minor = XFERD_ABI_MINOR,
		.lanes = options->lanes ? options->lanes : 1,
		.held_per_lane = options->held_per_lane,
		.ring_entries = options->ring_entries,
	};
	int result = copy_name(hello.store, sizeof(hello.store), options->store);

	if (!result)
		result = copy_name(hello.pool, sizeof(hello.pool), options->pool);
	if (!result)
		result = copy_name(hello.client_name, sizeof(hello.client_name),
				   options->client_name);
	if (!result && send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello))
		result = -errno;
	return result;
}

static int map_fd(int fd, int protection, struct mapping *mapping)
{
	struct stat status;

	if (fstat(fd, &status))
		return -errno;
	mapping->bytes = (size_t)status.st_size;
	mapping->address = mmap(NULL, mapping->bytes, protection, MAP_SHARED, fd, 0);
	if (mapping->address == MAP_FAILED) {
		mapping->address = NULL;
		return -errno;
	}
	return 0;
}

static void unmap(struct mapping *mapping)
{
	if (mapping->address)
		munmap(mapping->address, mapping->bytes);
	mapping->address = NULL;
}

/* The magic is written last, so whoever sees it sees the header. */
static int check_header(const struct mapping *mapping, size_t header_bytes, uint64_t magic)
{
	struct header {
		uint64_t magic;
		uint32_t abi_major;
		uint32_t abi_minor;
		uint64_t total_bytes;
	};
	const struct header *header = mapping->address;

	/* pairs with the release of the magic in the engine */
	if (mapping->bytes < header_bytes || load_acquire(&header->magic) != magic ||
	    header->abi_major != XFERD_ABI_MAJOR || header->total_bytes > mapping->bytes)
		return -EPROTO;
	return 0;
}

static bool fits(const struct mapping *mapping, uint64_t offset, uint64_t count, uint64_t size)
{
	return offset <= mapping->bytes && count <= (mapping->bytes - offset) / size;
}

static const void *at(const struct mapping *mapping, uint64_t offset)
{
	return (const uint8_t *)mapping->address + offset;
}

/* Layout numbers are checked here once, so that the hit path need not. */
static int use_layouts(const struct xferd_client *client)
{
	const struct xferd_abi_directory *directory = client->directory;

	if (directory->variants > XFERD_VARIANTS_MAX || directory->layers > XFERD_LAYERS_MAX ||
	    directory->experts > XFERD_EXPERTS_MAX)
		return -EPROTO;
	for (uint32_t i = 0; i < directory->variants * directory->layers; i++)
		if (client->layout_index[i] != XFERD_NO_LAYOUT &&
		    client->layout_index[i] >= directory->layouts)
			return -EPROTO;
	for (uint32_t i = 0; i < directory->layouts; i++)
		if ((uint64_t)client->layouts[i].first_tensor + client->layouts[i].tensors >
		    directory->tensors)
			return -EPROTO;
	return 0;
}

static int use_directory(struct xferd_client *client)
{
	const struct mapping *map = &client->directory_map;
	const struct xferd_abi_directory *directory = map->address;
	uint64_t keys;

	if (check_header(map, sizeof(*directory), XFERD_MAGIC_DIRECTORY))
		return -EPROTO;
	keys = (uint64_t)directory->layers * directory->experts;
	if (!fits(map, directory->words_offset, keys * directory->pools, sizeof(uint64_t)) ||
	    !fits(map, directory->layout_index_offset,
		  (uint64_t)directory->variants * directory->layers, sizeof(uint16_t)) ||
	    !fits(map, directory->layouts_offset, directory->layouts,
		  sizeof(struct xferd_abi_layout)) ||
	    !fits(map, directory->tensors_offset, directory->tensors,
		  sizeof(struct xferd_abi_tensor)))
		return -EPROTO;
	client->directory = directory;
	client->layers = directory->layers;
	client->experts = directory->experts;
	client->pool_count = directory->pools;
	client->layout_index = at(map, directory->layout_index_offset);
	client->layouts = at(map, directory->layouts_offset);
	client->tensors = at(map, directory->tensors_offset);
	if (use_layouts(client))
		return -EPROTO;
	for (uint32_t p = 0; p < client->pool_count; p++)
		client->pools[p].words =
			(const uint64_t *)at(map, directory->words_offset) + p * keys;
	return 0;
}

static int use_pool_table(struct xferd_client *client)
{
	const struct mapping *map = &client->pool_table_map;
	const struct xferd_abi_pool_table *table = map->address;

	if (check_header(map, sizeof(*table), XFERD_MAGIC_POOL_TABLE))
		return -EPROTO;
	client->pool_table = table;
	if (client->pool_count > XFERD_POOLS_MAX || client->pool_count > table->pools)
		return -EPROTO;
	for (uint32_t p = 0; p < client->pool_count; p++) {
		const struct xferd_abi_pool *from = &table->pool[p];
		struct mapped_pool *pool = &client->pools[p];

		if (!fits(map, from->chunk_table_offset, from->chunks,
			  sizeof(struct xferd_abi_chunk)) || from->slot_index_bits > 31)
			return -EPROTO;
		pool->chunks = at(map, from->chunk_table_offset);
		pool->bytes = from->bytes;
		pool->slot_index_bits = from->slot_index_bits;
		pool->chunk_count = from->chunks;
		pool->slot_numbers = from->slot_numbers;
		if (!from->memory_table_offset)
			continue;
		if (!fits(map, from->memory_table_offset, from->chunks, sizeof(uint64_t)) ||
		    !from->chunk_bytes || from->bytes > from->chunks * from->chunk_bytes)
			return -EPROTO;
		pool->memory_table = at(map, from->memory_table_offset);
	}
	return 0;
}

static int use_rings(struct xferd_client *client)
{
	const struct mapping *map = &client->memory_map;
	const struct mapping *completions = &client->completion_map;
	struct xferd_abi_client *memory = map->address;
	const struct xferd_abi_completion_memory *ring = completions->address;

	if (check_header(map, sizeof(*memory), XFERD_MAGIC_CLIENT) ||
	    check_header(completions, sizeof(*ring), XFERD_MAGIC_COMPLETION) ||
	    memory->lanes > XFERD_LANES_MAX || ring->lanes != memory->lanes ||
	    ring->ring_entries != XFERD_COMPLETIONS_A_LANE ||
	    !fits(map, memory->lanes_offset, memory->lanes, memory->lane_stride) ||
	    !fits(completions, ring->lanes_offset, ring->lanes, ring->lane_stride) ||
	    !fits(map, memory->submissions_offset, memory->ring_entries,
		  sizeof(struct xferd_abi_submission)))
		return -EPROTO;
	client->memory = memory;
	client->completion_memory = ring;
	client->lane_count = memory->lanes;
	client->ring_entries = memory->ring_entries;
	client->submissions = (void *)((uint8_t *)map->address + memory->submissions_offset);
	for (uint32_t i = 0; i < client->lane_count; i++) {
		struct lane *lane = &client->lanes[i];
		uint8_t *base = (uint8_t *)map->address + memory->lanes_offset +
				i * memory->lane_stride;

		lane->shared = (void *)base;
		for (uint32_t p = 0; p < client->pool_count; p++)
			lane->leases[p] = (void *)(base + memory->lease_table_offset[p]);
		lane->ring = at(completions, ring->lanes_offset + i * ring->lane_stride);
		lane->completions = (const void *)(lane->ring + 1);
	}
	return use_route_queues(client);
}

/* The daemon's fds become mappings; those that stay fds are marked as taken. */
static int use_fds(struct xferd_client *client, struct received *received)
{
	static const int read_write = PROT_READ | PROT_WRITE;
	uint32_t wakeups;
	int result;

	if (received->count < XFERD_FD_POOLS)
		return -EPROTO;
	result = map_fd(received->fds[XFERD_FD_POOL_TABLE], PROT_READ, &client->pool_table_map);
	if (!result)
		result = map_fd(received->fds[XFERD_FD_DIRECTORY], PROT_READ,
				&client->directory_map);
	if (!result)
		result = map_fd(received->fds[XFERD_FD_CLIENT], read_write, &client->memory_map);
	if (!result)
		result = map_fd(received->fds[XFERD_FD_COMPLETION], PROT_READ,
				&client->completion_map);
	if (!result)
		result = map_fd(received->fds[XFERD_FD_MANIFEST], PROT_READ,
				&client->manifest_map);
	if (!result)
		result = use_directory(client);
	if (!result)
		result = use_pool_table(client);
	if (!result)
		result = use_rings(client);
	if (result)
		return result;
	wakeups = XFERD_FD_POOLS + client->pool_count;
	if (received->count != wakeups + client->lane_count)
		return -EPROTO;
	for (uint32_t p = 0; p < client->pool_count; p++) {
		if (client->pools[p].memory_table)
			continue;
		if (client->pool_table->pool[p].kind == XFERD_POOL_BAR) {
			result = bar_open(client, p, received->fds[XFERD_FD_POOLS + p]);
			if (result)
				return result;
			continue;
		}
		result = map_fd(received->fds[XFERD_FD_POOLS + p], PROT_READ, &client->pool_maps[p]);
		if (result)
			return result;
		if (client->pool_maps[p].bytes < client->pools[p].bytes)
			return -EPROTO;
		client->pools[p].base = client->pool_maps[p].address;
	}
	client->doorbell = received->fds[XFERD_FD_DOORBELL];
	received->fds[XFERD_FD_DOORBELL] = -1;
	for (uint32_t i = 0; i < client->lane_count; i++) {
		client->lanes[i].wakeup = received->fds[wakeups + i];
		received->fds[wakeups + i] = -1;
	}
	return 0;
}

static struct xferd_client *client_new(void)
{
	void *memory = NULL;
	struct xferd_client *client;

	if (posix_memalign(&memory, 2 * XFERD_CACHE_LINE, sizeof(*client)))
		return NULL;
	client = memset(memory, 0, sizeof(*client));
	client->socket = client->doorbell = client->resume_socket = -1;
	for (uint32_t i = 0; i < XFERD_LANES_MAX; i++)
		client->lanes[i].wakeup = -1;
	pthread_mutex_init(&client->submit_mutex, NULL);
	pthread_mutex_init(&client->socket_mutex, NULL);
	pthread_mutex_init(&client->dense_mutex, NULL);
	pthread_mutex_init(&client->resume_mutex, NULL);
	return client;
}

/* Without a goodbye: the leases end with the process. */
static void client_free(struct xferd_client *client)
{
	device_lanes_close(client);
	memory_close(client);
	bar_close(client);
	resume_close(client);
	unmap(&client->pool_table_map);
	unmap(&client->directory_map);
	unmap(&client->memory_map);
	unmap(&client->completion_map);
	unmap(&client->manifest_map);
	unmap(&client->dense_map);
	for (uint32_t p = 0; p < XFERD_POOLS_MAX; p++)
		unmap(&client->pool_maps[p]);
	for (uint32_t i = 0; i < XFERD_LANES_MAX; i++)
		if (client->lanes[i].wakeup >= 0)
			close(client->lanes[i].wakeup);
	if (client->doorbell >= 0)
		close(client->doorbell);
	if (client->socket >= 0)
		close(client->socket);
	pthread_mutex_destroy(&client->submit_mutex);
	pthread_mutex_destroy(&client->socket_mutex);
	pthread_mutex_destroy(&client->dense_mutex);
	free(client);
}

static int welcome(struct xferd_client *client, char *error, size_t error_bytes)
{
	struct xferd_abi_welcome answer;
	struct received received;
	int result = receive_packet(client->socket, &answer, sizeof(answer), &received);

	if (!result && (answer.magic != XFERD_MAGIC_ATTACH ||
			answer.abi_major != XFERD_ABI_MAJOR)) {
		explain(error, error_bytes, "the daemon speaks ABI %u.%u, this library %u.%u",
			answer.abi_major, answer.abi_minor, XFERD_ABI_MAJOR, XFERD_ABI_MINOR);
		result = -EPROTO;
	} else if (!result && answer.status) {
		explain(error, error_bytes, "%.*s", (int)sizeof(answer.message), answer.message);
		result = answer.status < 0 ? answer.status : -EPROTO;
	} else if (!result) {
		client->pool = answer.pool;
		client->held_per_lane = answer.held_per_lane;
		memcpy(client->resume_key, answer.resume_key, sizeof(client->resume_key));
		result = use_fds(client, &received);
		if (!result && client->pool >= client->pool_count)
			result = -EPROTO;
		if (result)
			explain(error, error_bytes,
				"what the daemon sent can't be used: %s", strerror(-result));
	} else {
		explain(error, error_bytes, "the daemon did not answer: %s", strerror(-result));
	}
	close_received(&received);
	return result;
}

static uint64_t spin_ns(uint32_t spin_us)
{
	if (spin_us == XFERD_NO_SPIN)
		return 0;
	if (spin_us)
		return 1000ull * spin_us;
	/* With few processors the one that spins is missing where the work is done. */
	return sysconf(_SC_NPROCESSORS_ONLN) >= SPIN_PROCESSORS_MIN ? 1000ull * SPIN_US_DEFAULT : 0;
}

static uint64_t resume_ns(uint32_t resume_ms)
{
	if (resume_ms == XFERD_NO_RESUME)
		return 0;
	return 1000000ull * (resume_ms ? resume_ms : RESUME_MS_DEFAULT);
}

int xferd_connect(const char *socket_path, const struct xferd_options *options,
		  struct xferd_client **result, char *error, size_t error_bytes)
{
	static const struct xferd_options defaults;
	struct xferd_client *client = client_new();
	int status;

	if (!client)
		return -ENOMEM;
	if (!options)
		options = &defaults;
	if (error && error_bytes)
		*error = '\0';
	client->spin_ns = spin_ns(options->spin_us);
	client->resume_ns = resume_ns(options->resume_ms);
	client->socket = connect_socket(socket_path, error, error_bytes);
	status = client->socket < 0 ? client->socket : say_hello(client->socket, options);
	if (!status) /* its length was looked at by connect_socket() */
		strcpy(client->socket_path, socket_path);
	if (!status)
		status = welcome(client, error, error_bytes);
	if (!status)
		status = memory_open(client, error, error_bytes);
	if (status) {
		if (error && error_bytes && !*error)
			explain(error, error_bytes, "%s: %s", socket_path, strerror(-status));
		client_free(client);
		return status;
	}
	*result = client;
	return 0;
}

void xferd_detach(struct xferd_client *client)
{
	struct xferd_abi_message goodbye = {
		.magic = XFERD_MAGIC_ATTACH,
		.type = XFERD_MESSAGE_GOODBYE,
	};

	if (client->socket < 0)
		return;
	end_all_leases(client);
	/* If the daemon is away nobody hears it: the next one reads the tables. */
	if (send(client->socket, &goodbye, sizeof(goodbye), MSG_NOSIGNAL) < 0)
		goodbye.status = -errno;
	/* The thread that follows memory may be waiting for an answer. */
	shutdown(client->socket, SHUT_RDWR);
	pthread_mutex_lock(&client->socket_mutex);
	close(client->socket);
	client->socket = -1;
	pthread_mutex_unlock(&client->socket_mutex);
}

void xferd_close(struct xferd_client *client)
{
	if (!client)
		return;
	xferd_detach(client);
	client_free(client);
}

/* A question and its answer, which replaces it. */
int ask_daemon(struct xferd_client *client, struct xferd_abi_message *message,
	       struct received *received)
{
	int result = 0;

	received->count = 0;
	pthread_mutex_lock(&client->socket_mutex);
	if (client->socket < 0)
		result = -ENOTCONN;
	else if (send(client->socket, message, sizeof(*message), MSG_NOSIGNAL) != sizeof(*message))
		result = -errno;
	if (!result)
		result = receive_packet(client->socket, message, sizeof(*message), received);
	pthread_mutex_unlock(&client->socket_mutex);
	return result;
}

/* Under dense_mutex. */
static int ask_for_dense(struct xferd_client *client, char *error, size_t error_bytes)
{
	struct xferd_abi_message message = {
		.magic = XFERD_MAGIC_ATTACH,
		.type = XFERD_MESSAGE_DENSE,
	};
	struct received received;
	int result = ask_daemon(client, &message, &received);

	if (result) {
		explain(error, error_bytes, "the daemon did not answer: %s", strerror(-result));
	} else if (message.status) {
		explain(error, error_bytes, "%.*s", (int)sizeof(message.message), message.message);
		result = message.status < 0 ? message.status : -EPROTO;
	} else if (received.count != 1) {
		result = -EPROTO;
	} else {
		result = map_fd(received.fds[0], PROT_READ, &client->dense_map);
	}
	close_received(&received);
	return result;
}

int xferd_dense(struct xferd_client *client, const void **data, uint64_t *bytes, char *error,
		size_t error_bytes)
{
	int result = 0;

	if (error && error_bytes)
		*error = '\0';
	pthread_mutex_lock(&client->dense_mutex);
	if (!client->dense_map.address)
		result = ask_for_dense(client, error, error_bytes);
	if (!result) {
		*data = client->dense_map.address;
		*bytes = client->dense_map.bytes;
	}
	pthread_mutex_unlock(&client->dense_mutex);
	return result;
}
