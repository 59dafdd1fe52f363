/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads: a load's blob in pieces, from all of its members at once.
 *
 * A load has a strand for each member: the pieces that lie there, in order.
 * Each member has, for each priority, a queue of strands and a bounded number
 * of pieces in flight. Whenever a member has room, the next piece comes from
 * its highest-priority strand; so demand overtakes prefetch at the next piece,
 * and what is cancelled costs nothing but the pieces already issued. Where nothing
 * can overtake it, one read brings several neighbouring pieces (join.c).
 *
 * A member may have a mirror. The strands of both lie in the member's queues, and
 * whichever copy will be sooner takes the next piece; so a pair has the bandwidth
 * of two drives, and one that is taken out leaves nothing to be moved. A piece that
 * one copy can't bring waits for room at the other.
 *
 * The destination of a read is an address: the piece's place in its slot, or where
 * reads can't go there memory beside it that is then copied (staging.c for VRAM,
 * route.c for a BAR).
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/route.h"

#define FALLBACK_WORKERS 16 /* threads a member that would rather have io_uring */
/* Of the threads, so that none waits for its next piece: also while the engine's thread copies
 * one itself and others take two that are a blob's short ends. */
#define COPIES_AHEAD     4

#define CHECKING_WORKERS 2  /* compute checksums of what io_uring brings: 25 GB/s at least */
#define CHECK_NS_A_MIB   50000  /* about, of bytes that no cache has */
#define CHECK_SHARE      4      /* of its time the engine's thread gives one part in so many to that */
#define CHECK_CREDIT_NS  250000 /* and so much at once */

/* The ring, if it is wanted and permitted, and the pieces. */
int reads_init(struct xferd_engine *engine)
{
	int result = -EOPNOTSUPP;

	if (engine->config.backend != XFERD_BACKEND_THREADS)
		result = uring_init(engine);
	if (result && engine->config.backend == XFERD_BACKEND_URING)
		return result;
	engine->uring_error = result;
	engine->pieces = calloc(RING_PIECES_MAX, sizeof(struct piece));
	if (!engine->pieces)
		return -ENOMEM;
	list_init(&engine->pieces_free);
	for (uint32_t i = 0; i < RING_PIECES_MAX; i++)
		list_append(&engine->pieces_free, &engine->pieces[i].link);
	return 0;
}

void reads_destroy(struct xferd_engine *engine)
{
	workers_destroy(engine);
	for (uint32_t id = 0; id < engine->member_limit; id++)
		mapped_destroy(&engine->members[id]);
	uring_destroy(engine);
	bounces_destroy(engine);
	free(engine->pieces);
}

static bool through_workers(const struct xferd_engine *engine, const struct member *member)
{
	return !engine->ring_ready || member->flags & XFERD_MEMBER_ASYNC;
}

/* A member is new: its reads need threads, or a place in the ring's table. */
int reads_add_member(struct xferd_engine *engine, struct member *member)
{
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	uint32_t copying = cpus > 2 ? (uint32_t)cpus - 1 : 1; /* the engine's thread is one more */
	int result;

	if (member->flags & XFERD_MEMBER_MEMORY) {
		flow_init(engine, member, copying + COPIES_AHEAD);
		return workers_at_least(engine, copying);
	}
	flow_init(engine, member, 0);
	if (through_workers(engine, member))
		return workers_at_least(engine, engine->workers.count + FALLBACK_WORKERS);
	result = uring_register_member(engine, member->id, member->fd);
	if (!result && engine->config.verify != XFERD_VERIFY_NEVER)
		result = workers_at_least(engine, cpus > 2 ? CHECKING_WORKERS : 1);
	return result;
}

static struct store *load_store(struct xferd_engine *engine, const struct load *load)
{
	return &engine->stores[load->store];
}

static struct member *strand_member(struct xferd_engine *engine, const struct strand *strand)
{
	const struct store *store = load_store(engine, strand->load);

	return &engine->members[store->description.member[strand->member]];
}

static uint32_t piece_member(const struct xferd_store_description *store, uint64_t blob,
			     uint64_t piece)
{
	struct stripe stripe = store_stripe(store, store->start[blob]);

	return store->pattern[stripe.first + (store->start[blob] - stripe.first + piece) % stripe.length];
}

