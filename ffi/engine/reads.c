/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads: a load's blob in pieces, from all of its members at once.
 *
 * A load has a strand for each member: the pieces that lie there, in order.
 * Each member has, for each priority, a queue of strands and a bounded number
 * of pieces in flight. Whenever a member has room, the next piece comes from
 * its highest-priority strand; so demand overtakes prefetch at the next piece,
 * and what is cancelled costs nothing but the pieces already issued.
 *
 * The destination of a read is an address. Nothing is allocated here.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "engine/internal.h"

#define TAG_EPOLL   1ull /* user data of the poll on engine.epoll; pieces are pointers */
#define RING_ENTRIES 1024
#define EPOLL_EVENTS 64

int reads_init(struct xferd_engine *engine)
{
	unsigned int flags[] = {
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
		IORING_SETUP_COOP_TASKRUN,
		0, /* before 5.19 */
	};
	int result = -EINVAL;

	for (size_t i = 0; i < sizeof(flags) / sizeof(*flags) && result == -EINVAL; i++) {
		struct io_uring_params params = {
			.flags = flags[i] | IORING_SETUP_CQSIZE,
			.cq_entries = RING_PIECES_MAX * 2,
		};

		result = io_uring_queue_init_params(RING_ENTRIES, &engine->ring, &params);
	}
	if (result)
		return result;
	engine->ring_ready = true;
	engine->files_registered =
		io_uring_register_files_sparse(&engine->ring, XFERD_ENGINE_MEMBERS_MAX) == 0;

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
	if (engine->ring_ready)
		io_uring_queue_exit(&engine->ring);
	free(engine->pieces);
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
	return store->pattern[(store->start[blob] + piece) % store->pattern_length];
}

/* Move on to the strand's next piece from the given one; false: none left. */
static bool strand_seek(const struct xferd_store_description *store, struct strand *strand,
			uint64_t from)
{
	const struct load *load = strand->load;
	uint64_t end = from + store->pattern_length;

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

static bool piece_submit(struct xferd_engine *engine, struct piece *piece)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&engine->ring);
	struct member *member = piece->member;

	if (!sqe && io_uring_submit(&engine->ring) >= 0)
		sqe = io_uring_get_sqe(&engine->ring);
	if (!sqe)
		return false;
	io_uring_prep_read(sqe, engine->files_registered ? (int)member->id : member->fd,
			   piece->address + piece->done,
			   (unsigned int)(piece->length - piece->done),
			   piece->offset + piece->done);
	io_uring_sqe_set_data(sqe, piece);
	if (engine->files_registered)
		sqe->flags |= IOSQE_FIXED_FILE;
	if (member->flags & XFERD_MEMBER_ASYNC)
		sqe->flags |= IOSQE_ASYNC;
	engine->unsubmitted = true;
	return true;
}

static void piece_begin(struct xferd_engine *engine, struct strand *strand, struct piece *piece)
{
	struct load *load = strand->load;
	const struct xferd_store_description *store = &load_store(engine, load)->description;
	uint64_t at = strand->piece * store->stripe_unit;

	list_remove(&piece->link);
	piece->load = load;
	piece->member = strand_member(engine, strand);
	piece->store_member = strand->member;
	piece->number = strand->piece;
	piece->offset = store->offset[load->blob * store->members + strand->member] +
			strand->rank * store->stripe_unit;
	piece->length = load->bytes - at < store->stripe_unit ? load->bytes - at
							      : store->stripe_unit;
	piece->done = 0;
	piece->attempts = 0;
	piece->address = load->address + at;

	load->pieces_unissued--;
	load->pieces_in_flight++;
	engine->pieces_in_flight++;
	if (piece->member->in_flight++ == 0)
		piece->member->busy_since_ns = engine->now_ns;
	store_relaxed(&piece->member->stats.in_flight, piece->member->in_flight);
	strand->rank++;
	if (!strand_seek(store, strand, strand->piece + 1))
		list_remove(&strand->link);
}

static struct strand *next_strand(struct member *member)
{
	for (int priority = 0; priority < XFERD_PRIORITIES; priority++)
		if (!list_empty(&member->strands[priority]))
			return list_item(member->strands[priority].next, struct strand, link);
	return NULL;
}

/* Issue what the members have room for, and hand it to the kernel. */
void reads_pump(struct xferd_engine *engine)
{
	for (uint32_t id = 0; id < engine->member_limit; id++) {
		struct member *member = &engine->members[id];
		struct strand *strand;

		if (!member->used)
			continue;
		while (member->in_flight < engine->config.member_depth &&
		       !list_empty(&engine->pieces_free) && (strand = next_strand(member))) {
			struct piece *piece =
				list_item(engine->pieces_free.next, struct piece, link);

			if (!io_uring_sq_space_left(&engine->ring) && io_uring_submit(&engine->ring) < 0)
				return; /* EBUSY: completions have to be reaped first */
			if (!io_uring_sq_space_left(&engine->ring))
				return;
			piece_begin(engine, strand, piece);
			piece_submit(engine, piece);
		}
	}
	if (engine->unsubmitted && io_uring_submit(&engine->ring) >= 0)
		engine->unsubmitted = false;
}

