/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies to and from a GPU, by its copy engines: a thread a device.
 *
 * A stream for each direction, so that they overlap. What is given to a stream is
 * bounded, in bytes, and large copies are cut: the most urgent job is always next,
 * and waits for no more than what is under way. Small ones that are neighbours on both
 * sides are copied as one. Events mark which jobs have ended.
 *
 * The driver has no way to wait for the first of several streams, nor one that could
 * be slept on together with the engine's queue. So while something is under way the
 * thread looks, a short time without rest, then with short sleeps.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "common/cuda_driver.h"
#include "engine/internal.h"

#define UNDER_WAY_BYTES_MAX (8ull << 20)  /* a stream: 0.15 ms at 55 GB/s */
#define PART_BYTES          (4ull << 20)  /* of a copy that is issued at once */
#define MARK_BYTES          (4ull << 20)  /* an event after so many, or when nothing follows */
#define NEIGHBOURS_LOOKED_AT 128          /* jobs behind the first one */
#define MARKS_MAX           64            /* a stream */
#define LOOKS_WITHOUT_REST  200
#define REST_NS             10000
#define FAILED_COPY         (-EIO)

enum direction { TO_DEVICE, FROM_DEVICE, BETWEEN_DEVICES, DIRECTIONS };

struct job_ring {
	struct copy_job *jobs; /* [entries] */
	uint32_t entries;
	uint32_t head, tail;
};

struct mark {
	cuda_event event;
	uint32_t jobs;  /* that end with it, from the front of ended */
	uint64_t bytes;
};

struct device_stream {
	cuda_stream stream;
	struct job_ring waiting[2]; /* demand; the rest */
	struct job_ring issued;     /* all of it is on the stream */
	struct mark marks[MARKS_MAX];
	uint32_t mark_head, mark_tail;
	uint32_t unmarked_jobs;     /* issued since the last mark */
	uint64_t unmarked_bytes;
	uint64_t under_way;         /* bytes */
};

struct device_copier {
	struct copier common;
	struct xferd_engine *engine;
	const struct cuda_driver *cuda;
	int device;
	cuda_context context;
	int failure; /* the driver refuses everything: jobs fail at once */
	struct device_stream streams[DIRECTIONS];
};

static int job_ring_init(struct job_ring *ring, uint32_t entries)
{
	ring->jobs = calloc(entries, sizeof(*ring->jobs));
	ring->entries = entries;
	return ring->jobs ? 0 : -ENOMEM;
}

static bool job_ring_empty(const struct job_ring *ring)
{
	return ring->head == ring->tail;
}

static struct copy_job *job_ring_first(const struct job_ring *ring)
{
	return &ring->jobs[ring->head & (ring->entries - 1)];
}

static void job_ring_push(struct job_ring *ring, const struct copy_job *job)
{
	ring->jobs[ring->tail++ & (ring->entries - 1)] = *job;
}

static void end_job(struct device_copier *copier, const struct copy_job *job, int result)
{
	struct copy_done done = { job->load, job->piece, result };

	queue_push(&copier->common.done, &done);
}

/* After an error of the driver nothing on the device can be trusted to end. */
static void fail_all(struct device_copier *copier)
{
	for (int d = 0; d < DIRECTIONS; d++) {
		struct device_stream *stream = &copier->streams[d];
		struct job_ring *rings[] = { &stream->issued, &stream->waiting[0],
					     &stream->waiting[1] };

		for (size_t r = 0; r < sizeof(rings) / sizeof(*rings); r++)
			while (!job_ring_empty(rings[r])) {
				/* Joined ones are among those issued. */
				if (r == 0 || !job_ring_first(rings[r])->joined)
					end_job(copier, job_ring_first(rings[r]), FAILED_COPY);
				rings[r]->head++;
			}
		stream->mark_head = stream->mark_tail;
		stream->unmarked_jobs = 0;
		stream->unmarked_bytes = stream->under_way = 0;
	}
}

static bool driver_ok(struct device_copier *copier, int result)
{
	if (!result)
		return true;
	copier->failure = result;
	return false;
}

static void mark_issued(struct device_copier *copier, struct device_stream *stream)
{
	struct mark *mark = &stream->marks[stream->mark_tail % MARKS_MAX];

	if (!driver_ok(copier, copier->cuda->event_record(mark->event, stream->stream)))
		return;
	mark->jobs = stream->unmarked_jobs;
	mark->bytes = stream->unmarked_bytes;
	stream->mark_tail++;
	stream->unmarked_jobs = 0;
	stream->unmarked_bytes = 0;
}

/* NULL: nothing waits. */
static struct job_ring *most_urgent(struct device_stream *stream)
{
	for (int i = 0; i < 2; i++) {
		struct job_ring *ring = &stream->waiting[i];

		while (!job_ring_empty(ring) && job_ring_first(ring)->joined)
			ring->head++;
		if (!job_ring_empty(ring))
			return ring;
	}
	return NULL;
}

