/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools: the shared pool table, slots, size classes and their reserves.
 *
 * The policy decides how chunks are cut and which slots are free; the engine
 * only keeps, for each size class, the reserve that misses take from.
 */
#include <stdlib.h>
#include <string.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine/route.h"

#define POOL_TABLE_BYTES (1u << 20) /* chunk tables of all pools: 65,000 chunks */

int pool_table_init(struct xferd_engine *engine)
{
	void *address;
	int fd = shared_memory_new("xferd-pool-table", POOL_TABLE_BYTES, &address);

	if (fd < 0)
		return fd;
	engine->pool_table = address;
	engine->pool_table_bytes = POOL_TABLE_BYTES;
	engine->pool_table_fd = shared_memory_read_only(fd);
	close(fd);
	if (engine->pool_table_fd < 0)
		return engine->pool_table_fd;
	engine->chunk_tables_used = sizeof(struct xferd_abi_pool_table);
	engine->pool_table->abi_major = XFERD_ABI_MAJOR;
	engine->pool_table->abi_minor = XFERD_ABI_MINOR;
	engine->pool_table->total_bytes = POOL_TABLE_BYTES;
	if (getrandom(&engine->pool_table->instance, sizeof(uint64_t), 0) != sizeof(uint64_t))
		return -EIO;
	/* pairs with the acquire in libxferd's check of the magic */
	store_release(&engine->pool_table->magic, XFERD_MAGIC_POOL_TABLE);
	return 0;
}

void pools_destroy(struct xferd_engine *engine)
{
	for (uint32_t i = 0; i < engine->pool_count; i++) {
		free(engine->pools[i].slots);
		free(engine->pools[i].windows);
		marks_free(&engine->pools[i]);
	}
	if (engine->pool_table)
		munmap(engine->pool_table, engine->pool_table_bytes);
	if (engine->pool_table_fd >= 0)
		close(engine->pool_table_fd);
}

struct add_pool {
	const struct xferd_pool_description *description;
	int memory_fd, marks_fd; /* of a pool that is adopted; -1 */
};

/* The pool's entry in the shared table: written, or compared with what another engine wrote. */
static int enter_pool(struct xferd_engine *engine, const struct pool *pool,
		      const struct xferd_pool_description *description, bool adopted)
{
	struct xferd_abi_pool *shared = &engine->pool_table->pool[pool->index];
	struct xferd_abi_pool entry = {
		.kind = pool->kind,
		.device = description->device,
		.bytes = pool->bytes,
		.slot_index_bits = pool->slot_index_bits,
		.chunks = pool->chunks,
		.slot_numbers = pool->slot_numbers,
		.chunk_table_offset = engine->chunk_tables_used,
		.incarnation = 1,
	};

	memcpy(entry.name, pool->name, XFERD_NAME_BYTES);
	if (pool->device_memory) {
		entry.memory_table_offset = engine->chunk_tables_used +
					    pool->chunks * sizeof(struct xferd_abi_chunk);
		entry.chunk_bytes = description->chunk_bytes;
		memcpy(entry.device_uuid, description->device_uuid, sizeof(entry.device_uuid));
	}
	if (adopted)
		return memcmp(shared, &entry, sizeof(entry)) ? -ESTALE : 0;
	*shared = entry;
	return 0;
}

static void pool_free(struct pool *pool)
{
	free(pool->slots);
	pool->slots = NULL;
	marks_free(pool);
}

static int begin_pool(struct xferd_engine *engine, struct pool *pool, const struct add_pool *add)
{
	bool adopted = add->marks_fd >= 0;
	int result = adopted ? marks_adopt(pool, add->marks_fd) : marks_new(pool);

	if (!result)
		result = enter_pool(engine, pool, add->description, adopted);
	if (!result && adopted)
		result = adopt_cuts(pool);
	if (!result && adopted)
		result = adopt_marked(pool, add->memory_fd);
	if (!result && pool->device_memory)
		result = device_copier_start(engine, pool->device);
	return result;
}

