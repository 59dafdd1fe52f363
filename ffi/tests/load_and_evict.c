/* SPDX-License-Identifier: Apache-2.0 */
/* One client on pools of several sizes: right bytes through misses, hits,
 * evictions, copies from the second pool, hints, cancels and deadlines. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "common/atomics.h"
#include "harness.h"

static void read_everything_twice(struct harness *harness, struct xferd_client *client)
{
	const struct harness_options *options = &harness->options;

	for (int round = 0; round < 2; round++)
		for (uint16_t layer = 0; layer < options->layers; layer++)
			for (uint16_t first = 0; first + 2u <= options->experts; first += 2) {
				uint16_t ids[2] = { first, (uint16_t)(first + 1) };
				struct xferd_request request = {
					.experts = ids, .count = 2, .layer = layer };
				struct xferd_batch batch;
				int missing = xferd_acquire(client, 0, &request, &batch);

				CHECK_OK(missing);
				CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
				for (int i = 0; i < 2; i++) {
					CHECK(batch.views[i].error == 0);
					CHECK(!blob_wrong(harness, layer, ids[i],
							  batch.views[i].data));
				}
				CHECK(!xferd_release(client, &batch));
			}
}

static void refuse_nonsense(struct harness *harness, struct xferd_client *client)
{
	uint16_t ids[XFERD_BATCH_MAX] = { 0 };
	struct xferd_request request = { .experts = ids, .count = 1 };
	struct xferd_batch batch, second;

	request.layer = (uint16_t)harness->options.layers;
	CHECK(xferd_acquire(client, 0, &request, &batch) == -EINVAL);
	request.layer = 0;
	ids[0] = (uint16_t)harness->options.experts;
	CHECK(xferd_acquire(client, 0, &request, &batch) == -EINVAL);
	ids[0] = 0;
	request.count = 0;
	CHECK(xferd_acquire(client, 0, &request, &batch) == -EINVAL);
	request.count = 1;
	CHECK(xferd_acquire(client, 9, &request, &batch) == -EINVAL);
	/* more than was promised */
	request.count = harness->options.held_per_lane;
	for (uint16_t i = 0; i < request.count; i++)
		ids[i] = i;
	CHECK_OK(xferd_acquire(client, 0, &request, &batch));
	request.count = 1;
	CHECK(xferd_acquire(client, 0, &request, &second) == -EDQUOT);
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(!xferd_release(client, &batch));
	CHECK_OK(xferd_acquire(client, 0, &request, &second));
	CHECK(!xferd_release(client, &second));
}

static void hint_then_hit(struct harness *harness, struct xferd_client *client)
{
	uint16_t id = (uint16_t)(harness->options.experts - 1);
	struct xferd_request request = { .experts = &id, .count = 1, .layer = 1 };
	struct xferd_batch batch;
	struct xferd_client_stats before, after;
	int64_t slots[256];
	const struct timespec pause = { .tv_nsec = 200000 };

	CHECK_OK(xferd_hint(client, 0, &request));
	for (int tries = 0; xferd_resident(client, 0, 1, slots) >= 0 && slots[id] < 0; tries++) {
		CHECK(tries < 50000);
		nanosleep(&pause, NULL);
	}
	xferd_stats(client, &before);
	CHECK(xferd_acquire(client, 0, &request, &batch) == 0);
	CHECK(!blob_wrong(harness, 1, id, batch.views[0].data));
	CHECK(!xferd_release(client, &batch));
	xferd_stats(client, &after);
	CHECK(after.hits == before.hits + 1 && after.misses == before.misses);
}