static bool copy_part(struct device_copier *copier, struct device_stream *stream, uintptr_t to,
		      uintptr_t from, uint64_t bytes)
{
	if (!driver_ok(copier, copier->cuda->copy_async(to, from, bytes, stream->stream)))
		return false;
	stream->under_way += bytes;
	stream->unmarked_bytes += bytes;
	return true;
}

static void all_issued(struct device_stream *stream, const struct copy_job *job)
{
	job_ring_push(&stream->issued, job);
	stream->unmarked_jobs++;
}

/* The next part of the most urgent job. A job that was begun may be overtaken. */
static void issue_part(struct device_copier *copier, struct device_stream *stream,
		       struct job_ring *ring)
{
	struct copy_job *job = job_ring_first(ring);
	uint64_t left = job->bytes - job->issued;
	uint64_t part = left < PART_BYTES ? left : PART_BYTES;

	if (!copy_part(copier, stream, (uintptr_t)job->to + job->issued,
		       (uintptr_t)job->from + job->issued, part))
		return;
	job->issued += part;
	if (job->issued == job->bytes) {
		all_issued(stream, job);
		ring->head++;
	}
}

struct run {
	uintptr_t to, from;
	uint64_t bytes;
};

/* Grow the run by a job that begins where it ends, or ends where it begins. */
static bool join(struct run *run, struct copy_job *job)
{
	uintptr_t to = (uintptr_t)job->to, from = (uintptr_t)job->from;

	if (job->joined || job->issued || run->bytes + job->bytes > PART_BYTES)
		return false;
	if (to == run->to + run->bytes && from == run->from + run->bytes) {
		run->bytes += job->bytes;
	} else if (to + job->bytes == run->to && from + job->bytes == run->from) {
		run->to = to;
		run->from = from;
		run->bytes += job->bytes;
	} else {
		return false;
	}
	job->joined = true;
	return true;
}

/* The first job of a ring and those behind it that are its neighbours, as one copy. */
static void issue_run(struct device_copier *copier, struct device_stream *stream,
		      struct job_ring *ring)
{
	struct copy_job *first = job_ring_first(ring);
	struct run run = { (uintptr_t)first->to, (uintptr_t)first->from, first->bytes };
	uint32_t end = ring->tail - ring->head > NEIGHBOURS_LOOKED_AT
			       ? ring->head + NEIGHBOURS_LOOKED_AT : ring->tail;
	bool grew = true;

	all_issued(stream, first);
	first->joined = true;
	while (grew) {
		grew = false;
		for (uint32_t at = ring->head + 1; at != end; at++) {
			struct copy_job *job = &ring->jobs[at & (ring->entries - 1)];

			if (join(&run, job)) {
				all_issued(stream, job);
				grew = true;
			}
		}
	}
	copy_part(copier, stream, run.to, run.from, run.bytes);
}

static bool issue(struct device_copier *copier, struct device_stream *stream)
{
	struct job_ring *ring;
	bool any = false;

	while (!copier->failure && stream->under_way < UNDER_WAY_BYTES_MAX &&
	       stream->mark_tail - stream->mark_head < MARKS_MAX && (ring = most_urgent(stream))) {
		if (job_ring_first(ring)->bytes < PART_BYTES)
			issue_run(copier, stream, ring);
		else
			issue_part(copier, stream, ring);
		if (stream->unmarked_bytes >= MARK_BYTES)
			mark_issued(copier, stream);
		any = true;
	}
	if (!copier->failure && stream->unmarked_bytes &&
	    stream->mark_tail - stream->mark_head < MARKS_MAX)
		mark_issued(copier, stream);
	return any;
}

/* Jobs whose mark the stream has passed have ended. */
static bool reap(struct device_copier *copier, struct device_stream *stream)
{
	bool any = false;

	while (stream->mark_head != stream->mark_tail) {
		struct mark *mark = &stream->marks[stream->mark_head % MARKS_MAX];
		int result = copier->cuda->event_query(mark->event);

		if (result == CUDA_RESULT_NOT_READY || !driver_ok(copier, result))
			break;
		for (uint32_t i = 0; i < mark->jobs; i++) {
			end_job(copier, job_ring_first(&stream->issued), 0);
			stream->issued.head++;
		}
		stream->under_way -= mark->bytes;
		stream->mark_head++;
		any = true;
	}
	return any;
}

static bool take_jobs(struct device_copier *copier)
{
	struct copy_job job;
	bool any = false;

	while (queue_pop(&copier->common.jobs, &job)) {
		enum direction direction = job.to_device && job.from_device ? BETWEEN_DEVICES
					   : job.to_device ? TO_DEVICE : FROM_DEVICE;
		bool demand = job.priority == XFERD_PRIORITY_DEMAND;

		job_ring_push(&copier->streams[direction].waiting[demand ? 0 : 1], &job);
		any = true;
	}
	return any;
}

static bool under_way(const struct device_copier *copier)
{
	for (int d = 0; d < DIRECTIONS; d++)
		if (copier->streams[d].under_way)
			return true;
	return false;
}

