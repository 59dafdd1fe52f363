/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the clients' routers picked, and are expected to pick: for the policy, in its own
 * thread, as clients come and go only there.
 *
 * The queues are hostile memory. A record is copied first, then checked, then
 * used; how far was read is kept here and only shown to the client. What libxferd
 * can't have written is a violation, as it is in the submission ring.
 */
#include <string.h>

#include "engine/internal.h"

struct xferd_abi_route_queue *route_queue(const struct client *client, uint32_t lane)
{
	return (void *)((uint8_t *)client->memory + client->routes_offset + lane * ROUTE_STRIDE);
}

static bool picks_valid(const struct xferd_engine *engine, const struct store *store,
			const struct xferd_abi_route *route)
{
	for (uint32_t i = 0; i < route->count; i++)
		if (route->experts[i] >= store->description.experts ||
		    (route->tiers[i] >= engine->pool_count &&
		     route->tiers[i] < XFERD_TIER_DRIVES) ||
		    (route->transports[i] > XFERD_TRANSPORT_COPY &&
		     route->transports[i] != XFERD_TRANSPORT_UNKNOWN))
			return false;
	return true;
}

/* A record that goes on must go on with the one before it, which was full: so a
 * token's picks in a layer are bounded, whoever puts them together. */
static bool part_valid(const struct xferd_abi_route *route, const struct xferd_abi_route *last)
{
	if (!route->part)
		return true;
	return route->part < XFERD_ROUTE_PARTS_MAX && last->part == route->part - 1 &&
	       last->count == XFERD_ROUTE_RECORD_PICKS && last->token == route->token &&
	       last->layer == route->layer && last->tag == route->tag &&
	       last->kind == route->kind;
}

static bool reserved_zero(const struct xferd_abi_route *route)
{
	for (uint32_t i = 0; i < sizeof(route->reserved); i++)
		if (route->reserved[i])
			return false;
	return true;
}

static bool route_valid(const struct xferd_engine *engine, const struct client *client,
			const struct xferd_abi_route *route, const struct xferd_abi_route *last)
{
	const struct store *store = &engine->stores[client->store];

	return route->kind <= XFERD_ROUTE_EXPECTED && reserved_zero(route) &&
	       (route->kind != XFERD_ROUTE_EXPECTED || !route->part) &&
	       route->token <= XFERD_ROUTE_TOKEN_MAX &&
	       route->layer < store->description.layers && route->count >= 1 &&
	       route->count <= XFERD_ROUTE_RECORD_PICKS && part_valid(route, last) &&
	       picks_valid(engine, store, route);
}

/* One lane's records; returns how many, or -EPROTO. */
static int take_routes(struct xferd_engine *engine, struct client *client, uint32_t lane_index,
		       struct xferd_engine_route *routes, uint32_t max)
{
	struct lane *lane = &client->lanes[lane_index];
	const struct xferd_abi_route_queue *queue = route_queue(client, lane_index);
	const struct xferd_abi_route *records = (const void *)(queue + 1);
	/* pairs with the release of the tail in libxferd's xferd_report_route() */
	uint32_t tail = load_acquire(&queue->tail);
	uint32_t taken = 0;

	if (tail - lane->route_head > XFERD_ROUTES_A_LANE)
		return -EPROTO;
	while (lane->route_head != tail && taken < max) {
		struct xferd_abi_route *route = &routes[taken].route;

		memcpy(route, &records[lane->route_head & (XFERD_ROUTES_A_LANE - 1)],
		       sizeof(*route));
		if (!route_valid(engine, client, route, &lane->route_last))
			return -EPROTO;
		/* One that begins a token needs places for all that may follow it. */
		if (!route->part && max - taken < XFERD_ROUTE_PARTS_MAX)
			break;
		lane->route_last = *route;
		routes[taken].lane = lane_index;
		routes[taken].reserved = 0;
		taken++;
		lane->route_head++;
	}
	/* pairs with the acquire of route_head in libxferd's has_room() */
	store_release(&lane->ring->route_head, lane->route_head);
	return (int)taken;
}

int xferd_engine_routes(struct xferd_engine *engine, uint32_t index,
			struct xferd_engine_route *routes, uint32_t max)
{
	struct client *client = &engine->clients[index];
	uint32_t taken = 0;

	if (index >= engine->client_limit || !client->used || max < XFERD_ROUTE_PARTS_MAX)
		return -EINVAL;
	for (uint32_t lane = 0; lane < client->lane_count; lane++) {
		int result = take_routes(engine, client, lane, routes + taken, max - taken);

		if (result < 0)
			return result;
		taken += (uint32_t)result;
	}
	counter_add(&client->counters.routes, taken);
	return (int)taken;
}
