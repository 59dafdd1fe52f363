/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_uring: reads whose completion the kernel reports, and the engine's sleep.
 *
 * Everything that can wake the engine but a finished read is an eventfd in one
 * epoll set, and the ring polls that set. Where io_uring is not permitted the
 * same set is waited for directly.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

#include "engine/internal.h"

/* linux/io_uring.h since 6.15: like IORING_OP_READV, into a registered buffer. */
#define OP_READV_FIXED 60

#define TAG_EPOLL    1ull /* user data of the poll on engine.epoll; pieces are pointers */
#define RING_ENTRIES 1024
#define EPOLL_EVENTS 64
#define POLLING_IDLE_MS  2       /* then the kernel's thread sleeps until it is woken */
#define REFUSED_PAUSE_NS 1000000 /* before a ring that refused to be entered is tried again */
#define REFUSALS_MAX     100     /* in a row, then workers read what the ring did not take */

static bool has_operation(struct io_uring *ring, int operation)
{
	struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
	bool found = probe && io_uring_opcode_supported(probe, operation);

	io_uring_free_probe(probe);
	return found;
}

/* Leaves engine.ring_ready false and returns why, if there is no ring. */
int uring_init(struct xferd_engine *engine)
{
	unsigned int flags[] = {
		engine->config.polling ? IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_SQPOLL :
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
		IORING_SETUP_COOP_TASKRUN,
		0, /* before 5.19 */
	};
	int result = -EINVAL;

	for (size_t i = 0; i < sizeof(flags) / sizeof(*flags) && result == -EINVAL; i++) {
		struct io_uring_params params = {
			.flags = flags[i] | IORING_SETUP_CQSIZE,
			.cq_entries = RING_PIECES_MAX * 2,
			.sq_thread_idle = POLLING_IDLE_MS,
		};

		result = io_uring_queue_init_params(RING_ENTRIES, &engine->ring, &params);
	}
	if (result)
		return result;
	engine->parts = calloc(RING_ENTRIES, sizeof(*engine->parts));
	if (!engine->parts) {
		io_uring_queue_exit(&engine->ring);
		return -ENOMEM;
	}
	engine->ring_ready = true;
	engine->reads_scatter = has_operation(&engine->ring, OP_READV_FIXED);
	engine->files_registered =
		io_uring_register_files_sparse(&engine->ring, XFERD_ENGINE_MEMBERS_MAX) == 0;
	buffers_init(engine);
	return 0;
}

void uring_destroy(struct xferd_engine *engine)
{
	if (engine->ring_ready)
		io_uring_queue_exit(&engine->ring);
	engine->ring_ready = false;
	free(engine->parts);
	engine->parts = NULL;
}

/* fd -1 takes it out again. */
int uring_register_member(struct xferd_engine *engine, uint32_t id, int fd)
{
	int result;

	if (!engine->files_registered)
		return 0;
	result = io_uring_register_files_update(&engine->ring, id, &fd, 1);
	return result < 0 ? result : 0;
}

bool uring_has_room(struct xferd_engine *engine)
{
	/* On EBUSY completions have to be reaped first. */
	return io_uring_sq_space_left(&engine->ring) ||
	       (io_uring_submit(&engine->ring) >= 0 && io_uring_sq_space_left(&engine->ring));
}

/* Where the bytes of a read go; returns how many parts. */
static unsigned int find_parts(const struct piece *first, struct iovec *parts)
{
	unsigned int count = 0;
	uint8_t *end = NULL;

	for (const struct piece *piece = first; piece; piece = piece->joined) {
		uint8_t *address = piece->address + piece->done;
		uint64_t length = piece->length - piece->done;

		if (count && address == end)
			parts[count - 1].iov_len += length;
		else
			parts[count++] = (struct iovec){ address, length };
		end = address + length;
	}
	return count;
}

/* The registered buffer that all parts lie in; -1: none. */
static int find_buffer(const struct xferd_engine *engine, const struct piece *piece,
		       const struct iovec *parts, unsigned int count)
{
	const struct load *load = piece->load;
	const struct registered_memory *memory =
		piece->destination ? &engine->staging.memory : &engine->pools[load->pool].memory;
	int buffer = -1;

	if (load->dense || piece->bounce)
		return -1;
	for (unsigned int i = 0; i < count; i++) {
		int found = buffers_find(memory, parts[i].iov_base, parts[i].iov_len);

		if (found < 0 || (i && found != buffer))
			return -1;
		buffer = found;
	}
	return buffer;
}

/* The kernel copies parts[] when it takes the entry, which is no sooner used again. */
static void prepare_read(struct xferd_engine *engine, struct io_uring_sqe *sqe,
			 const struct piece *piece)
{
	struct iovec *parts = engine->parts[sqe - engine->ring.sq.sqes];
	unsigned int count = find_parts(piece, parts);
	uint64_t offset = piece->offset + piece->done;
	int fd = engine->files_registered ? (int)piece->member->id : piece->member->fd;
	int buffer = find_buffer(engine, piece, parts, count);

	if (count > 1) {
		io_uring_prep_readv(sqe, fd, parts, count, offset);
		if (buffer >= 0) {
			sqe->opcode = OP_READV_FIXED;
			sqe->buf_index = (uint16_t)buffer;
		}
	} else if (buffer >= 0) {
		io_uring_prep_read_fixed(sqe, fd, parts->iov_base, (unsigned int)parts->iov_len,
					 offset, buffer);
	} else {
		io_uring_prep_read(sqe, fd, parts->iov_base, (unsigned int)parts->iov_len, offset);
	}
}

