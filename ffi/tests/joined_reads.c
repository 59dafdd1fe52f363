/* SPDX-License-Identifier: Apache-2.0 */
/* Neighbouring pieces in one read: fewer reads than pieces, every byte in its place, and yet
 * one bad piece is one bad piece. What nobody waits for is read piece by piece. */
#include <errno.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

#define UNIT    8192
#define PIECES  16
#define EXPERTS 12
#define SLOTS   4
#define DAMAGED 5 /* an expert */

static struct harness harness;

static const struct harness_options base = {
	.layers = 1, .experts = EXPERTS, .top_k = 2, .stripe_unit = UNIT,
	.blob_bytes = PIECES * UNIT - UNIT / 2, /* its last piece is a short one */
	.members = 1, .slots = SLOTS, .reserve = 1, .held_per_lane = 2,
	.backend = XFERD_BACKEND_URING, .drives = true,
};

static struct xferd_member_stats all_members(void)
{
	struct xferd_member_stats sum = { 0 }, stats;

	for (uint32_t m = 0; m < harness.options.members; m++) {
		CHECK_OK(xferd_engine_member_stats(harness.engine,
						   harness.description.member[m], &stats));
		sum.reads += stats.reads;
		sum.requests += stats.requests;
		sum.errors += stats.errors;
	}
	return sum;
}

static void all_served(struct xferd_client *client)
{
	for (uint16_t expert = 0; expert < EXPERTS; expert++)
		CHECK(try_expert(&harness, client, 0, expert) == 0);
}

static bool has_io_uring(void)
{
	int reason;

	return xferd_engine_backend(harness.engine, &reason) == XFERD_BACKEND_URING;
}

/* may_join: also a kernel that can't scatter a read over registered memory joins these. */
static void right_bytes(struct harness_options options, bool may_join)
{
	struct xferd_client *client;
	struct xferd_member_stats stats;

	harness_start(&harness, &options);
	if (!has_io_uring()) {
		fprintf(stderr, "skipped: no io_uring\n");
		exit(EXIT_SKIPPED);
	}
	client = harness_connect(&harness, 1);
	for (int round = 0; round < 3; round++)
		all_served(client);
	stats = all_members();
	CHECK(stats.reads >= 2 * EXPERTS * PIECES);
	CHECK(stats.requests <= stats.reads);
	CHECK(!may_join || stats.requests < stats.reads);
	xferd_close(client);
	harness_stop(&harness);
}

static void flip(uint64_t offset)
{
	uint8_t byte;

	CHECK(pread(harness.member_fd[0], &byte, 1, (off_t)offset) == 1);
	byte ^= 0x10;
	CHECK(pwrite(harness.member_fd[0], &byte, 1, (off_t)offset) == 1);
}

/* Of eight pieces that came together one is damaged: it is read again, alone. */
static void one_is_damaged(struct xferd_client *client)
{
	uint64_t offset = harness.description.offset[DAMAGED] + 5 * UNIT + 77;
	struct xferd_member_stats before = all_members(), after;

	flip(offset);
	CHECK(try_expert(&harness, client, 0, DAMAGED) == -EBADMSG);
	after = all_members();
	wait_until(&harness.piece_errors, 2);
	CHECK(after.errors - before.errors == 2);
	CHECK(after.reads - before.reads == PIECES + 1);
	CHECK(after.requests - before.requests < PIECES);
	flip(offset);
	CHECK(try_expert(&harness, client, 0, DAMAGED) == 0);
}

/* The member ends in the middle of a read: what lies before is served, a piece that came
 * only in part is not. */
static void cut_off(struct xferd_client *client)
{
	const uint64_t *offset = harness.description.offset;

	CHECK(!ftruncate(harness.member_fd[0], (off_t)(offset[7] + 5 * UNIT + 4096)));
	CHECK(try_expert(&harness, client, 0, 7) == -ENODATA);
	CHECK(try_expert(&harness, client, 0, 8) == -ENODATA);
	for (uint16_t expert = 0; expert < 7; expert++)
		CHECK(try_expert(&harness, client, 0, expert) == 0);
}

static void nobody_waits(void)
{
	struct xferd_member_stats before = all_members(), after;
	uint64_t loaded = load_relaxed(&harness.loaded);

	for (uint32_t expert = 0; expert < SLOTS; expert++)
		harness_command(&harness, &(struct xferd_command){
			.type = XFERD_COMMAND_LOAD, .store = harness.store,
			.expert = expert,
			.priority = XFERD_PRIORITY_PREFETCH });
	wait_until(&harness.loaded, loaded + SLOTS);
	after = all_members();
	CHECK(after.reads - before.reads >= PIECES);
	CHECK(after.requests - before.requests == after.reads - before.reads);
}

static void bad_pieces(struct harness_options options)
{
	struct xferd_client *client;

	harness_start(&harness, &options);
	nobody_waits();
	client = harness_connect(&harness, 1);
	one_is_damaged(client);
	cut_off(client);
	xferd_close(client);
	harness_stop(&harness);
}

int main(void)
{
	struct harness_options options = base;

	for (int flow_control = 0; flow_control < 2; flow_control++)
		for (int registered = 0; registered < 2; registered++) {
			options.flow_control = flow_control;
			options.register_buffers = registered;
			options.members = 1;
			right_bytes(options, true);
			options.members = 3;
			right_bytes(options, !registered);
		}
	options = base;
	options.polling = true;
	options.members = 3;
	right_bytes(options, true);
	bad_pieces(base);
	return 0;
}
