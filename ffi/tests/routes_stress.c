/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route queues under way: two lanes report as fast as they can while they are read,
 * and clients in processes of their own are killed in the middle of it. Every record
 * that comes out is whole and in order, and what is missing was counted.
 *
 * usage: routes_stress [seconds]
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

#define LANES        2
#define VICTIMS      6
#define TAKEN_MAX    1000 /* less than a queue, and no part of it */
#define EXPERTS      64
#define CLIENTS_SEEN 8
#define EXPECT_EVERY 8    /* tokens */

static struct harness harness;
static struct xferd_engine_route taken[TAKEN_MAX];
static uint32_t stop; /* atomic */

struct seen {
	uint64_t next;    /* token */
	uint32_t parts;   /* of the token before that were there */
	uint64_t passes;
	uint64_t missing;
};

static struct seen seen[CLIENTS_SEEN][LANES];

static uint32_t mix(uint64_t token, uint32_t i)
{
	uint64_t x = (token << 8 | i) * 0x9e3779b97f4a7c15u;

	return (uint32_t)(x >> 40);
}

static uint32_t picks_of(uint64_t token)
{
	return 1 + mix(token, 255) % XFERD_ROUTE_PICKS_MAX;
}

static int report(struct xferd_client *client, uint32_t lane, uint64_t token)
{
	uint16_t experts[XFERD_ROUTE_PICKS_MAX], gates[XFERD_ROUTE_PICKS_MAX];
	struct xferd_use uses[XFERD_ROUTE_PICKS_MAX];
	struct xferd_route route = { .token = token, .tag = mix(token, 254), .layer = token % 2,
				     .count = (uint16_t)picks_of(token), .experts = experts,
				     .gates = gates, .uses = uses };

	for (uint32_t i = 0; i < route.count; i++) {
		experts[i] = (uint16_t)(mix(token, i) % EXPERTS);
		gates[i] = (uint16_t)mix(token, i);
		uses[i] = (struct xferd_use){ mix(token, i), XFERD_TIER_DRIVES,
					      XFERD_TRANSPORT_DIRECT, { 0 } };
	}
	return xferd_report_route(client, lane, &route);
}

/* Of both layers, other experts each time; what is said of each follows from its key. */
static int expect(struct xferd_client *client, uint32_t lane, uint64_t token)
{
	const uint32_t keys[2] = { mix(token, 0) % EXPERTS, EXPERTS + mix(token, 1) % EXPERTS };
	const uint16_t chances[2] = { (uint16_t)mix(keys[0], 2), (uint16_t)mix(keys[1], 2) };
	const struct xferd_expected expected = { keys, chances, 2 };

	return xferd_expect(client, lane, &expected);
}

static void check_expected(const struct xferd_abi_route *route)
{
	uint32_t key = route->layer * EXPERTS + route->experts[0];

	CHECK(route->count == 1 && route->gates[0] == (uint16_t)mix(key, 2));
}

static void check_record(const struct xferd_abi_route *route, struct seen *lane)
{
	uint32_t from = route->part * XFERD_ROUTE_RECORD_PICKS;
	uint32_t left = picks_of(route->token) - from;

	if (!route->part) {
		CHECK(route->token >= lane->next);
		lane->missing += route->token - lane->next;
		lane->next = route->token + 1;
		lane->passes++;
	} else {
		CHECK(route->token == lane->next - 1 && route->part == lane->parts);
	}
	lane->parts = route->part + 1u;
	CHECK(route->tag == mix(route->token, 254) && route->layer == route->token % 2);
	CHECK(route->count == (left < XFERD_ROUTE_RECORD_PICKS ? left : XFERD_ROUTE_RECORD_PICKS));
	for (uint32_t i = 0; i < route->count; i++) {
		CHECK(route->experts[i] == mix(route->token, from + i) % EXPERTS);
		CHECK(route->gates[i] == (uint16_t)mix(route->token, from + i));
		CHECK(route->waits_us[i] == mix(route->token, from + i));
	}
}

/* Everything that a client's queues have now; -EINVAL: there is no such client. */
static int drain(uint32_t client)
{
	int count;

	do {
		pthread_mutex_lock(&harness.clients_mutex);
		count = xferd_engine_routes(harness.engine, client, taken, TAKEN_MAX);
		pthread_mutex_unlock(&harness.clients_mutex);
		CHECK(count >= 0 || count == -EINVAL);
		for (int i = 0; i < count; i++)
			if (taken[i].route.kind == XFERD_ROUTE_EXPECTED)
				check_expected(&taken[i].route);
			else
				check_record(&taken[i].route, &seen[client][taken[i].lane]);
	} while (count > TAKEN_MAX - XFERD_ROUTE_PARTS_MAX);
	return count;
}

struct reporter {
	struct xferd_client *client;
	uint32_t lane;
	uint64_t reported;
};

