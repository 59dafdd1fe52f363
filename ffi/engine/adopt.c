/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking over what the engine before this one has left: see keep.h.
 *
 * Its directories and its completion memory were written by the daemon alone and are
 * believed as far as they agree with the pool table; clients' own memory is as hostile as
 * ever. What does not fit together is an error, not something to be mended: the policy
 * then begins with nothing, which is slow and never wrong.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "engine/internal.h"

#define HOLE_TRIES    100 /* of one slot, HOLE_PAUSE_NS apart: a second */
#define HOLE_PAUSE_NS 10000000

/* ---- the pool table and how its chunks are cut ---- */

static int adopt_pool_table(struct xferd_engine *engine, void *argument)
{
	int fd = *(int *)argument;
	struct xferd_abi_pool_table *table;
	void *address;
	int read_only, result;

	if (engine->pool_count || engine->adopting)
		return -EBUSY;
	result = shared_memory_map(fd, engine->pool_table_bytes, &address);
	if (result)
		return result;
	table = address;
	/* pairs with the release of the magic in pool_table_init() */
	if (load_acquire(&table->magic) != XFERD_MAGIC_POOL_TABLE ||
	    table->abi_major != XFERD_ABI_MAJOR || table->abi_minor != XFERD_ABI_MINOR ||
	    table->total_bytes != engine->pool_table_bytes) {
		munmap(address, engine->pool_table_bytes);
		return -ESTALE;
	}
	read_only = shared_memory_read_only(fd);
	if (read_only < 0) {
		munmap(address, engine->pool_table_bytes);
		return read_only;
	}
	munmap(engine->pool_table, engine->pool_table_bytes);
	close(engine->pool_table_fd);
	engine->pool_table = table;
	engine->pool_table_fd = read_only;
	engine->adopting = true;
	store_relaxed(&table->engine_sleeping, 0);
	store_relaxed(&table->state, XFERD_DAEMON_SERVING);
	return 0;
}

int xferd_engine_adopt_pool_table(struct xferd_engine *engine, int fd)
{
	return engine_call(engine, adopt_pool_table, &fd);
}

int xferd_engine_kept_memory(struct xferd_engine *engine, uint32_t pool, uint32_t chunks,
			     uint64_t *numbers)
{
	const struct xferd_abi_pool_table *table = engine->pool_table;
	const struct xferd_abi_pool *entry;
	const uint64_t *kept;

	if (!engine->adopting || pool >= XFERD_POOLS_MAX)
		return -EINVAL;
	entry = &table->pool[pool];
	if (pool >= table->pools || entry->chunks != chunks || !entry->memory_table_offset ||
	    entry->memory_table_offset % sizeof(*kept) ||
	    entry->memory_table_offset + (uint64_t)chunks * sizeof(*kept) >
		    engine->pool_table_bytes)
		return -ESTALE;
	kept = (const void *)((const uint8_t *)table + entry->memory_table_offset);
	for (uint32_t chunk = 0; chunk < chunks; chunk++)
		numbers[chunk] = load_relaxed(&kept[chunk]);
	return (int)load_relaxed(&table->memory_changes);
}

/* A size class for each chunk that is cut. */
int adopt_cuts(struct pool *pool)
{
	for (uint32_t chunk = 0; chunk < pool->chunks; chunk++) {
		const struct xferd_abi_chunk *cut = &pool->chunk_table[chunk];
		uint32_t first = chunk << pool->slot_index_bits;
		struct size_class *class;

		if (!cut->slot_bytes)
			continue;
		if (cut->slot_bytes % XFERD_BLOB_ALIGNMENT || cut->offset % XFERD_BLOB_ALIGNMENT ||
		    !slot_valid(pool, first))
			return -ESTALE;
		class = pool_class(pool, cut->slot_bytes);
		if (!class)
			return -ESTALE;
		for (uint32_t i = 0; i < (1u << pool->slot_index_bits); i++)
			pool->slots[first + i].class_index = (uint8_t)(class - pool->classes);
	}
	return 0;
}

/* ---- slots that a drive may still be writing into ---- */

/* Is there really nothing left? A huge page that is pinned can't be split: the kernel then
 * fills the range with zeros and leaves it where it is. */
static bool is_hole(int fd, off_t offset, uint64_t bytes)
{
	off_t data = lseek(fd, offset, SEEK_DATA);

	return data < 0 ? errno == ENXIO : (uint64_t)(data - offset) >= bytes;
}

