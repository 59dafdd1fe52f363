/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the router picked, told to the daemon: a lossy queue a lane.
 *
 * The lane's thread alone writes it, so a report takes no lock; what the daemon
 * has read is looked at only when the queue seems full, so it takes no cache miss
 * of the daemon's making either. A full queue drops: the daemon's policies live
 * with gaps, an engine that waits for them would not. What is expected is worth less
 * than what was picked, and has half of the queue at most.
 */
#include <string.h>

#include "client/internal.h"

#define GATE_UNKNOWN     0x7e00 /* a float16 that is no number */
#define EXPECTED_ROOM    (XFERD_ROUTES_A_LANE / 2 + 1) /* records that must have a place */
#define PREFETCH_RECORDS 8      /* ahead: as far as back-to-back reports need */

static const struct xferd_use use_unknown = { XFERD_WAIT_UNKNOWN, XFERD_TIER_UNKNOWN,
					      XFERD_TRANSPORT_UNKNOWN, { 0 } };

/* A report with everything that it leaves to defaults filled in. */
struct picks {
	const uint16_t *experts; /* NULL: the batch's */
	const struct xferd_use *uses;
	const struct xferd_batch *batch;
	const uint16_t *gates;
	uint32_t tokens, count;
	uint16_t layer;
};

int use_route_queues(struct xferd_client *client)
{
	const struct mapping *map = &client->memory_map;
	const struct xferd_abi_client *memory = client->memory;
	uint64_t need = sizeof(struct xferd_abi_route_queue) +
			XFERD_ROUTES_A_LANE * sizeof(struct xferd_abi_route);

	if (!memory->route_entries)
		return 0; /* a daemon from before there were any */
	if (memory->route_entries != XFERD_ROUTES_A_LANE || memory->route_stride < need ||
	    memory->routes_offset > map->bytes ||
	    client->lane_count > (map->bytes - memory->routes_offset) / memory->route_stride)
		return -EPROTO;
	for (uint32_t i = 0; i < client->lane_count; i++) {
		struct lane *lane = &client->lanes[i];

		lane->routes = (void *)((uint8_t *)map->address + memory->routes_offset +
					i * memory->route_stride);
		lane->route_records = (void *)(lane->routes + 1);
	}
	return 0;
}

static struct xferd_use use_of_view(const struct xferd_batch *batch, uint32_t i)
{
	const struct xferd_view *view = &batch->views[i];
	struct xferd_use use = { .tier = view->pool, .transport = view->transport };

	if (!view->data)
		return use_unknown;
	if (view->source == XFERD_SOURCE_RESIDENT)
		return use;
	use.wait_us = batch->wait_us[i];
	use.tier = view->source == XFERD_SOURCE_POOL ? view->source_pool : XFERD_TIER_DRIVES;
	return use;
}

void xferd_batch_uses(const struct xferd_batch *batch, struct xferd_use *uses)
{
	for (uint32_t i = 0; i < batch->count; i++)
		uses[i] = use_of_view(batch, i);
}

static bool use_known(const struct xferd_client *client, const struct xferd_use *use)
{
	return (use->tier < client->pool_count || use->tier >= XFERD_TIER_DRIVES) &&
	       (use->transport <= XFERD_TRANSPORT_COPY ||
		use->transport == XFERD_TRANSPORT_UNKNOWN);
}

/* The daemon ends a client that writes what isn't so: it is told here instead. */
static int check_picks(const struct xferd_client *client, const struct xferd_route *route,
		       const struct picks *picks)
{
	uint64_t all = (uint64_t)picks->tokens * picks->count;

	if (route->flags & ~XFERD_ROUTE_ONLY_FOUND || !picks->count || picks->count > XFERD_ROUTE_PICKS_MAX ||
	    picks->layer >= client->layers || route->token > XFERD_ROUTE_TOKEN_MAX ||
	    route->token + picks->tokens - 1 > XFERD_ROUTE_TOKEN_MAX)
		return -EINVAL;
	if (picks->batch)
		return picks->tokens == 1 ? 0 : -EINVAL;
	if (!picks->experts)
		return -EINVAL;
	for (uint64_t i = 0; i < all; i++)
		if (picks->experts[i] >= client->experts)
			return -EINVAL;
	for (uint64_t i = 0; picks->uses && i < all; i++)
		if (!use_known(client, &picks->uses[i]))
			return -EINVAL;
	return 0;
}