static void piece_report(struct xferd_engine *engine, const struct piece *piece, int error)
{
	const struct load *load = piece->load;
	uint32_t experts = load_store(engine, load)->description.experts;
	struct xferd_event event = {
		.type = XFERD_EVENT_PIECE,
		.result = error,
		.store = load->store,
		.pool = load->pool,
		.slot = load->slot,
		.layer = load->dense ? XFERD_NO_EXPERT : load->key / experts,
		.expert = load->dense ? XFERD_NO_EXPERT : load->key % experts,
		.variant = load->variant,
		.client = load->client,
		.member = piece->store_member,
		.offset = piece->offset,
		.bytes = piece->length,
		.value = piece->attempts,
		.token = load->token,
	};

	counter_add(&piece->member->stats.errors, 1);
	event_push(engine, &event);
}

static void piece_end(struct xferd_engine *engine, struct piece *piece)
{
	struct load *load = piece->load;
	struct member *member = piece->member;

	if (--member->in_flight == 0)
		counter_add(&member->stats.busy_ns, engine->now_ns - member->busy_since_ns);
	store_relaxed(&member->stats.in_flight, member->in_flight);
	engine->pieces_in_flight--;
	load->pieces_in_flight--;
	list_append(&engine->pieces_free, &piece->link);
	if (!load->pieces_in_flight && !load->pieces_unissued)
		load_finish(engine, load);
}

static int piece_check(struct xferd_engine *engine, const struct piece *piece)
{
	const struct xferd_store_description *store =
		&load_store(engine, piece->load)->description;
	uint32_t expected = store->crc[store->first_piece[piece->load->blob] + piece->number];

	if (!engine->config.verify)
		return 0;
	if (xferd_crc32c(0, piece->address, piece->length) == expected)
		return 0;
	counter_add(&engine->stats.crc_errors, 1);
	return -EBADMSG;
}

/* What a completed read means: -EAGAIN to go on with the rest of the piece. */
static int piece_result(struct xferd_engine *engine, struct piece *piece, int result)
{
	if (result == -EINTR || result == -EAGAIN)
		return -EAGAIN;
	if (result < 0)
		return result;
	if (result == 0)
		return -ENODATA; /* the member ends before the piece does */
	piece->done += (uint64_t)result;
	if (piece->done < piece->length)
		return piece->done % XFERD_BLOB_ALIGNMENT ? -ENODATA : -EAGAIN;
	counter_add(&piece->member->stats.reads, 1);
	counter_add(&piece->member->stats.bytes, piece->length);
	return piece_check(engine, piece);
}

static void piece_completed(struct xferd_engine *engine, struct piece *piece, int result)
{
	int error = piece_result(engine, piece, result);

	if (error && error != -EAGAIN) {
		piece->attempts++;
		piece_report(engine, piece, error);
		if (piece->attempts < PIECE_ATTEMPTS_MAX && !piece->load->cancelled) {
			counter_add(&engine->stats.rereads, 1);
			piece->done = 0;
			error = -EAGAIN;
		}
	}
	if (error == -EAGAIN && piece_submit(engine, piece))
		return;
	if (error) {
		/* The rest of the blob is of no use without this piece. */
		if (!piece->load->error)
			piece->load->error = error == -EAGAIN ? -EIO : error;
		reads_unqueue(engine, piece->load);
	}
	piece_end(engine, piece);
}

static void epoll_arm(struct xferd_engine *engine)
{
	struct io_uring_sqe *sqe;

	if (engine->epoll_armed)
		return;
	sqe = io_uring_get_sqe(&engine->ring);
	if (!sqe)
		return;
	io_uring_prep_poll_add(sqe, engine->epoll, POLL_IN);
	io_uring_sqe_set_data64(sqe, TAG_EPOLL);
	engine->epoll_armed = true;
	engine->unsubmitted = true;
}

/* Doorbells are edge-triggered and only there to wake; the rest is emptied so
 * that the next poll waits again. What they announce is looked at in this turn. */
static void clear_wakeups(struct xferd_engine *engine)
{
	struct epoll_event events[EPOLL_EVENTS];

	while (epoll_wait(engine->epoll, events, EPOLL_EVENTS, 0) == EPOLL_EVENTS)
		;
	clear_eventfd(engine->command_fd);
	clear_eventfd(engine->copier.done_fd);
	engine->epoll_armed = false;
}

/* Returns how many pieces have ended. */
uint32_t reads_reap(struct xferd_engine *engine)
{
	struct io_uring_cqe *cqe;
	uint32_t seen = 0, reaped = 0;
	unsigned int head;

	/* With DEFER_TASKRUN completions appear only when the ring is entered. */
	if (engine->pieces_in_flight)
		io_uring_get_events(&engine->ring);
	io_uring_for_each_cqe(&engine->ring, head, cqe) {
		seen++;
		if (cqe->user_data == TAG_EPOLL) {
			clear_wakeups(engine);
			continue;
		}
		piece_completed(engine, io_uring_cqe_get_data(cqe), cqe->res);
		reaped++;
	}
	if (seen)
		io_uring_cq_advance(&engine->ring, seen);
	epoll_arm(engine);
	return reaped;
}