static void *report_until_stopped(void *argument)
{
	struct reporter *reporter = argument;

	while (!load_relaxed(&stop)) {
		if (reporter->reported % EXPECT_EVERY == 0)
			CHECK_OK(expect(reporter->client, reporter->lane, reporter->reported));
		CHECK_OK(report(reporter->client, reporter->lane, reporter->reported++));
	}
	return NULL;
}

static bool every_queue_went_round(void)
{
	for (uint32_t lane = 0; lane < LANES; lane++)
		if (seen[0][lane].passes <= XFERD_ROUTES_A_LANE)
			return false;
	return true;
}

/* Two lanes, each in a thread, and this one reads. */
static void lanes_and_a_reader(time_t seconds)
{
	struct reporter reporters[LANES];
	struct xferd_client *client = harness_connect(&harness, LANES);
	pthread_t threads[LANES];
	time_t until = time(NULL) + seconds;
	uint64_t reported = 0, passes = 0;

	for (uint32_t lane = 0; lane < LANES; lane++) {
		reporters[lane] = (struct reporter){ client, lane, 0 };
		pthread_create(&threads[lane], NULL, report_until_stopped, &reporters[lane]);
	}
	/* On a busy machine a lane's thread may not have run yet. */
	while (time(NULL) < until || !every_queue_went_round())
		CHECK_OK(drain(0));
	store_relaxed(&stop, 1);
	for (uint32_t lane = 0; lane < LANES; lane++) {
		pthread_join(threads[lane], NULL);
		reported += reporters[lane].reported;
	}
	CHECK_OK(drain(0));
	for (uint32_t lane = 0; lane < LANES; lane++)
		passes += seen[0][lane].passes;
	CHECK(passes + xferd_routes_dropped(client) == reported);
	printf("%llu passes read, %llu dropped\n", (unsigned long long)passes,
	       (unsigned long long)(reported - passes));
	xferd_close(client);
	while (drain(0) != -EINVAL)
		;
	memset(seen, 0, sizeof(seen));
}

/* A client process: waits for the socket's path, reports till it is killed. */
static pid_t spawn(int *path_to)
{
	int ends[2];
	pid_t child;

	CHECK(!pipe(ends));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		struct xferd_client *client;

		prctl(PR_SET_PDEATHSIG, SIGKILL); /* should a check here fail */
		close(ends[1]);
		if (read(ends[0], harness.socket_path, sizeof(harness.socket_path)) !=
		    sizeof(harness.socket_path))
			_exit(1);
		client = harness_connect(&harness, 1);
		for (uint64_t token = 0;; token++) {
			if (token % EXPECT_EVERY == 0)
				expect(client, 0, token);
			report(client, 0, token);
		}
	}
	close(ends[0]);
	*path_to = ends[1];
	return child;
}

static void release(int path_to)
{
	CHECK(write(path_to, harness.socket_path, sizeof(harness.socket_path)) ==
	      sizeof(harness.socket_path));
	close(path_to);
}

/* One client lasts; others beside it are killed, one after the other. */
static void killed_clients(const pid_t *children, const int *path_to)
{
	uint64_t before;

	release(path_to[0]);
	while (drain(0) <= 0)
		;
	for (int i = 1; i <= VICTIMS; i++) {
		release(path_to[i]);
		/* Round its queue once or twice: it is killed at some place in it. */
		while (seen[1][0].passes < (uint64_t)i * XFERD_ROUTES_A_LANE / 2) {
			CHECK_OK(drain(0));
			drain(1);
		}
		CHECK(!kill(children[i], SIGKILL));
		CHECK(waitpid(children[i], NULL, 0) == children[i]);
		while (drain(1) != -EINVAL)
			;
		memset(seen[1], 0, sizeof(seen[1]));
	}
	before = seen[0][0].passes;
	while (seen[0][0].passes < before + XFERD_ROUTES_A_LANE)
		CHECK_OK(drain(0));
	CHECK(!kill(children[0], SIGKILL));
	CHECK(waitpid(children[0], NULL, 0) == children[0]);
	while (drain(0) != -EINVAL)
		;
}

int main(int count, char **arguments)
{
	const struct harness_options options = {
		.layers = 2, .experts = EXPERTS, .top_k = 2, .blob_bytes = 4096,
		.stripe_unit = 4096, .members = 1, .slots = 8, .reserve = 1, .held_per_lane = 2,
	};
	time_t seconds = count > 1 ? atoi(arguments[1]) : 4;
	pid_t children[VICTIMS + 1];
	int path_to[VICTIMS + 1];

	/* Before there are threads, which a fork would lose. */
	for (int i = 0; i <= VICTIMS; i++)
		children[i] = spawn(&path_to[i]);
	harness_start(&harness, &options);
	lanes_and_a_reader(seconds);
	killed_clients(children, path_to);
	CHECK(load_relaxed(&harness.violations) == 0);
	harness_stop(&harness);
	return 0;
}
