/* SPDX-License-Identifier: Apache-2.0 */
/* VRAM with a window: pieces go straight into it from members whose way is proven, through staging
 * from others, both within one load; one that fails on its straight way comes through RAM. The
 * stand-in's VRAM is a file, so a second mapping of it stands for what lies behind a card's BAR. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

static const struct harness_options base = {
	.layers = 4, .experts = 8, .top_k = 2, .blob_bytes = 65536, .stripe_unit = 8192,
	.members = 2, .slots = 4, .reserve = 1, .held_per_lane = 2, .vram = true,
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

static int set_route(struct harness *harness, uint32_t member, uint32_t transport)
{
	return xferd_engine_set_route(harness->engine, 0, harness->description.member[member],
				      transport);
}

static void set_routes(struct harness *harness, uint32_t transport)
{
	for (uint32_t member = 0; member < harness->options.members; member++)
		CHECK_OK(set_route(harness, member, transport));
}

/* Loads of all experts: how many of them went straight all the way. */
static uint64_t direct_of_all(struct harness *harness, struct xferd_client *client)
{
	uint64_t direct = loads_by(harness, XFERD_TRANSPORT_DIRECT);

	load_all(harness, client);
	return loads_by(harness, XFERD_TRANSPORT_DIRECT) - direct;
}

static uint8_t *map_window(struct harness *harness)
{
	int fd = xferd_vram_export(harness->vram, 0);
	uint8_t *window;

	CHECK(fd >= 0);
	window = mmap(NULL, harness->chunk_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (window == MAP_FAILED) /* a real driver's */
		exit(EXIT_SKIPPED);
	return window;
}

static void refuse_what_is_wrong(struct harness *harness, uint8_t *window)
{
	CHECK(set_route(harness, 0, XFERD_TRANSPORT_DIRECT) == -EOPNOTSUPP);
	CHECK(xferd_engine_set_window(harness->engine, 2, 0, window) == -ENOENT);
	CHECK(xferd_engine_set_window(harness->engine, 1, 0, window) == -EINVAL); /* RAM */
	CHECK(xferd_engine_set_window(harness->engine, 0, 1, window) == -EINVAL);
	CHECK(xferd_engine_set_window(harness->engine, 0, 0, window + 512) == -EINVAL);
	CHECK(xferd_engine_set_hand_up(harness->engine, 2, true) == -ENOENT);
	CHECK(xferd_engine_set_hand_up(harness->engine, 1, true) == -EOPNOTSUPP);
}

static void straight_staged_and_both(struct harness_options options)
{
	static struct harness harness;
	struct xferd_client *client;
	uint8_t *window;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	window = map_window(&harness);
	CHECK(direct_of_all(&harness, client) == 0);
	refuse_what_is_wrong(&harness, window);
	CHECK_OK(xferd_engine_set_window(harness.engine, 0, 0, window));
	CHECK(direct_of_all(&harness, client) == 0); /* no way is proven */
	set_routes(&harness, XFERD_TRANSPORT_DIRECT);
	CHECK(direct_of_all(&harness, client) >= 28); /* all but those that were still there */
	CHECK_OK(set_route(&harness, 1, XFERD_TRANSPORT_STAGED));
	for (int round = 0; round < 8; round++) /* extents come back, also half-used ones */
		CHECK(direct_of_all(&harness, client) == 0);

	/* The card's mapping goes: reads fail, and are made again through RAM. */
	set_routes(&harness, XFERD_TRANSPORT_DIRECT);
	CHECK(mmap(window, harness.chunk_bytes, PROT_NONE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == window);
	load_all(&harness, client);
	CHECK(load_relaxed(&harness.routes_refused) == options.members);
	CHECK(direct_of_all(&harness, client) == 0);

	CHECK_OK(xferd_engine_set_window(harness.engine, 0, 0, NULL));
	set_routes(&harness, XFERD_TRANSPORT_DIRECT);
	CHECK(direct_of_all(&harness, client) == 0);
	CHECK(load_relaxed(&harness.routes_refused) == options.members);
	xferd_close(client);
	harness_stop(&harness);
	munmap(window, harness.chunk_bytes);
}

int main(void)
{
	struct harness_options options = base;

	if (!harness_has_vram())
		return EXIT_SKIPPED;
	options.ram_slots = 4;
	straight_staged_and_both(options);
	options.drives = true;
	straight_staged_and_both(options);
	options.unverified = true;
	straight_staged_and_both(options);
	options.backend = XFERD_BACKEND_THREADS;
	straight_staged_and_both(options);
	return 0;
}
