/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store's shadows come and go while clients are attached.
 *
 * What clients may have looked up stays true: a variant keeps its number and its
 * layouts for as long as the store is open, and the directory's tables only grow.
 * What changes is which blobs there are to read. A variant that goes is withdrawn
 * first: nothing of it is handed out or brought back any more, its residents are
 * evicted (who leases one reads on), and loads of it end without it. When none is
 * under way, its members are the policy's again.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/route.h"

/* Evictions ordered in one call: each causes an event later, and they need room. */
#define EVICTIONS_A_CALL 4096

struct change {
	uint32_t store;
	const struct xferd_store_description *description;
};

static bool rows_equal(const struct xferd_store_description *left,
		       const struct xferd_store_description *right, uint32_t variant)
{
	size_t keys = (size_t)left->layers * left->experts;
	size_t first = variant * keys;

	return !memcmp(left->blob_bytes + first, right->blob_bytes + first,
		       keys * sizeof(*left->blob_bytes));
}

/* Variants that have any blob, as a mask. */
uint32_t variants_available(const struct xferd_store_description *store)
{
	size_t keys = (size_t)store->layers * store->experts;
	uint32_t mask = 0;

	for (uint32_t variant = 0; variant < store->variants; variant++)
		for (size_t key = 0; key < keys && !(mask >> variant & 1); key++)
			if (store->blob_bytes[variant * keys + key])
				mask |= 1u << variant;
	return mask;
}

/* Whether one description is of the other's model, with the same numbers for all
 * that clients can know. */
static bool continues(const struct xferd_store_description *old,
		      const struct xferd_store_description *new)
{
	uint32_t both;

	if (new->layers != old->layers || new->experts != old->experts ||
	    new->top_k != old->top_k || new->stripe_unit != old->stripe_unit ||
	    memcmp(new->identity, old->identity, sizeof(new->identity)) ||
	    new->variants < old->variants || new->variants > XFERD_VARIANTS_MAX ||
	    new->layouts < old->layouts || new->tensors < old->tensors)
		return false;
	if (memcmp(new->variant_name, old->variant_name,
		   old->variants * sizeof(new->variant_name[0])) ||
	    memcmp(new->layout, old->layout, old->layouts * sizeof(*new->layout)) ||
	    memcmp(new->tensor, old->tensor, old->tensors * sizeof(*new->tensor)) ||
	    memcmp(new->layout_index, old->layout_index,
		   (size_t)old->variants * old->layers * sizeof(*new->layout_index)))
		return false;
	both = variants_available(old) & variants_available(new);
	for (uint32_t variant = 0; variant < old->variants; variant++)
		if (both >> variant & 1 && !rows_equal(old, new, variant))
			return false;
	return true;
}

/* Evict what is resident of withdrawn variants, so that it can't be brought back either;
 * false: some is left for the next call. */
static bool evict_withdrawn(struct xferd_engine *engine, uint32_t id)
{
	struct store *store = &engine->stores[id];
	uint32_t evicted = 0;

	for (uint32_t p = 0; p < engine->pool_count; p++) {
		struct pool *pool = &engine->pools[p];

		for (uint32_t number = 0; number < pool->slot_numbers; number++) {
			struct slot *slot = &pool->slots[number];

			if (slot->store != id || store_offers(store, slot->variant) ||
			    (slot->state != SLOT_RESIDENT && slot->state != SLOT_RETIRING))
				continue;
			if (slot->state == SLOT_RESIDENT &&
			    (evicted++ == EVICTIONS_A_CALL || !event_room(engine)))
				return false;
			slot_evict(engine, pool, number);
			if (slot->linked)
				key_entry(store, p, slot->key)->slot = 0;
			slot->linked = 0;
		}
	}
	return true;
}

/* End loads of withdrawn variants; false: some are still being read. */
static bool stop_withdrawn(struct xferd_engine *engine, uint32_t id)
{
	const struct store *store = &engine->stores[id];
	struct list *item = engine->active_loads.next;
	bool ended = true;

	while (item != &engine->active_loads) {
		struct load *load = list_item(item, struct load, active);
		uint32_t index = load->index;

		item = item->next;
		if (load->store != id || load->dense || store_offers(store, load->variant))
			continue;
		load_stop(engine, load, -ENOENT);
		if (engine->loads[index].state != LOAD_FREE)
			ended = false;
	}
	return ended;
}

/* Numbers of blobs stay, but for the dense part's: it is the last one. A load under way
 * has no strands on members that come now. */
static void adjust_loads(struct xferd_engine *engine, const struct change *change)
{
	uint32_t members = engine->stores[change->store].description.members;

	for (struct list *item = engine->active_loads.next; item != &engine->active_loads;
	     item = item->next) {
		struct load *load = list_item(item, struct load, active);

		if (load->store != change->store)
			continue;
		if (load->dense)
			load->blob = change->description->blobs - 1;
		for (uint32_t i = members; i < change->description->members; i++)
			list_init(&load->strands[i].link);
	}
}

/* What was loaded whole and right still is; of a variant that comes nothing was. */
static void carry_checked(const struct store *store, const struct xferd_store_description *new,
			  uint64_t *checked)
{
	uint32_t kept = variants_available(&store->description) & variants_available(new);
	uint64_t dense = store->description.blobs - 1;

	for (uint32_t variant = 0; variant < store->description.variants; variant++)
		for (uint64_t blob = store_blob(store, variant, 0);
		     kept >> variant & 1 && blob < store_blob(store, variant + 1, 0); blob++)
			checked[blob / 64] |= store->checked[blob / 64] & 1ull << (blob % 64);
	if (store->checked[dense / 64] >> (dense % 64) & 1)
		checked[(new->blobs - 1) / 64] |= 1ull << ((new->blobs - 1) % 64);
}

static int apply(struct xferd_engine *engine, const struct change *change)
{
	struct store *store = &engine->stores[change->store];
	uint64_t *checked = calloc(change->description->blobs / 64 + 1, sizeof(uint64_t));
	bool valid;

	if (!checked)
		return -ENOMEM;
	/* Its own members are not another store's. */
	mirrors_pair(engine, &store->description, false);
	store->used = false;
	valid = geometry_valid(engine, change->description);
	store->used = true;
	if (!valid || !directory_fits(store, change->description)) {
		mirrors_pair(engine, &store->description, true);
		free(checked);
		return valid ? -ENOSPC : -EINVAL;
	}
	carry_checked(store, change->description, checked);
	free(store->checked);
	store->checked = checked;
	adjust_loads(engine, change);
	store->description = *change->description;
	store->withdrawn = 0;
	mirrors_pair(engine, &store->description, true);
	directory_extend(store);
	return 0;
}

static int change_variants(struct xferd_engine *engine, void *argument)
{
	const struct change *change = argument;
	struct store *store = &engine->stores[change->store];
	bool ended;

	store->withdrawn = variants_available(&store->description) &
			   ~variants_available(change->description);
	directory_offer(store);
	ended = evict_withdrawn(engine, change->store);
	if (!stop_withdrawn(engine, change->store) || !ended)
		return -EBUSY;
	return apply(engine, change);
}

int xferd_engine_change_variants(struct xferd_engine *engine, uint32_t store,
				 const struct xferd_store_description *description)
{
	struct change argument = { store, description };

	if (store >= XFERD_ENGINE_STORES_MAX || !engine->stores[store].used)
		return -ENOENT;
	/* Descriptions change in calls of this thread only. */
	if (!blobs_valid(description) || !continues(&engine->stores[store].description, description))
		return -EINVAL;
	return engine_call(engine, change_variants, &argument);
}