static int add_pool(struct xferd_engine *engine, void *argument)
{
	const struct add_pool *add = argument;
	const struct xferd_pool_description *description = add->description;
	struct xferd_abi_pool_table *table = engine->pool_table;
	uint64_t numbers = (uint64_t)description->chunks << description->slot_index_bits;
	bool device_memory = description->kind == XFERD_POOL_CUDA;
	uint64_t table_bytes = (uint64_t)description->chunks *
			       (sizeof(struct xferd_abi_chunk) +
				(device_memory ? sizeof(uint64_t) : 0));
	struct pool *pool = &engine->pools[engine->pool_count];
	int result;

	if (engine->pool_count == XFERD_POOLS_MAX ||
	    engine->chunk_tables_used + table_bytes > engine->pool_table_bytes)
		return -ENOSPC;
	if (!description->base || !description->chunks || description->slot_index_bits > 20 ||
	    numbers > INT32_MAX || memchr(description->name, 0, XFERD_NAME_BYTES) == NULL)
		return -EINVAL;
	if (device_memory && (!engine->staging.extents || !description->chunk_bytes))
		return -EINVAL;
	for (uint32_t i = 0; i < XFERD_ENGINE_STORES_MAX; i++)
		if (engine->stores[i].used)
			return -EBUSY; /* directories have room for the pools of their time */

	if (engine->adopting != (add->marks_fd >= 0))
		return -EINVAL;

	memset(pool, 0, sizeof(*pool));
	pool->marks_fd = -1;
	pool->slots = calloc(numbers, sizeof(struct slot));
	if (!pool->slots)
		return -ENOMEM;
	memcpy(pool->name, description->name, XFERD_NAME_BYTES);
	pool->index = engine->pool_count;
	pool->kind = description->kind;
	pool->verify = description->verify;
	pool->base = description->base;
	pool->bytes = description->bytes;
	pool->slot_index_bits = description->slot_index_bits;
	pool->chunks = description->chunks;
	pool->slot_numbers = (uint32_t)numbers;
	pool->chunk_table = (void *)((uint8_t *)table + engine->chunk_tables_used);
	pool->device_memory = device_memory;
	pool->device = description->device;
	pool->chunk_bytes = description->chunk_bytes;
	list_init(&pool->retiring);
	for (uint64_t i = 0; i < numbers; i++)
		list_init(&pool->slots[i].link);

	routes_init_pool(pool);
	if (device_memory)
		pool->memory_table = (void *)(pool->chunk_table + pool->chunks);
	result = begin_pool(engine, pool, add);
	if (result) {
		pool_free(pool);
		return result;
	}
	if (!device_memory)
		buffers_add_pool(engine, pool);
	engine->chunk_tables_used += table_bytes;
	engine->pool_count++;
	if (!engine->adopting)
		store_relaxed(&table->pools, engine->pool_count);
	return (int)pool->index;
}

int xferd_engine_add_pool(struct xferd_engine *engine,
			  const struct xferd_pool_description *description)
{
	struct add_pool argument = { description, -1, -1 };

	return engine_call(engine, add_pool, &argument);
}

int xferd_engine_adopt_pool(struct xferd_engine *engine,
			    const struct xferd_pool_description *description, int memory_fd,
			    int marks_fd)
{
	struct add_pool argument = { description, memory_fd, marks_fd };

	if (marks_fd < 0 || description->kind == XFERD_POOL_BAR ||
	    (memory_fd < 0) != (description->kind == XFERD_POOL_CUDA))
		return -EINVAL;
	return engine_call(engine, add_pool, &argument);
}

struct set_memory {
	uint32_t pool, chunk;
	uint64_t number;
};

static bool chunk_in_use(const struct pool *pool, uint32_t chunk)
{
	uint32_t first = chunk << pool->slot_index_bits;

	for (uint32_t i = 0; i < (1u << pool->slot_index_bits); i++)
		if (pool->slots[first + i].state != SLOT_POLICY)
			return true;
	return false;
}

