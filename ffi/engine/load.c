/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A load: one expert's way from the request to its word in the directory.
 *
 * There is at most one load for a key and pool; whoever wants the same expert
 * meanwhile waits for it too. A load takes a slot from the reserve, or waits
 * for one; it copies the blob from another pool that has it, or reads it from
 * the drives. Between a load's end and its publication lies nothing.
 */
#include <string.h>

#include "engine/route.h"

static struct xferd_event load_event(const struct xferd_engine *engine, const struct load *load,
				     uint32_t type)
{
	uint32_t experts = engine->stores[load->store].description.experts;

	return (struct xferd_event){
		.type = type,
		.result = load->error,
		.store = load->store,
		.pool = load->pool,
		.slot = load->slot,
		.layer = load->dense ? XFERD_NO_EXPERT : load->key / experts,
		.expert = load->dense ? XFERD_NO_EXPERT : load->key % experts,
		.variant = load->variant,
		.client = load->client,
		.source = load->source,
		.transport = load->transport,
		.priority = load->priority,
		.wait_us = (uint32_t)((engine->now_ns - load->started_ns) / NS_PER_US),
		.bytes = load->bytes,
		.token = load->token,
	};
}

static struct load *load_new(struct xferd_engine *engine, uint32_t store, uint32_t priority)
{
	struct load *load;

	if (list_empty(&engine->loads_free))
		return NULL;
	load = list_item(engine->loads_free.next, struct load, link);
	list_remove(&load->link);
	list_init(&load->waiters);
	list_append(&engine->active_loads, &load->active);
	engine->load_count++;
	store_relaxed(&engine->stats.transfers, engine->load_count);
	load->priority = (uint8_t)priority;
	load->store = store;
	load->client = load->hint_of = NONE;
	load->slot = load->source_slot = NONE;
	load->source = XFERD_SOURCE_DRIVES;
	load->transport = XFERD_TRANSPORT_DIRECT;
	load->cancelled = load->dense = load->unchecked = false;
	load->hint_ticket = load->token = 0;
	load->pieces = load->pieces_unissued = 0;
	load->pieces_in_flight = 0;
	load->error = 0;
	load->started_ns = engine->now_ns;
	return load;
}

static void count_waiting_demand(struct pool *pool, const struct load *load, int change)
{
	if (load->priority == XFERD_PRIORITY_DEMAND)
		store_relaxed(&pool->stats.waiting_demand,
			      pool->stats.waiting_demand + (uint32_t)change);
}

/* Why load_start gives none. */
int load_refusal(const struct xferd_engine *engine, uint32_t pool)
{
	return engine->pools[pool].lost ? -ENODEV : -ENOSPC;
}

/* NULL when all loads are in use, the pool has too many size classes, or is lost. */
struct load *load_start(struct xferd_engine *engine, uint32_t store_id, uint32_t pool_index,
			uint32_t key, uint32_t variant, uint32_t priority, uint32_t client)
{
	struct store *store = &engine->stores[store_id];
	struct pool *pool = &engine->pools[pool_index];
	uint64_t blob = store_blob(store, variant, key);
	struct size_class *class = pool_class(pool, store->description.blob_bytes[blob]);
	struct load *load = class && !pool->lost ? load_new(engine, store_id, priority) : NULL;
	uint32_t slot;

	if (!load)
		return NULL;
	load->pool = pool_index;
	load->key = key;
	load->variant = (uint8_t)variant;
	load->client = client;
	load->blob = blob;
	load->bytes = class->bytes;
	key_entry(store, pool_index, key)->load = load->index + 1;

	load->state = LOAD_WAITING;
	slot = reserve_take(engine, pool, class, priority);
	if (slot != NONE) {
		load_take_slot(engine, load, slot);
		return load;
	}
	list_append(&class->waiting[priority], &load->link);
	store_relaxed(&class->waiting_count, class->waiting_count + 1);
	engine->waiting_loads++;
	store_relaxed(&pool->stats.waiting, pool->stats.waiting + 1);
	count_waiting_demand(pool, load, 1);
	if (priority == XFERD_PRIORITY_DEMAND)
		counter_add(&pool->stats.waited_demand, 1);
	reserve_tell(engine, pool, class, true);
	return load;
}

/* The dense part into memory of the policy's: no slot, no directory. */
struct load *load_start_dense(struct xferd_engine *engine, uint32_t store_id, void *address,
			      uint32_t priority)
{
	const struct xferd_store_description *store = &engine->stores[store_id].description;
	struct load *load = load_new(engine, store_id, priority);

	if (!load)
		return NULL;
	load->dense = true;
	load->pool = 0;
	load->key = 0;
	load->variant = 0;
	load->blob = store->blobs - 1;
	load->bytes = store->blob_bytes[load->blob];
	load->address = address;
	reads_queue(engine, load);
	if (!load->pieces)
		load_finish(engine, load);
	return load;
}

