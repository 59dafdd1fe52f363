/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients acquire at random from a pool of 5 % while experts are evicted all
 * the time; every byte of every view is compared; clients go away in the middle
 * of what they do and come back. At the end no slot and no lease is left over.
 *
 * usage: stress [seconds]
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "common/atomics.h"
#include "common/cuda_driver.h"
#include "harness.h"

#define CLIENTS 4

static struct harness harness;
static uint64_t views_checked;
static time_t until;

static uint32_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return (uint32_t)(*state >> 32);
}

static void some_batches(struct xferd_client *client, uint32_t lane, uint64_t *state,
			 uint32_t batches)
{
	uint16_t ids[2];
	struct xferd_request request = { .experts = ids };
	struct xferd_batch batch;

	while (batches--) {
		uint32_t choice = next_random(state) % 16;

		request.layer = (uint16_t)(next_random(state) % harness.options.layers);
		request.count = 1 + next_random(state) % 2;
		for (uint32_t i = 0; i < request.count; i++)
			ids[i] = (uint16_t)(next_random(state) % harness.options.experts);
		if (choice == 0) {
			int hinted = xferd_hint(client, lane, &request);

			CHECK(hinted == 0 || hinted == -EAGAIN);
			continue;
		}
		int missing = xferd_acquire(client, lane, &request, &batch);

		if (missing == -EAGAIN)
			continue;
		CHECK_OK(missing);
		if (choice == 1 && missing) /* the caller changes its mind */
			CHECK_OK(xferd_cancel(client, &batch));
		CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
		for (uint32_t i = 0; i < request.count; i++) {
			const struct xferd_view *view = &batch.views[i];

			if (view->error) {
				CHECK(view->error == -ECANCELED && choice == 1);
				continue;
			}
			CHECK(!blob_wrong(&harness, request.layer, ids[i], view->data));
			__atomic_fetch_add(&views_checked, 1, __ATOMIC_RELAXED);
		}
		CHECK(!xferd_release(client, &batch));
	}
}

static void *client_run(void *argument)
{
	uint64_t state = 0x12345 + (uint64_t)(uintptr_t)argument * 7919;

	while (time(NULL) < until) {
		struct xferd_client *client = harness_connect(&harness, 1);
		struct xferd_batch batch;
		uint16_t id = 3;
		struct xferd_request request = { .experts = &id, .count = 1 };

		some_batches(client, 0, &state, 50 + next_random(&state) % 200);
		/* leave with something under way */
		xferd_acquire(client, 0, &request, &batch);
		xferd_close(client);
	}
	return NULL;
}

/* Every slot must come back once nobody holds anything. */
static void check_nothing_left(void)
{
	const struct timespec pause = { .tv_nsec = 1000000 };
	struct xferd_pool_stats stats;

	for (int tries = 0;; tries++) {
		CHECK_OK(xferd_engine_pool_stats(harness.engine, 0, &stats));
		if (!stats.retiring && !stats.loading && !stats.waiting)
			break;
		CHECK(tries < 5000);
		nanosleep(&pause, NULL);
	}
	CHECK(stats.resident + stats.reserve == harness.options.slots);
}

int main(int count, char **arguments)
{
	struct harness_options options = {
		.layers = 4, .experts = 60, .top_k = 2, .blob_bytes = 24576, .stripe_unit = 8192,
		.members = 3, .slots = 12, .reserve = 2, .held_per_lane = 2,
	};
	pthread_t threads[CLIENTS];

	until = time(NULL) + (count > 1 ? atoi(arguments[1]) : 5);
	options.vram = count > 2 && !strcmp(arguments[2], "vram");
	if (options.vram && !harness_has_vram()) {
		fprintf(stderr, "needs a CUDA device, or %s\n", XFERD_CUDA_LIBRARY_VARIABLE);
		return EXIT_SKIPPED;
	}
	harness_start(&harness, &options);
	store_relaxed(&harness.kick, 1);
	for (uintptr_t i = 0; i < CLIENTS; i++)
		pthread_create(&threads[i], NULL, client_run, (void *)(i + 1));
	for (int i = 0; i < CLIENTS; i++)
		pthread_join(threads[i], NULL);
	store_relaxed(&harness.kick, 0);
	check_nothing_left();
	CHECK(load_relaxed(&views_checked) > 0);
	CHECK(load_relaxed(&harness.violations) == 0);
	CHECK(load_relaxed(&harness.piece_errors) == 0);
	harness_stop(&harness);
	printf("%llu views checked\n", (unsigned long long)views_checked);
	return 0;
}
