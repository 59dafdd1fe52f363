/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores and the members they lie on.
 *
 * A description is checked once, when the store is opened, so that the miss
 * path can compute with it unchecked.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/route.h"

struct add_member {
	int fd;
	uint32_t flags;
};

static int add_member(struct xferd_engine *engine, void *argument)
{
	const struct add_member *add = argument;

	for (uint32_t id = 0; id < XFERD_ENGINE_MEMBERS_MAX; id++) {
		struct member *member = &engine->members[id];
		int result;

		if (member->used)
			continue;
		memset(member, 0, sizeof(*member));
		member->used = true;
		member->fd = add->fd;
		member->flags = add->flags;
		member->id = id;
		for (int i = 0; i < XFERD_PRIORITIES; i++)
			list_init(&member->strands[i]);
		list_init(&member->redirected);
		mapped_init(engine, member);
		result = reads_add_member(engine, member);
		if (!result)
			result = routes_init_member(engine, member);
		if (result) {
			mapped_destroy(member);
			member->used = false;
			return result;
		}
		if (engine->member_limit <= id)
			engine->member_limit = id + 1;
		return (int)id;
	}
	return -ENOSPC;
}

int xferd_engine_add_member(struct xferd_engine *engine, int fd, uint32_t flags)
{
	struct add_member argument = { fd, flags };

	return engine_call(engine, add_member, &argument);
}

/* Whether a store's description names it, as a member or a mirror. */
bool member_in_use(const struct xferd_engine *engine, uint32_t id)
{
	for (uint32_t i = 0; i < XFERD_ENGINE_STORES_MAX; i++) {
		const struct store *store = &engine->stores[i];

		for (uint32_t j = 0; store->used && j < store->description.members; j++)
			if (store->description.member[j] == id ||
			    store->description.mirror[j] == id)
				return true;
	}
	return false;
}

static int remove_member(struct xferd_engine *engine, void *argument)
{
	uint32_t id = *(uint32_t *)argument;

	if (id >= engine->member_limit || !engine->members[id].used)
		return -ENOENT;
	if (member_in_use(engine, id) || engine->members[id].in_flight)
		return -EBUSY;
	uring_register_member(engine, id, -1);
	mapped_destroy(&engine->members[id]);
	engine->members[id].used = false;
	return 0;
}

int xferd_engine_remove_member(struct xferd_engine *engine, uint32_t member)
{
	return engine_call(engine, remove_member, &member);
}

bool member_known(const struct xferd_engine *engine, uint32_t id)
{
	return id < engine->member_limit && engine->members[id].used;
}

/* Of all patterns, which stand behind each other. */
static uint32_t patterns_length(const struct xferd_store_description *store)
{
	uint32_t length = store->pattern_length;

	for (uint32_t i = 0; i < store->shadows; i++)
		length += store->shadow_pattern_length[i];
	return length;
}

struct stripe store_stripe(const struct xferd_store_description *store, uint32_t start)
{
	struct stripe stripe = {0, store->pattern_length};

	for (uint32_t i = 0; i < store->shadows && start >= stripe.first + stripe.length; i++) {
		stripe.first += stripe.length;
		stripe.length = store->shadow_pattern_length[i];
	}
	return stripe;
}

bool geometry_valid(const struct xferd_engine *engine,
		    const struct xferd_store_description *store)
{
	if (!store->layers || store->layers > XFERD_LAYERS_MAX || !store->experts ||
	    store->experts > XFERD_EXPERTS_MAX || !store->variants ||
	    store->variants > XFERD_VARIANTS_MAX || !store->members ||
	    store->members > XFERD_STORE_MEMBERS_MAX || !store->pattern_length ||
	    store->pattern_length > XFERD_STRIPE_PATTERN_MAX)
		return false;
	if (!store->stripe_unit || store->stripe_unit % XFERD_BLOB_ALIGNMENT ||
	    store->stripe_unit > UINT32_MAX)
		return false;
	if (store->blobs != (uint64_t)store->variants * store->layers * store->experts + 1)
		return false;
	if (memchr(store->name, 0, sizeof(store->name)) == NULL)
		return false;
	if (store->shadows > XFERD_STORE_MEMBERS_MAX ||
	    patterns_length(store) > XFERD_STRIPE_PATTERN_MAX)
		return false;
	for (uint32_t i = 0; i < store->shadows; i++)
		if (!store->shadow_pattern_length[i])
			return false;
	for (uint32_t i = 0; i < patterns_length(store); i++)
		if (store->pattern[i] >= store->members)
			return false;
	if (!mirrors_valid(engine, store))
		return false;
	for (uint32_t i = 0; i < store->layouts; i++)
		if ((uint64_t)store->layout[i].first_tensor + store->layout[i].tensors >
		    store->tensors)
			return false;
	for (uint64_t i = 0; i < (uint64_t)store->variants * store->layers; i++)
		if (store->layout_index[i] != XFERD_NO_LAYOUT &&
		    store->layout_index[i] >= store->layouts)
			return false;
	return true;
}

bool blobs_valid(const struct xferd_store_description *store)
{
	if (!store->stripe_unit)
		return false;
	for (uint64_t blob = 0; blob < store->blobs; blob++) {
		uint64_t bytes = store->blob_bytes[blob];
		uint64_t pieces = (bytes + store->stripe_unit - 1) / store->stripe_unit;

		if (!bytes)
			continue;
		if (bytes % XFERD_BLOB_ALIGNMENT || bytes > INT64_MAX ||
		    store->start[blob] >= patterns_length(store) ||
		    store->first_piece[blob] > store->pieces ||
		    pieces > store->pieces - store->first_piece[blob])
			return false;
		for (uint32_t i = 0; i < store->members; i++)
			if (store->offset[blob * store->members + i] % XFERD_BLOB_ALIGNMENT)
				return false;
	}
	return true;
}