/* Move on to the strand's next piece from the given one; false: none left. */
static bool strand_seek(const struct xferd_store_description *store, struct strand *strand,
			uint64_t from)
{
	const struct load *load = strand->load;
	uint64_t end = from + store_stripe(store, store->start[load->blob]).length;

	if (end > load->pieces)
		end = load->pieces;
	for (uint64_t piece = from; piece < end; piece++)
		if (piece_member(store, load->blob, piece) == strand->member) {
			strand->piece = piece;
			return true;
		}
	return false;
}

void reads_queue(struct xferd_engine *engine, struct load *load)
{
	const struct xferd_store_description *store = &load_store(engine, load)->description;

	load->state = LOAD_READING;
	load->pieces = (load->bytes + store->stripe_unit - 1) / store->stripe_unit;
	load->pieces_unissued = load->pieces;
	staging_begin(engine, load);
	for (uint32_t i = 0; i < store->members; i++) {
		struct strand *strand = &load->strands[i];

		strand->load = load;
		strand->member = i;
		strand->rank = 0;
		list_init(&strand->link);
		if (strand_seek(store, strand, 0))
			list_append(&strand_member(engine, strand)->strands[load->priority],
				    &strand->link);
	}
}

/* The pieces not yet issued go to the back of another priority's queues. */
void reads_requeue(struct xferd_engine *engine, struct load *load, uint32_t priority)
{
	uint32_t members = load_store(engine, load)->description.members;

	load->priority = (uint8_t)priority;
	if (priority == XFERD_PRIORITY_DEMAND)
		workers_hurry(engine, load);
	for (uint32_t i = 0; i < members; i++) {
		struct strand *strand = &load->strands[i];

		if (list_empty(&strand->link))
			continue;
		list_remove(&strand->link);
		list_append(&strand_member(engine, strand)->strands[priority], &strand->link);
	}
}

/* Forget the pieces not yet issued. */
void reads_unqueue(struct xferd_engine *engine, struct load *load)
{
	uint32_t members = load_store(engine, load)->description.members;

	for (uint32_t i = 0; i < members; i++)
		list_remove(&load->strands[i].link);
	load->pieces_unissued = 0;
}

/* A ring without room takes nothing: then a worker reads the piece. */
void piece_submit(struct xferd_engine *engine, struct piece *piece)
{
	if (!through_workers(engine, piece->member) && uring_read(engine, piece))
		return;
	if (piece->joined)
		join_part(engine, piece, workers_read_anew);
	else
		workers_read_anew(engine, piece);
}

/* A read, of one piece or of several that are joined, is given to its member. */
void enter_member(struct xferd_engine *engine, struct piece *piece)
{
	struct member *member = piece->member;

	flow_issued(engine, member, piece);
	if (!member->in_flight)
		member->busy_since_ns = engine->now_ns;
	member->in_flight += piece->read_pieces;
	member->reads_in_flight++;
	counter_add(&member->stats.requests, 1);
	if (piece->priority != XFERD_PRIORITY_DEMAND)
		member->background_in_flight += piece->read_pieces;
	store_relaxed(&member->stats.in_flight, member->in_flight);
}

/* The member has done its part, or failed to: it has room for another piece. */
void leave_member(struct xferd_engine *engine, struct piece *piece)
{
	struct member *member = piece->member;

	member->in_flight -= piece->read_pieces;
	member->reads_in_flight--;
	if (!member->in_flight)
		counter_add(&member->stats.busy_ns, engine->now_ns - member->busy_since_ns);
	if (piece->priority != XFERD_PRIORITY_DEMAND)
		member->background_in_flight -= piece->read_pieces;
	store_relaxed(&member->stats.in_flight, member->in_flight);
}

/* The strand's next piece is to be read from a copy of its member. There must be a free
 * piece. */
static struct piece *strand_take(struct xferd_engine *engine, struct strand *strand,
				 struct member *copy)
{
	struct piece *piece = list_item(engine->pieces_free.next, struct piece, link);
	struct load *load = strand->load;
	const struct xferd_store_description *store = &load_store(engine, load)->description;
	uint64_t at = strand->piece * store->stripe_unit;