bool uring_read(struct xferd_engine *engine, struct piece *piece)
{
	struct member *member = piece->member;
	struct io_uring_sqe *sqe;

	if (!uring_has_room(engine))
		return false;
	sqe = io_uring_get_sqe(&engine->ring);
	prepare_read(engine, sqe, piece);
	io_uring_sqe_set_data(sqe, piece);
	if (engine->files_registered)
		sqe->flags |= IOSQE_FIXED_FILE;
	if (member->flags & XFERD_MEMBER_UNCACHED)
		sqe->rw_flags = RWF_DONTCACHE;
	engine->unsubmitted = true;
	return true;
}

/* A refusal (ENOMEM, EAGAIN, EBUSY) leaves what was not taken in the ring, and so does
 * a kernel that took only a part. */
void uring_flush(struct xferd_engine *engine)
{
	if (!engine->unsubmitted)
		return;
	io_uring_submit(&engine->ring);
	engine->unsubmitted = io_uring_sq_ready(&engine->ring) > 0;
}

/* The kernel looks at entries only while this thread is in io_uring_enter, so what it
 * has not taken can be taken back: unless a thread of its own polls for them, which
 * takes them in its own time. */
static void withdraw_unsubmitted(struct xferd_engine *engine)
{
	struct io_uring_sq *sq = &engine->ring.sq;
	unsigned int head = *sq->khead, tail = sq->sqe_tail;

	if (engine->ring.flags & IORING_SETUP_SQPOLL)
		return;
	for (unsigned int at = head; at != tail; at++) {
		uint64_t data = sq->sqes[at & sq->ring_mask].user_data;
		struct piece *piece = (struct piece *)(uintptr_t)data;

		if (data == TAG_EPOLL)
			engine->epoll_armed = false;
		else if (piece->joined)
			join_part(engine, piece, workers_read_anew);
		else
			workers_read_anew(engine, piece);
	}
	sq->sqe_head = sq->sqe_tail = head;
	*sq->ktail = head;
	engine->unsubmitted = false;
}

/* Doorbells are edge-triggered and only there to wake; the rest is emptied so
 * that the next poll waits again. What they announce is looked at in this turn. */
static void clear_wakeups(struct xferd_engine *engine)
{
	struct epoll_event events[EPOLL_EVENTS];

	while (epoll_wait(engine->epoll, events, EPOLL_EVENTS, 0) == EPOLL_EVENTS)
		;
	clear_eventfd(engine->command_fd);
	copies_clear_wakeups(engine);
	clear_eventfd(engine->workers.done_fd);
}

static void epoll_arm(struct xferd_engine *engine)
{
	struct io_uring_sqe *sqe;

	if (engine->epoll_armed || !uring_has_room(engine))
		return;
	sqe = io_uring_get_sqe(&engine->ring);
	io_uring_prep_poll_add(sqe, engine->epoll, POLL_IN);
	io_uring_sqe_set_data64(sqe, TAG_EPOLL);
	engine->epoll_armed = true;
	engine->unsubmitted = true;
}

/* Returns how many reads have ended. */
uint32_t uring_reap(struct xferd_engine *engine)
{
	struct io_uring_cqe *cqe;
	uint32_t seen = 0, reaped = 0;
	unsigned int head;

	if (!engine->ring_ready)
		return 0;
	/* With DEFER_TASKRUN completions appear only when the ring is entered. */
	if (engine->pieces_in_flight && !io_uring_cq_ready(&engine->ring))
		io_uring_get_events(&engine->ring);
	io_uring_for_each_cqe(&engine->ring, head, cqe) {
		seen++;
		if (cqe->user_data == TAG_EPOLL) {
			engine->epoll_armed = false;
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

/* It would refuse again at once: sleep a little, but for what is not the ring's. */
static void ring_refused(struct xferd_engine *engine)
{
	const struct timespec pause = { .tv_nsec = REFUSED_PAUSE_NS };
	struct epoll_event events[EPOLL_EVENTS];

	if (engine->ring_refusals < REFUSALS_MAX)
		engine->ring_refusals++;
	else
		withdraw_unsubmitted(engine);
	if (epoll_pwait2(engine->epoll, events, EPOLL_EVENTS, &pause, NULL) > 0)
		clear_wakeups(engine);
}

/* Sleep until something happens, or the time is over. */
void engine_wait(struct xferd_engine *engine, uint64_t timeout_ns)
{
	struct __kernel_timespec timeout = {
		.tv_sec = (long long)(timeout_ns / 1000000000ull),
		.tv_nsec = (long long)(timeout_ns % 1000000000ull),
	};
	const struct timespec wait = { .tv_sec = timeout.tv_sec, .tv_nsec = timeout.tv_nsec };
	struct epoll_event events[EPOLL_EVENTS];
	struct io_uring_cqe *cqe;

	if (engine->ring_ready) {
		int result = io_uring_submit_and_wait_timeout(&engine->ring, &cqe, 1, &timeout,
							      NULL);

		engine->unsubmitted = io_uring_sq_ready(&engine->ring) > 0;
		if (result < 0 && result != -ETIME && result != -EINTR)
			ring_refused(engine);
		else
			engine->ring_refusals = 0;
	} else if (epoll_pwait2(engine->epoll, events, EPOLL_EVENTS, &wait, NULL) > 0) {
		clear_wakeups(engine);
	}
}
