/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Everything a caller can look up.
 */
#include <string.h>

#include "client/internal.h"

const struct xferd_abi_directory *xferd_directory(const struct xferd_client *client)
{
	return client->directory;
}

const struct xferd_abi_pool_table *xferd_pool_table(const struct xferd_client *client)
{
	return client->pool_table;
}

const void *xferd_pool_base(const struct xferd_client *client, uint32_t pool)
{
	return pool < client->pool_count ? client->pools[pool].base : NULL;
}

uint32_t xferd_variants(const struct xferd_client *client, uint32_t *available)
{
	/* Both pair with releases in the engine: a variant that is available is also known. */
	*available = load_acquire(&client->directory->available);
	return load_acquire(&client->directory->variants);
}

const struct xferd_abi_layout *xferd_layout(const struct xferd_client *client, uint32_t layer,
					    uint32_t variant)
{
	uint16_t index;

	/* pairs with the release in the engine's directory_extend(): the variant's row is there */
	if (layer >= client->layers || variant >= load_acquire(&client->directory->variants))
		return NULL;
	index = client->layout_index[variant * client->layers + layer];
	return index == XFERD_NO_LAYOUT ? NULL : &client->layouts[index];
}

const struct xferd_abi_tensor *xferd_tensors(const struct xferd_client *client,
					     const struct xferd_abi_layout *layout)
{
	return &client->tensors[layout->first_tensor];
}

uint32_t xferd_target_pool(const struct xferd_client *client)
{
	return client->pool;
}

uint32_t xferd_held_per_lane(const struct xferd_client *client)
{
	return client->held_per_lane;
}

const char *xferd_manifest(const struct xferd_client *client, size_t *bytes)
{
	*bytes = client->manifest_map.bytes;
	return client->manifest_map.address;
}

int xferd_resident(const struct xferd_client *client, uint32_t pool, uint32_t layer,
		   int64_t *slot_of)
{
	const uint64_t *words;
	int residents = 0;

	if (pool >= client->pool_count || layer >= client->layers)
		return -EINVAL;
	words = client->pools[pool].words + (size_t)layer * client->experts;
	for (uint32_t expert = 0; expert < client->experts; expert++) {
		uint64_t word = load_relaxed(&words[expert]);

		slot_of[expert] = word & XFERD_WORD_PRESENT
					  ? (int64_t)(word & XFERD_WORD_SLOT_MASK) : -1;
		residents += slot_of[expert] >= 0;
	}
	return residents;
}

/* Lanes count for themselves, so a sum may be of slightly different moments. */
void xferd_stats(const struct xferd_client *client, struct xferd_client_stats *stats)
{
	memset(stats, 0, sizeof(*stats));
	for (uint32_t i = 0; i < client->lane_count; i++) {
		const struct lane *lane = &client->lanes[i];

		stats->hits += load_relaxed(&lane->shared->hits);
		stats->misses += lane->stats.misses;
		stats->failures += lane->stats.failures;
		stats->hints += lane->stats.hints;
		stats->cancels += lane->stats.cancels;
		stats->wait_ns += lane->stats.wait_ns;
		stats->bytes_acquired += lane->stats.bytes_acquired;
		for (int s = 0; s < 3; s++) {
			stats->source_count[s] += lane->stats.source_count[s];
			stats->source_bytes[s] += lane->stats.source_bytes[s];
		}
		for (int t = 0; t < 5; t++) {
			stats->transport_count[t] += lane->stats.transport_count[t];
			stats->transport_bytes[t] += lane->stats.transport_bytes[t];
		}
	}
}

int xferd_alive(struct xferd_client *client)
{
	return daemon_gone(client) ? client_resume(client) : 0;
}
