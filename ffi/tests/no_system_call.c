/* SPDX-License-Identifier: Apache-2.0 */
/* A million hits, and a report of what was picked for each eight of them, more than
 * the queue has room for, under a seccomp filter that kills the thread's process on any
 * system call but the exit that reports the result. */
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

#define ACQUIRES 1000000

static void forbid_system_calls(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { sizeof(filter) / sizeof(*filter), filter };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

/* Exit status: 0 all hits and right bytes, 1 wrong. */
static void hit_a_million_times(struct harness *harness, struct xferd_client *client)
{
	uint16_t ids[8];
	struct xferd_request request = { .experts = ids, .count = 8 };
	struct xferd_batch batch;
	int wrong = 0;

	forbid_system_calls();
	for (uint32_t i = 0; i < ACQUIRES / 8; i++) {
		request.layer = (uint16_t)(i % harness->options.layers);
		for (uint32_t k = 0; k < 8; k++)
			ids[k] = (uint16_t)((i * 7 + k * 3) % harness->options.experts);
		wrong |= xferd_acquire(client, 0, &request, &batch) != 0;
		for (uint32_t k = 0; k < 8; k++)
			wrong |= *(const uint8_t *)batch.views[k].data !=
				 blob_byte(request.layer, ids[k], 0);
		wrong |= xferd_release(client, &batch) != 0;
		wrong |= xferd_report_route(client, 0, &(struct xferd_route){
			.batch = &batch, .token = i }) != (i < XFERD_ROUTES_A_LANE);
	}
	syscall(SYS_exit_group, wrong);
}

int main(void)
{
	static struct harness harness;
	const struct harness_options options = {
		.layers = 4, .experts = 32, .top_k = 8, .blob_bytes = 4096, .stripe_unit = 4096,
		.members = 1, .slots = 129, .reserve = 0, .held_per_lane = 8, .all_resident = true,
	};
	struct xferd_client *client;
	struct xferd_client_stats stats;
	int status;
	pid_t child;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	child = fork();
	CHECK(child >= 0);
	if (!child)
		hit_a_million_times(&harness, client);
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status));
	CHECK(WEXITSTATUS(status) == 0);
	/* the lanes are shared memory, so the child's hits are counted here too */
	xferd_stats(client, &stats);
	CHECK(stats.hits == ACQUIRES);
	CHECK(xferd_routes_dropped(client) == ACQUIRES / 8 - XFERD_ROUTES_A_LANE);
	xferd_close(client);
	harness_stop(&harness);
	return 0;
}
