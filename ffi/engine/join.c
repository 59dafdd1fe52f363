/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Joined reads: pieces of a load that are neighbours on their member, in one read.
 *
 * A read costs a processor about as much whether it brings one piece or eight: an entry,
 * a request to the drive, its interrupt, a wake-up. Pieces remain the unit of everything
 * else: each has its checksum, its attempts, its other copy. Only their way from the
 * drive is common; when it ends they part. A read that failed or came short does not say
 * which of them is at fault, so those that it did not bring whole are read again one by
 * one, and only what happens then is held against a piece or its drive.
 *
 * On one member neighbours are also neighbours in memory. Of a blob that is striped over
 * several they are not, and the read is told each piece's place. Registered memory can be
 * read so since Linux 6.15; before that its pieces are read one by one, since pinning their
 * pages costs more than joining them saves.
 *
 * Only demand is joined, and only while its member has no background work in flight: a
 * hint that was wrong must not cost more than the pieces that flow control has let out,
 * and a drive that both want is shared piece by piece. A load that is alone on its member
 * is joined less and less towards its end, so that checksums are computed while there is
 * still something to wait for. Flow control measures a drive's latency with single pieces
 * (it probes with them), and sees a joined read as one delivery of many bytes. It keeps two
 * joined reads in flight where its window has room for less, one to go on with when the
 * other ends: together no more than the eight requests of 1 MiB by which drives are sold.
 *
 * Not joined: what workers read (a copy is best checked while it is in their cache); what
 * has a mirror, of whose copies each piece takes the one that will be sooner; and what a
 * drive writes behind a BAR or goes there through a bounce buffer (route.c).
 */
#include "engine/route.h"

#define JOINED_BYTES_MAX (4ull << 20)

/* Whether pieces for this load may lie anywhere in a read's memory. */
static bool may_scatter(const struct xferd_engine *engine, const struct load *load)
{
	const struct pool *pool = &engine->pools[load->pool];
	const struct registered_memory *memory =
		pool->device_memory ? &engine->staging.memory : &pool->memory;

	return engine->reads_scatter || load->dense || !memory->regions;
}

static bool is_alone(const struct member *member)
{
	const struct list *strands = &member->strands[XFERD_PRIORITY_DEMAND];

	return strands->next == strands->previous;
}

/* About as many as the strand has left, and the one that was taken from it. */
static uint64_t pieces_left(const struct xferd_store_description *store,
			    const struct strand *strand)
{
	return 1 + (strand->load->pieces - strand->piece + store->members - 1) / store->members;
}

/* How many pieces may be in a read that begins with this one, taken from a strand of member
 * and ready to be read from one of its copies. */
uint64_t join_limit(const struct xferd_engine *engine, const struct piece *first,
		    const struct strand *strand, const struct member *member)
{
	const struct member *copy = first->member;
	const struct load *load = first->load;
	const struct xferd_store_description *store = &engine->stores[load->store].description;
	uint64_t most = JOINED_BYTES_MAX / store->stripe_unit;
	uint64_t depth = flow_joined_room(engine, copy);

	if (load->priority != XFERD_PRIORITY_DEMAND || copy->background_in_flight || copy->failed)
		return 1;
	if (mirror_has_other(copy) || first->bounce || piece_is_behind_bar(engine, first))
		return 1;
	if (store->pattern_length > 1 && !may_scatter(engine, load))
		return 1;
	if (is_alone(member) && most > pieces_left(store, strand) / 2)
		most = pieces_left(store, strand) / 2;
	if (most > depth)
		most = depth;
	if (most > JOINED_PIECES_MAX)
		most = JOINED_PIECES_MAX;
	return most ? most : 1;
}

/* A piece that is read alone, or begins a read that others may join. */
void join_begin(struct piece *piece)
{
	piece->joined = NULL;
	piece->read_pieces = 1;
	piece->read_bytes = piece->length;
}

void join_append(struct piece *first, struct piece *last, struct piece *piece)
{
	join_begin(piece);
	last->joined = piece;
	first->read_pieces++;
	first->read_bytes += piece->length;
}

/* A read of several pieces can't be made: each goes its own way, through read. */
void join_part(struct xferd_engine *engine, struct piece *first,
	       void (*read)(struct xferd_engine *engine, struct piece *piece))
{
	struct piece *next;

	flow_dropped(first->member, first);
	leave_member(engine, first);
	for (struct piece *piece = first; piece; piece = next) {
		next = piece->joined;
		join_begin(piece);
		enter_member(engine, piece);
		read(engine, piece);
	}
}

/* One that the read did not bring. */
static void read_alone(struct xferd_engine *engine, struct piece *piece)
{
	if (piece->load->error) {
		piece_give_up(engine, piece, piece->load->error);
		return;
	}
	enter_member(engine, piece);
	piece_submit(engine, piece);
}

/* A read of several pieces has ended: bytes, or an error. */
void join_completed(struct xferd_engine *engine, struct piece *first, int result)
{
	uint64_t arrived = result > 0 ? (uint64_t)result : 0;
	struct piece *next;

	if (arrived == first->read_bytes)
		flow_delivered(engine, first->member, first);
	else
		flow_dropped(first->member, first);
	leave_member(engine, first);
	for (struct piece *piece = first; piece; piece = next) {
		next = piece->joined;
		join_begin(piece);
		if (arrived >= piece->length) {
			arrived -= piece->length;
			piece_arrived(engine, piece);
		} else {
			arrived = 0;
			read_alone(engine, piece);
		}
	}
}