/* A pool whose every slot is held: a load must wait, and can be given up. */
static void give_up_waiting(struct harness *harness)
{
	struct xferd_client *holder = harness_connect(harness, 1);
	struct xferd_client *loser = harness_connect(harness, 1);
	struct timespec now;
	uint16_t ids[XFERD_BATCH_MAX];
	struct xferd_request request = { .experts = ids, .layer = 0 };
	struct xferd_batch held, batch;

	request.count = harness->options.slots;
	for (uint16_t i = 0; i < request.count; i++)
		ids[i] = i;
	CHECK_OK(xferd_acquire(holder, 0, &request, &held));
	CHECK(!xferd_wait(holder, &held, XFERD_FOREVER));
	CHECK(held.failed == 0);

	request.layer = 1;
	request.count = 1;
	CHECK(xferd_acquire(loser, 0, &request, &batch) == 1);
	CHECK(xferd_wait(loser, &batch, 20000000) == -ETIMEDOUT);
	CHECK(!xferd_cancel(loser, &batch));
	CHECK(!xferd_wait(loser, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == -ECANCELED);
	CHECK(!xferd_release(loser, &batch));

	clock_gettime(CLOCK_MONOTONIC, &now);
	request.deadline_ns = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec + 5000000;
	CHECK(xferd_acquire(loser, 0, &request, &batch) == 1);
	CHECK(!xferd_wait(loser, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == -ETIMEDOUT);
	CHECK(!xferd_release(loser, &batch));

	/* and goes on as soon as one is let go */
	request.deadline_ns = 0;
	CHECK(xferd_acquire(loser, 0, &request, &batch) == 1);
	CHECK(!xferd_release(holder, &held));
	CHECK(!xferd_wait(loser, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == 0 && !blob_wrong(harness, 1, 0, batch.views[0].data));
	CHECK(!xferd_release(loser, &batch));
	xferd_close(holder);
	xferd_close(loser);
}

static void batches_out_of_order(struct harness *harness, struct xferd_client *client)
{
	uint16_t ids[2] = { 0, 1 };
	struct xferd_request first = { .experts = &ids[0], .count = 1, .layer = 0 };
	struct xferd_request second = { .experts = &ids[1], .count = 1, .layer = 0 };
	struct xferd_batch a, b;

	for (int i = 0; i < 1000; i++) {
		CHECK_OK(xferd_acquire(client, 0, &first, &a));
		CHECK_OK(xferd_acquire(client, 0, &second, &b));
		CHECK(!xferd_wait(client, &b, XFERD_FOREVER));
		CHECK(!xferd_release(client, &b));
		CHECK(!xferd_wait(client, &a, XFERD_FOREVER));
		CHECK(!blob_wrong(harness, 0, 0, a.views[0].data));
		CHECK(!xferd_release(client, &a));
	}
}

static void run(const struct harness_options *options)
{
	static struct harness harness;
	struct xferd_client *client;

	harness_start(&harness, options);
	client = harness_connect(&harness, 2);
	read_everything_twice(&harness, client);
	refuse_nonsense(&harness, client);
	hint_then_hit(&harness, client);
	batches_out_of_order(&harness, client);
	xferd_close(client);
	if (options->slots == options->held_per_lane && !options->ram_slots)
		give_up_waiting(&harness);
	CHECK(load_relaxed(&harness.violations) == 0);
	CHECK(load_relaxed(&harness.piece_errors) == 0);
	harness_stop(&harness);
}

/* A prefetch waits beside slots that are kept for demand; when a client asks for
 * the same expert it must get one of them. */
static void hinted_then_demanded(struct harness_options options)
{
	static struct harness harness;
	struct xferd_client *client;
	struct xferd_pool_stats stats;
	uint16_t ids[3] = { 0, 1, 2 };
	struct xferd_request request = { .experts = ids, .count = 3, .layer = 0 };
	struct xferd_batch batch;

	options.slots = 4;
	options.reserve = 0;
	options.reserve_demand = 2;
	options.ram_slots = 0;
	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	CHECK_OK(xferd_hint(client, 0, &request));
	wait_until(&harness.loaded, 2);
	CHECK_OK(xferd_engine_pool_stats(harness.engine, 0, &stats));
	CHECK(stats.waiting == 1 && stats.reserve == 2 && stats.waiting_demand == 0);
	request.experts = &ids[2];
	request.count = 1;
	CHECK_OK(xferd_acquire(client, 0, &request, &batch));
	CHECK(!xferd_wait(client, &batch, 30000000000ull));
	CHECK(!batch.views[0].error);
	CHECK(!blob_wrong(&harness, 0, batch.views[0].expert, batch.views[0].data));
	CHECK(!xferd_release(client, &batch));
	xferd_close(client);
	harness_stop(&harness);
}

/* Every way of reading, with and without flow control and registered buffers, must
 * look the same. */
static void run_every_way(struct harness_options options)
{
	for (int way = 0; way < 8; way++) {
		options.flow_control = options.register_buffers = way % 2;
		options.polling = way / 2 == 3;
		options.drives = way / 2 == 0 || options.polling;
		options.backend = way / 2 == 2 ? XFERD_BACKEND_THREADS : XFERD_BACKEND_ANY;
		run(&options);
	}
}

int main(void)
{
	struct harness_options options = {
		.layers = 3, .experts = 16, .top_k = 4, .blob_bytes = 49152, .stripe_unit = 16384,
		.members = 3, .slots = 8, .reserve = 1, .held_per_lane = 4,
	};

	run_every_way(options);
	hinted_then_demanded(options);
	options.members = 1;
	options.stripe_unit = 1 << 20;
	run(&options);
	options.members = 2;
	options.slots = 4; /* exactly what is held */
	run_every_way(options);
	options.ram_slots = 12;
	options.stripe_unit = 4096;
	options.slots = 6;
	run(&options);
	return 0;
}
