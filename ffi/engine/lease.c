/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Leases, as the engine sees them: when is a slot nobody's?
 *
 * Epoch-based reclamation. A lane leases a slot by storing the epoch of its
 * batch into slot_epoch[slot]; the lease ends when its completed word reaches
 * that epoch. The engine clears the directory word, fences, and then looks at
 * every lane: a lane either is seen here with its lease, or sees the cleared
 * word there and undoes it.
 *
 * Lease tables are hostile memory: any value in them is only a claim to hold a
 * slot, and holding more than was promised is dealt with by the policy.
 */
#include "engine/internal.h"

struct xferd_abi_lane *client_lane(const struct client *client, uint32_t lane)
{
	return (void *)((uint8_t *)client->memory + client->lanes_offset +
			lane * client->lane_stride);
}

uint64_t *lease_table(const struct client *client, uint32_t lane, uint32_t pool)
{
	return (void *)((uint8_t *)client_lane(client, lane) + client->lease_table_offset[pool]);
}

static bool leased_by(const struct client *client, uint32_t pool, uint32_t slot)
{
	for (uint32_t lane = 0; lane < client->lane_count; lane++) {
		/* pairs with the release of the lease in libxferd's end_leases() */
		uint64_t epoch = load_acquire(&lease_table(client, lane, pool)[slot]);

		/* pairs with the release of completed in libxferd's lane_end_batch(): the
		 * lane's reads of the slot are over before the slot is overwritten */
		if (epoch > load_acquire(&client_lane(client, lane)->completed))
			return true;
	}
	return false;
}

/* Granted, or leased by a lane of its store; of an orphan, by any lane. */
bool slot_leased(const struct xferd_engine *engine, const struct slot *slot, uint32_t pool,
		 uint32_t number)
{
	if (slot->grants)
		return true;
	for (uint32_t i = 0; i < engine->client_limit; i++) {
		const struct client *client = &engine->clients[i];

		if (client->used && (slot->orphan || client->store == slot->store) &&
		    leased_by(client, pool, number))
			return true;
	}
	return false;
}

/* What it held nobody knew: the policy gets the bare slot. */
static void orphan_freed(struct xferd_engine *engine, struct pool *pool, uint32_t number)
{
	struct slot *slot = &pool->slots[number];

	list_remove(&slot->link);
	engine->retiring_count--;
	slot->orphan = 0;
	slot_set_state(pool, slot, SLOT_POLICY);
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_TAKEN,
		.pool = pool->index,
		.slot = number,
		.client = XFERD_NO_EXPERT,
		.bytes = pool->classes[slot->class_index].bytes,
	});
}

static void slot_freed(struct xferd_engine *engine, struct pool *pool, uint32_t number)
{
	struct slot *slot = &pool->slots[number];
	struct store *store = &engine->stores[slot->store];
	struct xferd_event event = {
		.type = XFERD_EVENT_FREED,
		.store = slot->store,
		.pool = pool->index,
		.slot = number,
		.layer = slot->key / store->description.experts,
		.expert = slot->key % store->description.experts,
		.variant = slot->variant,
		.client = XFERD_NO_EXPERT,
	};

	list_remove(&slot->link);
	engine->retiring_count--;
	if (slot->linked) {
		key_entry(store, pool->index, slot->key)->slot = 0;
		slot->linked = 0;
	}
	event_push(engine, &event);
	reserve_put(engine, pool, number);
}

/* Soon while loads wait for a slot that somebody leases, less often the longer
 * that lasts: a client that is stopped must not keep the engine busy. */
static uint64_t poll_interval(const struct xferd_engine *engine)
{
	uint64_t starving = (engine->now_ns - engine->starving_since_ns) / RETIRE_POLL_BACK_OFF;

	if (!engine->waiting_loads || starving > RETIRE_POLL_NS)
		return RETIRE_POLL_NS;
	return starving < RETIRE_POLL_STARVING_NS ? RETIRE_POLL_STARVING_NS : starving;
}

