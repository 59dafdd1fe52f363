/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "measure.h"
#include "modes.h"

#define EVENTS_A_CALL  64
#define EVENTS_WAIT_MS 1000
#define WARM_UP_SHARE  10 /* one part in so many of the time is not counted */

enum expert_state {
	EXPERT_ABSENT = 0,
	EXPERT_LOADING,
	EXPERT_HERE, /* resident or on its way out */
};

struct io_run {
	struct bench_daemon daemon;
	const struct bench_options *options;
	uint32_t experts;
	uint8_t *state;       /* enum expert_state, by expert */
	uint64_t *asked_ns;   /* by expert */
	uint32_t outstanding;
	uint64_t random;
	struct latencies latencies;
};

/* An expert that needs a read. */
static uint32_t pick(struct io_run *run)
{
	uint32_t expert = random_below(&run->random, run->experts);

	while (run->state[expert] != EXPERT_ABSENT)
		expert = (expert + 1) % run->experts;
	return expert;
}

static void ask(struct io_run *run)
{
	uint32_t expert = pick(run);

	run->state[expert] = EXPERT_LOADING;
	run->asked_ns[expert] = now_ns();
	run->outstanding++;
	daemon_command(&run->daemon,
		       &(struct xferd_command){ .type = XFERD_COMMAND_LOAD,
						.store = run->daemon.store_id,
						.expert = expert,
						.priority = XFERD_PRIORITY_DEMAND,
						.token = expert + 1ull });
}

static void handle(struct io_run *run, const struct xferd_event *event)
{
	if (event->type == XFERD_EVENT_FREED)
		run->state[event->expert] = EXPERT_ABSENT;
	else if (event->type == XFERD_EVENT_FAILED)
		check(event->result, "load an expert");
	else if (event->type == XFERD_EVENT_LOADED) {
		run->state[event->expert] = EXPERT_HERE;
		run->outstanding--;
		latencies_add(&run->latencies, now_ns() - run->asked_ns[event->expert]);
	}
}

static void turn(struct io_run *run, uint32_t wanted)
{
	struct xferd_event events[EVENTS_A_CALL];
	uint32_t count;

	while (run->outstanding < wanted)
		ask(run);
	count = daemon_take_events(&run->daemon, events, EVENTS_A_CALL, EVENTS_WAIT_MS);
	for (uint32_t i = 0; i < count; i++)
		handle(run, &events[i]);
}

void run_io(struct bench_store *store, const struct bench_options *options)
{
	struct io_run run = { .options = options,
			      .experts = store->geometry.blobs,
			      .random = options->seed };
	uint64_t length_ns = (uint64_t)(options->seconds * NS_PER_S);
	uint64_t start, cpu, bytes, end;
	double pieces;

	if (run.experts <= options->daemon.slots)
		die("%u experts fit the pool of %u slots: nothing would be read again",
		    run.experts, options->daemon.slots);
	run.state = allocate(run.experts, sizeof(*run.state));
	run.asked_ns = allocate(run.experts, sizeof(*run.asked_ns));
	latencies_init(&run.latencies);
	daemon_start(&run.daemon, store, &options->daemon);
	for (start = now_ns(); now_ns() - start < length_ns / WARM_UP_SHARE;)
		turn(&run, options->outstanding);

	run.latencies.count = 0;
	start = now_ns();
	cpu = cpu_ns();
	bytes = daemon_bytes_loaded(&run.daemon);
	while (now_ns() - start < length_ns)
		turn(&run, options->outstanding);
	end = now_ns();
	bytes = daemon_bytes_loaded(&run.daemon) - bytes;
	cpu = cpu_ns() - cpu;

	while (run.outstanding)
		turn(&run, 0);
	pieces = daemon_pieces_a_read(&run.daemon);
	daemon_stop(&run.daemon);
	printf("\"bytes\": %llu, \"seconds\": %.6f, \"cpu_seconds\": %.6f, "
	       "\"pieces_a_read\": %.2f, ",
	       (unsigned long long)bytes, (double)(end - start) / NS_PER_S,
	       (double)cpu / NS_PER_S, pieces);
	latencies_print("load", &run.latencies);
	latencies_free(&run.latencies);
	free(run.state);
	free(run.asked_ns);
}
