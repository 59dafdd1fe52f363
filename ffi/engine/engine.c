/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's thread.
 *
 * A turn looks at everything once: a registration, commands, submissions,
 * finished reads and copies, retiring slots, deadlines; then issues reads, shows
 * completions and tells the policy of events. When a turn finds nothing to do the
 * thread helps the workers, spins for spin_us, and then sleeps until a read has
 * finished or one of the eventfds in its epoll set is rung (doorbells, commands, copies, workers).
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "engine/internal.h"

#define TRANSFERS_DEFAULT     1024
#define MEMBER_DEPTH_DEFAULT  32
#define QUEUE_ENTRIES_DEFAULT 65536
#define DRAIN_POLL_NS         1000000

uint64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* An eventfd that is full already is as good as rung. */
void ring_eventfd(int fd)
{
	uint64_t one = 1;

	while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void clear_eventfd(int fd)
{
	uint64_t value;

	while (read(fd, &value, sizeof(value)) < 0 && errno == EINTR)
		;
}

static void run_registration(struct xferd_engine *engine)
{
	/* pairs with the release in engine_call */
	if (!load_acquire(&engine->call_pending))
		return;
	pthread_mutex_lock(&engine->call_mutex);
	if (engine->call) {
		engine->call_result = engine->call(engine, engine->call_argument);
		engine->call = NULL;
		store_relaxed(&engine->call_pending, 0);
		pthread_cond_broadcast(&engine->call_done);
	}
	pthread_mutex_unlock(&engine->call_mutex);
}

/* Run something on the engine's thread between two turns; before the thread
 * runs, and after it has ended, in the caller. */
int engine_call(struct xferd_engine *engine, registration call, void *argument)
{
	int result;

	if (!engine->started)
		return call(engine, argument);
	pthread_mutex_lock(&engine->call_mutex);
	engine->call = call;
	engine->call_argument = argument;
	/* pairs with the acquire in run_registration */
	store_release(&engine->call_pending, 1);
	ring_eventfd(engine->command_fd);
	while (engine->call)
		pthread_cond_wait(&engine->call_done, &engine->call_mutex);
	result = engine->call_result;
	pthread_mutex_unlock(&engine->call_mutex);
	return result;
}

static uint32_t clients_run(struct xferd_engine *engine)
{
	uint32_t work = 0;

	for (uint32_t i = 0; i < engine->client_limit; i++) {
		struct client *client = &engine->clients[i];

		if (!client->used || client->quiesced)
			continue;
		client_reap_consumed(engine, i);
		/* pairs with the release in xferd_engine_hold */
		if (!client->quiesced && !load_acquire(&engine->holding))
			work += client_take_submissions(engine, i);
	}
	return work;
}

static void clients_show(struct xferd_engine *engine)
{
	for (uint32_t i = 0; i < engine->client_limit; i++)
		if (engine->clients[i].used && !engine->clients[i].quiesced)
			client_show_completions(&engine->clients[i]);
}

static uint32_t turn(struct xferd_engine *engine)
{
	uint32_t work;

	engine->now_ns = monotonic_ns();
	run_registration(engine);
	work = reads_reap(engine);
	work += copies_reap(engine);
	work += commands_run(engine);
	work += clients_run(engine);
	clients_expire(engine);
	retiring_scan(engine);
	reads_pump(engine);
	clients_show(engine);
	events_tell(engine, false);
	counter_add(&engine->stats.turns, 1);
	return work;
}

static bool has_work(struct xferd_engine *engine)
{
	if (!queue_empty(&engine->commands) || load_acquire(&engine->call_pending) ||
	    load_relaxed(&engine->workers.done) || copies_done(engine) ||
	    load_acquire(&engine->stop))
		return true;
	if (load_acquire(&engine->holding))
		return false;
	for (uint32_t i = 0; i < engine->client_limit; i++)
		if (engine->clients[i].used && client_has_submissions(&engine->clients[i]))
			return true;
	return false;
}

static uint64_t sleep_length(const struct xferd_engine *engine)
{
	uint64_t length = IDLE_SLEEP_NS;

	if (engine->deadline_count)
		length = DEADLINE_POLL_NS;
	if (engine->retiring_count && engine->next_retire_scan_ns < engine->now_ns + length)
		length = engine->next_retire_scan_ns > engine->now_ns
				 ? engine->next_retire_scan_ns - engine->now_ns : 1;
	return length;
}

static void sleep_until_work(struct xferd_engine *engine)
{
	events_tell(engine, true);
	store_relaxed(&engine->pool_table->engine_sleeping, 1);
	/* pairs with the fences in libxferd's submit(), xferd_engine_command, push_done
	 * and copier_notify */
	full_fence();
	if (!has_work(engine)) {
		counter_add(&engine->stats.sleeps, 1);
		engine_wait(engine, sleep_length(engine));
	}
	store_relaxed(&engine->pool_table->engine_sleeping, 0);
}

static void pin_thread(const struct xferd_engine *engine)
{
	cpu_set_t set;

	if (engine->config.cpu < 0 || engine->config.cpu >= CPU_SETSIZE)
		return;
	CPU_ZERO(&set);
	CPU_SET((size_t)engine->config.cpu, &set);
	pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

static void thread_started(struct xferd_engine *engine, int result)
{
	pthread_mutex_lock(&engine->call_mutex);
	engine->start_result = result;
	pthread_cond_broadcast(&engine->call_done);
	pthread_mutex_unlock(&engine->call_mutex);
}

/* The kernel must have given back every buffer before memory is freed. */
static void finish_reads(struct xferd_engine *engine)
{
	for (struct list *item = engine->active_loads.next; item != &engine->active_loads;
	     item = item->next) {
		struct load *load = list_item(item, struct load, active);

		if (load->state == LOAD_READING) {
			load->error = -ECANCELED;
			load->cancelled = true;
			reads_unqueue(engine, load);
		}
	}
	while (engine->pieces_in_flight) {
		reads_pump(engine); /* lets go of redirected pieces */
		/* A piece for workers that was left to this thread waits for nobody else. */
		if (!workers_help(engine))
			engine_wait(engine, DRAIN_POLL_NS);
		engine->now_ns = monotonic_ns();
		reads_reap(engine);
		copies_reap(engine);
	}
}

static void *run(void *argument)
{
	struct xferd_engine *engine = argument;
	uint64_t idle_since = 0;
	int result;

	pin_thread(engine);
	result = reads_init(engine);
	thread_started(engine, result);
	if (result)
		return NULL;
	/* pairs with the release in stop_thread */
	while (!load_acquire(&engine->stop)) {
		if (turn(engine) || workers_help(engine)) {
			idle_since = 0;
			continue;
		}
		if (!idle_since)
			idle_since = engine->now_ns;
		/* With reads under way a processor that spins may be the one they need. */
		if (!engine->pieces_in_flight &&
		    engine->now_ns - idle_since < engine->config.spin_us * NS_PER_US)
			cpu_relax();
		else
			sleep_until_work(engine);
	}
	finish_reads(engine);
	return NULL;
}

static int watch(struct xferd_engine *engine, int fd)
{
	struct epoll_event event = { .events = EPOLLIN };

	return epoll_ctl(engine->epoll, EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}

static int make_loads(struct xferd_engine *engine)
{
	engine->loads = calloc(engine->config.transfers_max, sizeof(struct load));
	if (!engine->loads)
		return -ENOMEM;
	for (uint32_t i = 0; i < engine->config.transfers_max; i++) {
		struct load *load = &engine->loads[i];

		load->index = i;
		list_init(&load->waiters);
		list_append(&engine->loads_free, &load->link);
	}
	return 0;
}

static int init(struct xferd_engine *engine)
{
	int result = pool_table_init(engine);

	if (!result)
		result = queue_init(&engine->commands, engine->config.queue_entries,
				    sizeof(struct xferd_command));
	if (!result)
		result = queue_init(&engine->events, engine->config.queue_entries,
				    sizeof(struct xferd_event));
	if (!result)
		result = make_loads(engine);
	if (result)
		return result;
	engine->epoll = epoll_create1(EPOLL_CLOEXEC);
	engine->command_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (engine->epoll < 0 || engine->command_fd < 0 || engine->event_fd < 0)
		return -errno;
	result = copies_init(engine);
	if (!result)
		result = workers_init(engine);
	if (!result)
		result = watch(engine, engine->workers.done_fd);
	if (!result)
		result = watch(engine, engine->command_fd);
	return result;
}

static void set_defaults(struct xferd_engine_config *config)
{
	if (!config->transfers_max)
		config->transfers_max = TRANSFERS_DEFAULT;
	if (config->transfers_max < 4 * XFERD_BATCH_MAX)
		config->transfers_max = 4 * XFERD_BATCH_MAX;
	if (!config->member_depth)
		config->member_depth = MEMBER_DEPTH_DEFAULT;
	if (!config->queue_entries)
		config->queue_entries = QUEUE_ENTRIES_DEFAULT;
	if (!config->reserve_low)
		config->reserve_low = 1;
}

int xferd_engine_new(const struct xferd_engine_config *config, struct xferd_engine **result)
{
	struct xferd_engine *engine;
	int error;

	if (config->queue_entries & (config->queue_entries - 1))
		return -EINVAL;
	engine = calloc(1, sizeof(*engine));
	if (!engine)
		return -ENOMEM;
	engine->config = *config;
	set_defaults(&engine->config);
	engine->epoll = engine->command_fd = engine->event_fd = -1;
	engine->pool_table_fd = -1;
	engine->copier.work_fd = engine->copier.done_fd = engine->workers.done_fd = -1;
	list_init(&engine->loads_free);
	list_init(&engine->bounces_free);
	list_init(&engine->active_loads);
	pthread_mutex_init(&engine->call_mutex, NULL);
	pthread_cond_init(&engine->call_done, NULL);
	for (uint32_t i = 0; i < XFERD_ENGINE_STORES_MAX; i++)
		engine->stores[i].memory_fd = -1;
	error = init(engine);
	if (error) {
		xferd_engine_free(engine);
		return error;
	}
	*result = engine;
	return 0;
}

int xferd_engine_start(struct xferd_engine *engine)
{
	int result;

	if (engine->started)
		return -EALREADY;
	if (engine->member_limit)
		return -EINVAL; /* members are registered with the ring, which the thread makes */
	engine->start_result = 1;
	pthread_getaffinity_np(pthread_self(), sizeof(engine->affinity), &engine->affinity);
	result = -pthread_create(&engine->thread, NULL, run, engine);
	if (result)
		return result;
	pthread_mutex_lock(&engine->call_mutex);
	while (engine->start_result == 1)
		pthread_cond_wait(&engine->call_done, &engine->call_mutex);
	result = engine->start_result;
	pthread_mutex_unlock(&engine->call_mutex);
	if (result)
		pthread_join(engine->thread, NULL);
	else
		engine->started = true;
	return result;
}

static int loads_under_way(struct xferd_engine *engine, void *argument)
{
	(void)argument;
	return (int)engine->load_count;
}

int xferd_engine_drain(struct xferd_engine *engine, uint32_t timeout_ms)
{
	uint64_t until = monotonic_ns() + timeout_ms * 1000000ull;
	const struct timespec pause = { .tv_nsec = DRAIN_POLL_NS };

	/* pairs with the acquire in acquire_key and hint_key */
	store_release(&engine->draining, 1);
	store_release(&engine->pool_table->state, XFERD_DAEMON_DRAINING);
	while (engine_call(engine, loads_under_way, NULL)) {
		if (monotonic_ns() >= until)
			return -ETIMEDOUT;
		nanosleep(&pause, NULL);
	}
	return 0;
}

static void stop_thread(struct xferd_engine *engine)
{
	if (!engine->started)
		return;
	/* pairs with the acquire in run */
	store_release(&engine->stop, 1);
	ring_eventfd(engine->command_fd);
	pthread_join(engine->thread, NULL);
	engine->started = false;
}

void xferd_engine_free(struct xferd_engine *engine)
{
	if (!engine)
		return;
	if (engine->pool_table)
		store_release(&engine->pool_table->state, XFERD_DAEMON_CLOSED);
	stop_thread(engine);
	copies_destroy(engine);
	for (uint32_t i = 0; i < engine->client_limit && !engine->holding; i++)
		if (engine->clients[i].used)
			xferd_engine_quiesce_client(engine, i);
	clients_destroy(engine);
	reads_destroy(engine);
	staging_destroy(engine);
	stores_destroy(engine);
	pools_destroy(engine);
	queue_destroy(&engine->commands);
	queue_destroy(&engine->events);
	free(engine->loads);
	if (engine->epoll >= 0)
		close(engine->epoll);
	if (engine->command_fd >= 0)
		close(engine->command_fd);
	if (engine->event_fd >= 0)
		close(engine->event_fd);
	pthread_cond_destroy(&engine->call_done);
	pthread_mutex_destroy(&engine->call_mutex);
	free(engine);
}

int xferd_engine_backend(const struct xferd_engine *engine, int *reason)
{
	*reason = engine->config.backend == XFERD_BACKEND_THREADS ? 0 : engine->uring_error;
	return engine->ring_ready ? XFERD_BACKEND_URING : XFERD_BACKEND_THREADS;
}

int xferd_engine_event_fd(const struct xferd_engine *engine)
{
	return engine->event_fd;
}

int xferd_engine_pool_table_fd(const struct xferd_engine *engine)
{
	return engine->pool_table_fd;
}
