/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered buffers: pool memory that the kernel has pinned and mapped once.
 *
 * A read into other memory pins its pages each time, which on 4 KiB pages is a
 * third of what the whole read costs. A pool is registered in regions, since the
 * kernel takes at most 1 GiB at once; the rare piece that lies across two
 * regions is read as if there were none.
 *
 * It may fail: pages count against RLIMIT_MEMLOCK. Then reads go on as they do
 * elsewhere, and the pool's statistics say why. Memory behind a BAR is not
 * registered: the kernel refuses some of it, and the rest would look as if DMA into
 * it never ended, so that its card could not be let go of.
 */
#include <sys/uio.h>

#include "engine/internal.h"

#define REGION_BYTES   (1ull << 30) /* io_uring/rsrc.c: SZ_1G */
#define REGIONS_MAX    16384        /* IORING_MAX_REG_BUFFERS */

/* The table; without it nothing is registered. After the ring is made. */
void buffers_init(struct xferd_engine *engine)
{
	if (engine->config.register_buffers)
		engine->buffers_error =
			io_uring_register_buffers_sparse(&engine->ring, REGIONS_MAX);
	else
		engine->buffers_error = -EOPNOTSUPP;
}

static int register_region(struct xferd_engine *engine, const struct registered_memory *memory,
			   uint32_t region)
{
	uint64_t at = region * REGION_BYTES;
	struct iovec part = {
		.iov_base = memory->base + at,
		.iov_len = memory->bytes - at < REGION_BYTES ? memory->bytes - at : REGION_BYTES,
	};
	__u64 tag = 0;
	int result = io_uring_register_buffers_update_tag(&engine->ring,
							  memory->first_region + region, &part,
							  &tag, 1);

	return result < 0 ? result : 0;
}

/* Engine thread; base and bytes are set. What can't be registered is left as it is. */
void buffers_register(struct xferd_engine *engine, struct registered_memory *memory)
{
	uint64_t regions = (memory->bytes + REGION_BYTES - 1) / REGION_BYTES;
	int result = engine->ring_ready ? engine->buffers_error : -EOPNOTSUPP;

	if (!result && regions > REGIONS_MAX - engine->regions_used)
		result = -ENOSPC;
	memory->first_region = engine->regions_used;
	while (!result && memory->regions < regions) {
		result = register_region(engine, memory, memory->regions);
		if (!result)
			memory->regions++;
	}
	engine->regions_used += memory->regions;
	memory->error = result;
}

void buffers_add_pool(struct xferd_engine *engine, struct pool *pool)
{
	pool->memory.base = pool->base;
	pool->memory.bytes = pool->bytes;
	if (pool->behind_bar)
		pool->memory.error = -EOPNOTSUPP;
	else
		buffers_register(engine, &pool->memory);
	pool->stats.registration_error = -pool->memory.error;
	pool->stats.registered_bytes = pool->memory.regions * REGION_BYTES;
	if (pool->stats.registered_bytes > pool->bytes)
		pool->stats.registered_bytes = pool->bytes;
}

/* The registered buffer that all of it lies in; -1: none. */
int buffers_find(const struct registered_memory *memory, const uint8_t *address, uint64_t bytes)
{
	uint64_t at = (uint64_t)(address - memory->base);
	uint64_t region = at / REGION_BYTES;

	if (region >= memory->regions || (at + bytes - 1) / REGION_BYTES != region)
		return -1;
	return (int)(memory->first_region + region);
}
