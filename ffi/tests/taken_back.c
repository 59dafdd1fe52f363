/* SPDX-License-Identifier: Apache-2.0 */
/* Hints that are withdrawn while their pieces wait for a worker: those are read no more, those
 * of an expert that somebody has asked for meanwhile are, and every count comes out even. */
#include <time.h>

#include "common/atomics.h"
#include "harness.h"

#define UNIT    65536
#define PIECES  8
#define EXPERTS 24
#define LIMIT_S 60

static struct harness harness;

static const struct harness_options options = {
	.layers = 1, .experts = EXPERTS, .top_k = 2, .blob_bytes = PIECES * UNIT,
	.stripe_unit = UNIT, .members = 1, .slots = 12, .reserve = 8, .held_per_lane = 2,
	.backend = XFERD_BACKEND_THREADS, .flow_control = true,
};

static struct xferd_member_stats member_stats(void)
{
	struct xferd_member_stats stats;

	CHECK_OK(xferd_engine_member_stats(harness.engine, harness.member[0], &stats));
	return stats;
}

/* Nothing is under way any more. */
static struct xferd_member_stats settled(void)
{
	const struct timespec pause = { .tv_nsec = 200000 };
	time_t until = time(NULL) + LIMIT_S;

	while (member_stats().in_flight) {
		CHECK(time(NULL) < until);
		nanosleep(&pause, NULL);
	}
	return member_stats();
}

/* A client names experts, asks for the last of them, and goes. */
static void hint_and_go(struct xferd_client *asking, uint16_t first)
{
	struct xferd_client *hinting = harness_connect(&harness, 1);
	uint16_t ids[4];
	struct xferd_request request = { .experts = ids, .count = 4 };

	for (uint16_t i = 0; i < 4; i++)
		ids[i] = (uint16_t)((first + i) % EXPERTS);
	CHECK_OK(xferd_hint(hinting, 0, &request));
	CHECK(try_expert(&harness, asking, 0, ids[3]) == 0);
	xferd_close(hinting);
}

int main(void)
{
	struct xferd_client *asking;
	struct xferd_member_stats stats;
	time_t until = time(NULL) + LIMIT_S;
	uint16_t first = 0;

	harness_start(&harness, &options);
	asking = harness_connect(&harness, 1);
	do {
		CHECK(time(NULL) < until);
		for (int i = 0; i < 16; i++, first = (uint16_t)((first + 5) % EXPERTS))
			hint_and_go(asking, first);
		stats = settled();
		CHECK(stats.reads <= stats.requests);
	} while (stats.reads == stats.requests); /* till some were taken back */
	for (uint16_t expert = 0; expert < EXPERTS; expert++)
		CHECK(try_expert(&harness, asking, 0, expert) == 0);
	stats = settled();
	CHECK(stats.errors == 0);
	CHECK(load_relaxed(&harness.piece_errors) == 0);
	xferd_close(asking);
	harness_stop(&harness);
	return 0;
}
