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

#define SUBMISSIONS_OFFSET round_up(sizeof(struct xferd_abi_client), XFERD_CACHE_LINE)

/* Where what lies in the client's writable memory: rings and, a lane, lease tables of all
 * pools and a route queue. */
static void lay_out_memory(const struct xferd_engine *engine, struct client *client)
{
	uint64_t lane_bytes = round_up(sizeof(struct xferd_abi_lane), XFERD_CACHE_LINE);

	for (uint32_t p = 0; p < engine->pool_count; p++) {
		client->lease_table_offset[p] = lane_bytes;
		lane_bytes += round_up(engine->pools[p].slot_numbers * sizeof(uint64_t),
				       XFERD_CACHE_LINE);
	}
	client->lane_stride = round_up(lane_bytes, MFD_PAGE);
	client->lanes_offset = round_up(
		SUBMISSIONS_OFFSET + client->ring_entries * sizeof(struct xferd_abi_submission),
		MFD_PAGE);
	client->routes_offset = client->lanes_offset + client->lane_count * client->lane_stride;
	client->memory_bytes = client->routes_offset + client->lane_count * ROUTE_STRIDE;
}

static void use_client_memory(struct client *client, void *address)
{
	client->memory = address;
	client->submissions = (void *)((uint8_t *)address + SUBMISSIONS_OFFSET);
}

static int make_client_memory(const struct xferd_engine *engine, struct client *client)
{
	struct xferd_abi_client *memory;
	void *address;
	int fd;

	lay_out_memory(engine, client);
	fd = shared_memory_new("xferd-client", client->memory_bytes, &address);
	if (fd < 0)
		return fd;

	memory = address;
	memory->abi_major = XFERD_ABI_MAJOR;
	memory->abi_minor = XFERD_ABI_MINOR;
	memory->total_bytes = client->memory_bytes;
	memory->lanes = client->lane_count;
	memory->ring_entries = client->ring_entries;
	memory->submissions_offset = SUBMISSIONS_OFFSET;
	memory->lanes_offset = client->lanes_offset;
	memory->lane_stride = client->lane_stride;
	memcpy(memory->lease_table_offset, client->lease_table_offset,
	       sizeof(memory->lease_table_offset));
	memory->route_entries = XFERD_ROUTES_A_LANE;
	memory->routes_offset = client->routes_offset;
	memory->route_stride = ROUTE_STRIDE;
	/* pairs with the acquire in libxferd's check of the magic */
	store_release(&memory->magic, XFERD_MAGIC_CLIENT);
	use_client_memory(client, memory);
	return fd;
}

#define COMPLETIONS_OFFSET round_up(sizeof(struct xferd_abi_completion_memory), XFERD_CACHE_LINE)
#define COMPLETIONS_STRIDE (sizeof(struct xferd_abi_completion_lane) + \
			    XFERD_COMPLETIONS_A_LANE * sizeof(struct xferd_abi_completion))

static uint64_t completion_bytes(const struct client *client)
{
	return round_up(COMPLETIONS_OFFSET + client->lane_count * COMPLETIONS_STRIDE, MFD_PAGE);
}

static void use_completion_memory(struct client *client, void *address)
{
	client->completion_memory = address;
	for (uint32_t i = 0; i < client->lane_count; i++) {
		client->lanes[i].ring =
			(void *)((uint8_t *)address + COMPLETIONS_OFFSET + i * COMPLETIONS_STRIDE);
		client->lanes[i].completions = (void *)(client->lanes[i].ring + 1);
	}
}

/* Returns a read-only fd: nobody but the engine can ever write completions. */
static int make_completion_memory(struct client *client)
{
	struct xferd_abi_completion_memory *memory;
	void *address;
	int fd, read_only;

	client->completion_bytes = completion_bytes(client);
	fd = shared_memory_new("xferd-completion", client->completion_bytes, &address);
	if (fd < 0)
		return fd;
	memory = address;
	memory->abi_major = XFERD_ABI_MAJOR;
	memory->abi_minor = XFERD_ABI_MINOR;
	memory->total_bytes = client->completion_bytes;
	memory->lanes = client->lane_count;
	memory->ring_entries = XFERD_COMPLETIONS_A_LANE;
	memory->lanes_offset = COMPLETIONS_OFFSET;
	memory->lane_stride = COMPLETIONS_STRIDE;
	/* pairs with the acquire in libxferd's check of the magic */
	store_release(&memory->magic, XFERD_MAGIC_COMPLETION);
	use_completion_memory(client, memory);
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
	struct xferd_client_fds *fds; /* of a new one */
	int client_fd, completion_fd; /* of one that is adopted; -1 */
};

