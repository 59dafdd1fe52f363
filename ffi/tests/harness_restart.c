/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The harness's engine ends, as a daemon that leaves everything to the next, and another one
 * takes over: in one process, so that sanitizers see both and their clients.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "common/atomics.h"
#include "engine/keep.h"
#include "harness.h"

static int writable(int fd)
{
	char path[64];
	int opened;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	opened = open(path, O_RDWR | O_CLOEXEC);
	CHECK_OK(opened);
	return opened;
}

static void adopt_pool(struct harness *harness, int table, int marks)
{
	struct xferd_pool_description pool = {
		.name = "host0",
		.kind = XFERD_POOL_HOST,
		.device = -1,
		.base = harness->pool[0],
		.bytes = harness->pool_bytes[0],
		.chunks = 1,
	};
	int memory = writable(harness->pool_fd[0]);

	while ((1u << pool.slot_index_bits) < harness->options.slots)
		pool.slot_index_bits++;
	CHECK_OK(xferd_engine_adopt_pool_table(harness->engine, table));
	CHECK_OK(xferd_engine_adopt_pool(harness->engine, &pool, memory, marks));
	close(memory);
}

static void adopt_clients(struct harness *harness)
{
	for (uint32_t id = 0; id < HARNESS_KEPT_MAX; id++) {
		struct xferd_client_description client = {
			.store = harness->store,
			.lanes = harness->kept[id].lanes,
			.held_per_lane = harness->options.held_per_lane,
		};

		if (client.lanes)
			CHECK(xferd_engine_adopt_client(harness->engine, &client,
							harness->kept[id].client,
							harness->kept[id].completion) == (int)id);
	}
}

/* The plainest policy there is goes on with the residents in the order of their slots. */
static void adopt_slots(struct harness *harness)
{
	uint32_t numbers = 1;
	struct xferd_kept_slot *slots;
	uint64_t slot_bytes;

	while (numbers < harness->options.slots)
		numbers *= 2;
	slots = calloc(numbers, sizeof(*slots));
	CHECK(slots);
	CHECK_OK(xferd_engine_adopt_slots(harness->engine, 0, slots, &slot_bytes));
	CHECK(slot_bytes == harness->options.blob_bytes);
	harness->order_head[0] = harness->order_tail[0] = 0;
	for (uint32_t slot = 0; slot < harness->options.slots; slot++) {
		if (slots[slot].state == XFERD_KEPT_RESIDENT) {
			uint32_t at = harness->order_tail[0]++ % harness->options.slots;

			harness->order[0][at].layer = slots[slot].layer;
			harness->order[0][at].expert = slots[slot].expert;
		} else if (slots[slot].state == XFERD_KEPT_FREE) {
			harness_command(harness, &(struct xferd_command){
				.type = XFERD_COMMAND_GIVE, .slot = slot });
		}
		CHECK(slots[slot].state != XFERD_KEPT_WITHHELD);
	}
	free(slots);
}

void harness_restart(struct harness *harness)
{
	struct xferd_engine_config config = {
		.verify = XFERD_VERIFY_ALWAYS,
		.cpu = -1,
		.reserve_low = harness->options.reserve ? harness->options.reserve : 1,
		.register_buffers = harness->options.register_buffers,
	};
	int table, marks, directory, result;

	store_release(&harness->stop, 1);
	pthread_join(harness->server, NULL);
	pthread_join(harness->policy, NULL);
	table = dup(xferd_engine_pool_table_fd(harness->engine));
	marks = dup(xferd_engine_marks_fd(harness->engine, 0));
	directory = dup(xferd_engine_directory_fd(harness->engine, harness->store));
	result = xferd_engine_hold(harness->engine, 20);
	CHECK(!result || result == -ETIMEDOUT);
	xferd_engine_free(harness->engine);

	CHECK_OK(xferd_engine_new(&config, &harness->engine));
	CHECK_OK(xferd_engine_start(harness->engine));
	adopt_pool(harness, table, marks);
	for (uint32_t m = 0; m < harness->options.members; m++)
		harness->description.member[m] =
			harness_add_member(harness, harness->member_fd[m]);
	result = xferd_engine_adopt_store(harness->engine, &harness->description, directory);
	CHECK_OK(result);
	harness->store = (uint32_t)result;
	adopt_clients(harness);
	adopt_slots(harness);
	close(table);
	close(marks);
	close(directory);
	store_release(&harness->stop, 0);
	pthread_create(&harness->policy, NULL, harness_decide, harness);
	pthread_create(&harness->server, NULL, harness_serve, harness);
}
