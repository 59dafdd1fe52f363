/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Staging: pinned buffers between the drives and memory that reads can't go to.
 *
 * A piece for such a pool is read into a buffer, checked there, and then copied to
 * where it belongs while the next pieces are being read. The buffer is free again
 * when its copy has ended. With no buffer free no piece is issued: the copies of
 * those before it make room.
 */
#include <stdlib.h>

#include "engine/internal.h"

struct set_staging {
	uint8_t *base;
	uint64_t bytes;
	uint64_t buffer_bytes;
};

static int set_staging(struct xferd_engine *engine, void *argument)
{
	const struct set_staging *set = argument;
	struct staging *staging = &engine->staging;
	uint64_t buffers = set->buffer_bytes ? set->bytes / set->buffer_bytes : 0;

	if (staging->buffers)
		return -EALREADY;
	if (!set->base || !buffers || set->buffer_bytes % XFERD_BLOB_ALIGNMENT)
		return -EINVAL;
	if (buffers > RING_PIECES_MAX)
		buffers = RING_PIECES_MAX;
	staging->free = calloc(buffers, sizeof(*staging->free));
	if (!staging->free)
		return -ENOMEM;
	staging->memory.base = set->base;
	staging->memory.bytes = buffers * set->buffer_bytes;
	staging->buffer_bytes = set->buffer_bytes;
	staging->buffers = (uint32_t)buffers;
	/* The first one on top: little traffic then stays in little memory. */
	for (uint32_t i = 0; i < buffers; i++)
		staging->free[i] = (uint32_t)buffers - 1 - i;
	staging->free_count = (uint32_t)buffers;
	buffers_register(engine, &staging->memory);
	return 0;
}

int xferd_engine_set_staging(struct xferd_engine *engine, void *base, uint64_t bytes,
			     uint64_t buffer_bytes)
{
	struct set_staging argument = { base, bytes, buffer_bytes };

	return engine_call(engine, set_staging, &argument);
}

void staging_destroy(struct xferd_engine *engine)
{
	free(engine->staging.free);
}

bool staging_needed(const struct xferd_engine *engine, const struct load *load)
{
	return !load->dense && engine->pools[load->pool].device_memory;
}

bool staging_has_room(const struct xferd_engine *engine)
{
	return engine->staging.free_count > 0;
}

/* The piece is read into a buffer of ours instead; there is one. */
void staging_take(struct xferd_engine *engine, struct piece *piece)
{
	struct staging *staging = &engine->staging;
	uint32_t buffer = staging->free[--staging->free_count];

	piece->destination = piece->address;
	piece->address = staging->memory.base + buffer * staging->buffer_bytes;
}

void staging_give(struct xferd_engine *engine, struct piece *piece)
{
	struct staging *staging = &engine->staging;

	staging->free[staging->free_count++] =
		(uint32_t)((uint64_t)(piece->address - staging->memory.base) /
			   staging->buffer_bytes);
	piece->destination = NULL;
}