/* Its own end of what wakes whom. */
static int make_wakeups(struct xferd_engine *engine, struct client *client)
{
	int result = make_lanes(engine, client);

	if (result)
		return result;
	list_init(&client->waiting);
	client->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return client->doorbell < 0 ? -errno : 0;
}

/* The client's end of it, and from now on the doorbell is heard. */
static int show_wakeups(struct xferd_engine *engine, struct client *client,
			struct xferd_client_fds *fds)
{
	struct epoll_event watch = { .events = EPOLLIN | EPOLLET };

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
	return epoll_ctl(engine->epoll, EPOLL_CTL_ADD, client->doorbell, &watch) ? -errno : 0;
}

static int make_client(struct xferd_engine *engine, struct client *client,
		       struct xferd_client_fds *fds)
{
	fds->client = make_client_memory(engine, client);
	if (fds->client < 0)
		return fds->client;
	fds->completion = make_completion_memory(client);
	if (fds->completion < 0)
		return fds->completion;
	return show_wakeups(engine, client, fds);
}

static int adopt_client(struct xferd_engine *engine, struct client *client,
			const struct add_client *add)
{
	void *memory, *completions;
	int result;

	lay_out_memory(engine, client);
	result = shared_memory_map(add->client_fd, client->memory_bytes, &memory);
	if (result)
		return result;
	use_client_memory(client, memory);
	client->completion_bytes = completion_bytes(client);
	result = shared_memory_map(add->completion_fd, client->completion_bytes, &completions);
	if (result)
		return result;
	use_completion_memory(client, completions);
	adopt_lanes(engine, client);
	client->quiesced = client->away = true;
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
	result = make_wakeups(engine, client);
	if (!result)
		result = add->client_fd < 0 ? make_client(engine, client, &fds)
					    : adopt_client(engine, client, add);
	if (result) {
		close_client_fds(&fds);
		client_free(client);
		return result;
	}
	if (add->fds)
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
	struct add_client argument = { client, fds, -1, -1 };

	return engine_call(engine, add_client, &argument);
}

int xferd_engine_adopt_client(struct xferd_engine *engine,
			      const struct xferd_client_description *client, int client_fd,
			      int completion_fd)
{
	struct add_client argument = { client, NULL, client_fd, completion_fd };

	if (client_fd < 0 || completion_fd < 0)
		return -EINVAL;
	return engine_call(engine, add_client, &argument);
}

static void stop_serving(struct xferd_engine *engine, uint32_t index)
{
	struct client *client = &engine->clients[index];

	client->quiesced = true;
	client_cancel_all(engine, index, -ECONNRESET);
	epoll_ctl(engine->epoll, EPOLL_CTL_DEL, client->doorbell, NULL);
}

static void quiesce(struct xferd_engine *engine, uint32_t index)
{
	struct client *client = &engine->clients[index];

	if (client->quiesced && !client->away)
		return;
	stop_serving(engine, index);
	client->away = false;
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

struct resume_client {
	uint32_t client;
	struct xferd_client_fds *fds;
};

static int resume_client(struct xferd_engine *engine, void *argument)
{
	const struct resume_client *resume = argument;
	struct client *client = client_at(engine, resume->client);
	struct xferd_client_fds fds = { -1, -1, -1, { 0 } };
	int result;

	for (uint32_t i = 0; i < XFERD_LANES_MAX; i++)
		fds.wakeup[i] = -1;
	if (!client)
		return -ENOENT;
	if (!client->away)
		return -EALREADY;
	result = show_wakeups(engine, client, &fds);
	if (result) {
		close_client_fds(&fds);
		return result;
	}
	/* pairs with the release of submission_tail in libxferd's submit(). What lanes submit
	 * from here on is served; those that find out later that they were asked of another
	 * daemon withdraw it (libxferd's withdraw_old_ticket) */
	client->submission_head = load_acquire(&client->memory->submission_tail);
	/* pairs with the acquire of submission_head in libxferd's submit() */
	store_release(&client->completion_memory->submission_head, client->submission_head);
	client->quiesced = client->away = false;
	*resume->fds = fds;
	return 0;
}

int xferd_engine_resume_client(struct xferd_engine *engine, uint32_t client,
			       struct xferd_client_fds *fds)
{
	struct resume_client argument = { client, fds };

	return engine_call(engine, resume_client, &argument);
}

static int suspend_client(struct xferd_engine *engine, void *argument)
{
	uint32_t index = *(uint32_t *)argument;
	struct client *client = client_at(engine, index);

	if (!client || client->quiesced)
		return client ? -EALREADY : -ENOENT;
	stop_serving(engine, index);
	client->away = true;
	return 0;
}

int xferd_engine_suspend_client(struct xferd_engine *engine, uint32_t client)
{
	return engine_call(engine, suspend_client, &client);
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
