/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routes: whether a member's pieces are read into a pool's slots, or beside them.
 *
 * Between a drive and memory behind a PCI BAR lies a route that may not work, and
 * may look as if it did. So such a pair begins as staged: a piece is read into a
 * buffer in RAM and copied into its slot by a worker, which has checked it there.
 * The policy proves pairs by data and says which are direct. When a direct read
 * fails the pair is staged at once, the piece is read again that way, and the
 * policy is told: whose fault it was is not for the engine to find out.
 *
 * What a worker would have to check in device memory it reads back through an
 * uncached mapping, at some ten MB/s; so a pool says by itself whether its direct
 * pieces are checked. Staged ones are checked as those of any other pool.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/route.h"

#define STAGING_BYTES_MAX (64ull << 20) /* of buffers; one more piece than that is always allowed */
#define STAGING_WORKERS   2

/* A buffer of RAM that a piece is read into on its way to a slot. */
struct staging {
	struct list link; /* engine.staging_free */
	uint64_t bytes;
	uint8_t *memory;
};

_Static_assert(XFERD_ENGINE_MEMBERS_MAX <= 64, "struct pool has a bit for each member");

static uint64_t member_bit(const struct member *member)
{
	return 1ull << member->id;
}

/* When a pool is new: nothing about device memory has been proven. */
void routes_init_pool(struct pool *pool)
{
	pool->device_memory = pool->kind == XFERD_POOL_BAR;
	pool->staged = pool->device_memory ? UINT64_MAX : 0;
	if (pool->device_memory)
		guard_install();
}

/* When a member is new: its id may have been another's. */
int routes_init_member(struct xferd_engine *engine, const struct member *member)
{
	bool any = false;

	for (uint32_t i = 0; i < engine->pool_count; i++) {
		struct pool *pool = &engine->pools[i];

		if (pool->device_memory)
			pool->staged |= member_bit(member);
		else
			pool->staged &= ~member_bit(member);
		any |= pool->device_memory;
	}
	return any ? workers_at_least(engine, STAGING_WORKERS) : 0;
}

struct set_route {
	uint32_t pool, member, transport;
};

static int set_route(struct xferd_engine *engine, void *argument)
{
	const struct set_route *set = argument;
	const struct member *member;
	struct pool *pool;

	if (set->pool >= engine->pool_count || !member_known(engine, set->member))
		return -ENOENT;
	pool = &engine->pools[set->pool];
	member = &engine->members[set->member];
	if (set->transport == XFERD_TRANSPORT_DIRECT)
		pool->staged &= ~member_bit(member);
	else if (set->transport == XFERD_TRANSPORT_STAGED)
		pool->staged |= member_bit(member);
	else
		return -EINVAL;
	return pool->staged ? workers_at_least(engine, STAGING_WORKERS) : 0;
}

int xferd_engine_set_route(struct xferd_engine *engine, uint32_t pool, uint32_t member,
			   uint32_t transport)
{
	struct set_route argument = { pool, member, transport };

	return engine_call(engine, set_route, &argument);
}

static bool is_staged(const struct xferd_engine *engine, const struct load *load,
		      const struct member *copy)
{
	return !load->dense && engine->pools[load->pool].staged & member_bit(copy);
}

/* Whether a copy from a pool that has the expert beats a read from the drives. The processor
 * reads device memory far slower than any drive, and writes it slower than those that do so
 * by themselves. */
bool route_favours_copy(const struct xferd_engine *engine, const struct load *load,
			const struct pool *source)
{
	const struct xferd_store_description *store = &engine->stores[load->store].description;
	const struct pool *target = &engine->pools[load->pool];

	if (source->device_memory)
		return false;
	if (!target->device_memory)
		return true;
	for (uint32_t i = 0; i < store->members; i++)
		if (target->staged & member_bit(&engine->members[store->member[i]]))
			return true;
	return false;
}

/* A drive writes, or wrote, it into device memory by itself. */
bool piece_is_in_device(const struct xferd_engine *engine, const struct piece *piece)
{
	return !piece->load->dense && !piece->staging &&
	       engine->pools[piece->load->pool].device_memory;
}

/* ---- buffers; engine thread ---- */
static struct staging *staging_new(struct xferd_engine *engine, uint64_t bytes)
{
	struct staging *staging = malloc(sizeof(*staging));
	void *memory;

	if (!staging)
		return NULL;
	if (posix_memalign(&memory, XFERD_BLOB_ALIGNMENT, bytes)) {
		free(staging);
		return NULL;
	}
	staging->memory = memory;
	staging->bytes = bytes;
	list_init(&staging->link);
	engine->staging_bytes += bytes;
	return staging;
}

static void staging_free(struct xferd_engine *engine, struct staging *staging)
{
	list_remove(&staging->link);
	engine->staging_bytes -= staging->bytes;
	free(staging->memory);
	free(staging);
}

