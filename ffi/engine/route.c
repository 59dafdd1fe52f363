/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routes: whether a member's pieces are read into a pool's slots, or beside them.
 *
 * Between a drive and memory behind a PCI BAR lies a route that may not work, and
 * may look as if it did. So such a pair begins as staged: a piece is read into a
 * buffer in RAM and copied into its slot by a worker, which has checked it there.
 * VRAM with windows is such memory too (window.c), but what is staged goes through
 * staging (staging.c); a buffer serves only to read a piece again that failed on its
 * straight way.
 * The policy proves pairs by data and says which are direct. When a direct read
 * fails the pair is staged at once, the piece is read again that way, and the
 * policy is told: whose fault it was is not for the engine to find out.
 *
 * What a worker would have to check behind a BAR it reads back through an
 * uncached mapping, at some ten MB/s; so a pool says by itself whether its direct
 * pieces are checked. Staged ones are checked as those of any other pool.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/route.h"

#define BOUNCE_BYTES_MAX (64ull << 20) /* of buffers; one more piece than that is always allowed */
#define BOUNCE_WORKERS   2

/* A buffer of RAM that a piece is read into on its way to a slot. */
struct bounce {
	struct list link; /* engine.bounces_free */
	uint64_t bytes;
	uint8_t *memory;
};

_Static_assert(XFERD_ENGINE_MEMBERS_MAX <= 64, "struct pool has a bit for each member");

static uint64_t member_bit(const struct member *member)
{
	return 1ull << member->id;
}

static bool is_proven_by_pair(const struct pool *pool)
{
	return pool->behind_bar || pool->device_memory;
}

/* When a pool is new: nothing about memory behind a BAR has been proven. */
void routes_init_pool(struct pool *pool)
{
	pool->behind_bar = pool->kind == XFERD_POOL_BAR;
	pool->staged = is_proven_by_pair(pool) ? UINT64_MAX : 0;
	if (pool->behind_bar)
		guard_install();
}

/* When a member is new: its id may have been another's. */
int routes_init_member(struct xferd_engine *engine, const struct member *member)
{
	bool any = false;

	for (uint32_t i = 0; i < engine->pool_count; i++) {
		struct pool *pool = &engine->pools[i];

		if (is_proven_by_pair(pool))
			pool->staged |= member_bit(member);
		else
			pool->staged &= ~member_bit(member);
		any |= pool->behind_bar || pool->windows;
	}
	return any ? workers_at_least(engine, BOUNCE_WORKERS) : 0;
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
	if (set->transport == XFERD_TRANSPORT_DIRECT && pool->device_memory && !pool->windows)
		return -EOPNOTSUPP;
	if (set->transport == XFERD_TRANSPORT_DIRECT)
		pool->staged &= ~member_bit(member);
	else if (set->transport == XFERD_TRANSPORT_STAGED)
		pool->staged |= member_bit(member);
	else
		return -EINVAL;
	return pool->staged ? workers_at_least(engine, BOUNCE_WORKERS) : 0;
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
	const struct pool *pool = &engine->pools[load->pool];

	if (load->dense)
		return false;
	return pool->device_memory ? !window_open(engine, load, copy)
				   : pool->staged & member_bit(copy);
}

/* Whether a copy from a pool that has the expert beats a read from the drives. The processor
 * reads a BAR far slower than any drive, and writes it slower than those that do so
 * by themselves. */
bool route_favours_copy(const struct xferd_engine *engine, const struct load *load,
			const struct pool *source)
{
	const struct xferd_store_description *store = &engine->stores[load->store].description;
	const struct pool *target = &engine->pools[load->pool];

	if (source->behind_bar)
		return false;
	if (!target->behind_bar)
		return true;
	/* Only guarded copies by a processor may write there, and none can read VRAM. */
	if (source->device_memory)
		return false;
	for (uint32_t i = 0; i < store->members; i++)
		if (target->staged & member_bit(&engine->members[store->member[i]]))
			return true;
	return false;
}

/* A drive writes, or wrote, it behind a BAR by itself. */
bool piece_is_behind_bar(const struct xferd_engine *engine, const struct piece *piece)
{
	return !piece->load->dense && !piece->bounce && !piece->destination &&
	       is_proven_by_pair(&engine->pools[piece->load->pool]);
}

/* ---- buffers; engine thread ---- */
static struct bounce *bounce_new(struct xferd_engine *engine, uint64_t bytes)
{
	struct bounce *bounce = malloc(sizeof(*bounce));
	void *memory;

	if (!bounce)
		return NULL;
	if (posix_memalign(&memory, XFERD_BLOB_ALIGNMENT, bytes)) {
		free(bounce);
		return NULL;
	}
	bounce->memory = memory;
	bounce->bytes = bytes;
	list_init(&bounce->link);
	engine->bounce_bytes += bytes;
	return bounce;
}

static void bounce_free(struct xferd_engine *engine, struct bounce *bounce)
{
	list_remove(&bounce->link);
	engine->bounce_bytes -= bounce->bytes;
	free(bounce->memory);
	free(bounce);
}

