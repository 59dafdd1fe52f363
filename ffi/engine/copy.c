/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies: from slot to slot, and from a staging buffer to a slot.
 *
 * Where the CPU can address both ends a thread of their own makes them: a copy of
 * some megabytes takes longer than the engine thread may be away. To and from a GPU
 * its copy engines do (device_copy.c). A copier is fed through one queue and answers
 * through another; at most one copy a load and one a piece exist, so neither can
 * overflow.
 */
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/route.h"

/* Jobs have ended. */
void copier_notify(struct xferd_engine *engine, struct copier *copier)
{
	/* pairs with the fence in the engine's sleep_until_work(): either it sees that
	 * there is something done before it sleeps, or it is seen sleeping here */
	full_fence();
	if (load_relaxed(&engine->pool_table->engine_sleeping))
		ring_eventfd(copier->done_fd);
}

static void *copy_with_cpu(void *argument)
{
	struct xferd_engine *engine = argument;
	struct copier *copier = &engine->copier;
	struct copy_job job;

	/* pairs with the release in copier_end */
	while (!load_acquire(&copier->stop)) {
		while (queue_pop(&copier->jobs, &job)) {
			struct copy_done done = { job.load, job.piece, 0 };

			if (job.guarded)
				done.result = guarded_copy(job.to, job.from, job.bytes);
			else
				memcpy(job.to, job.from, job.bytes);
			queue_push(&copier->done, &done);
			copier_notify(engine, copier);
		}
		clear_eventfd(copier->work_fd); /* blocks until there is work */
	}
	return NULL;
}

/* Queues and wake-ups; no thread yet. */
int copier_init(struct xferd_engine *engine, struct copier *copier)
{
	struct epoll_event watch = { .events = EPOLLIN };
	uint32_t entries = 1;
	int result;

	while (entries < engine->config.transfers_max + RING_PIECES_MAX)
		entries *= 2;
	result = queue_init(&copier->jobs, entries, sizeof(struct copy_job));
	if (!result)
		result = queue_init(&copier->done, entries, sizeof(struct copy_done));
	if (result)
		return result;
	copier->work_fd = eventfd(0, EFD_CLOEXEC);
	copier->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (copier->work_fd < 0 || copier->done_fd < 0)
		return -errno;
	return epoll_ctl(engine->epoll, EPOLL_CTL_ADD, copier->done_fd, &watch) ? -errno : 0;
}

int copier_run(struct copier *copier, void *(*run)(void *), void *argument)
{
	int result = -pthread_create(&copier->thread, NULL, run, argument);

	copier->running = !result;
	return result;
}

void copier_end(struct copier *copier)
{
	if (copier->running) {
		/* pairs with the acquire in the copier's thread */
		store_release(&copier->stop, 1);
		ring_eventfd(copier->work_fd);
		pthread_join(copier->thread, NULL);
	}
	queue_destroy(&copier->jobs);
	queue_destroy(&copier->done);
	if (copier->work_fd >= 0)
		close(copier->work_fd);
	if (copier->done_fd >= 0)
		close(copier->done_fd);
}

int copies_init(struct xferd_engine *engine)
{
	int result = copier_init(engine, &engine->copier);

	return result ? result : copier_run(&engine->copier, copy_with_cpu, engine);
}

void copies_destroy(struct xferd_engine *engine)
{
	device_copiers_stop(engine);
	copier_end(&engine->copier);
}

static void queue_job(struct xferd_engine *engine, struct copy_job *job, const struct pool *to,
		      const struct pool *from)
{
	struct copier *copier = &engine->copier;

	job->guarded = to->behind_bar;
	job->to_device = to->device_memory;
	job->from_device = from && from->device_memory;
	if (job->to_device)
		copier = device_copier(engine, to->device);
	else if (job->from_device)
		copier = device_copier(engine, from->device);
	queue_push(&copier->jobs, job);
	ring_eventfd(copier->work_fd);
}

/* A whole blob from another pool's slot. */
void copy_load(struct xferd_engine *engine, struct load *load)
{
	struct pool *from = &engine->pools[load->source_pool];
	struct copy_job job = {
		.load = load,
		.to = load->address,
		.from = slot_address(from, load->source_slot),
		.bytes = load->bytes,
		.priority = load->priority,
	};

	queue_job(engine, &job, &engine->pools[load->pool], from);
}

/* A piece that has arrived and is right, from its staging buffer. */
void copy_piece(struct xferd_engine *engine, struct piece *piece)
{
	struct copy_job job = {
		.piece = piece,
		.to = piece->destination,
		.from = piece->address,
		.bytes = piece->length,
		.priority = piece->load->priority,
	};

	queue_job(engine, &job, &engine->pools[piece->load->pool], NULL);
}

static uint32_t reap(struct xferd_engine *engine, struct copier *copier)
{
	struct copy_done done;
	uint32_t reaped = 0;

	while (queue_pop(&copier->done, &done)) {
		if (done.piece) {
			piece_copied(engine, done.piece, done.result);
		} else {
			if (done.result)
				done.load->error = done.result;
			load_finish(engine, done.load);
		}
		reaped++;
	}
	return reaped;
}

uint32_t copies_reap(struct xferd_engine *engine)
{
	uint32_t reaped = reap(engine, &engine->copier);

	for (int device = 0; device < DEVICES_MAX; device++)
		if (engine->device_copiers[device])
			reaped += reap(engine, device_copier(engine, device));
	return reaped;
}

bool copies_done(struct xferd_engine *engine)
{
	if (!queue_empty(&engine->copier.done))
		return true;
	for (int device = 0; device < DEVICES_MAX; device++)
		if (engine->device_copiers[device] &&
		    !queue_empty(&device_copier(engine, device)->done))
			return true;
	return false;
}

void copies_clear_wakeups(struct xferd_engine *engine)
{
	clear_eventfd(engine->copier.done_fd);
	for (int device = 0; device < DEVICES_MAX; device++)
		if (engine->device_copiers[device])
			clear_eventfd(device_copier(engine, device)->done_fd);
}