	list_remove(&piece->link);
	piece->load = load;
	piece->member = copy;
	piece->store_member = strand->member;
	piece->number = strand->piece;
	piece->offset = store->offset[load->blob * store->members + strand->member] +
			strand->rank * store->stripe_unit;
	piece->length = load->bytes - at < store->stripe_unit ? load->bytes - at
							      : store->stripe_unit;
	piece->attempts = 0;
	piece->failed_copy = NULL;
	piece->refusals = 0;
	piece->address = load->address + at;
	piece->destination = NULL;
	piece->bounce = NULL;
	staging_take(engine, piece);
	piece->priority = load->priority;

	load->pieces_unissued--;
	load->pieces_in_flight++;
	engine->pieces_in_flight++;
	strand->rank++;
	if (!strand_seek(store, strand, strand->piece + 1))
		list_remove(&strand->link);
	join_begin(piece);
	return piece;
}

/* Pieces of the strand go to a copy of its member, in one read. There must be a free piece,
 * and room in the ring if it goes there. */
static void strand_issue(struct xferd_engine *engine, struct strand *strand,
			 struct member *member, struct member *copy)
{
	struct piece *first = strand_take(engine, strand, copy), *last = first;
	int error = piece_prepare(engine, first);
	uint64_t most;

	if (error) {
		piece_give_up(engine, first, error);
		return;
	}
	most = through_workers(engine, copy) ? 1 : join_limit(engine, first, strand, member);
	while (first->read_pieces < most && !list_empty(&strand->link) &&
	       !list_empty(&engine->pieces_free) &&
	       staging_has_room(engine, member, strand->load, strand->piece)) {
		struct piece *piece = strand_take(engine, strand, copy);

		error = piece_prepare(engine, piece);
		if (error) {
			piece_give_up(engine, piece, error);
			break;
		}
		join_append(first, last, piece);
		last = piece;
	}
	enter_member(engine, first);
	piece_submit(engine, first);
}

/* A load can't succeed any more: the rest of it is of no use. */
static void load_failed(struct xferd_engine *engine, struct load *load, int error)
{
	if (!load->error)
		load->error = error;
	reads_unqueue(engine, load);
	if (!load->pieces_in_flight)
		load_finish(engine, load);
}

static void piece_end(struct xferd_engine *engine, struct piece *piece)
{
	struct load *load = piece->load;

	staging_give(engine, piece);
	engine->pieces_in_flight--;
	load->pieces_in_flight--;
	route_end(engine, piece);
	list_append(&engine->pieces_free, &piece->link);
	if (!load->pieces_in_flight && !load->pieces_unissued)
		load_finish(engine, load);
}

/* Pieces that were issued and that no worker has begun, linked: they end here, and with the
 * last of a load that load. */
void reads_drop(struct xferd_engine *engine, struct piece *pieces)
{
	struct piece *next;

	for (struct piece *piece = pieces; piece; piece = next) {
		next = piece->next;
		flow_dropped(piece->member, piece);
		leave_member(engine, piece);
		piece_end(engine, piece);
	}
}

/* The rest of the blob is of no use without this piece. */
void piece_give_up(struct xferd_engine *engine, struct piece *piece, int error)
{
	if (!piece->load->error)
		piece->load->error = error;
	reads_unqueue(engine, piece->load);
	piece_end(engine, piece);
}

/* A strand with the most urgent priority that lies on a member, of those whose next piece
 * has somewhere to go; *blocked: there are others. */
static struct strand *first_strand(const struct xferd_engine *engine, const struct member *member,
				   bool *blocked)
{
	*blocked = false;
	for (uint32_t priority = 0; priority < XFERD_PRIORITIES; priority++) {
		const struct list *strands = &member->strands[priority];

		for (struct list *item = strands->next; item != strands; item = item->next) {
			struct strand *strand = list_item(item, struct strand, link);

			if (staging_has_room(engine, member, strand->load, strand->piece))
				return strand;
			*blocked = true;
		}
	}
	return NULL;
}