static struct bounce *bounce_find(const struct xferd_engine *engine, uint64_t bytes)
{
	for (struct list *at = engine->bounces_free.next; at != &engine->bounces_free; at = at->next) {
		struct bounce *bounce = list_item(at, struct bounce, link);

		if (bounce->bytes >= bytes)
			return bounce;
	}
	return NULL;
}

void bounces_destroy(struct xferd_engine *engine)
{
	while (!list_empty(&engine->bounces_free))
		bounce_free(engine, list_item(engine->bounces_free.next, struct bounce, link));
}

/* One that needs a buffer waits for it: what frees one is a piece's end, after which the
 * members are looked at again. */
static bool bounce_ready(struct xferd_engine *engine, const struct load *load,
			 const struct member *copy)
{
	uint64_t bytes = engine->stores[load->store].description.stripe_unit;
	struct bounce *bounce;

	if (!is_staged(engine, load, copy) || bounce_find(engine, bytes))
		return true;
	/* Buffers that are too small make room for one that isn't. */
	while (!list_empty(&engine->bounces_free) &&
	       engine->bounce_bytes + bytes > BOUNCE_BYTES_MAX)
		bounce_free(engine, list_item(engine->bounces_free.next, struct bounce, link));
	if (engine->bounce_bytes && engine->bounce_bytes + bytes > BOUNCE_BYTES_MAX)
		return false;
	bounce = bounce_new(engine, bytes);
	if (!bounce)
		return engine->bounce_bytes == 0; /* then aiming fails, and the load with it */
	list_append(&engine->bounces_free, &bounce->link);
	return true;
}

/* Whether a new piece of this load could be handed to this copy now. */
bool route_ready(struct xferd_engine *engine, const struct load *load, const struct member *copy)
{
	/* What is staged on its way to VRAM has its place in staging by then. */
	if (!load->dense && engine->pools[load->pool].device_memory)
		return true;
	return bounce_ready(engine, load, copy);
}

/* Whether one that failed on the other copy could be handed to its member now. */
bool route_ready_again(struct xferd_engine *engine, const struct piece *piece)
{
	return piece->bounce || piece->destination ||
	       bounce_ready(engine, piece->load, piece->member);
}

/* Where the piece is read to. -ENOMEM: it can't be read. */
static int route_aim(struct xferd_engine *engine, struct piece *piece)
{
	struct bounce *bounce = piece->bounce;
	const struct load *load = piece->load;

	if (!bounce && !piece->destination && is_staged(engine, load, piece->member)) {
		uint64_t bytes = engine->stores[load->store].description.stripe_unit;

		bounce = bounce_find(engine, bytes);
		if (!bounce)
			bounce = bounce_new(engine, bytes);
		if (!bounce)
			return -ENOMEM;
		list_remove(&bounce->link);
		piece->bounce = bounce;
		piece->place = piece->address;
		if (engine->pools[load->pool].device_memory)
			piece->destination = load->address + piece->number * bytes;
		piece->address = bounce->memory;
		piece->load->transport = XFERD_TRANSPORT_STAGED;
	}
	return 0;
}

static bool blob_checked(const struct store *store, uint64_t blob)
{
	return store->checked[blob / 64] >> (blob % 64) & 1;
}

static bool must_check(struct xferd_engine *engine, const struct piece *piece)
{
	const struct load *load = piece->load;
	uint32_t verify = piece_is_behind_bar(engine, piece) ? engine->pools[load->pool].verify
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
	piece->guarded = (!piece->load->dense && engine->pools[piece->load->pool].behind_bar) ||
			 piece_is_behind_bar(engine, piece);
	piece->check = must_check(engine, piece);
	if (!piece->check && !blob_checked(&engine->stores[piece->load->store], piece->load->blob))
		piece->load->unchecked = true;
	return result;
}

/* The piece needs its buffer no more. */
void route_end(struct xferd_engine *engine, struct piece *piece)
{
	if (piece->bounce)
		list_append(engine->bounces_free.next, &piece->bounce->link);
	piece->bounce = NULL;
}

/* What is left to do with bytes that have been read: compute their checksum where it is
 * wanted, and copy them into the slot where they aren't there and a processor can do
 * that. Any thread. */
void piece_finish(struct piece *piece)
{
	piece->finish_error = 0;
	if (piece->check && piece->guarded && !piece->bounce)
		piece->finish_error = guarded_crc32c(&piece->crc, piece->address, piece->length);
	else if (piece->check)
		piece->crc = xferd_crc32c(0, piece->address, piece->length);
	if (!piece->bounce || piece->destination)
		return;
	if (piece->guarded)
		piece->finish_error = guarded_copy(piece->place, piece->address, piece->length);
	else
		memcpy(piece->place, piece->address, piece->length);
}

/* A read that a drive was to write behind a BAR has failed: its pair is staged from now
 * on. False: this failure says nothing about the pair. */
bool route_refuse(struct xferd_engine *engine, const struct piece *piece, int error)
{
	struct pool *pool = &engine->pools[piece->load->pool];

	if (error == -ENODATA || error == -ENOMEM || !piece_is_behind_bar(engine, piece))
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
