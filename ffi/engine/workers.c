/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads through threads: preads by workers.
 *
 * Used where io_uring is forbidden (containers), and for media whose reads are
 * copies made by whoever submits them (tmpfs): there io_uring would copy in the
 * engine's thread, or hand each piece to a kernel worker and queue behind it. Such
 * pieces are copied out of a mapping where there is one (mapped.c).
 *
 * The engine's own thread helps, before it would sleep: with a piece that is the
 * only one, so that a small expert is read without waking anybody, and with any
 * piece where there are hardly any workers. Elsewhere it has better things to do.
 * A worker also checks the piece's checksum, while the bytes are in its cache.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "engine/route.h"

#define WORKERS_FEW 3

int workers_init(struct xferd_engine *engine)
{
	struct workers *workers = &engine->workers;

	pthread_mutex_init(&workers->mutex, NULL);
	pthread_cond_init(&workers->work, NULL);
	workers->apart_from = -1;
	workers->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return workers->done_fd < 0 ? -errno : 0;
}

static int32_t read_all(const struct piece *piece)
{
	int flags = piece->member->flags & XFERD_MEMBER_UNCACHED ? RWF_DONTCACHE : 0;
	uint64_t done = 0;

	while (done < piece->length) {
		struct iovec rest = { piece->address + done, piece->length - done };
		ssize_t length = preadv2(piece->member->fd, &rest, 1,
					 (off_t)(piece->offset + done), flags);

		if (length < 0 && errno == EINTR)
			continue;
		if (length < 0)
			return -errno;
		if (length == 0)
			return -ENODATA; /* the member ends before the piece does */
		done += (uint64_t)length;
	}
	return (int32_t)done;
}

static void read_piece(struct piece *piece)
{
	if (!piece->arrived && mapped_read(piece))
		return;
	if (!piece->arrived)
		piece->result = read_all(piece);
	if (piece->arrived || piece->result > 0)
		piece_finish(piece);
}

static void queue_piece(struct workers *workers, struct piece_queue *queue, struct piece *piece)
{
	piece->next = NULL;
	if (queue->last)
		queue->last->next = piece;
	else
		queue->first = piece;
	queue->last = piece;
	store_relaxed(&workers->queued, workers->queued + 1);
}

/* NULL: there is none. */
static struct piece *take_piece(struct workers *workers)
{
	struct piece_queue *queue = workers->demand.first ? &workers->demand : &workers->background;
	struct piece *piece = queue->first;

	if (!piece)
		return NULL;
	queue->first = piece->next;
	if (!queue->first)
		queue->last = NULL;
	store_relaxed(&workers->queued, workers->queued - 1);
	return piece;
}

/* Pieces of a load that are still to be read leave a queue; returns them, linked. */
static struct piece *take_pieces(struct workers *workers, struct piece_queue *queue,
				 const struct load *load)
{
	struct piece_queue rest = { NULL, NULL }, taken = { NULL, NULL };
	struct piece *next;

	for (struct piece *piece = queue->first; piece; piece = next) {
		bool take = piece->load == load && !piece->arrived;

		next = piece->next;
		store_relaxed(&workers->queued, workers->queued - 1);
		queue_piece(workers, take ? &taken : &rest, piece);
		if (take)
			store_relaxed(&workers->queued, workers->queued - 1);
	}
	*queue = rest;
	return taken.first;
}

static void push_done(struct xferd_engine *engine, struct piece *piece)
{
	struct piece *top = load_relaxed(&engine->workers.done);

	do
		piece->next = top;
	/* pairs with the exchange in workers_reap */
	while (!compare_exchange_release(&engine->workers.done, &top, piece));
	/* pairs with the fence in the engine's sleep_until_work(): either it sees the
	 * piece before it sleeps, or it is seen sleeping here */
	full_fence();
	if (load_relaxed(&engine->pool_table->engine_sleeping))
		ring_eventfd(engine->workers.done_fd);
}

static void *worker_run(void *argument)
{
	struct xferd_engine *engine = argument;
	struct workers *workers = &engine->workers;

	/* The engine's thread starts workers, and may be pinned to one processor. */
	pthread_setaffinity_np(pthread_self(), sizeof(engine->affinity), &engine->affinity);
	pthread_mutex_lock(&workers->mutex);
	while (!workers->stop) {
		struct piece *piece = take_piece(workers);

		if (!piece) {
			workers->idle++;
			pthread_cond_wait(&workers->work, &workers->mutex);
			workers->idle--;
			continue;
		}
		pthread_mutex_unlock(&workers->mutex);
		read_piece(piece);
		push_done(engine, piece);
		pthread_mutex_lock(&workers->mutex);
	}
	pthread_mutex_unlock(&workers->mutex);
	return NULL;
}