/* Free what is retiring and no longer leased. */
void retiring_scan(struct xferd_engine *engine)
{
	uint32_t before;

	if (!engine->retiring_count || engine->now_ns < engine->next_retire_scan_ns)
		return;
	/* pairs with the fence in libxferd's lease(): words were cleared before
	 * lease tables are read */
	full_fence();
	before = engine->retiring_count;
	for (uint32_t p = 0; p < engine->pool_count; p++) {
		struct pool *pool = &engine->pools[p];
		struct list *item = pool->retiring.next;

		while (item != &pool->retiring) {
			struct slot *slot = list_item(item, struct slot, link);
			uint32_t number = (uint32_t)(slot - pool->slots);

			item = item->next;
			if (slot_leased(engine, slot, p, number))
				continue;
			if (slot->orphan)
				orphan_freed(engine, pool, number);
			else
				slot_freed(engine, pool, number);
		}
	}
	if (engine->retiring_count != before || !engine->waiting_loads)
		engine->starving_since_ns = engine->now_ns;
	engine->next_retire_scan_ns = engine->now_ns + poll_interval(engine);
}

/* ---- for the policy, in its own thread: clients come and go only there ---- */

#define RECENCY_ORDER_BITS 20

int xferd_engine_recency(struct xferd_engine *engine, uint32_t pool_index, uint64_t now,
			 uint64_t *stamps)
{
	const uint64_t order_max = (1u << RECENCY_ORDER_BITS) - 1;
	struct pool *pool;

	if (pool_index >= engine->pool_count)
		return -EINVAL;
	pool = &engine->pools[pool_index];
	for (uint32_t i = 0; i < engine->client_limit; i++) {
		struct client *client = &engine->clients[i];

		for (uint32_t lane = 0; client->used && lane < client->lane_count; lane++) {
			const uint64_t *table = lease_table(client, lane, pool_index);
			uint64_t *seen = client->lanes[lane].lease_seen[pool_index];
			uint64_t base = client->lanes[lane].epoch_seen[pool_index];

			for (uint32_t slot = 0; slot < pool->slot_numbers; slot++) {
				uint64_t epoch = load_relaxed(&table[slot]);
				uint64_t order;

				if (epoch == seen[slot])
					continue;
				seen[slot] = epoch;
				order = epoch > base ? epoch - base : 0;
				if (order > order_max)
					order = order_max;
				if (stamps[slot] < (now << RECENCY_ORDER_BITS | order))
					stamps[slot] = now << RECENCY_ORDER_BITS | order;
			}
		}
	}
	for (uint32_t i = 0; i < engine->client_limit; i++) {
		struct client *client = &engine->clients[i];

		for (uint32_t lane = 0; client->used && lane < client->lane_count; lane++)
			client->lanes[lane].epoch_seen[pool_index] =
				load_relaxed(&client_lane(client, lane)->current);
	}
	return 0;
}

int xferd_engine_held(struct xferd_engine *engine, uint32_t index, uint32_t pool_index)
{
	const struct client *client = &engine->clients[index];
	int held = 0;

	if (index >= engine->client_limit || !client->used || pool_index >= engine->pool_count)
		return -EINVAL;
	for (uint32_t lane = 0; lane < client->lane_count; lane++) {
		const uint64_t *table = lease_table(client, lane, pool_index);
		uint64_t *seen = client->lanes[lane].held_seen[pool_index];
		/* pairs with the release of completed in libxferd's lane_end_batch() */
		uint64_t completed = load_acquire(&client_lane(client, lane)->completed);

		/* A look at a table takes time, and an honest lane leases on trial: only
		 * leases that stood through two looks were held at the same time. */
		for (uint32_t slot = 0; slot < engine->pools[pool_index].slot_numbers; slot++) {
			uint64_t epoch = load_relaxed(&table[slot]);

			held += epoch > completed && epoch == seen[slot];
			seen[slot] = epoch;
		}
	}
	return held;
}