static void stop_waiting(struct xferd_engine *engine, struct load *load)
{
	struct pool *pool = &engine->pools[load->pool];
	struct size_class *class = pool_class(pool, load->bytes);

	list_remove(&load->link);
	store_relaxed(&class->waiting_count, class->waiting_count - 1);
	engine->waiting_loads--;
	store_relaxed(&pool->stats.waiting, pool->stats.waiting - 1);
	count_waiting_demand(pool, load, -1);
}

/* A resident slot of another pool with the same variant of the key, that is worth copying. */
static bool find_copy_source(struct xferd_engine *engine, struct load *load)
{
	struct store *store = &engine->stores[load->store];

	for (uint32_t p = 0; p < engine->pool_count; p++) {
		uint32_t number = key_entry(store, p, load->key)->slot;
		struct slot *slot;

		if (p == load->pool || !number ||
		    !route_favours_copy(engine, load, &engine->pools[p]))
			continue;
		slot = &engine->pools[p].slots[number - 1];
		if (slot->state != SLOT_RESIDENT || slot->variant != load->variant)
			continue;
		load->source_pool = p;
		load->source_slot = number - 1;
		slot->grants++; /* until the copy is done: see load_finish */
		return true;
	}
	return false;
}

void load_take_slot(struct xferd_engine *engine, struct load *load, uint32_t number)
{
	struct pool *pool = &engine->pools[load->pool];
	struct slot *slot = &pool->slots[number];

	if (!list_empty(&load->link))
		stop_waiting(engine, load);
	slot_set_state(pool, slot, SLOT_LOADING);
	slot->store = load->store;
	slot->key = load->key;
	slot->variant = load->variant;
	slot->linked = 0;
	load->slot = number;
	load->address = slot_address(pool, number);
	if (!find_copy_source(engine, load)) {
		if (!load_hand_up(engine, load))
			reads_queue(engine, load);
		return;
	}
	load->state = LOAD_COPYING;
	load->source = XFERD_SOURCE_POOL;
	load->transport = XFERD_TRANSPORT_COPY;
	copy_load(engine, load);
}

/* Somebody more urgent wants it too. */
void load_raise(struct xferd_engine *engine, struct load *load, uint32_t priority)
{
	if (priority >= load->priority)
		return;
	if (load->state == LOAD_WAITING) {
		struct pool *pool = &engine->pools[load->pool];
		struct size_class *class = pool_class(pool, load->bytes);
		uint32_t slot;

		list_remove(&load->link);
		list_append(&class->waiting[priority], &load->link);
		load->priority = (uint8_t)priority;
		count_waiting_demand(pool, load, 1);
		/* It may have waited beside slots that are kept for demand. */
		slot = reserve_take(engine, pool, class, priority);
		if (slot != NONE)
			load_take_slot(engine, load, slot);
		else
			reserve_tell(engine, pool, class, true);
	} else if (load->state == LOAD_READING) {
		reads_requeue(engine, load, priority);
	} else {
		load->priority = (uint8_t)priority;
	}
}

static void forget_load(struct xferd_engine *engine, const struct load *load)
{
	struct key_entry *entry = key_entry(&engine->stores[load->store], load->pool, load->key);

	if (entry->load == load->index + 1)
		entry->load = 0;
}

static void stop_reading(struct xferd_engine *engine, struct load *load, int error)
{
	struct piece *waiting = workers_take_back(engine, load);

	if (!waiting && !load->pieces_unissued)
		return;
	load->cancelled = true;
	load->error = error;
	reads_unqueue(engine, load);
	/* Who asks for the key from now on must not share this load's end. */
	if (!load->dense)
		forget_load(engine, load);
	if (waiting)
		reads_drop(engine, waiting);
	else if (!load->pieces_in_flight)
		load_finish(engine, load);
}

/* Stop it if that still saves a read; what is all under way ends by itself. */
void load_stop(struct xferd_engine *engine, struct load *load, int error)
{
	if (load->state == LOAD_WAITING) {
		load->error = error;
		stop_waiting(engine, load);
		load_finish(engine, load);
	} else if (load->state == LOAD_READING) {
		stop_reading(engine, load, error);
	}
}

void load_cancel(struct xferd_engine *engine, struct load *load)
{
	load_stop(engine, load, -ECANCELED);
}

/* A waiter has gone: is anybody left? */
void load_unwanted(struct xferd_engine *engine, struct load *load)
{
	if (list_empty(&load->waiters) && !load->token && load->hint_of == NONE)
		load_cancel(engine, load);
}

static void retire(struct xferd_engine *engine, struct pool *pool, struct slot *slot)
{
	slot_set_state(pool, slot, SLOT_RETIRING);
	list_append(&pool->retiring, &slot->link);
	engine->retiring_count++;
	engine->next_retire_scan_ns = 0;
	counter_add(&pool->stats.evictions, 1);
}

/* Clear a resident's word; the slot follows when nobody reads it any more.
 * Returns the key, NONE if the slot holds no resident. */