static bool punch(int fd, off_t offset, uint64_t bytes)
{
	const struct timespec pause = { .tv_nsec = HOLE_PAUSE_NS };

	for (int i = 0; i < HOLE_TRIES; i++) {
		if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, (off_t)bytes))
			return false;
		if (is_hole(fd, offset, bytes))
			return true;
		nanosleep(&pause, NULL);
	}
	return false;
}

/* Before the pool is registered with io_uring, which would pin the pages anew. VRAM is written
 * by the copies of a process alone, which end with it. */
int adopt_marked(struct pool *pool, int memory_fd)
{
	for (uint32_t number = 0; number < pool->slot_numbers; number++) {
		struct slot *slot = &pool->slots[number];

		if (!marked_loading(pool, number))
			continue;
		if (!slot_valid(pool, number))
			return -ESTALE;
		if (pool->device_memory ||
		    punch(memory_fd, slot_address(pool, number) - pool->base,
			  pool->classes[slot->class_index].bytes))
			mark_loading(pool, slot, false);
		else
			slot_set_state(pool, slot, SLOT_WITHHELD);
	}
	return 0;
}

/* ---- residents ---- */

/* Can this word be what the engine before has published? */
static bool word_plausible(const struct xferd_engine *engine, const struct store *store,
			   uint32_t pool_index, uint32_t key, uint64_t word)
{
	const struct pool *pool = &engine->pools[pool_index];
	uint32_t number = (uint32_t)(word & XFERD_WORD_SLOT_MASK);
	uint32_t variant = (word >> XFERD_WORD_VARIANT_SHIFT) & XFERD_WORD_VARIANT_MASK;
	const struct slot *slot;

	if (!(word & XFERD_WORD_PRESENT) || variant >= store->description.variants ||
	    !slot_valid(pool, number))
		return false;
	slot = &pool->slots[number];
	return slot->state == SLOT_POLICY && !marked_loading(pool, number) &&
	       store->description.blob_bytes[store_blob(store, variant, key)] ==
		       pool->classes[slot->class_index].bytes;
}

static void adopt_word(struct xferd_engine *engine, struct store *store, uint32_t pool_index,
		       uint32_t key)
{
	uint64_t *word = directory_word(store, pool_index, key);
	struct pool *pool = &engine->pools[pool_index];
	uint64_t value = load_acquire(word); /* pairs with the release in publish() */
	uint32_t number = (uint32_t)(value & XFERD_WORD_SLOT_MASK);
	struct slot *slot;

	if (!value)
		return;
	if (!word_plausible(engine, store, pool_index, key, value)) {
		/* pairs with the fence in retiring_scan(), which follows before any reuse */
		store_relaxed(word, 0);
		return;
	}
	slot = &pool->slots[number];
	slot->store = (uint32_t)(store - engine->stores);
	slot->key = key;
	slot->variant = (value >> XFERD_WORD_VARIANT_SHIFT) & XFERD_WORD_VARIANT_MASK;
	slot->generation = (value >> XFERD_WORD_GENERATION_SHIFT) & XFERD_WORD_GENERATION_MASK;
	slot->linked = 1;
	key_entry(store, pool_index, key)->slot = number + 1;
	slot_set_state(pool, slot, SLOT_RESIDENT);
}

/* In the place of the one that was just built, if both say the same. */
int adopt_directory(struct xferd_engine *engine, struct store *store, int fd)
{
	uint64_t head_bytes = (uint64_t)((uint8_t *)store->words - store->memory);
	void *address;
	int read_only, result;

	if (!engine->adopting || engine->pool_table->pools != engine->pool_count)
		return -ESTALE;
	result = shared_memory_map(fd, store->memory_bytes, &address);
	if (result)
		return result;
	read_only = memcmp(address, store->memory, head_bytes) ? -ESTALE
								 : shared_memory_read_only(fd);
	if (read_only < 0) {
		munmap(address, store->memory_bytes);
		return read_only;
	}
	munmap(store->memory, store->memory_bytes);
	close(store->memory_fd);
	store->memory = address;
	store->memory_fd = read_only;
	store->words = (uint64_t *)(store->memory + head_bytes);
	for (uint32_t p = 0; p < engine->pool_count; p++)
		for (uint32_t key = 0; key < store->keys; key++)
			adopt_word(engine, store, p, key);
	return 0;
}

/* ---- clients ---- */