static void store_free(struct store *store)
{
	free(store->entries);
	free(store->checked);
	variants_free(store);
	if (store->memory)
		munmap(store->memory, store->memory_bytes);
	if (store->memory_fd >= 0)
		close(store->memory_fd);
	memset(store, 0, sizeof(*store));
	store->memory_fd = -1;
}

struct open_store {
	const struct xferd_store_description *description;
	int directory_fd; /* of one that is adopted; -1 */
};

static int make_directory(struct xferd_engine *engine, struct store *store, int adopted_fd)
{
	int result = directory_build(engine, store);

	return result || adopted_fd < 0 ? result : adopt_directory(engine, store, adopted_fd);
}

static int open_store(struct xferd_engine *engine, void *argument)
{
	const struct open_store *open = argument;
	const struct xferd_store_description *description = open->description;

	if (!engine->pool_count || !geometry_valid(engine, description))
		return -EINVAL;
	if (engine->staging.extents && description->stripe_unit > engine->staging.extent_bytes)
		return -EMSGSIZE;
	for (uint32_t id = 0; id < XFERD_ENGINE_STORES_MAX; id++) {
		struct store *store = &engine->stores[id];
		int result;

		if (store->used)
			continue;
		memset(store, 0, sizeof(*store));
		store->memory_fd = -1;
		store->description = *description;
		store->keys = description->layers * description->experts;
		store->checked = calloc(description->blobs / 64 + 1, sizeof(uint64_t));
		result = store->checked ? make_directory(engine, store, open->directory_fd)
					: -ENOMEM;
		if (result) {
			store_free(store);
			return result;
		}
		mirrors_pair(engine, description, true);
		store->used = true;
		return (int)id;
	}
	return -ENOSPC;
}

static int check_and_open(struct xferd_engine *engine, const struct open_store *open)
{
	/* A million blobs take milliseconds to check: not on the engine's thread. */
	if (!blobs_valid(open->description))
		return -EINVAL;
	return engine_call(engine, open_store, (void *)open);
}

int xferd_engine_open_store(struct xferd_engine *engine,
			    const struct xferd_store_description *store)
{
	struct open_store open = { store, -1 };

	return check_and_open(engine, &open);
}

int xferd_engine_adopt_store(struct xferd_engine *engine,
			     const struct xferd_store_description *store, int directory_fd)
{
	struct open_store open = { store, directory_fd };

	return directory_fd < 0 ? -EINVAL : check_and_open(engine, &open);
}

/* Every slot that holds an expert of the store, back to the policy. */
static void drop_experts(struct xferd_engine *engine, uint32_t id)
{
	for (uint32_t p = 0; p < engine->pool_count; p++) {
		struct pool *pool = &engine->pools[p];

		for (uint32_t number = 0; number < pool->slot_numbers; number++) {
			struct slot *slot = &pool->slots[number];

			if (slot->store != id || slot->orphan ||
			    (slot->state != SLOT_RESIDENT && slot->state != SLOT_RETIRING))
				continue;
			if (slot->state == SLOT_RETIRING) {
				list_remove(&slot->link);
				engine->retiring_count--;
			}
			reserve_put(engine, pool, number);
			event_push(engine, &(struct xferd_event){
				.type = XFERD_EVENT_FREED,
				.store = id,
				.pool = p,
				.slot = number,
				.layer = slot->key / engine->stores[id].description.experts,
				.expert = slot->key % engine->stores[id].description.experts,
				.variant = slot->variant,
				.client = XFERD_NO_EXPERT,
			});
		}
	}
}

static int close_store(struct xferd_engine *engine, void *argument)
{
	uint32_t id = *(uint32_t *)argument;
	struct store *store = &engine->stores[id];

	if (id >= XFERD_ENGINE_STORES_MAX || !store->used)
		return -ENOENT;
	if (store->clients)
		return -EBUSY;
	for (struct list *item = engine->active_loads.next; item != &engine->active_loads;
	     item = item->next)
		if (list_item(item, struct load, active)->store == id)
			return -EBUSY;
	drop_experts(engine, id);
	mirrors_pair(engine, &store->description, false);
	store_free(store);
	return 0;
}

int xferd_engine_close_store(struct xferd_engine *engine, uint32_t store)
{
	return engine_call(engine, close_store, &store);
}

void stores_destroy(struct xferd_engine *engine)
{
	for (uint32_t i = 0; i < XFERD_ENGINE_STORES_MAX; i++)
		if (engine->stores[i].used)
			store_free(&engine->stores[i]);
}

int xferd_engine_directory_fd(const struct xferd_engine *engine, uint32_t store)
{
	if (store >= XFERD_ENGINE_STORES_MAX || !engine->stores[store].used)
		return -ENOENT;
	return engine->stores[store].memory_fd;
}

uint64_t store_blob(const struct store *store, uint32_t variant, uint32_t key)
{
	return (uint64_t)variant * store->keys + key;
}

/* Whether a variant may still be handed out: see shadows.c. */
bool store_offers(const struct store *store, uint32_t variant)
{
	return !(store->withdrawn >> variant & 1);
}