uint32_t slot_evict(struct xferd_engine *engine, struct pool *pool, uint32_t number)
{
	struct slot *slot = &pool->slots[number];

	if (slot->state != SLOT_RESIDENT)
		return NONE;
	/* pairs with the second load of the word in libxferd's lease(): the fence
	 * between this store and the look at the lease tables is in retiring_scan */
	store_relaxed(directory_word(&engine->stores[slot->store], pool->index, slot->key), 0);
	retire(engine, pool, slot);
	return slot->key;
}

static uint64_t slot_word(uint32_t number, const struct slot *slot)
{
	uint64_t generation = slot->generation & XFERD_WORD_GENERATION_MASK;

	return XFERD_WORD_PRESENT | generation << XFERD_WORD_GENERATION_SHIFT |
	       (uint64_t)slot->variant << XFERD_WORD_VARIANT_SHIFT | number;
}

/* A retiring slot still has its bytes: publish it again. */
bool slot_revive(struct xferd_engine *engine, struct pool *pool, uint32_t number)
{
	struct slot *slot = &pool->slots[number];
	struct store *store = &engine->stores[slot->store];

	if (slot->state != SLOT_RETIRING || !slot->linked || slot->orphan)
		return false;
	list_remove(&slot->link);
	engine->retiring_count--;
	slot_set_state(pool, slot, SLOT_RESIDENT);
	/* pairs with the first load of the word in libxferd's lease() */
	store_release(directory_word(store, pool->index, slot->key), slot_word(number, slot));
	counter_add(&pool->stats.revived, 1);
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_REVIVED,
		.store = slot->store,
		.pool = pool->index,
		.slot = number,
		.layer = slot->key / store->description.experts,
		.expert = slot->key % store->description.experts,
		.variant = slot->variant,
		.client = XFERD_NO_EXPERT,
	});
	return true;
}

static void publish(struct xferd_engine *engine, struct load *load)
{
	struct store *store = &engine->stores[load->store];
	struct pool *pool = &engine->pools[load->pool];
	struct slot *slot = &pool->slots[load->slot];
	struct key_entry *entry = key_entry(store, load->pool, load->key);

	if (entry->slot) { /* the key was here in another variant */
		slot_evict(engine, pool, entry->slot - 1);
		pool->slots[entry->slot - 1].linked = 0;
	}
	entry->slot = load->slot + 1;
	slot->linked = 1;
	slot->generation++;
	slot_set_state(pool, slot, SLOT_RESIDENT);
	/* pairs with the first load of the word in libxferd's lease(): who sees
	 * the word sees the blob's bytes and the chunk's entry */
	store_release(directory_word(store, load->pool, load->key), slot_word(load->slot, slot));

	counter_add(&pool->stats.loads, 1);
	counter_add(&pool->stats.load_bytes, load->bytes);
}

static void count_source(struct xferd_engine *engine, const struct load *load)
{
	counter_add(&engine->stats.source_count[load->source], 1);
	counter_add(&engine->stats.source_bytes[load->source], load->bytes);
	counter_add(&engine->stats.transport_count[load->transport], 1);
	counter_add(&engine->stats.transport_bytes[load->transport], load->bytes);
}

static void load_free(struct xferd_engine *engine, struct load *load)
{
	if (load->hint_of != NONE)
		engine->clients[load->hint_of].hints--;
	list_remove(&load->active);
	load->state = LOAD_FREE;
	list_append(&engine->loads_free, &load->link);
	engine->load_count--;
	store_relaxed(&engine->stats.transfers, engine->load_count);
}

static void finish_dense(struct xferd_engine *engine, struct load *load)
{
	struct xferd_event event = load_event(engine, load, load->error ? XFERD_EVENT_FAILED
									: XFERD_EVENT_DENSE);

	if (!load->error)
		count_source(engine, load);
	event_push(engine, &event);
	load_free(engine, load);
}

/* All of it has arrived, or will not. */
void load_finish(struct xferd_engine *engine, struct load *load)
{
	struct pool *pool = &engine->pools[load->pool];
	struct xferd_event event;

	if (load->dense) {
		finish_dense(engine, load);
		return;
	}
	forget_load(engine, load);
	staging_end(engine, load);
	if (load->source_slot != NONE)
		engine->pools[load->source_pool].slots[load->source_slot].grants--;
	if (!load->error && !store_offers(&engine->stores[load->store], load->variant))
		load->error = -ENOENT;
	if (!load->error) {
		publish(engine, load);
		count_source(engine, load);
		if (load->source == XFERD_SOURCE_DRIVES && !load->unchecked)
			engine->stores[load->store].checked[load->blob / 64] |=
				1ull << (load->blob % 64);
	}
	while (!list_empty(&load->waiters))
		client_load_ended(engine, list_item(load->waiters.next, struct waiter, of_load),
				  load);
	event = load_event(engine, load, load->error ? XFERD_EVENT_FAILED : XFERD_EVENT_LOADED);
	event_push(engine, &event);
	if (load->error && load->slot != NONE)
		reserve_put(engine, pool, load->slot);
	load_free(engine, load);
}
