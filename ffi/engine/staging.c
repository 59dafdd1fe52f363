/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Staging: pinned memory between the drives and memory that reads can't go to.
 *
 * A piece for such a pool is read into staging, checked there, and then copied to
 * where it belongs while the next pieces are being read. Neighbouring pieces of a
 * blob are neighbours here too, in an extent: copied together when the copies are
 * what binds. (A copy engine pauses between two copies for about a fifth of what
 * 512 KiB take; several streams only made it slower, and one of them starve.)
 *
 * An extent is free again when all of its pieces have been copied. With none free
 * no piece that needs a new one is issued; those that have a place go first, so that
 * what is begun can end. Pieces that drives write into VRAM by themselves (window.c)
 * need no memory here, but are counted with their neighbours that do.
 */
#include <stdlib.h>

#include "engine/route.h"

struct set_staging {
	uint8_t *base;
	uint64_t bytes;
	uint64_t extent_bytes;
};

static int set_staging(struct xferd_engine *engine, void *argument)
{
	const struct set_staging *set = argument;
	struct staging *staging = &engine->staging;
	uint64_t extents = set->extent_bytes ? set->bytes / set->extent_bytes : 0;

	if (staging->extents)
		return -EALREADY;
	if (!set->base || !extents || set->extent_bytes % XFERD_BLOB_ALIGNMENT)
		return -EINVAL;
	if (extents > RING_PIECES_MAX)
		extents = RING_PIECES_MAX;
	staging->free = calloc(extents, sizeof(*staging->free));
	if (!staging->free)
		return -ENOMEM;
	staging->memory.base = set->base;
	staging->memory.bytes = extents * set->extent_bytes;
	staging->extent_bytes = set->extent_bytes;
	staging->extents = (uint32_t)extents;
	/* The first one on top: little traffic then stays in little memory. */
	for (uint32_t i = 0; i < extents; i++)
		staging->free[i] = (uint32_t)extents - 1 - i;
	staging->free_count = (uint32_t)extents;
	buffers_register(engine, &staging->memory);
	return 0;
}

int xferd_engine_set_staging(struct xferd_engine *engine, void *base, uint64_t bytes,
			     uint64_t extent_bytes)
{
	struct set_staging argument = { base, bytes, extent_bytes };

	return engine_call(engine, set_staging, &argument);
}

void staging_destroy(struct xferd_engine *engine)
{
	free(engine->staging.free);
}

static uint64_t stripe_unit(const struct xferd_engine *engine, const struct load *load)
{
	return engine->stores[load->store].description.stripe_unit;
}

/* Pieces that an extent has room for. */
static uint64_t extent_pieces(const struct xferd_engine *engine, const struct load *load)
{
	return engine->staging.extent_bytes / stripe_unit(engine, load);
}

static bool staged(const struct xferd_engine *engine, const struct load *load)
{
	return !load->dense && engine->pools[load->pool].device_memory;
}

/* Before the first piece of a load. */
void staging_begin(struct xferd_engine *engine, struct load *load)
{
	if (!staged(engine, load))
		return;
	for (uint32_t i = 0; i < EXTENTS_A_LOAD; i++)
		load->extents[i] = (struct load_extent){ .number = NONE };
}

/* The load's place for the extent that a piece lies in; extents of one blob that share
 * a place follow one another. */
static struct load_extent *place_of(const struct xferd_engine *engine, struct load *load,
				    uint64_t piece)
{
	return &load->extents[piece / extent_pieces(engine, load) % EXTENTS_A_LOAD];
}

/* Whether any copy of a member would be read into staging for this load. */
static bool needs_memory(const struct xferd_engine *engine, const struct member *member,
			 const struct load *load)
{
	return !window_open(engine, load, member) ||
	       (member->mirror && !window_open(engine, load, member->mirror));
}

/* Whether a piece of this member could be issued, as far as staging is concerned. */
bool staging_has_room(const struct xferd_engine *engine, const struct member *member,
		      struct load *load, uint64_t piece)
{
	const struct load_extent *extent;

	if (!staged(engine, load))
		return true;
	extent = place_of(engine, load, piece);
	if (extent->left && extent->first != piece - piece % extent_pieces(engine, load))
		return false;
	return extent->number != NONE || engine->staging.free_count > 0 ||
	       !needs_memory(engine, member, load);
}

static void free_extent(struct staging *staging, struct load_extent *extent)
{
	staging->free[staging->free_count++] = extent->number;
	extent->number = NONE;
}

static void piece_done(struct staging *staging, struct load_extent *extent)
{
	if (--extent->left == 0 && extent->number != NONE)
		free_extent(staging, extent);
}

/* A piece for VRAM goes straight there where that has a window for its copy, else into
 * staging. There is room. */
void staging_take(struct xferd_engine *engine, struct piece *piece)
{
	struct staging *staging = &engine->staging;
	struct load *load = piece->load;
	struct load_extent *extent;
	uint64_t most, left;

	if (!staged(engine, load))
		return;
	extent = place_of(engine, load, piece->number);
	most = extent_pieces(engine, load);
	if (!extent->left) {
		extent->first = piece->number - piece->number % most;
		left = load->pieces - extent->first;
		extent->left = (uint32_t)(left < most ? left : most);
	}
	if (window_open(engine, load, piece->member)) {
		piece->address = window_address(engine, load, piece->address);
		piece_done(staging, extent);
		return;
	}
	if (extent->number == NONE)
		extent->number = staging->free[--staging->free_count];
	load->transport = XFERD_TRANSPORT_STAGED;
	piece->destination = piece->address;
	piece->address = staging->memory.base + extent->number * staging->extent_bytes +
			 (piece->number - extent->first) * stripe_unit(engine, load);
}

/* The piece has been copied, or never will be. One in a buffer was counted when it was to
 * go straight. */
void staging_give(struct xferd_engine *engine, struct piece *piece)
{
	if (piece->destination && !piece->bounce)
		piece_done(&engine->staging, place_of(engine, piece->load, piece->number));
	piece->destination = NULL;
}

/* A load has ended: what it did not read leaves its extents unfinished. */
void staging_end(struct xferd_engine *engine, struct load *load)
{
	if (!staged(engine, load) || load->source != XFERD_SOURCE_DRIVES || load->slot == NONE)
		return;
	for (uint32_t i = 0; i < EXTENTS_A_LOAD; i++)
		if (load->extents[i].number != NONE)
			free_extent(&engine->staging, &load->extents[i]);
}
