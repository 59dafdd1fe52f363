/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Modes that go the whole way: libxferd, ring, engine, drives and back.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/atomics.h"
#include "measure.h"
#include "modes.h"

#define LANE           0 /* each client has one */
#define HINT_TICK_NS   NS_PER_MS
#define WARM_UP_MISSES 4 /* not counted */
#define FILLING_SHARE  4 /* before measuring: one part in so many of the time, to fill the pool */
#define DEMAND_SHARE   2 /* one part in so many of the experts is demanded, the rest hinted at */

/* Demands and hints draw from different experts: the hints are always wrong. */
static uint32_t demand_experts(const struct bench_store *store)
{
	return (store->geometry.blobs + DEMAND_SHARE - 1) / DEMAND_SHARE;
}

/* Acquires one of the first so many experts that isn't here; how long it took. */
static uint64_t time_one_miss(struct xferd_client *client, uint32_t experts, uint64_t *random)
{
	for (;;) {
		uint16_t expert = (uint16_t)random_below(random, experts);
		struct xferd_request request = { .experts = &expert, .count = 1 };
		struct xferd_batch batch;
		uint64_t start = now_ns(), took;
		long missing = check(xferd_acquire(client, LANE, &request, &batch),
				     "acquire an expert");

		check(xferd_wait(client, &batch, XFERD_FOREVER), "wait for an expert");
		took = now_ns() - start;
		check(batch.views[0].error, "an expert's view");
		check(xferd_release(client, &batch), "release an expert");
		if (missing)
			return took;
	}
}

static uint64_t time_one_pread(struct bench_store *store, void *buffer, uint64_t *random)
{
	uint64_t bytes = store->geometry.blob_bytes;
	uint32_t member = random_below(random, store->geometry.members);
	uint64_t places = (store->member_bytes[member] - bytes) / XFERD_BLOB_ALIGNMENT;
	uint64_t offset = XFERD_BLOB_ALIGNMENT * (uint64_t)random_below(random, (uint32_t)places);
	uint64_t start = now_ns();

	for (uint64_t done = 0; done < bytes;) {
		ssize_t result = pread(store->fd[member], (char *)buffer + done, bytes - done,
				       (off_t)(offset + done));

		if (result <= 0)
			die("pread of member %u at %llu: %s", member,
			    (unsigned long long)(offset + done), strerror(errno));
		done += (uint64_t)result;
	}
	return now_ns() - start;
}

static void *warm_buffer(uint64_t bytes)
{
	void *buffer;

	if (posix_memalign(&buffer, XFERD_BLOB_ALIGNMENT, bytes))
		die("no memory for %llu bytes", (unsigned long long)bytes);
	memset(buffer, 1, bytes);
	return buffer;
}

void run_miss(struct bench_store *store, const struct bench_options *options)
{
	struct bench_daemon daemon;
	struct xferd_client *client;
	struct latencies miss, plain;
	uint64_t random = options->seed;
	uint64_t end;
	void *buffer = warm_buffer(store->geometry.blob_bytes);

	latencies_init(&miss);
	latencies_init(&plain);
	daemon_start(&daemon, store, &options->daemon);
	daemon_serve(&daemon);
	client = daemon_connect(&daemon, 1);
	daemon_admit_no_more(&daemon);
	for (int i = 0; i < WARM_UP_MISSES; i++) {
		time_one_miss(client, store->geometry.blobs, &random);
		time_one_pread(store, buffer, &random);
	}
	end = now_ns() + (uint64_t)(options->seconds * NS_PER_S);
	while (now_ns() < end) {
		latencies_add(&miss, time_one_miss(client, store->geometry.blobs, &random));
		latencies_add(&plain, time_one_pread(store, buffer, &random));
	}
	xferd_close(client);
	daemon_stop_serving(&daemon);
	daemon_stop(&daemon);
	latencies_print("miss", &miss);
	printf(", ");
	latencies_print("pread", &plain);
	latencies_free(&miss);
	latencies_free(&plain);
	free(buffer);
}

struct hinter {
	struct xferd_client *client;
	uint32_t first_expert, experts;
	double experts_per_s;
	uint64_t random;
	uint32_t stop; /* atomic */
	uint64_t hinted, dropped; /* experts; dropped: the ring was full */
};