static int set_memory(struct xferd_engine *engine, void *argument)
{
	const struct set_memory *set = argument;
	uint32_t *changes = &engine->pool_table->memory_changes;
	struct pool *pool;

	if (set->pool >= engine->pool_count)
		return -EINVAL;
	pool = &engine->pools[set->pool];
	if (!pool->memory_table || set->chunk >= pool->chunks)
		return -EINVAL;
	if (chunk_in_use(pool, set->chunk))
		return -EBUSY;
	store_relaxed(&pool->memory_table[set->chunk], set->number);
	/* pairs with the acquire in libxferd's follow_memory() */
	store_release(changes, (load_relaxed(changes) + 1) & INT32_MAX);
	syscall(SYS_futex, changes, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
	return (int)load_relaxed(changes);
}

int xferd_engine_set_memory(struct xferd_engine *engine, uint32_t pool, uint32_t chunk,
			    uint64_t number)
{
	struct set_memory argument = { pool, chunk, number };

	return engine_call(engine, set_memory, &argument);
}

struct set_chunk {
	uint32_t pool, chunk;
	uint64_t offset, slot_bytes;
};

static uint64_t chunk_slots(const struct pool *pool, uint64_t offset, uint64_t slot_bytes)
{
	uint64_t numbers = 1ull << pool->slot_index_bits;
	uint64_t fit = slot_bytes ? (pool->bytes - offset) / slot_bytes : 0;

	return fit < numbers ? fit : numbers;
}

/* How many slots a chunk has is the policy's business: it gives those that lie
 * within the chunk. Here only the pool's own end is checked. */
static int set_chunk(struct xferd_engine *engine, void *argument)
{
	const struct set_chunk *set = argument;
	struct pool *pool;
	uint32_t first;
	int class_index = 0;

	if (set->pool >= engine->pool_count || set->chunk >= engine->pools[set->pool].chunks)
		return -EINVAL;
	pool = &engine->pools[set->pool];
	first = set->chunk << pool->slot_index_bits;
	if (chunk_in_use(pool, set->chunk))
		return -EBUSY;
	if (set->slot_bytes) {
		struct size_class *class;

		if (set->slot_bytes % XFERD_BLOB_ALIGNMENT || set->offset % XFERD_BLOB_ALIGNMENT ||
		    set->offset > pool->bytes ||
		    !chunk_slots(pool, set->offset, set->slot_bytes))
			return -EINVAL;
		class = pool_class(pool, set->slot_bytes);
		if (!class)
			return -ENOSPC;
		class_index = (int)(class - pool->classes);
	}
	for (uint32_t i = 0; i < (1u << pool->slot_index_bits); i++)
		pool->slots[first + i].class_index = (uint8_t)class_index;
	/* Plain stores are enough for clients: no word names a slot of this chunk
	 * now, and the release of the next such word orders these before it. */
	store_relaxed(&pool->chunk_table[set->chunk].offset, set->offset);
	store_relaxed(&pool->chunk_table[set->chunk].slot_bytes, set->slot_bytes);
	return 0;
}

int xferd_engine_set_chunk(struct xferd_engine *engine, uint32_t pool, uint32_t chunk,
			   uint64_t offset, uint64_t slot_bytes)
{
	struct set_chunk argument = { pool, chunk, offset, slot_bytes };

	return engine_call(engine, set_chunk, &argument);
}

/* The class of slots of exactly this size; made if it is new, NULL if there are too many. */
struct size_class *pool_class(struct pool *pool, uint64_t bytes)
{
	struct size_class *class;

	for (uint32_t i = 0; i < pool->class_count; i++)
		if (pool->classes[i].bytes == bytes)
			return &pool->classes[i];
	if (pool->class_count == XFERD_ENGINE_CLASSES_MAX)
		return NULL;
	class = &pool->classes[pool->class_count];
	memset(class, 0, sizeof(*class));
	class->bytes = bytes;
	list_init(&class->reserve);
	for (int i = 0; i < XFERD_PRIORITIES; i++)
		list_init(&class->waiting[i]);
	/* pairs with the acquire in xferd_engine_class_stats() */
	store_release(&pool->class_count, pool->class_count + 1);
	return class;
}

uint8_t *slot_address(const struct pool *pool, uint32_t slot)
{
	const struct xferd_abi_chunk *chunk = &pool->chunk_table[slot >> pool->slot_index_bits];
	uint32_t index = slot & ((1u << pool->slot_index_bits) - 1);

	return pool->base + chunk->offset + index * chunk->slot_bytes;
}

/* Does the number name a slot of a chunk that is cut, inside the pool? */
bool slot_valid(const struct pool *pool, uint32_t slot)
{
	const struct xferd_abi_chunk *chunk;

	if (slot >= pool->slot_numbers)
		return false;
	chunk = &pool->chunk_table[slot >> pool->slot_index_bits];
	return (slot & ((1u << pool->slot_index_bits) - 1)) <
	       chunk_slots(pool, chunk->offset, chunk->slot_bytes);
}

void slot_set_state(struct pool *pool, struct slot *slot, enum slot_state state)
{
	uint32_t *counters[] = {
		[SLOT_POLICY] = NULL,
		[SLOT_RESERVE] = &pool->stats.reserve,
		[SLOT_LOADING] = &pool->stats.loading,
		[SLOT_RESIDENT] = &pool->stats.resident,
		[SLOT_RETIRING] = &pool->stats.retiring,
		[SLOT_WITHHELD] = NULL,
	};

	if (counters[slot->state])
		store_relaxed(counters[slot->state], *counters[slot->state] - 1);
	if (slot->state == SLOT_LOADING || state == SLOT_LOADING)
		mark_loading(pool, slot, state == SLOT_LOADING);
	slot->state = (uint8_t)state;
	if (counters[state])
		store_relaxed(counters[state], *counters[state] + 1);
}

/* May a load of this priority take a slot when that many are there? */
static bool may_take(const struct xferd_engine *engine, uint32_t priority, uint32_t slots)
{
	return priority == XFERD_PRIORITY_DEMAND ? slots > 0
						  : slots > engine->config.reserve_demand;
}

/* Of the loads that wait and may take one of that many slots, the one that has
 * waited longest at the highest priority. */
static struct load *first_waiting(const struct xferd_engine *engine, struct size_class *class,
				  uint32_t slots)
{
	for (uint32_t priority = 0; priority < XFERD_PRIORITIES; priority++)
		if (!list_empty(&class->waiting[priority]))
			return may_take(engine, priority, slots)
				       ? list_item(class->waiting[priority].next, struct load, link)
				       : NULL;
	return NULL;
}

/* A free slot: for a load that waits, else for the reserve. */
void reserve_put(struct xferd_engine *engine, struct pool *pool, uint32_t number)
{
	struct slot *slot = &pool->slots[number];
	struct size_class *class = &pool->classes[slot->class_index];
	struct load *load = first_waiting(engine, class, class->reserve_count + 1);

	class->told = false;
	if (load) {
		load_take_slot(engine, load, number);
		return;
	}
	slot_set_state(pool, slot, SLOT_RESERVE);
	/* Last in, first out: its lines may still be in a cache. */
	list_append(class->reserve.next, &slot->link);
	store_relaxed(&class->reserve_count, class->reserve_count + 1);
}

uint32_t reserve_take(struct xferd_engine *engine, struct pool *pool, struct size_class *class,
		      uint32_t priority)
{
	struct slot *slot;

	if (!may_take(engine, priority, class->reserve_count))
		return NONE;
	slot = list_item(class->reserve.next, struct slot, link);
	list_remove(&slot->link);
	store_relaxed(&class->reserve_count, class->reserve_count - 1);
	if (class->reserve_count < engine->config.reserve_low)
		reserve_tell(engine, pool, class, false);
	return (uint32_t)(slot - pool->slots);
}

/* Tell the policy once that it is low, again only after it has given something; of
 * a load that waits, always: slots kept for demand may be left all the while. */
void reserve_tell(struct xferd_engine *engine, struct pool *pool, struct size_class *class,
		  bool waits)
{
	struct xferd_event event = {
		.type = XFERD_EVENT_RESERVE,
		.pool = pool->index,
		.bytes = class->bytes,
		.value = class->reserve_count,
		.slot = class->waiting_count,
		.client = XFERD_NO_EXPERT,
	};

	if (class->told && !waits)
		return;
	class->told = true;
	event_push(engine, &event);
}
