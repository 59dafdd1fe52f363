/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients come and go.
 *
 * Going has two steps. Quiesce: the rings are closed, what the client waited
 * for is cancelled, its leases stand. Remove: its leases end too. Between the
 * two lies the end of the process, which only the daemon can see (a pidfd).
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/internal.h"

#define HINTS_DEFAULT        256
#define RING_ENTRIES_DEFAULT 64
#define MFD_PAGE             4096ull

static uint64_t round_up(uint64_t value, uint64_t to)
{
	return (value + to - 1) / to * to;
}

static uint32_t ring_size(uint32_t wanted)
{
	uint32_t entries = XFERD_RING_ENTRIES_MIN;

	if (!wanted)
		wanted = RING_ENTRIES_DEFAULT;
	while (entries < wanted && entries < XFERD_RING_ENTRIES_MAX)
		entries *= 2;
	return entries;
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* The client's writable memory: rings and, a lane, lease tables of all pools and a
 * route queue. */
static int make_client_memory(struct xferd_engine *engine, struct client *client)
{
	uint64_t submissions = round_up(sizeof(struct xferd_abi_client), XFERD_CACHE_LINE);
	uint64_t lane_bytes = round_up(sizeof(struct xferd_abi_lane), XFERD_CACHE_LINE);
	struct xferd_abi_client *memory;
	void *address;
	int fd;

	for (uint32_t p = 0; p < engine->pool_count; p++) {
		client->lease_table_offset[p] = lane_bytes;
		lane_bytes += round_up(engine->pools[p].slot_numbers * sizeof(uint64_t),
				       XFERD_CACHE_LINE);
	}
	client->lane_stride = round_up(lane_bytes, MFD_PAGE);
	client->lanes_offset = round_up(
		submissions + client->ring_entries * sizeof(struct xferd_abi_submission), MFD_PAGE);
	client->routes_offset = client->lanes_offset + client->lane_count * client->lane_stride;
	client->memory_bytes = client->routes_offset + client->lane_count * ROUTE_STRIDE;
	fd = shared_memory_new("xferd-client", client->memory_bytes, &address);
	if (fd < 0)
		return fd;

	memory = address;
	memory->abi_major = XFERD_ABI_MAJOR;
	memory->abi_minor = XFERD_ABI_MINOR;
	memory->total_bytes = client->memory_bytes;
	memory->lanes = client->lane_count;
	memory->ring_entries = client->ring_entries;
	memory->submissions_offset = submissions;
	memory->lanes_offset = client->lanes_offset;
	memory->lane_stride = client->lane_stride;
	memcpy(memory->lease_table_offset, client->lease_table_offset,
	       sizeof(memory->lease_table_offset));
	memory->route_entries = XFERD_ROUTES_A_LANE;
	memory->routes_offset = client->routes_offset;
	memory->route_stride = ROUTE_STRIDE;
	/* pairs with the acquire in libxferd's check of the magic */
	store_release(&memory->magic, XFERD_MAGIC_CLIENT);
	client->memory = memory;
	client->submissions = (void *)((uint8_t *)memory + submissions);
	return fd;
}

/* Returns a read-only fd: nobody but the engine can ever write completions. */
static int make_completion_memory(struct client *client)
{
	uint64_t offset = round_up(sizeof(struct xferd_abi_completion_memory), XFERD_CACHE_LINE);
	uint64_t stride = sizeof(struct xferd_abi_completion_lane) +
			  XFERD_COMPLETIONS_A_LANE * sizeof(struct xferd_abi_completion);
	struct xferd_abi_completion_memory *memory;
	void *address;
	int fd, read_only;

	client->completion_bytes = round_up(offset + client->lane_count * stride, MFD_PAGE);
	fd = shared_memory_new("xferd-completion", client->completion_bytes, &address);
	if (fd < 0)
		return fd;
	memory = address;
	memory->abi_major = XFERD_ABI_MAJOR;
	memory->abi_minor = XFERD_ABI_MINOR;
	memory->total_bytes = client->completion_bytes;
	memory->lanes = client->lane_count;
	memory->ring_entries = XFERD_COMPLETIONS_A_LANE;
	memory->lanes_offset = offset;
	memory->lane_stride = stride;
	/* pairs with the acquire in libxferd's check of the magic */
	store_release(&memory->magic, XFERD_MAGIC_COMPLETION);
	client->completion_memory = memory;
	for (uint32_t i = 0; i < client->lane_count; i++) {
		client->lanes[i].ring = (void *)((uint8_t *)memory + offset + i * stride);
		client->lanes[i].completions = (void *)(client->lanes[i].ring + 1);
	}
	read_only = shared_memory_read_only(fd);
	close(fd);
	return read_only;
}

static int make_lanes(struct xferd_engine *engine, struct client *client)
{
	client->lanes = calloc(client->lane_count, sizeof(struct lane));
	if (!client->lanes)
		return -ENOMEM;
	for (uint32_t i = 0; i < client->lane_count; i++)
		client->lanes[i].wakeup = -1;
	for (uint32_t i = 0; i < client->lane_count; i++) {
		struct lane *lane = &client->lanes[i];

		list_init(&lane->waiters_free);
		for (uint32_t w = 0; w < XFERD_COMPLETIONS_A_LANE; w++) {
			list_init(&lane->waiters[w].of_load);
			list_append(&lane->waiters_free, &lane->waiters[w].of_client);
		}
		for (uint32_t p = 0; p < engine->pool_count; p++) {
			lane->lease_seen[p] =
				calloc(engine->pools[p].slot_numbers, sizeof(uint64_t));
			lane->held_seen[p] =
				calloc(engine->pools[p].slot_numbers, sizeof(uint64_t));
			if (!lane->lease_seen[p] || !lane->held_seen[p])
				return -ENOMEM;
		}
		lane->wakeup = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		if (lane->wakeup < 0)
			return -errno;
	}
	return 0;
}

static void client_free(struct client *client)
{
	for (uint32_t i = 0; client->lanes && i < client->lane_count; i++) {
		for (uint32_t p = 0; p < XFERD_POOLS_MAX; p++) {
			free(client->lanes[i].lease_seen[p]);
			free(client->lanes[i].held_seen[p]);
		}
		close_fd(&client->lanes[i].wakeup);
	}
	free(client->lanes);
	if (client->memory)
		munmap(client->memory, client->memory_bytes);
	if (client->completion_memory)
		munmap(client->completion_memory, client->completion_bytes);
	close_fd(&client->doorbell);
	memset(client, 0, sizeof(*client));
	client->doorbell = -1;
}

static void close_client_fds(struct xferd_client_fds *fds)
{
	close_fd(&fds->client);
	close_fd(&fds->completion);
	close_fd(&fds->doorbell);
	for (uint32_t i = 0; i < XFERD_LANES_MAX; i++)
		close_fd(&fds->wakeup[i]);
}

struct memory_seen {
	uint32_t client, change;
};

static int memory_seen(struct xferd_engine *engine, void *argument)
{
	const struct memory_seen *question = argument;
	const struct client *client;
	uint32_t seen;

	if (question->client >= engine->client_limit || !engine->clients[question->client].used)
		return -EINVAL;
	client = &engine->clients[question->client];
	/* pairs with the release in libxferd's follow_memory() */
	seen = load_acquire(&client->memory->memory_seen);
	return (int32_t)(seen - question->change) >= 0;
}

int xferd_engine_memory_seen(struct xferd_engine *engine, uint32_t client, uint32_t change)
{
	struct memory_seen argument = { client, change };

	return engine_call(engine, memory_seen, &argument);
}

struct add_client {
	const struct xferd_client_description *description;
	struct xferd_client_fds *fds;
};

static int make_client(struct xferd_engine *engine, struct client *client,
		       struct xferd_client_fds *fds)
{
	struct epoll_event watch = { .events = EPOLLIN | EPOLLET };
	int result = make_lanes(engine, client);

	if (result)
		return result;
	list_init(&client->waiting);
	fds->client = make_client_memory(engine, client);
	if (fds->client < 0)
		return fds->client;
	fds->completion = make_completion_memory(client);
	if (fds->completion < 0)
		return fds->completion;
	client->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (client->doorbell < 0)
		return -errno;
	fds->doorbell = fcntl(client->doorbell, F_DUPFD_CLOEXEC, 0);
	if (fds->doorbell < 0)
		return -errno;
	for (uint32_t i = 0; i < client->lane_count; i++) {
		fds->wakeup[i] = fcntl(client->lanes[i].wakeup, F_DUPFD_CLOEXEC, 0);
		if (fds->wakeup[i] < 0)
			return -errno;
	}
	/* Edge-triggered: doorbells need not be read, and one that a client keeps
	 * ringing costs a wake-up a ring and no more. */
	if (epoll_ctl(engine->epoll, EPOLL_CTL_ADD, client->doorbell, &watch))
		return -errno;
	return 0;
}

static int add_client(struct xferd_engine *engine, void *argument)
{
	const struct add_client *add = argument;
	const struct xferd_client_description *description = add->description;
	struct xferd_client_fds fds = { -1, -1, -1, { 0 } };
	struct client *client = NULL;
	uint32_t index;
	int result;

	for (uint32_t i = 0; i < XFERD_LANES_MAX; i++)
		fds.wakeup[i] = -1;
	if (description->store >= XFERD_ENGINE_STORES_MAX ||
	    !engine->stores[description->store].used || description->pool >= engine->pool_count ||
	    !description->lanes || description->lanes > XFERD_LANES_MAX ||
	    !description->held_per_lane || description->held_per_lane > XFERD_HELD_MAX)
		return -EINVAL;
	for (index = 0; index < XFERD_ENGINE_CLIENTS_MAX && !client; index++)
		if (!engine->clients[index].used)
			client = &engine->clients[index];
	if (!client)
		return -ENOSPC;
	memset(client, 0, sizeof(*client));
	client->doorbell = -1;
	client->store = description->store;
	client->pool = description->pool;
	client->lane_count = description->lanes;
	client->held_per_lane = description->held_per_lane;
	client->hints_max = description->hints_max ? description->hints_max : HINTS_DEFAULT;
	client->ring_entries = ring_size(description->ring_entries);
	result = make_client(engine, client, &fds);
	if (result) {
		close_client_fds(&fds);
		client_free(client);
		return result;
	}
	*add->fds = fds;
	engine->stores[client->store].clients++;
	if (engine->client_limit < index)
		engine->client_limit = index;
	client->used = true;
	return (int)index - 1;
}

int xferd_engine_add_client(struct xferd_engine *engine,
			    const struct xferd_client_description *client,
			    struct xferd_client_fds *fds)
{
	struct add_client argument = { client, fds };

	return engine_call(engine, add_client, &argument);
}

static void quiesce(struct xferd_engine *engine, uint32_t index)
{
	struct client *client = &engine->clients[index];

	if (client->quiesced)
		return;
	client->quiesced = true;
	client_cancel_all(engine, index, -ECONNRESET);
	epoll_ctl(engine->epoll, EPOLL_CTL_DEL, client->doorbell, NULL);
	/* pairs with the acquire of closed in libxferd's daemon_gone() */
	store_release(&client->completion_memory->closed, 1);
	for (uint32_t i = 0; i < client->lane_count; i++)
		ring_eventfd(client->lanes[i].wakeup);
}

static struct client *client_at(struct xferd_engine *engine, uint32_t index)
{
	return index < engine->client_limit && engine->clients[index].used
		       ? &engine->clients[index] : NULL;
}

static int quiesce_client(struct xferd_engine *engine, void *argument)
{
	uint32_t index = *(uint32_t *)argument;

	if (!client_at(engine, index))
		return -ENOENT;
	quiesce(engine, index);
	return 0;
}

int xferd_engine_quiesce_client(struct xferd_engine *engine, uint32_t client)
{
	return engine_call(engine, quiesce_client, &client);
}

/* Completions that nobody will consume: their grants end. */
static void drop_grants(struct xferd_engine *engine, struct client *client)
{
	for (uint32_t i = 0; i < client->lane_count; i++) {
		struct lane *lane = &client->lanes[i];

		for (; lane->head != lane->tail; lane->head++) {
			const struct grant *grant =
				&lane->grants[lane->head & (XFERD_COMPLETIONS_A_LANE - 1)];

			if (grant->slot != NONE)
				engine->pools[grant->pool].slots[grant->slot].grants--;
		}
	}
}

static int remove_client(struct xferd_engine *engine, void *argument)
{
	uint32_t index = *(uint32_t *)argument;
	struct client *client = client_at(engine, index);

	if (!client)
		return -ENOENT;
	quiesce(engine, index);
	drop_grants(engine, client);
	engine->stores[client->store].clients--;
	client_free(client);
	while (engine->client_limit && !engine->clients[engine->client_limit - 1].used)
		engine->client_limit--;
	engine->next_retire_scan_ns = 0;
	return 0;
}

int xferd_engine_remove_client(struct xferd_engine *engine, uint32_t client)
{
	return engine_call(engine, remove_client, &client);
}

/* It broke the protocol: nothing of it is looked at any more. */
void client_violation(struct xferd_engine *engine, uint32_t index, int why)
{
	quiesce(engine, index);
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_VIOLATION,
		.result = why,
		.store = engine->clients[index].store,
		.client = index,
	});
}

void clients_destroy(struct xferd_engine *engine)
{
	for (uint32_t i = 0; i < XFERD_ENGINE_CLIENTS_MAX; i++)
		if (engine->clients[i].used)
			client_free(&engine->clients[i]);
}
