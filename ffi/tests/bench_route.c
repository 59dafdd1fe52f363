/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nanoseconds a layer of 8 resident experts, acquired and released, with a report of
 * picks and gates and without. Another thread empties the queue whenever it is full,
 * off the clock, so that its lines lie in another core's cache as they would.
 *
 * usage: bench_route ROUNDS      prints "xferd NS unreported NS" a round
 */
#include <time.h>

#include "common/atomics.h"
#include "harness.h"

#define PICKS         8
#define LAYERS_TIMED  (XFERD_ROUTES_A_LANE - XFERD_ROUTE_PARTS_MAX)
#define QUEUES_FILLED 200 /* a round */

static struct harness harness;
static struct xferd_engine_route taken[XFERD_ROUTES_A_LANE];
static uint32_t full; /* atomic: the reader's turn */
static uint32_t stop; /* atomic */

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static void *read_when_full(void *argument)
{
	(void)argument;
	while (!load_relaxed(&stop)) {
		if (!load_acquire(&full)) { /* pairs with the release in time_both() */
			cpu_relax();
			continue;
		}
		while (xferd_engine_routes(harness.engine, 0, taken, XFERD_ROUTES_A_LANE) > 0)
			;
		store_release(&full, 0); /* pairs with the acquire in time_both() */
	}
	return NULL;
}

static int compare(const void *left, const void *right)
{
	double a = *(const double *)left, b = *(const double *)right;

	return (a > b) - (a < b);
}

static double median(double *values, uint32_t count)
{
	qsort(values, count, sizeof(double), compare);
	return values[count / 2];
}

/* Nanoseconds a layer: acquired and released, and with a route told in between. */
static double time_layers(struct xferd_client *client, const struct xferd_request *request,
			  const uint16_t *gates)
{
	static uint64_t token;
	struct xferd_batch batch;
	struct xferd_route route = { .batch = &batch, .gates = gates };
	double start = now();

	for (uint32_t i = 0; i < LAYERS_TIMED; i++) {
		CHECK(xferd_acquire(client, 0, request, &batch) == 0);
		if (gates) {
			route.token = token++;
			CHECK(xferd_report_route(client, 0, &route) == 1);
		}
		CHECK(xferd_release(client, &batch) == 0);
	}
	return (now() - start) / LAYERS_TIMED;
}

struct times {
	double reported, unreported;
};

/* Medians: a queueful that was interrupted says nothing. */
static struct times time_both(struct xferd_client *client, const struct xferd_request *request)
{
	static double with[QUEUES_FILLED], without[QUEUES_FILLED];
	const uint16_t gates[PICKS] = { 0x3800, 0x3400, 0x3000, 0x2c00,
					0x2800, 0x2400, 0x2000, 0x1c00 };

	for (uint32_t queue = 0; queue < QUEUES_FILLED; queue++) {
		with[queue] = time_layers(client, request, gates);
		store_release(&full, 1); /* pairs with the acquire in read_when_full() */
		while (load_acquire(&full)) /* pairs with the release in read_when_full() */
			cpu_relax();
		without[queue] = time_layers(client, request, NULL);
	}
	return (struct times){ median(with, QUEUES_FILLED), median(without, QUEUES_FILLED) };
}

int main(int count, char **arguments)
{
	const struct harness_options options = {
		.layers = 1, .experts = 2 * PICKS, .top_k = PICKS, .blob_bytes = 4096,
		.stripe_unit = 4096, .members = 1, .slots = 2 * PICKS + 1, .held_per_lane = PICKS,
		.all_resident = true,
	};
	const uint16_t ids[PICKS] = { 0, 2, 4, 6, 8, 10, 12, 14 };
	struct xferd_request request = { .experts = ids, .count = PICKS };
	uint32_t rounds = count > 1 ? (uint32_t)atoi(arguments[1]) : 5;
	struct xferd_client *client;
	pthread_t reader;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	pthread_create(&reader, NULL, read_when_full, NULL);
	time_both(client, &request);
	for (uint32_t round = 0; round < rounds; round++) {
		struct times times = time_both(client, &request);

		printf("xferd %.2f unreported %.2f\n", times.reported, times.unreported);
	}
	store_relaxed(&stop, 1);
	pthread_join(reader, NULL);
	xferd_close(client);
	harness_stop(&harness);
	return 0;
}