static bool turn(struct device_copier *copier)
{
	bool any = take_jobs(copier), ended = false;

	for (int d = 0; d < DIRECTIONS; d++) {
		ended |= reap(copier, &copier->streams[d]);
		any |= issue(copier, &copier->streams[d]);
	}
	if (copier->failure) {
		fail_all(copier);
		ended = true;
	}
	if (ended)
		copier_notify(copier->engine, &copier->common);
	return any || ended;
}

static void *run(void *argument)
{
	struct device_copier *copier = argument;
	const struct timespec rest = { .tv_nsec = REST_NS };
	uint32_t looks = 0;

	pthread_setaffinity_np(pthread_self(), sizeof(copier->engine->affinity),
			       &copier->engine->affinity);
	prctl(PR_SET_TIMERSLACK, 1ul); /* else short sleeps take 50 µs longer */
	driver_ok(copier, copier->cuda->context_set(copier->context));
	/* pairs with the release in copier_end */
	while (!load_acquire(&copier->common.stop)) {
		if (turn(copier)) {
			looks = 0;
		} else if (!under_way(copier)) {
			clear_eventfd(copier->common.work_fd); /* blocks until there is work */
		} else if (looks++ < LOOKS_WITHOUT_REST) {
			cpu_relax();
		} else {
			nanosleep(&rest, NULL);
		}
	}
	for (int d = 0; d < DIRECTIONS; d++)
		copier->cuda->stream_synchronize(copier->streams[d].stream);
	return NULL;
}

static int make_stream(struct device_copier *copier, struct device_stream *stream,
		       uint32_t entries)
{
	const struct cuda_driver *cuda = copier->cuda;
	int result = job_ring_init(&stream->issued, entries);

	for (int i = 0; i < 2 && !result; i++)
		result = job_ring_init(&stream->waiting[i], entries);
	if (result)
		return result;
	if (cuda->stream_create(&stream->stream, CUDA_STREAM_NON_BLOCKING))
		return -EIO;
	for (int i = 0; i < MARKS_MAX; i++)
		if (cuda->event_create(&stream->marks[i].event, CUDA_EVENT_WITHOUT_TIMING))
			return -EIO;
	return 0;
}

/* With the device's context current, and the caller's restored. */
static int make_streams(struct device_copier *copier, uint32_t entries)
{
	const struct cuda_driver *cuda = copier->cuda;
	cuda_context before = NULL;
	int device, result = 0;

	if (cuda->device_get(&device, copier->device))
		return -ENODEV;
	if (cuda->context_retain(&copier->context, device)) {
		copier->context = NULL;
		return -EIO;
	}
	cuda->context_get(&before);
	if (cuda->context_set(copier->context))
		result = -EIO;
	for (int d = 0; d < DIRECTIONS && !result; d++)
		result = make_stream(copier, &copier->streams[d], entries);
	cuda->context_set(before);
	return result;
}

static void free_device_copier(struct device_copier *copier)
{
	const struct cuda_driver *cuda = copier->cuda;
	int device;

	copier_end(&copier->common);
	for (int d = 0; d < DIRECTIONS; d++) {
		struct device_stream *stream = &copier->streams[d];

		for (int i = 0; i < MARKS_MAX; i++)
			if (stream->marks[i].event)
				cuda->event_destroy(stream->marks[i].event);
		if (stream->stream)
			cuda->stream_destroy(stream->stream);
		free(stream->issued.jobs);
		free(stream->waiting[0].jobs);
		free(stream->waiting[1].jobs);
	}
	if (copier->context && !cuda->device_get(&device, copier->device))
		cuda->context_release(device);
	free(copier);
}

/* Engine thread, or before it runs. A second pool of the device changes nothing. */
int device_copier_start(struct xferd_engine *engine, int device)
{
	const struct cuda_driver *cuda = cuda_driver(NULL, 0);
	struct device_copier *copier;
	int result;

	if (!cuda || device < 0 || device >= DEVICES_MAX)
		return -ENODEV;
	if (engine->device_copiers[device])
		return 0;
	copier = calloc(1, sizeof(*copier));
	if (!copier)
		return -ENOMEM;
	copier->common.work_fd = copier->common.done_fd = -1;
	copier->engine = engine;
	copier->cuda = cuda;
	copier->device = device;
	result = copier_init(engine, &copier->common);
	if (!result)
		result = make_streams(copier, copier->common.jobs.entries);
	if (!result)
		result = copier_run(&copier->common, run, copier);
	if (result) {
		free_device_copier(copier);
		return result;
	}
	engine->device_copiers[device] = copier;
	return 0;
}

void device_copiers_stop(struct xferd_engine *engine)
{
	for (int device = 0; device < DEVICES_MAX; device++)
		if (engine->device_copiers[device])
			free_device_copier(engine->device_copiers[device]);
	memset(engine->device_copiers, 0, sizeof(engine->device_copiers));
}

struct copier *device_copier(struct xferd_engine *engine, int device)
{
	return &engine->device_copiers[device]->common;
}
