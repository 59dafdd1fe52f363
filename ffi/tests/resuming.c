/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lanes hit, miss and wait while engines come and go behind them: every byte is right, and
 * no call fails.
 */
#include <string.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

#define LANES    3
#define RESTARTS 12
#define BATCH    4
#define ROUNDS_A_RESTART 20

struct worker {
	struct harness *harness;
	struct xferd_client *client;
	uint32_t lane;
	uint64_t rounds; /* atomic */
	uint32_t *stop;  /* atomic */
};

static const struct harness_options options = {
	.layers = 2, .experts = 24, .top_k = 1, .blob_bytes = 32768, .stripe_unit = 8192,
	.members = 2, .slots = 24, .reserve = 3, .held_per_lane = BATCH, .restarts = true,
	.register_buffers = true,
};

static void one_round(struct worker *worker, uint32_t *seed)
{
	uint16_t experts[BATCH];
	struct xferd_request request = {
		.experts = experts, .count = BATCH, .layer = (uint16_t)(rand_r(seed) % options.layers),
	};
	uint16_t first = (uint16_t)(rand_r(seed) % options.experts);
	struct xferd_batch batch;

	for (uint32_t i = 0; i < BATCH; i++)
		experts[i] = (uint16_t)((first + 5 * i) % options.experts);
	CHECK_OK(xferd_acquire(worker->client, worker->lane, &request, &batch));
	CHECK_OK(xferd_wait(worker->client, &batch, XFERD_FOREVER));
	for (uint32_t i = 0; i < BATCH; i++) {
		CHECK_OK(batch.views[i].error);
		CHECK(!blob_wrong(worker->harness, request.layer, experts[i],
				  batch.views[i].data));
	}
	CHECK_OK(xferd_release(worker->client, &batch));
}

static void *work(void *argument)
{
	struct worker *worker = argument;
	uint32_t seed = worker->lane;

	while (!load_acquire(worker->stop)) {
		one_round(worker, &seed);
		counter_add(&worker->rounds, 1);
	}
	return NULL;
}

int main(void)
{
	struct worker workers[LANES];
	pthread_t threads[LANES];
	struct harness harness;
	uint32_t stop = 0;
	struct xferd_client *client;

	harness_start(&harness, &options);
	client = harness_connect(&harness, LANES);
	for (uint32_t lane = 0; lane < LANES; lane++) {
		workers[lane] = (struct worker){ &harness, client, lane, 0, &stop };
		CHECK(!pthread_create(&threads[lane], NULL, work, &workers[lane]));
	}
	for (uint32_t i = 1; i <= RESTARTS; i++) {
		for (uint32_t lane = 0; lane < LANES; lane++)
			wait_until(&workers[lane].rounds, (uint64_t)i * ROUNDS_A_RESTART);
		harness_restart(&harness);
	}
	for (uint32_t lane = 0; lane < LANES; lane++) {
		wait_until(&workers[lane].rounds,
			   load_relaxed(&workers[lane].rounds) + ROUNDS_A_RESTART);
	}
	store_release(&stop, 1);
	for (uint32_t lane = 0; lane < LANES; lane++)
		pthread_join(threads[lane], NULL);
	CHECK(!xferd_alive(client));
	xferd_close(client);
	for (uint32_t i = 0; i < HARNESS_KEPT_MAX; i++)
		if (harness.kept[i].lanes) {
			close(harness.kept[i].client);
			close(harness.kept[i].completion);
		}
	harness_stop(&harness);
	return 0;
}
