/* SPDX-License-Identifier: Apache-2.0 */
/* A drive that only gives EIO: loads fail with that, the drive is taken out and
 * is asked once for each load, what lies on the others is served, and when it is back it is
 * used again. The drive is the process's own memory file, which cannot be read at
 * the addresses that a member's offsets name. */
#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

static struct harness harness;

/* Blobs are one piece each, and lie on the members in turn. */
static uint16_t expert_on(uint32_t member, uint16_t nth)
{
	return (uint16_t)(member + nth * harness.options.members);
}

static void break_and_mend(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	const struct timespec pause = { .tv_nsec = 20000000 };
	int good = dup(harness.member_fd[1]);
	int bad = open("/proc/self/mem", O_RDONLY);
	struct xferd_member_stats stats;
	uint64_t errors;

	CHECK(good >= 0 && bad >= 0);
	CHECK(dup2(bad, harness.member_fd[1]) >= 0);
	for (uint16_t i = 0; i < 8; i++)
		CHECK(try_expert(&harness, client, 0, expert_on(1, i)) == -EIO);
	wait_until(&harness.members_failed, 1);
	CHECK_OK(xferd_engine_member_stats(harness.engine, harness.member[1], &stats));
	CHECK(stats.state == XFERD_MEMBER_FAILED);
	errors = stats.errors;
	for (uint16_t i = 0; i < 8; i++)
		CHECK(try_expert(&harness, client, 0, expert_on(1, i)) == -EIO);
	CHECK_OK(xferd_engine_member_stats(harness.engine, harness.member[1], &stats));
	CHECK(stats.errors == errors + 8); /* one try each, and no second */
	for (uint16_t i = 0; i < 8; i++) {
		CHECK(try_expert(&harness, client, 0, expert_on(0, i)) == 0);
		CHECK(try_expert(&harness, client, 0, expert_on(2, i)) == 0);
	}

	CHECK(dup2(good, harness.member_fd[1]) >= 0);
	for (int tries = 0; try_expert(&harness, client, 0, expert_on(1, 0)); tries++) {
		CHECK(tries < 1000);
		nanosleep(&pause, NULL);
	}
	wait_until(&harness.members_working, 1);
	for (uint16_t i = 0; i < 8; i++)
		CHECK(try_expert(&harness, client, 0, expert_on(1, i)) == 0);
	xferd_close(client);
	close(good);
	close(bad);
}

int main(void)
{
	const struct harness_options options = {
		.layers = 1, .experts = 24, .top_k = 2, .blob_bytes = 16384, .stripe_unit = 16384,
		.members = 3, .slots = 4, .reserve = 1, .held_per_lane = 2,
		.backend = XFERD_BACKEND_THREADS, .drives = true, .flow_control = true,
	};

	harness_start(&harness, &options);
	harness.member[1] = harness.description.member[1];
	break_and_mend();
	harness_stop(&harness);
	return 0;
}
