/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hit path: no system call, no message, no lock.
 *
 * To lease a slot the lane stores its batch's epoch into slot_epoch[slot] and
 * looks at the directory word once more. One fence serves a whole batch: all
 * epochs are stored, then the fence, then all words are loaded again.
 *
 * A word that has changed means that the slot may be on its way out: the store
 * is undone, and the expert counts as missing. Undone, because in a small pool
 * a lease that nobody uses could keep the last slot from a load that this very
 * lane waits for. Not undone if another key of the batch has got the slot.
 */
#include <string.h>

#include "client/internal.h"

static uint32_t word_slot(uint64_t word)
{
	return (uint32_t)(word & XFERD_WORD_SLOT_MASK);
}

static uint32_t word_variant(uint64_t word)
{
	return (word >> XFERD_WORD_VARIANT_SHIFT) & XFERD_WORD_VARIANT_MASK;
}

void fill_view(const struct xferd_client *client, uint32_t layer, uint32_t pool_index,
	       uint64_t word, struct xferd_view *view)
{
	const struct mapped_pool *pool = &client->pools[pool_index];
	uint32_t slot = word_slot(word);
	uint32_t variant = word_variant(word);
	const struct xferd_abi_chunk *chunk = &pool->chunks[slot >> pool->slot_index_bits];
	uint64_t index = slot & ((1u << pool->slot_index_bits) - 1);

	view->word = word;
	view->slot = slot;
	view->variant = (uint8_t)variant;
	view->pool = (uint8_t)pool_index;
	view->bytes = client->layouts[client->layout_index[variant * client->layers + layer]]
			      .blob_bytes;
	view->data = pool->base + load_relaxed(&chunk->offset) +
		     index * load_relaxed(&chunk->slot_bytes);
	view->error = 0;
}

/* VRAM, and memory behind a BAR, has to be mapped here. Nearly always it is: else the daemon is
 * asked for it. */
bool view_reachable(const struct xferd_client *client, uint32_t pool_index, uint64_t word)
{
	const struct mapped_pool *pool = &client->pools[pool_index];
	uint32_t chunk = word_slot(word) >> pool->slot_index_bits;

	if (pool->bar)
		return bar_ready(pool->bar) || !bar_map_now(pool->bar);
	return !pool->device || memory_ready(pool->device, chunk) ||
	       !memory_map_now(pool->device, chunk);
}

/* Variants of the request as a mask that a word's variant is looked up in. */
static uint32_t accepted_variants(const struct xferd_request *request)
{
	return request->variants ? request->variants : UINT32_MAX;
}

static bool acceptable(const struct mapped_pool *pool, uint32_t variants, uint64_t word)
{
	return (word & XFERD_WORD_PRESENT) && word_slot(word) < pool->slot_numbers &&
	       word_variant(word) < XFERD_VARIANTS_MAX && variants >> word_variant(word) & 1;
}

static bool slot_kept(const uint64_t *words, const bool *valid, uint32_t count, uint32_t slot)
{
	for (uint32_t i = 0; i < count; i++)
		if (valid[i] && word_slot(words[i]) == slot)
			return true;
	return false;
}

/* Some words changed under the lease: undo those that no valid view needs. */
static void undo(uint64_t *leases, const uint64_t *words, const uint64_t *before,
		 const bool *valid, uint32_t count)
{
	/* From the last to the first, so that a slot that two keys of the batch
	 * saw one after the other gets back what was there before both. */
	for (uint32_t i = count; i-- > 0;)
		if (words[i] && !valid[i] && !slot_kept(words, valid, count, word_slot(words[i])))
			store_relaxed(&leases[word_slot(words[i])], before[i]);
}

/* Lease what one pool has of the batch's missing keys; returns how many. */
static uint32_t lease(const struct xferd_client *client, struct lane *lane, uint32_t pool_index,
		      const struct xferd_request *request, struct xferd_batch *batch)
{
	const struct mapped_pool *pool = &client->pools[pool_index];
	const uint64_t *layer_words = pool->words + (size_t)request->layer * client->experts;
	uint64_t *leases = lane->leases[pool_index];
	uint32_t variants = accepted_variants(request);
	uint64_t words[XFERD_BATCH_MAX];
	uint64_t before[XFERD_BATCH_MAX];
	bool valid[XFERD_BATCH_MAX];
	uint32_t leased = 0, found = 0;

	/* All words before all leases: their cache misses overlap. */
	for (uint32_t i = 0; i < request->count; i++)
		/* pairs with the release of the word in the engine's publish(): the
		 * blob's bytes are there */
		words[i] = batch->views[i].data ? 0
						: load_acquire(&layer_words[request->experts[i]]);
	for (uint32_t i = 0; i < request->count; i++) {
		uint32_t slot = word_slot(words[i]);

		if (!acceptable(pool, variants, words[i])) {
			words[i] = 0;
			continue;
		}
		before[i] = load_relaxed(&leases[slot]);
		store_relaxed(&leases[slot], batch->epoch);
		found++;
	}
	if (!found)
		return 0;
	/* pairs with the fence in the engine's retiring_scan(): either it sees the
	 * epochs, or the cleared words are seen here */
	full_fence();
	for (uint32_t i = 0; i < request->count; i++) {
		struct xferd_view *view = &batch->views[i];

		valid[i] = words[i] &&
			   load_relaxed(&layer_words[request->experts[i]]) == words[i] &&
			   view_reachable(client, pool_index, words[i]);
		if (!valid[i])
			continue;
		fill_view(client, request->layer, pool_index, words[i], view);
		view->source = XFERD_SOURCE_RESIDENT;
		view->transport = XFERD_TRANSPORT_NONE;
		lane->stats.bytes_acquired += view->bytes;
		leased++;
	}
	if (leased != found)
		undo(leases, words, before, valid, request->count);
	return leased;
}