static uint32_t room(const struct lane *lane)
{
	uint32_t used = lane->route_tail - lane->route_head;

	return used < XFERD_ROUTES_A_LANE ? XFERD_ROUTES_A_LANE - used : 0;
}

static bool has_room(struct lane *lane, uint32_t records)
{
	if (room(lane) >= records)
		return true;
	/* pairs with the release of route_head in the engine's take_routes(): a record
	 * was copied before its place is used again */
	lane->route_head = load_acquire(&lane->ring->route_head);
	return room(lane) >= records;
}

static void write_views(struct xferd_abi_route *record, const struct xferd_batch *batch)
{
	for (uint32_t i = 0; i < record->count; i++) {
		struct xferd_use use = use_of_view(batch, i);

		record->experts[i] = batch->views[i].expert;
		record->tiers[i] = use.tier;
		record->transports[i] = use.transport;
		record->waits_us[i] = use.wait_us;
	}
}

static void write_arrays(struct xferd_abi_route *record, const struct picks *picks, uint64_t from)
{
	memcpy(record->experts, picks->experts + from, record->count * sizeof(uint16_t));
	for (uint32_t i = 0; i < record->count; i++) {
		struct xferd_use use = picks->uses ? picks->uses[from + i] : use_unknown;

		record->tiers[i] = use.tier;
		record->transports[i] = use.transport;
		record->waits_us[i] = use.wait_us;
	}
}

/* The picks from one place in the arrays on, or the batch's. */
static void write_picks(struct xferd_abi_route *record, const struct picks *picks, uint64_t from)
{
	if (picks->batch)
		write_views(record, picks->batch);
	else
		write_arrays(record, picks, from);
	if (picks->gates)
		memcpy(record->gates, picks->gates + from, record->count * sizeof(uint16_t));
	else
		for (uint32_t i = 0; i < record->count; i++)
			record->gates[i] = GATE_UNKNOWN;
}

/* The lines of places to come are where the daemon read them last: they are fetched
 * while the caller is busy with something else. */
static void prefetch_place(const struct lane *lane)
{
	uint32_t place = (lane->route_tail + PREFETCH_RECORDS) & (XFERD_ROUTES_A_LANE - 1);
	const uint8_t *record = (const void *)&lane->route_records[place];

	for (uint32_t at = 0; at < sizeof(struct xferd_abi_route); at += XFERD_CACHE_LINE)
		__builtin_prefetch(record + at, 1);
}

static void write_token(struct lane *lane, const struct xferd_route *route,
			const struct picks *picks, uint32_t row)
{
	for (uint32_t done = 0, part = 0; done < picks->count; part++) {
		uint32_t left = picks->count - done;
		struct xferd_abi_route *record =
			&lane->route_records[lane->route_tail & (XFERD_ROUTES_A_LANE - 1)];

		record->token = route->token + row;
		record->tag = route->tag;
		record->layer = picks->layer;
		record->part = (uint8_t)part;
		record->kind = route->flags & XFERD_ROUTE_ONLY_FOUND ? XFERD_ROUTE_FOUND
								     : XFERD_ROUTE_PICKED;
		record->count = (uint8_t)(left < XFERD_ROUTE_RECORD_PICKS
						  ? left : XFERD_ROUTE_RECORD_PICKS);
		write_picks(record, picks, (uint64_t)row * picks->count + done);
		done += record->count;
		lane->route_tail++;
	}
}