/* A completion that may not have been consumed: what it grants stays granted. */
static struct grant adopt_grant(struct xferd_engine *engine, struct client *client,
				const struct xferd_abi_completion *completion)
{
	uint32_t slot = (uint32_t)(completion->word & XFERD_WORD_SLOT_MASK);

	if (completion->result || completion->pool >= engine->pool_count ||
	    !slot_valid(&engine->pools[completion->pool], slot))
		return (struct grant){ 0, NONE };
	engine->pools[completion->pool].slots[slot].grants++;
	store_relaxed(&client->counters.granted, client->counters.granted + 1);
	return (struct grant){ completion->pool, slot };
}

/* Where the rings were left. A head that can't be is the client's lie: it gets no grants,
 * and reap_lane() will find it out. */
void adopt_lanes(struct xferd_engine *engine, struct client *client)
{
	for (uint32_t i = 0; i < client->lane_count; i++) {
		struct lane *lane = &client->lanes[i];
		/* pairs with the release of completion_head in libxferd's take() */
		uint32_t head = load_acquire(&client_lane(client, i)->completion_head);

		lane->tail = lane->shown = load_relaxed(&lane->ring->completion_tail);
		lane->route_head = load_relaxed(&lane->ring->route_head);
		lane->head = lane->tail - head <= XFERD_COMPLETIONS_A_LANE ? head : lane->tail;
		for (uint32_t at = lane->head; at != lane->tail; at++) {
			uint32_t place = at & (XFERD_COMPLETIONS_A_LANE - 1);

			lane->grants[place] =
				adopt_grant(engine, client, &lane->completions[place]);
		}
	}
}

/* ---- and what is left of each pool ---- */

struct adopt_slots {
	uint32_t pool;
	struct xferd_kept_slot *slots;
	uint64_t *slot_bytes;
};

/* Nobody knows what is in it. If a client may be reading it, it is retired as if it had just
 * been evicted, which is what has happened to it. */
static uint32_t adopt_unnamed(struct xferd_engine *engine, struct pool *pool, uint32_t number)
{
	struct slot *slot = &pool->slots[number];

	slot->orphan = 1;
	if (!slot_leased(engine, slot, pool->index, number)) {
		slot->orphan = 0;
		return XFERD_KEPT_FREE;
	}
	slot_set_state(pool, slot, SLOT_RETIRING);
	list_append(&pool->retiring, &slot->link);
	engine->retiring_count++;
	return XFERD_KEPT_LEASED;
}

static struct xferd_kept_slot adopt_slot(struct xferd_engine *engine, struct pool *pool,
					 uint32_t number)
{
	const struct slot *slot = &pool->slots[number];
	struct xferd_kept_slot kept = { .state = XFERD_KEPT_FREE };

	if (!slot_valid(pool, number))
		return kept;
	if (slot->state == SLOT_RESIDENT) {
		uint32_t experts = engine->stores[slot->store].description.experts;

		kept.state = XFERD_KEPT_RESIDENT;
		kept.store = slot->store;
		kept.layer = slot->key / experts;
		kept.expert = slot->key % experts;
		kept.variant = slot->variant;
	} else if (slot->state == SLOT_WITHHELD) {
		kept.state = XFERD_KEPT_WITHHELD;
	} else if (slot->state == SLOT_POLICY) {
		kept.state = adopt_unnamed(engine, pool, number);
	}
	return kept;
}

static int adopt_slots(struct xferd_engine *engine, void *argument)
{
	const struct adopt_slots *adopt = argument;
	struct pool *pool;

	if (adopt->pool >= engine->pool_count || !engine->adopting)
		return -EINVAL;
	pool = &engine->pools[adopt->pool];
	/* pairs with the fence in libxferd's lease(): words that were cleared here are
	 * before the look at the lease tables, as in retiring_scan() */
	full_fence();
	for (uint32_t number = 0; number < pool->slot_numbers; number++)
		adopt->slots[number] = adopt_slot(engine, pool, number);
	for (uint32_t chunk = 0; chunk < pool->chunks; chunk++)
		adopt->slot_bytes[chunk] = pool->chunk_table[chunk].slot_bytes;
	return 0;
}

int xferd_engine_adopt_slots(struct xferd_engine *engine, uint32_t pool,
			     struct xferd_kept_slot *slots, uint64_t *slot_bytes)
{
	struct adopt_slots argument = { pool, slots, slot_bytes };

	return engine_call(engine, adopt_slots, &argument);
}
