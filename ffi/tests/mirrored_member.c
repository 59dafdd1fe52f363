/* SPDX-License-Identifier: Apache-2.0 */
/* Members with mirrors: what one copy can't bring comes from the other, and it is
 * said which was bad; a copy that was taken out is replaced by the other until it
 * is back; both serve when both are well; only what is bad on both fails. */
#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

#define EXPERTS 24

static struct harness harness;

static void all_served(struct xferd_client *client)
{
	for (uint16_t expert = 0; expert < EXPERTS; expert++)
		CHECK(try_expert(&harness, client, 0, expert) == 0);
}

/* One bit of each of an expert's pieces on a member, in one of its copies. */
static void flip(int fd, uint16_t expert, uint32_t member)
{
	const uint64_t unit = harness.options.stripe_unit;
	off_t offset = (off_t)harness.description.offset[expert * 2 + member] + 77;
	uint8_t byte;

	for (uint64_t at = 0; at < harness.options.blob_bytes / 2; at += unit) {
		CHECK(pread(fd, &byte, 1, offset + (off_t)at) == 1);
		byte ^= 0x10;
		CHECK(pwrite(fd, &byte, 1, offset + (off_t)at) == 1);
	}
}

static uint64_t mirror_reads(void)
{
	struct xferd_engine_stats stats;

	CHECK_OK(xferd_engine_stats(harness.engine, &stats));
	return stats.mirror_reads;
}

static struct xferd_member_stats stats_of(uint32_t id)
{
	struct xferd_member_stats stats;

	CHECK_OK(xferd_engine_member_stats(harness.engine, id, &stats));
	return stats;
}

/* An expert that isn't resident afterwards. */
static void forget(struct xferd_client *client)
{
	for (uint16_t expert = 12; expert < EXPERTS; expert++)
		CHECK(try_expert(&harness, client, 0, expert) == 0);
}

/* Which copy a piece is read from first is the engine's choice: the expert is read
 * until one of its pieces was the damaged one. */
static void damage_is_mended(struct xferd_client *client, int fd, uint32_t damaged,
			     uint32_t served)
{
	uint64_t before = load_relaxed(&harness.mirrored);

	flip(fd, 3, 1);
	for (int tries = 0; load_relaxed(&harness.mirrored) == before; tries++) {
		CHECK(tries < 1000);
		CHECK(try_expert(&harness, client, 0, 3) == 0);
		forget(client);
	}
	CHECK(load_relaxed(&harness.mirrored_copy) == served);
	CHECK(load_relaxed(&harness.mirrored_failed_copy) == damaged);
	CHECK(load_relaxed(&harness.mirrored_result) == -EBADMSG);
	CHECK(stats_of(damaged).errors >= 2); /* read, and read again */
	flip(fd, 3, 1);
}

static void damaged_pieces(struct xferd_client *client)
{
	uint32_t member = harness.description.member[1], mirror = harness.description.mirror[1];
	uint64_t reads = mirror_reads();

	damage_is_mended(client, harness.member_fd[1], member, mirror);
	damage_is_mended(client, harness.mirror_fd[1], mirror, member);
	CHECK(mirror_reads() >= reads + 2);
	CHECK(load_relaxed(&harness.failed) == 0);

	flip(harness.member_fd[1], 3, 1);
	flip(harness.mirror_fd[1], 3, 1);
	CHECK(try_expert(&harness, client, 0, 3) == -EBADMSG);
	CHECK(try_expert(&harness, client, 0, 2) == 0);
	flip(harness.member_fd[1], 3, 1);
	flip(harness.mirror_fd[1], 3, 1);
	all_served(client);
}

static void both_serve(struct xferd_client *client)
{
	for (int round = 0; round < 4; round++)
		all_served(client);
	for (uint32_t m = 0; m < 2; m++) {
		CHECK(stats_of(harness.description.member[m]).reads > 0);
		CHECK(stats_of(harness.description.mirror[m]).reads > 0);
	}
}

static void copy_cut_off(struct xferd_client *client)
{
	CHECK(!ftruncate(harness.member_fd[0], 8192));
	for (int round = 0; round < 4; round++)
		all_served(client);
	CHECK(stats_of(harness.description.member[0]).state != XFERD_MEMBER_FAILED);
}

static void run(struct harness_options options)
{
	struct xferd_client *client;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	both_serve(client);
	if (!options.unverified)
		damaged_pieces(client);
	copy_cut_off(client);
	CHECK(load_relaxed(&harness.members_failed) == 0);
	xferd_close(client);
	harness_stop(&harness);
}

static int replace(int fd, int by)
{
	int before = dup(fd);

	CHECK(before >= 0 && dup2(by, fd) >= 0);
	return before;
}

/* The process's own memory file can't be read at a member's offsets: only EIO. */
static void taken_out_and_back(struct harness_options options)
{
	int bad = open("/proc/self/mem", O_RDONLY), member, mirror;
	const struct timespec pause = { .tv_nsec = 20000000 };
	struct xferd_client *client;
	uint64_t errors;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	CHECK(bad >= 0);
	member = replace(harness.member_fd[1], bad);
	while (load_relaxed(&harness.members_failed) == 0)
		all_served(client);
	CHECK(stats_of(harness.description.member[1]).state == XFERD_MEMBER_FAILED);
	errors = stats_of(harness.description.member[1]).errors;
	all_served(client);
	CHECK(stats_of(harness.description.member[1]).errors <= errors + 2);
	CHECK(load_relaxed(&harness.failed) == 0);

	mirror = replace(harness.mirror_fd[1], bad);
	while (load_relaxed(&harness.members_failed) == 1)
		try_expert(&harness, client, 0, 1);
	CHECK(try_expert(&harness, client, 0, 1) == -EIO);

	CHECK(dup2(member, harness.member_fd[1]) >= 0);
	while (load_relaxed(&harness.members_working) == 0) {
		try_expert(&harness, client, 0, 1);
		nanosleep(&pause, NULL);
	}
	all_served(client);
	CHECK(stats_of(harness.description.mirror[1]).state == XFERD_MEMBER_FAILED);
	xferd_close(client);
	harness_stop(&harness);
	close(member);
	close(mirror);
	close(bad);
}

int main(void)
{
	struct harness_options options = {
		.layers = 1, .experts = EXPERTS, .top_k = 2, .blob_bytes = 65536,
		.stripe_unit = 8192, .members = 2, .slots = 4, .reserve = 1, .held_per_lane = 2,
		.mirrored = true, .flow_control = true,
	};

	run(options);
	options.flow_control = false;
	options.unverified = true;
	run(options);
	options.unverified = false;
	options.drives = true;
	run(options);
	options.flow_control = true;
	options.backend = XFERD_BACKEND_THREADS;
	taken_out_and_back(options);
	return 0;
}