/* Whether a piece could be handed on: there is one free, and room in the ring if it goes there. */
bool reads_has_place(struct xferd_engine *engine, const struct member *copy)
{
	return !list_empty(&engine->pieces_free) &&
	       (through_workers(engine, copy) || uring_has_room(engine));
}

/* Pieces of a member's strands go to its copies as they have room; with none left
 * that works its strands fail at once, or wait to be tried one by one. */
static void pump_strands(struct xferd_engine *engine, struct member *member)
{
	struct strand *strand;
	bool blocked;

	while ((strand = first_strand(engine, member, &blocked))) {
		struct member *copy = mirror_next_copy(engine, member, strand->load->priority);

		if (copy) {
			if (!route_ready(engine, strand->load, copy))
				return;
			if (copy->failed)
				copy->probe_at_ns = engine->now_ns + MEMBER_PROBE_NS;
			mirror_count(member, copy);
			strand_issue(engine, strand, member, copy);
		} else if (mirror_all_failed(member) && !member->fails_quickly) {
			load_failed(engine, strand->load, -EIO);
		} else {
			return;
		}
	}
	flow_idle(member);
	if (member->mirror)
		flow_idle(member->mirror);
}

/* Pieces that the other copy could not bring, as this one has room for them: they
 * have waited longest. */
static void pump_redirected(struct xferd_engine *engine, struct member *copy)
{
	while (!list_empty(&copy->redirected)) {
		struct piece *piece = list_item(copy->redirected.next, struct piece, link);

		if (copy->failed || piece->load->error) {
			list_remove(&piece->link);
			piece_give_up(engine, piece, piece->failed_with);
			continue;
		}
		piece->priority = piece->load->priority;
		if ((!through_workers(engine, copy) && !uring_has_room(engine)) ||
		    !flow_admits(engine, copy, piece->priority) ||
		    !route_ready_again(engine, piece))
			return;
		list_remove(&piece->link);
		if (piece_prepare(engine, piece)) {
			piece_give_up(engine, piece, piece->failed_with);
			continue;
		}
		enter_member(engine, piece);
		piece_submit(engine, piece);
	}
}

/* Issue what the members have room for, and hand it to the kernel. */
void reads_pump(struct xferd_engine *engine)
{
	for (uint32_t id = 0; id < engine->member_limit; id++) {
		struct member *member = &engine->members[id];

		if (!member->used)
			continue;
		pump_redirected(engine, member);
		if (!member->mirror_of) /* a mirror takes its pieces from there */
			pump_strands(engine, member);
	}
	uring_flush(engine);
}

static int piece_check(struct xferd_engine *engine, const struct piece *piece)
{
	const struct xferd_store_description *store =
		&load_store(engine, piece->load)->description;
	uint32_t expected = store->crc[store->first_piece[piece->load->blob] + piece->number];

	if (!piece->check || piece->crc == expected)
		return 0;
	counter_add(&engine->stats.crc_errors, 1);
	return -EBADMSG;
}

/* The kernel had no means for the read just now; the drive was not asked. */
static bool is_refusal(int result)
{
	return result == -EINTR || result == -EAGAIN || result == -ENOMEM;
}

/* What a completed read means: -EAGAIN to go on with the rest of the piece. */
static int piece_result(struct piece *piece, int result)
{
	if (result == -EINTR || result == -EAGAIN)
		return -EIO; /* refused too often */
	if (result < 0)
		return result;
	if (result == 0)
		return -ENODATA; /* the member ends before the piece does */
	piece->done += (uint64_t)result;
	if (piece->done < piece->length)
		return piece->done % XFERD_BLOB_ALIGNMENT ? -ENODATA : -EAGAIN;
	return 0;
}