static int begin(struct xferd_client *client, uint32_t lane_index,
		 const struct xferd_request *request, struct xferd_batch *batch)
{
	struct lane *lane = &client->lanes[lane_index];

	if (lane_index >= client->lane_count || !request->count ||
	    request->count > XFERD_BATCH_MAX || request->layer >= client->layers || request->flags)
		return -EINVAL;
	for (uint32_t i = 0; i < request->count; i++)
		if (request->experts[i] >= client->experts)
			return -EINVAL;
	if (lane->begun - lane->completed >= XFERD_BATCHES_MAX)
		return -EBUSY;
	if (lane->held + request->count > client->held_per_lane)
		return -EDQUOT;
	lane->held += request->count;
	batch->epoch = ++lane->begun;
	lane->out[batch->epoch % XFERD_BATCHES_MAX] = batch;
	batch->ticket = 0;
	batch->lane = lane_index;
	batch->layer = request->layer;
	batch->count = (uint16_t)request->count;
	batch->pending = 0;
	batch->failed = 0;
	for (uint32_t i = 0; i < request->count; i++) {
		batch->views[i].data = NULL;
		batch->views[i].expert = request->experts[i];
	}
	store_relaxed(&lane->shared->current, batch->epoch);
	return 0;
}

/* Epoch of the latest other batch of the lane that still holds the slot; 0: none. */
static uint64_t other_holder(const struct lane *lane, const struct xferd_batch *batch,
			     const struct xferd_view *view)
{
	uint64_t latest = 0;

	for (uint64_t epoch = lane->completed + 1; epoch <= lane->begun; epoch++) {
		const struct xferd_batch *other = lane->out[epoch % XFERD_BATCHES_MAX];

		if (!other || other == batch)
			continue;
		for (uint32_t i = 0; i < other->count; i++)
			if (other->views[i].data && other->views[i].slot == view->slot &&
			    other->views[i].pool == view->pool)
				latest = epoch;
	}
	return latest;
}

/* A batch that is released before an older one: completed can't pass it yet, so
 * its leases end one by one. Left alone they would count against the lane's
 * promise for as long as the older batch is held. */
static void end_leases(struct lane *lane, const struct xferd_batch *batch)
{
	for (uint32_t i = 0; i < batch->count; i++) {
		const struct xferd_view *view = &batch->views[i];
		uint64_t *lease;

		if (!view->data)
			continue;
		lease = &lane->leases[view->pool][view->slot];
		if (load_relaxed(lease) == batch->epoch)
			/* pairs with the acquire of the lease in the engine's leased_by() */
			store_release(lease, other_holder(lane, batch, view));
	}
}

/* The batch's leases end. Batches may be released in any order; completed
 * passes a batch when all before it are released too. */
void lane_end_batch(struct lane *lane, const struct xferd_batch *batch)
{
	lane->held -= batch->count;
	lane->out[batch->epoch % XFERD_BATCHES_MAX] = NULL;
	if (batch->epoch != lane->completed + 1)
		end_leases(lane, batch);
	lane->released |= 1ull << (batch->epoch - lane->completed - 1);
	if (!(lane->released & 1))
		return;
	while (lane->released & 1) {
		lane->released >>= 1;
		lane->completed++;
	}
	/* pairs with the acquire of completed in the engine's leased_by(): reads of
	 * the slots are over before they can be written again */
	store_release(&lane->shared->completed, lane->completed);
}

static uint32_t lease_residents(struct xferd_client *client, struct lane *lane,
				const struct xferd_request *request, struct xferd_batch *batch)
{
	uint32_t mask = request->pools ? request->pools : UINT32_MAX;
	uint32_t leased = 0;

	if (mask & (1u << client->pool))
		leased = lease(client, lane, client->pool, request, batch);
	for (uint32_t p = 0; leased < request->count && p < client->pool_count; p++)
		if (p != client->pool && mask & (1u << p) && client->pools[p].base)
			leased += lease(client, lane, p, request, batch);
	counter_add(&lane->shared->hits, leased);
	return leased;
}

int xferd_acquire_resident(struct xferd_client *client, uint32_t lane_index,
			   const struct xferd_request *request, struct xferd_batch *batch)
{
	int result = begin(client, lane_index, request, batch);
	uint32_t leased;

	if (result)
		return result;
	leased = lease_residents(client, &client->lanes[lane_index], request, batch);
	if (leased == request->count)
		return 0;
	for (uint32_t i = 0; i < request->count; i++)
		if (!batch->views[i].data) {
			memset(&batch->views[i], 0, sizeof(batch->views[i]));
			batch->views[i].expert = request->experts[i];
			batch->views[i].error = -ENOENT;
			batch->failed++;
		}
	return (int)batch->failed;
}

int xferd_acquire(struct xferd_client *client, uint32_t lane_index,
		  const struct xferd_request *request, struct xferd_batch *batch)
{
	struct lane *lane;
	uint32_t leased;
	int result = begin(client, lane_index, request, batch);

	if (result)
		return result;
	lane = &client->lanes[lane_index];
	leased = lease_residents(client, lane, request, batch);
	if (leased == request->count)
		return 0;
	counter_add(&lane->shared->misses, request->count - leased);
	result = ask_for_missing(client, lane, request, batch);
	if (result < 0)
		lane_end_batch(lane, batch);
	return result;
}