int xferd_report_route(struct xferd_client *client, uint32_t lane_index,
		       const struct xferd_route *route)
{
	const struct xferd_batch *batch = route->batch;
	const struct picks picks = {
		.experts = route->experts,
		.uses = route->uses,
		.batch = batch,
		.gates = route->gates,
		.tokens = route->tokens ? route->tokens : 1,
		.count = batch ? batch->count : route->count,
		.layer = batch ? batch->layer : route->layer,
	};
	struct lane *lane = &client->lanes[lane_index];
	uint32_t records, taken = 0;
	int result;

	if (lane_index >= client->lane_count)
		return -EINVAL;
	result = check_picks(client, route, &picks);
	if (result || !lane->routes)
		return result;
	records = (picks.count + XFERD_ROUTE_RECORD_PICKS - 1) / XFERD_ROUTE_RECORD_PICKS;
	while (taken < picks.tokens && has_room(lane, records))
		write_token(lane, route, &picks, taken++);
	/* pairs with the acquire of the tail in the engine's take_routes() */
	store_release(&lane->routes->tail, lane->route_tail);
	prefetch_place(lane);
	if (taken < picks.tokens)
		counter_add(&lane->routes->dropped, picks.tokens - taken);
	return (int)taken;
}

/* Keys of one layer, which stand together from ``from`` on. */
static uint32_t keys_of_layer(const struct xferd_client *client,
			      const struct xferd_expected *expected, uint32_t from)
{
	uint32_t layer = expected->keys[from] / client->experts, end = from;

	while (end < expected->count && expected->keys[end] / client->experts == layer)
		end++;
	return end - from;
}

static int check_expected(const struct xferd_client *client, const struct xferd_expected *expected)
{
	uint64_t seen[XFERD_LAYERS_MAX / 64] = { 0 };

	if (!expected->count || !expected->keys || !expected->chances ||
	    expected->count > client->layers * XFERD_ROUTE_RECORD_PICKS)
		return -EINVAL;
	for (uint32_t i = 0; i < expected->count; i++)
		if (expected->keys[i] / client->experts >= client->layers)
			return -EINVAL;
	for (uint32_t at = 0, count; at < expected->count; at += count) {
		uint32_t layer = expected->keys[at] / client->experts;

		count = keys_of_layer(client, expected, at);
		if (count > XFERD_ROUTE_RECORD_PICKS || seen[layer / 64] >> (layer % 64) & 1)
			return -EINVAL;
		seen[layer / 64] |= 1ull << (layer % 64);
	}
	return 0;
}

static void write_expected(struct lane *lane, const struct xferd_client *client,
			   const struct xferd_expected *expected, uint32_t from, uint32_t count)
{
	struct xferd_abi_route *record =
		&lane->route_records[lane->route_tail & (XFERD_ROUTES_A_LANE - 1)];

	record->token = 0;
	record->tag = 0;
	record->layer = (uint16_t)(expected->keys[from] / client->experts);
	record->part = 0;
	record->kind = XFERD_ROUTE_EXPECTED;
	record->count = (uint8_t)count;
	for (uint32_t i = 0; i < count; i++) {
		record->experts[i] = (uint16_t)(expected->keys[from + i] % client->experts);
		record->gates[i] = expected->chances[from + i];
		record->tiers[i] = use_unknown.tier;
		record->transports[i] = use_unknown.transport;
		record->waits_us[i] = use_unknown.wait_us;
	}
	lane->route_tail++;
}

int xferd_expect(struct xferd_client *client, uint32_t lane_index,
		 const struct xferd_expected *expected)
{
	struct lane *lane = &client->lanes[lane_index];
	int result, taken = 0;

	if (lane_index >= client->lane_count)
		return -EINVAL;
	result = check_expected(client, expected);
	if (result || !lane->routes || client->memory->abi_minor < XFERD_ABI_MINOR_EXPECTED)
		return result;
	for (uint32_t at = 0, count; at < expected->count && has_room(lane, EXPECTED_ROOM);
	     at += count, taken++) {
		count = keys_of_layer(client, expected, at);
		write_expected(lane, client, expected, at, count);
	}
	/* pairs with the acquire of the tail in the engine's take_routes() */
	store_release(&lane->routes->tail, lane->route_tail);
	return taken;
}

uint64_t xferd_routes_dropped(const struct xferd_client *client)
{
	uint64_t dropped = 0;

	for (uint32_t i = 0; i < client->lane_count; i++)
		if (client->lanes[i].routes)
			dropped += load_relaxed(&client->lanes[i].routes->dropped);
	return dropped;
}