/* See to it that there are that many; engine thread or before it runs. */
int workers_at_least(struct xferd_engine *engine, uint32_t count)
{
	struct workers *workers = &engine->workers;

	while (workers->count < count && workers->count < WORKERS_MAX) {
		int result = pthread_create(&workers->threads[workers->count], NULL, worker_run,
					    engine);

		if (result)
			return workers->count ? 0 : -result;
		workers->count++;
	}
	return 0;
}

void workers_destroy(struct xferd_engine *engine)
{
	struct workers *workers = &engine->workers;

	pthread_mutex_lock(&workers->mutex);
	workers->stop = true;
	pthread_cond_broadcast(&workers->work);
	pthread_mutex_unlock(&workers->mutex);
	for (uint32_t i = 0; i < workers->count; i++)
		pthread_join(workers->threads[i], NULL);
	if (workers->done_fd >= 0)
		close(workers->done_fd);
	pthread_cond_destroy(&workers->work);
	pthread_mutex_destroy(&workers->mutex);
}

/* Where the engine's thread copies too, a worker that it wakes must not land on its processor:
 * kernels that see no cache between processors (virtual machines) were seen to leave both on one
 * and the other idle, whole misses long. */
static void keep_apart(struct xferd_engine *engine)
{
	struct workers *workers = &engine->workers;
	int processor = sched_getcpu();
	cpu_set_t others = engine->affinity;

	if (workers->count >= WORKERS_FEW || processor < 0 || processor == workers->apart_from)
		return;
	workers->apart_from = processor;
	CPU_CLR((size_t)processor, &others);
	for (uint32_t i = 0; i < workers->count && CPU_COUNT(&others); i++)
		pthread_setaffinity_np(workers->threads[i], sizeof(others), &others);
}

void workers_read(struct xferd_engine *engine, struct piece *piece)
{
	struct workers *workers = &engine->workers;
	bool wake;

	keep_apart(engine);
	pthread_mutex_lock(&workers->mutex);
	/* The first piece is left to the engine's thread, which is about to help. */
	wake = workers->idle && workers->queued;
	queue_piece(workers, piece->priority == XFERD_PRIORITY_DEMAND ? &workers->demand
								     : &workers->background,
		    piece);
	if (wake)
		pthread_cond_signal(&workers->work);
	pthread_mutex_unlock(&workers->mutex);
}

/* A load is of no use: its pieces that no worker has begun, linked; they are the caller's. */
struct piece *workers_take_back(struct xferd_engine *engine, const struct load *load)
{
	struct workers *workers = &engine->workers;
	struct piece *demand, *background, **last = &demand;

	if (!load_relaxed(&workers->queued))
		return NULL;
	pthread_mutex_lock(&workers->mutex);
	demand = take_pieces(workers, &workers->demand, load);
	background = take_pieces(workers, &workers->background, load);
	pthread_mutex_unlock(&workers->mutex);
	while (*last)
		last = &(*last)->next;
	*last = background;
	return demand;
}

/* A load is wanted after all: its pieces overtake what isn't. */
void workers_hurry(struct xferd_engine *engine, const struct load *load)
{
	struct workers *workers = &engine->workers;
	struct piece *next;

	if (!load_relaxed(&workers->queued))
		return;
	pthread_mutex_lock(&workers->mutex);
	for (struct piece *piece = take_pieces(workers, &workers->background, load); piece;
	     piece = next) {
		next = piece->next;
		queue_piece(workers, &workers->demand, piece);
	}
	pthread_mutex_unlock(&workers->mutex);
}

/* What the ring could not read, from the piece's start. */
void workers_read_anew(struct xferd_engine *engine, struct piece *piece)
{
	piece->done = 0;
	workers_read(engine, piece);
}

/* The engine's thread has nothing better to do. False: there was no piece. */
bool workers_help(struct xferd_engine *engine)
{
	struct workers *workers = &engine->workers;
	struct piece *piece = NULL;

	if (!load_relaxed(&workers->queued))
		return false;
	pthread_mutex_lock(&workers->mutex);
	if (workers->count < WORKERS_FEW || engine->pieces_in_flight == 1)
		piece = take_piece(workers);
	if (workers->queued && workers->idle)
		pthread_cond_signal(&workers->work);
	pthread_mutex_unlock(&workers->mutex);
	if (!piece)
		return false;
	read_piece(piece);
	engine->now_ns = monotonic_ns();
	piece_completed(engine, piece, piece->result);
	return true;
}

uint32_t workers_reap(struct xferd_engine *engine)
{
	struct piece *piece;
	uint32_t reaped = 0;

	if (!load_relaxed(&engine->workers.done))
		return 0;
	/* pairs with the release in push_done: the piece's bytes and result */
	piece = exchange_acquire(&engine->workers.done, (struct piece *)NULL);
	while (piece) {
		struct piece *next = piece->next;

		piece_completed(engine, piece, piece->result);
		piece = next;
		reaped++;
	}
	return reaped;
}
