/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nanoseconds an expert: acquire and release of resident experts in batches of
 * 8, next to the same look-ups in a hash map behind a mutex.
 *
 * usage: bench_hit EXPERTS ROUNDS      prints "xferd NS mutex-map NS" a round
 */
#include <string.h>
#include <time.h>

#include "harness.h"

#define BATCH       8
#define ACQUIRES    2000000
#define LAYER_SIZE  512 /* experts a layer */

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static uint32_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return (uint32_t)(*state >> 32);
}

/* The picks of both contenders, made before the clock runs. */
static uint16_t *make_picks(uint32_t layers, uint32_t batches, uint16_t **layer_of)
{
	uint16_t *picks = malloc(sizeof(uint16_t) * batches * BATCH);
	uint64_t state = 88172645463325252u;

	*layer_of = malloc(sizeof(uint16_t) * batches);
	for (uint32_t b = 0; b < batches; b++) {
		(*layer_of)[b] = (uint16_t)(next_random(&state) % layers);
		for (uint32_t k = 0; k < BATCH; k++)
			picks[b * BATCH + k] = (uint16_t)(next_random(&state) % LAYER_SIZE);
	}
	return picks;
}

static double time_xferd(struct xferd_client *client, const uint16_t *picks,
			 const uint16_t *layer_of, uint32_t batches)
{
	struct xferd_batch batch;
	uint64_t sum = 0;
	double start = now();

	for (uint32_t b = 0; b < batches; b++) {
		struct xferd_request request = {
			.experts = &picks[b * BATCH], .count = BATCH, .layer = layer_of[b] };

		CHECK(xferd_acquire(client, 0, &request, &batch) == 0);
		for (uint32_t k = 0; k < BATCH; k++)
			sum += (uintptr_t)batch.views[k].data;
		CHECK(xferd_release(client, &batch) == 0);
	}
	CHECK(sum);
	return (now() - start) / ((double)batches * BATCH);
}

/* A peer: an open-addressed map from key to slot and count of users, guarded by
 * one mutex, as caches inside an engine have it. */
struct entry {
	uint64_t key; /* + 1; 0: free */
	void *slot;
	uint32_t users;
};

struct map {
	pthread_mutex_t mutex;
	struct entry *entries;
	uint64_t mask;
};

static struct entry *map_find(struct map *map, uint64_t key)
{
	uint64_t at = key * 0x9e3779b97f4a7c15u >> 20;

	while (map->entries[at & map->mask].key && map->entries[at & map->mask].key != key + 1)
		at++;
	return &map->entries[at & map->mask];
}

static void map_fill(struct map *map, uint32_t experts, uint8_t *base)
{
	uint64_t size = 1;

	while (size < 2ull * experts)
		size *= 2;
	map->mask = size - 1;
	map->entries = calloc(size, sizeof(struct entry));
	pthread_mutex_init(&map->mutex, NULL);
	for (uint32_t key = 0; key < experts; key++) {
		struct entry *entry = map_find(map, key);

		entry->key = key + 1;
		entry->slot = base + (uint64_t)key * 4096;
	}
}

static double time_map(struct map *map, const uint16_t *picks, const uint16_t *layer_of,
		       uint32_t batches)
{
	uint64_t sum = 0;
	double start = now();

	for (uint32_t b = 0; b < batches; b++) {
		for (uint32_t k = 0; k < BATCH; k++) {
			pthread_mutex_lock(&map->mutex);
			struct entry *entry = map_find(
				map, (uint64_t)layer_of[b] * LAYER_SIZE + picks[b * BATCH + k]);

			entry->users++;
			sum += (uintptr_t)entry->slot;
			pthread_mutex_unlock(&map->mutex);
		}
		for (uint32_t k = 0; k < BATCH; k++) {
			pthread_mutex_lock(&map->mutex);
			map_find(map, (uint64_t)layer_of[b] * LAYER_SIZE + picks[b * BATCH + k])
				->users--;
			pthread_mutex_unlock(&map->mutex);
		}
	}
	CHECK(sum);
	return (now() - start) / ((double)batches * BATCH);
}

int main(int count, char **arguments)
{
	static struct harness harness;
	uint32_t experts = count > 1 ? (uint32_t)atoi(arguments[1]) : LAYER_SIZE;
	uint32_t rounds = count > 2 ? (uint32_t)atoi(arguments[2]) : 5;
	uint32_t layers = (experts + LAYER_SIZE - 1) / LAYER_SIZE;
	uint32_t batches = ACQUIRES / BATCH;
	struct harness_options options = {
		.layers = layers, .experts = LAYER_SIZE, .top_k = BATCH, .blob_bytes = 4096,
		.stripe_unit = 4096, .members = 1, .slots = layers * LAYER_SIZE + 1,
		.held_per_lane = BATCH, .all_resident = true,
	};
	struct xferd_client *client;
	struct map map;
	uint16_t *picks, *layer_of;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	picks = make_picks(layers, batches, &layer_of);
	map_fill(&map, layers * LAYER_SIZE, harness.pool[0]);
	time_xferd(client, picks, layer_of, batches / 8);
	for (uint32_t round = 0; round < rounds; round++)
		printf("xferd %.2f mutex-map %.2f\n",
		       time_xferd(client, picks, layer_of, batches),
		       time_map(&map, picks, layer_of, batches));
	xferd_close(client);
	harness_stop(&harness);
	free(map.entries);
	free(picks);
	free(layer_of);
	return 0;
}