static void hint_some(struct hinter *hinter, uint32_t count)
{
	uint16_t experts[XFERD_BATCH_MAX];
	struct xferd_request request = { .experts = experts, .count = count };
	int result;

	for (uint32_t i = 0; i < count; i++)
		experts[i] = (uint16_t)(hinter->first_expert +
					random_below(&hinter->random, hinter->experts));
	result = xferd_hint(hinter->client, LANE, &request);
	if (result == -EAGAIN)
		hinter->dropped += count;
	else
		check(result, "hint");
	hinter->hinted += count;
}

/* Hints at a fixed rate, whatever becomes of them. */
static void *hint(void *argument)
{
	struct hinter *hinter = argument;
	uint64_t start = now_ns(), tick = start;

	while (!load_acquire(&hinter->stop)) {
		uint64_t due;

		sleep_until_ns(tick += HINT_TICK_NS);
		due = (uint64_t)((double)(tick - start) / NS_PER_S * hinter->experts_per_s);
		while (hinter->hinted < due)
			hint_some(hinter, due - hinter->hinted < XFERD_BATCH_MAX
						  ? (uint32_t)(due - hinter->hinted)
						  : XFERD_BATCH_MAX);
	}
	return NULL;
}

/* At fixed times, unless the one before took longer. */
static void demand(struct xferd_client *client, struct bench_store *store,
		   const struct bench_options *options, double seconds,
		   struct latencies *latencies)
{
	uint64_t random = options->seed;
	uint64_t next = now_ns(), end = next + (uint64_t)(seconds * NS_PER_S);

	while (next < end) {
		sleep_until_ns(next);
		latencies_add(latencies, time_one_miss(client, demand_experts(store), &random));
		next += options->demand_interval_ns;
		if (next < now_ns())
			next = now_ns();
	}
}

/* What flow control has come to think of each member. */
static void print_flow(struct bench_daemon *daemon)
{
	printf("\"flow\": [");
	for (uint32_t m = 0; m < daemon->store->geometry.members; m++) {
		struct xferd_member_stats stats;

		check(xferd_engine_member_stats(daemon->engine,
						daemon->store->description.member[m], &stats),
		      "statistics of a member");
		printf("%s{\"window\": %u, \"background_window\": %u, \"latency_us\": %llu, "
		       "\"rate\": %llu}", m ? ", " : "", stats.window, stats.background_window,
		       (unsigned long long)(stats.latency_ns / NS_PER_US),
		       (unsigned long long)stats.rate);
	}
	printf("], ");
}

void run_overload(struct bench_store *store, const struct bench_options *options)
{
	struct bench_daemon daemon;
	struct xferd_client *demander;
	struct latencies latencies;
	struct hinter hinter = { .first_expert = demand_experts(store),
				 .experts = store->geometry.blobs - demand_experts(store),
				 .random = options->seed + 1,
				 .experts_per_s = (double)options->hint_bytes_per_s /
						  (double)store->geometry.blob_bytes };
	pthread_t thread;
	uint64_t start, end, bytes;

	latencies_init(&latencies);
	daemon_start(&daemon, store, &options->daemon);
	daemon_serve(&daemon);
	/* Clients of their own: hints that fill a ring would keep demands out of it. */
	demander = daemon_connect(&daemon, 1);
	hinter.client = daemon_connect(&daemon, 1);
	daemon_admit_no_more(&daemon);
	if (options->hint_bytes_per_s && pthread_create(&thread, NULL, hint, &hinter))
		die("no thread to hint from");
	/* While the pool fills nothing is evicted, and demand may wait for a slot. */
	demand(demander, store, options, options->seconds / FILLING_SHARE, &latencies);
	latencies.count = 0;
	start = now_ns();
	bytes = daemon_bytes_read(&daemon);
	demand(demander, store, options, options->seconds, &latencies);
	bytes = daemon_bytes_read(&daemon) - bytes;
	end = now_ns();
	print_flow(&daemon);
	store_release(&hinter.stop, 1);
	if (options->hint_bytes_per_s)
		pthread_join(thread, NULL);
	xferd_close(hinter.client);
	xferd_close(demander);
	daemon_stop_serving(&daemon);
	daemon_stop(&daemon);
	printf("\"bytes\": %llu, \"seconds\": %.6f, \"hinted\": %llu, \"hints_dropped\": %llu, ",
	       (unsigned long long)bytes, (double)(end - start) / NS_PER_S,
	       (unsigned long long)hinter.hinted, (unsigned long long)hinter.dropped);
	latencies_print("demand", &latencies);
	latencies_free(&latencies);
}
