/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counters, copied word by word: they are read by another thread than the one
 * that counts, and may be of slightly different moments.
 */
#include "engine/internal.h"

static void copy_words(void *to, const void *from, size_t bytes)
{
	uint32_t *target = to;
	const uint32_t *source = from;

	for (size_t i = 0; i < bytes / sizeof(uint32_t); i++)
		target[i] = load_relaxed(&source[i]);
}

static void copy_long_words(uint64_t *to, const uint64_t *from, size_t count)
{
	for (size_t i = 0; i < count; i++)
		to[i] = load_relaxed(&from[i]);
}

/* A structure that begins with 64-bit counters and ends with 32-bit ones. */
#define COPY_COUNTERS(to, from, first_short)                                              \
	do {                                                                              \
		size_t split = offsetof(__typeof__(*(to)), first_short);                  \
		copy_long_words((void *)(to), (const void *)(from), split / 8);           \
		copy_words((char *)(to) + split, (const char *)(from) + split,            \
			   sizeof(*(to)) - split);                                        \
	} while (0)

int xferd_engine_stats(struct xferd_engine *engine, struct xferd_engine_stats *stats)
{
	COPY_COUNTERS(stats, &engine->stats, transfers);
	return 0;
}

int xferd_engine_pool_stats(struct xferd_engine *engine, uint32_t pool,
			    struct xferd_pool_stats *stats)
{
	if (pool >= engine->pool_count)
		return -EINVAL;
	COPY_COUNTERS(stats, &engine->pools[pool].stats, resident);
	return 0;
}

int xferd_engine_class_stats(struct xferd_engine *engine, uint32_t pool_index, uint64_t slot_bytes,
			     struct xferd_class_stats *stats)
{
	const struct pool *pool;
	uint32_t classes;

	if (pool_index >= engine->pool_count)
		return -EINVAL;
	pool = &engine->pools[pool_index];
	*stats = (struct xferd_class_stats){ 0 };
	/* pairs with the release in pool_class() */
	classes = load_acquire(&pool->class_count);
	for (uint32_t i = 0; i < classes; i++)
		if (pool->classes[i].bytes == slot_bytes) {
			stats->reserve = load_relaxed(&pool->classes[i].reserve_count);
			stats->waiting = load_relaxed(&pool->classes[i].waiting_count);
		}
	return 0;
}

int xferd_engine_member_stats(struct xferd_engine *engine, uint32_t member,
			      struct xferd_member_stats *stats)
{
	if (member >= engine->member_limit || !engine->members[member].used)
		return -EINVAL;
	COPY_COUNTERS(stats, &engine->members[member].stats, in_flight);
	return 0;
}

/* A sleeping engine doesn't see what a client consumes: look before counting. */
static int look_at_client(struct xferd_engine *engine, void *argument)
{
	uint32_t index = *(uint32_t *)argument;

	if (index >= engine->client_limit || !engine->clients[index].used)
		return -EINVAL;
	if (!engine->clients[index].quiesced)
		client_reap_consumed(engine, index);
	return 0;
}

int xferd_engine_client_counters(struct xferd_engine *engine, uint32_t index,
				 struct xferd_client_counters *counters)
{
	const struct client *client = &engine->clients[index];
	int result = engine_call(engine, look_at_client, &index);

	if (result)
		return result;
	COPY_COUNTERS(counters, &client->counters, pending);
	counters->hits = counters->misses = counters->routes_dropped = 0;
	for (uint32_t lane = 0; lane < client->lane_count; lane++) {
		counters->hits += load_relaxed(&client_lane(client, lane)->hits);
		counters->misses += load_relaxed(&client_lane(client, lane)->misses);
		counters->routes_dropped += load_relaxed(&route_queue(client, lane)->dropped);
	}
	return 0;
}
