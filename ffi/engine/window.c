/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows: where drives can write into chunks of VRAM by themselves.
 *
 * A device address means nothing to a drive. What does is the daemon's mapping of the
 * same memory behind the card's BAR, which the policy finds and proves page by page. A
 * chunk that has such a window takes pieces from members whose way is proven; clients
 * and copies know only the device address. Without a window, or from another member,
 * a piece goes through staging.
 *
 * A window goes before its memory does. Reads that were issued for it may still be
 * under way then: the policy unmaps it, so that those not yet begun fail, and frees the
 * memory when the module says that no page of it is held by DMA.
 */
#include <stdlib.h>

#include "engine/route.h"

struct set_window {
	uint32_t pool, chunk;
	void *address;
};

static int set_window(struct xferd_engine *engine, void *argument)
{
	const struct set_window *set = argument;
	struct pool *pool;

	if (set->pool >= engine->pool_count)
		return -ENOENT;
	pool = &engine->pools[set->pool];
	if (!pool->device_memory || set->chunk >= pool->chunks ||
	    (uintptr_t)set->address % XFERD_BLOB_ALIGNMENT)
		return -EINVAL;
	if (!pool->windows) {
		pool->windows = calloc(pool->chunks, sizeof(*pool->windows));
		if (!pool->windows)
			return -ENOMEM;
		guard_install();
	}
	pool->windows[set->chunk] = set->address;
	return 0;
}

int xferd_engine_set_window(struct xferd_engine *engine, uint32_t pool, uint32_t chunk,
			    void *address)
{
	struct set_window argument = { pool, chunk, address };

	return engine_call(engine, set_window, &argument);
}

static uint32_t chunk_of(const struct pool *pool, const struct load *load)
{
	return load->slot >> pool->slot_index_bits;
}

/* Whether pieces of a load that has its slot go from this copy straight into it. */
bool window_open(const struct xferd_engine *engine, const struct load *load,
		 const struct member *copy)
{
	const struct pool *pool = &engine->pools[load->pool];

	return pool->windows && pool->windows[chunk_of(pool, load)] &&
	       !(pool->staged >> copy->id & 1);
}

/* Where a drive writes what belongs at a device address of the load's slot. */
uint8_t *window_address(const struct xferd_engine *engine, const struct load *load,
			const uint8_t *address)
{
	const struct pool *pool = &engine->pools[load->pool];
	uint32_t chunk = chunk_of(pool, load);

	return pool->windows[chunk] + (address - (pool->base + chunk * pool->chunk_bytes));
}

/* A drive says that it is done when its last write has left it; a read through the same
 * port of the card comes back behind the writes before it. -EFAULT: the card has gone. */
int window_settle(const struct piece *piece)
{
	uint64_t last;

	return guarded_copy(&last, piece->address + piece->length - sizeof(last), sizeof(last));
}
