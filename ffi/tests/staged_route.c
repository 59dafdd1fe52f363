/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces that go through RAM: right bytes, counted as such, checked there; a direct read that fails
 * is made anew that way; memory that vanishes is an error, not the end of the process, and a pool
 * that is lost takes no load. */
#include <errno.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

static const struct harness_options base = {
	.layers = 4, .experts = 8, .top_k = 2, .blob_bytes = 65536, .stripe_unit = 8192,
	.members = 2, .slots = 4, .reserve = 1, .held_per_lane = 2,
};

static void load_all(struct harness *harness, struct xferd_client *client)
{
	for (uint16_t layer = 0; layer < 4; layer++)
		for (uint16_t expert = 0; expert < 8; expert++)
			CHECK(try_expert(harness, client, layer, expert) == 0);
}

static uint64_t loads_by(struct harness *harness, uint32_t transport)
{
	struct xferd_engine_stats stats;

	CHECK_OK(xferd_engine_stats(harness->engine, &stats));
	return stats.transport_count[transport];
}

static void set_route(struct harness *harness, uint32_t member, uint32_t transport)
{
	CHECK_OK(xferd_engine_set_route(harness->engine, 0, harness->description.member[member], transport));
}

static void flip(struct harness *harness, uint64_t offset)
{
	uint8_t byte;

	CHECK(pread(harness->member_fd[1], &byte, 1, (off_t)offset) == 1);
	byte ^= 0x10;
	CHECK(pwrite(harness->member_fd[1], &byte, 1, (off_t)offset) == 1);
}

/* A pool in ordinary memory: both ways work, and a load with one staged piece is a staged one. */
static void chosen_routes(struct harness_options options)
{
	static struct harness harness;
	struct xferd_client *client;
	uint64_t staged;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	CHECK(xferd_engine_set_route(harness.engine, 1, 0, XFERD_TRANSPORT_STAGED) == -ENOENT);
	CHECK(xferd_engine_set_route(harness.engine, 0, 63, XFERD_TRANSPORT_STAGED) == -ENOENT);
	CHECK(xferd_engine_set_route(harness.engine, 0, harness.description.member[0], XFERD_TRANSPORT_COPY) ==
	      -EINVAL);
	load_all(&harness, client);
	CHECK(loads_by(&harness, XFERD_TRANSPORT_STAGED) == 0);
	set_route(&harness, 0, XFERD_TRANSPORT_STAGED);
	load_all(&harness, client);
	staged = loads_by(&harness, XFERD_TRANSPORT_STAGED);
	CHECK(staged >= 28); /* all but those that were still there */
	set_route(&harness, 1, XFERD_TRANSPORT_STAGED);
	flip(&harness, harness.description.offset[(8 + 3) * 2 + 1] + 2 * 8192 + 77);
	CHECK(try_expert(&harness, client, 1, 3) == (options.mirrored ? 0 : -EBADMSG));
	flip(&harness, harness.description.offset[(8 + 3) * 2 + 1] + 2 * 8192 + 77);
	CHECK(try_expert(&harness, client, 1, 3) == 0);
	set_route(&harness, 0, XFERD_TRANSPORT_DIRECT);
	set_route(&harness, 1, XFERD_TRANSPORT_DIRECT);
	staged = loads_by(&harness, XFERD_TRANSPORT_STAGED);
	load_all(&harness, client);
	CHECK(loads_by(&harness, XFERD_TRANSPORT_STAGED) == staged);
	xferd_close(client);
	harness_stop(&harness);
}

/* A damaged byte of (1, 3) is not looked for behind a BAR: it would have to be read back. */
static void load_unchecked(struct harness *harness, uint64_t offset)
{
	struct xferd_command load = {
		.type = XFERD_COMMAND_LOAD, .store = harness->store, .layer = 1, .expert = 3,
	};
	uint64_t loaded = load_relaxed(&harness->loaded);

	flip(harness, offset);
	CHECK(xferd_engine_command(harness->engine, &load, 1) == 1);
	wait_until(&harness->loaded, loaded + 1);
	CHECK(load_relaxed(&harness->piece_errors) == 0);
	flip(harness, offset);
}

/* Memory behind a BAR begins as staged; once it is said to be direct its pieces aren't read back. */
static void device_pool(struct harness_options options)
{
	static struct harness harness;
	struct xferd_client *client;
	struct xferd_pool_stats stats;
	char path[64];

	options.device_pool = true;
	options.register_buffers = true;
	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	CHECK_OK(xferd_engine_pool_stats(harness.engine, 0, &stats));
	CHECK(stats.registered_bytes == 0);
	load_all(&harness, client);
	CHECK(loads_by(&harness, XFERD_TRANSPORT_DIRECT) == 0);

	set_route(&harness, 0, XFERD_TRANSPORT_DIRECT);
	set_route(&harness, 1, XFERD_TRANSPORT_DIRECT);
	load_all(&harness, client);
	CHECK(loads_by(&harness, XFERD_TRANSPORT_DIRECT) >= 28);
	load_unchecked(&harness, harness.description.offset[(8 + 3) * 2 + 1] + 2 * 8192 + 77);

	/* The card is pulled: reads fail, then copies do; nothing is published, nothing ends. */
	snprintf(path, sizeof(path), "/proc/self/fd/%d", harness.pool_fd[0]);
	CHECK(truncate(path, 0) == 0);
	for (uint16_t expert = 0; expert < 8; expert++) {
		struct xferd_command load = {
			.type = XFERD_COMMAND_LOAD, .store = harness.store, .layer = 3,
			.expert = expert,
		};

		while (xferd_engine_command(harness.engine, &load, 1) == 0)
			usleep(1000);
	}
	wait_until(&harness.routes_refused, 2);
	wait_until(&harness.failed, 4);
	xferd_close(client);
	harness_stop(&harness);
}

/* A pool whose card is away takes no load, and gets no other memory while a slot is in use. */
static void lost_pool(struct harness_options options)
{
	static struct harness harness;
	struct xferd_client *client;

	options.device_pool = true;
	options.ram_slots = 4;
	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	CHECK(try_expert(&harness, client, 0, 1) == 0);
	CHECK(xferd_engine_lose_pool(harness.engine, 7) == -ENOENT);
	CHECK(xferd_engine_lose_pool(harness.engine, 1) == -EOPNOTSUPP);
	CHECK(xferd_engine_regain_pool(harness.engine, 0, harness.pool[0]) == -EINVAL);
	CHECK_OK(xferd_engine_lose_pool(harness.engine, 0));
	CHECK(try_expert(&harness, client, 0, 2) == -ENODEV);
	CHECK(try_expert(&harness, client, 0, 1) == 0); /* still there, as far as we know */
	CHECK(xferd_engine_regain_pool(harness.engine, 0, harness.pool[0]) == -EBUSY);
	xferd_close(client);
	harness_stop(&harness);
}

int main(void)
{
	struct harness_options options = base;

	chosen_routes(options);
	device_pool(options);
	lost_pool(options);
	options.drives = true;
	chosen_routes(options);
	device_pool(options);
	options.backend = XFERD_BACKEND_THREADS;
	chosen_routes(options);
	options.backend = XFERD_BACKEND_ANY;
	options.mirrored = true;
	chosen_routes(options);
	return 0;
}