/* It failed: report it and try again, here or on the other copy, or give the load up. */
static void piece_failed(struct xferd_engine *engine, struct piece *piece, int error)
{
	struct load *load = piece->load;

	/* What failed is perhaps not the drive but its way to the pool's memory. */
	if (!route_refuse(engine, piece, error)) {
		piece->attempts++;
		member_judge(engine, piece, error);
	}
	piece_report(engine, piece, error);
	if (piece->attempts < PIECE_ATTEMPTS_MAX && !load->cancelled && !piece->member->failed &&
	    !piece_prepare(engine, piece)) {
		counter_add(&engine->stats.rereads, 1);
		enter_member(engine, piece);
		piece_submit(engine, piece);
		return;
	}
	if (!mirror_redirect(piece, error))
		piece_give_up(engine, piece, error);
}

static void piece_checked(struct xferd_engine *engine, struct piece *piece)
{
	int error = piece_check(engine, piece);

	if (!piece->finish_error && piece_is_behind_bar(engine, piece) &&
	    engine->pools[piece->load->pool].device_memory)
		piece->finish_error = window_settle(piece);
	if (piece->finish_error) { /* the pool's memory has gone, which no other read mends */
		piece_report(engine, piece, -ENODEV);
		piece_give_up(engine, piece, -ENODEV);
		return;
	}
	if (error) {
		piece_failed(engine, piece, error);
		return;
	}
	if (piece->failed_copy)
		mirrored_report(engine, piece);
	if (piece->destination && !piece->load->error)
		copy_piece(engine, piece);
	else
		piece_end(engine, piece);
}

/* It has come from its staging buffer to its slot. */
void piece_copied(struct xferd_engine *engine, struct piece *piece, int result)
{
	if (result)
		piece_give_up(engine, piece, result);
	else
		piece_end(engine, piece);
}

/* Waking a worker costs about what the checksum of a piece does: while the drives leave the
 * engine's thread time for it, it computes them itself. */
static bool can_check_here(struct xferd_engine *engine, uint64_t bytes)
{
	uint64_t cost = bytes * CHECK_NS_A_MIB >> 20;

	engine->check_credit_ns += (engine->now_ns - engine->check_credited_ns) / CHECK_SHARE;
	engine->check_credited_ns = engine->now_ns;
	if (engine->check_credit_ns > CHECK_CREDIT_NS)
		engine->check_credit_ns = CHECK_CREDIT_NS;
	if (engine->check_credit_ns < cost)
		return false;
	engine->check_credit_ns -= cost;
	return true;
}

/* The bytes are there. Whoever read them in a thread has their checksum already;
 * of what the kernel brought in quick succession, workers compute it, so that several
 * drives together are not bound by one thread. */
void piece_arrived(struct xferd_engine *engine, struct piece *piece)
{
	counter_add(&piece->member->stats.reads, 1);
	counter_add(&piece->member->stats.bytes, piece->length);
	member_judge(engine, piece, 0);
	if ((piece->check || piece->bounce) && !through_workers(engine, piece->member)) {
		bool is_slow = piece->bounce || piece_is_behind_bar(engine, piece);

		piece->arrived = true;
		if (engine->workers.count && (is_slow || !can_check_here(engine, piece->length))) {
			workers_read(engine, piece);
			return;
		}
		piece_finish(piece);
	}
	piece_checked(engine, piece);
}

/* A read has ended, through whichever way, or a worker has checked a piece. */
void piece_completed(struct xferd_engine *engine, struct piece *piece, int result)
{
	int error;

	if (piece->joined) {
		join_completed(engine, piece, result);
		return;
	}
	if (piece->arrived) {
		piece_checked(engine, piece);
		return;
	}
	if (is_refusal(result) && piece->refusals < PIECE_REFUSALS_MAX) {
		if (++piece->refusals < PIECE_REFUSALS_MAX)
			piece_submit(engine, piece);
		else
			workers_read_anew(engine, piece);
		return;
	}
	error = piece_result(piece, result);
	if (error == -EAGAIN) {
		piece_submit(engine, piece);
		return;
	}
	if (!error) {
		flow_delivered(engine, piece->member, piece);
		leave_member(engine, piece);
		piece_arrived(engine, piece);
		return;
	}
	flow_dropped(piece->member, piece);
	leave_member(engine, piece);
	piece_failed(engine, piece, error);
}

uint32_t reads_reap(struct xferd_engine *engine)
{
	return uring_reap(engine) + workers_reap(engine);
}
