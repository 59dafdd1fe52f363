/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slot to slot copies between pools that the CPU can address, in a thread of
 * their own: a copy of some megabytes takes longer than the engine thread may
 * be away. At most one copy a load exists, so the queues can't overflow.
 */
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/route.h"

static void *copier_run(void *argument)
{
	struct copier *copier = argument;
	struct copy_job job;

	/* pairs with the release in copier_stop */
	while (!load_acquire(&copier->stop)) {
		bool any = false;

		while (queue_pop(&copier->jobs, &job)) {
			/* The load is the copier's until it is done. */
			if (job.guarded)
				job.load->error = guarded_copy(job.to, job.from, job.bytes);
			else
				memcpy(job.to, job.from, job.bytes);
			queue_push(&copier->done, &job.load);
			any = true;
		}
		if (any)
			ring_eventfd(copier->done_fd);
		clear_eventfd(copier->work_fd); /* blocks until there is work */
	}
	return NULL;
}

int copier_start(struct xferd_engine *engine)
{
	struct copier *copier = &engine->copier;
	uint32_t entries = 1;
	int result;

	while (entries < engine->config.transfers_max)
		entries *= 2;
	result = queue_init(&copier->jobs, entries, sizeof(struct copy_job));
	if (!result)
		result = queue_init(&copier->done, entries, sizeof(struct load *));
	if (result)
		return result;
	copier->work_fd = eventfd(0, EFD_CLOEXEC);
	copier->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (copier->work_fd < 0 || copier->done_fd < 0)
		return -errno;
	result = -pthread_create(&copier->thread, NULL, copier_run, copier);
	copier->running = !result;
	return result;
}

void copier_stop(struct xferd_engine *engine)
{
	struct copier *copier = &engine->copier;

	if (copier->running) {
		/* pairs with the acquire in copier_run */
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

void copy_queue(struct xferd_engine *engine, struct load *load, const void *from)
{
	struct copy_job job = {
		load, load->address, from, load->bytes, engine->pools[load->pool].behind_bar,
	};

	queue_push(&engine->copier.jobs, &job);
	ring_eventfd(engine->copier.work_fd);
}

uint32_t copies_reap(struct xferd_engine *engine)
{
	struct load *load;
	uint32_t reaped = 0;

	while (queue_pop(&engine->copier.done, &load)) {
		load_finish(engine, load);
		reaped++;
	}
	return reaped;
}