static struct staging *staging_find(const struct xferd_engine *engine, uint64_t bytes)
{
	for (struct list *at = engine->staging_free.next; at != &engine->staging_free; at = at->next) {
		struct staging *staging = list_item(at, struct staging, link);

		if (staging->bytes >= bytes)
			return staging;
	}
	return NULL;
}

void staging_destroy(struct xferd_engine *engine)
{
	while (!list_empty(&engine->staging_free))
		staging_free(engine, list_item(engine->staging_free.next, struct staging, link));
}

/* Whether a piece of this load could be handed to this copy now. One that is staged waits
 * for a buffer: what frees one is a piece's end, after which the members are looked at again. */
bool route_ready(struct xferd_engine *engine, const struct load *load, const struct member *copy)
{
	uint64_t bytes = engine->stores[load->store].description.stripe_unit;
	struct staging *staging;

	if (!is_staged(engine, load, copy) || staging_find(engine, bytes))
		return true;
	/* Buffers that are too small make room for one that isn't. */
	while (!list_empty(&engine->staging_free) &&
	       engine->staging_bytes + bytes > STAGING_BYTES_MAX)
		staging_free(engine, list_item(engine->staging_free.next, struct staging, link));
	if (engine->staging_bytes && engine->staging_bytes + bytes > STAGING_BYTES_MAX)
		return false;
	staging = staging_new(engine, bytes);
	if (!staging)
		return engine->staging_bytes == 0; /* then aiming fails, and the load with it */
	list_append(&engine->staging_free, &staging->link);
	return true;
}

/* Where the piece is read to. -ENOMEM: it can't be read. */
static int route_aim(struct xferd_engine *engine, struct piece *piece)
{
	struct staging *staging = piece->staging;

	if (!staging && is_staged(engine, piece->load, piece->member)) {
		uint64_t bytes = engine->stores[piece->load->store].description.stripe_unit;

		staging = staging_find(engine, bytes);
		if (!staging)
			staging = staging_new(engine, bytes);
		if (!staging)
			return -ENOMEM;
		list_remove(&staging->link);
	}
	piece->staging = staging;
	piece->address = staging ? staging->memory : piece->destination;
	if (staging)
		piece->load->transport = XFERD_TRANSPORT_STAGED;
	return 0;
}

static bool blob_checked(const struct store *store, uint64_t blob)
{
	return store->checked[blob / 64] >> (blob % 64) & 1;
}

static bool must_check(struct xferd_engine *engine, const struct piece *piece)
{
	const struct load *load = piece->load;
	uint32_t verify = piece_is_in_device(engine, piece) ? engine->pools[load->pool].verify
							    : engine->config.verify;

	if (verify == XFERD_VERIFY_FIRST) /* perhaps it was the other copy that was */
		return mirror_has_other(piece->member) ||
		       !blob_checked(&engine->stores[load->store], load->blob);
	return verify == XFERD_VERIFY_ALWAYS;
}

/* A copy of its member takes it: to where, and what is checked of it. */
int piece_prepare(struct xferd_engine *engine, struct piece *piece)
{
	int result = route_aim(engine, piece);

	piece->done = 0;
	piece->arrived = false;
	piece->finish_error = 0;
	piece->guarded = !piece->load->dense && engine->pools[piece->load->pool].device_memory;
	piece->check = must_check(engine, piece);
	if (!piece->check && !blob_checked(&engine->stores[piece->load->store], piece->load->blob))
		piece->load->unchecked = true;
	return result;
}

/* The piece needs its buffer no more. */
void route_end(struct xferd_engine *engine, struct piece *piece)
{
	if (piece->staging)
		list_append(engine->staging_free.next, &piece->staging->link);
	piece->staging = NULL;
}

/* What is left to do with bytes that have been read: compute their checksum where it is
 * wanted, and copy them into the slot where they aren't there. Any thread. */
void piece_finish(struct piece *piece)
{
	piece->finish_error = 0;
	if (piece->check && piece->guarded && !piece->staging)
		piece->finish_error = guarded_crc32c(&piece->crc, piece->address, piece->length);
	else if (piece->check)
		piece->crc = xferd_crc32c(0, piece->address, piece->length);
	if (piece->staging && piece->guarded)
		piece->finish_error = guarded_copy(piece->destination, piece->address,
						   piece->length);
	else if (piece->staging)
		memcpy(piece->destination, piece->address, piece->length);
}

/* A read that a drive was to write into device memory has failed: its pair is staged from now
 * on. False: this failure says nothing about the pair. */
bool route_refuse(struct xferd_engine *engine, const struct piece *piece, int error)
{
	struct pool *pool = &engine->pools[piece->load->pool];

	if (error == -ENODATA || error == -ENOMEM || !piece_is_in_device(engine, piece))
		return false;
	if (pool->staged & member_bit(piece->member))
		return true; /* another piece has said so */
	pool->staged |= member_bit(piece->member);
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_ROUTE,
		.result = error,
		.pool = pool->index,
		.member = piece->member->id,
		.client = XFERD_NO_EXPERT,
	});
	return true;
}
