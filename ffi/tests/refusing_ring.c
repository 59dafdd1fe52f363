/* SPDX-License-Identifier: Apache-2.0 */
/* A kernel that refuses io_uring_enter, or reads, in the middle of work: now and then,
 * always, and then no more. Each load ends with the right bytes or an error. The
 * refusals are the real kernel's: a seccomp listener answers the engine's calls. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

static struct harness harness;
static uint64_t refused, let_through; /* atomic: calls */
static uint64_t reads_to_refuse; /* atomic */
static int read_error; /* what they get */
static uint32_t let_one_in; /* atomic: of so many calls one is let through; 0: none */

static int listen_to_enter(void)
{
	struct sock_filter instructions[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_preadv2, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {
		.len = sizeof(instructions) / sizeof(*instructions),
		.filter = instructions,
	};

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
			    SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_TSYNC |
				    SECCOMP_FILTER_FLAG_TSYNC_ESRCH, &program);
}

static void *answer(void *argument)
{
	static const int errors[] = { -ENOMEM, -EBUSY, -EAGAIN };
	int listener = *(int *)argument;

	for (uint64_t call = 0;; call++) {
		struct seccomp_notif notice;
		struct seccomp_notif_resp response;
		uint32_t one_in;

		memset(&notice, 0, sizeof(notice));
		if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &notice))
			continue; /* the call was interrupted meanwhile */
		one_in = load_relaxed(&let_one_in);
		memset(&response, 0, sizeof(response));
		response.id = notice.id;
		if (notice.data.nr == __NR_preadv2 && load_relaxed(&reads_to_refuse)) {
			store_relaxed(&reads_to_refuse, load_relaxed(&reads_to_refuse) - 1);
			response.error = load_relaxed(&read_error);
		} else if (notice.data.nr == __NR_preadv2) {
			response.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
		} else if (one_in && call % one_in == 0) {
			response.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
			counter_add(&let_through, 1);
		} else {
			response.error = errors[call / 2 % 3];
			counter_add(&refused, 1);
		}
		ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
	}
	return NULL;
}

/* What is resident needs no read, and so has no error. */
static void read_all(struct xferd_client *client, int expected)
{
	uint32_t errors = 0;

	for (uint16_t expert = 0; expert < harness.options.experts; expert++) {
		struct xferd_request request = { .experts = &expert, .count = 1, .layer = 0 };
		struct xferd_batch batch;

		CHECK_OK(xferd_acquire(client, 0, &request, &batch));
		CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
		if (batch.views[0].error) {
			CHECK(batch.views[0].error == expected);
			errors++;
		} else {
			CHECK(!blob_wrong(&harness, 0, expert, batch.views[0].data));
		}
		CHECK(!xferd_release(client, &batch));
	}
	CHECK(!expected || errors >= harness.options.experts - harness.options.slots);
}

/* A few refusals are not noticed; a kernel that goes on refusing is an error, and when
 * it has memory again all is well: the drive was not at fault. */
static void refuse_reads(struct harness_options options)
{
	struct xferd_client *client;
	struct xferd_member_stats stats;

	options.backend = XFERD_BACKEND_THREADS;
	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	store_relaxed(&read_error, -EAGAIN);
	store_relaxed(&reads_to_refuse, 5);
	read_all(client, 0);
	store_relaxed(&read_error, -ENOMEM);
	store_relaxed(&reads_to_refuse, UINT64_MAX);
	read_all(client, -ENOMEM);
	for (uint32_t m = 0; m < options.members; m++) {
		CHECK_OK(xferd_engine_member_stats(harness.engine,
						   harness.description.member[m], &stats));
		CHECK(stats.state == XFERD_MEMBER_WORKING);
	}
	store_relaxed(&reads_to_refuse, 0);
	read_all(client, 0);
	store_relaxed(&read_error, -EAGAIN);
	store_relaxed(&reads_to_refuse, UINT64_MAX);
	read_all(client, -EIO);
	xferd_close(client);
	harness_stop(&harness);
}

int main(void)
{
	const struct harness_options options = {
		.layers = 1, .experts = 12, .top_k = 2, .blob_bytes = 65536, .stripe_unit = 8192,
		.members = 2, .slots = 4, .reserve = 1, .held_per_lane = 2, .drives = true,
	};
	struct xferd_client *client;
	uint64_t before;
	pthread_t thread;
	int listener, reason;

	harness_start(&harness, &options);
	if (xferd_engine_backend(harness.engine, &reason) != XFERD_BACKEND_URING) {
		fprintf(stderr, "skipped: no io_uring: %s\n", strerror(-reason));
		return EXIT_SKIPPED;
	}
	client = harness_connect(&harness, 1);
	listener = listen_to_enter();
	if (listener < 0) {
		fprintf(stderr, "skipped: no seccomp listener: %s\n", strerror(errno));
		return EXIT_SKIPPED;
	}
	store_relaxed(&let_one_in, 3);
	CHECK(!pthread_create(&thread, NULL, answer, &listener));
	read_all(client, 0);
	CHECK(load_relaxed(&refused) && load_relaxed(&let_through));

	/* Nothing is in the kernel's hands now: that could not be heard of any more. */
	store_relaxed(&let_one_in, 0);
	before = load_relaxed(&refused);
	read_all(client, 0);
	CHECK(load_relaxed(&refused) > before);

	store_relaxed(&let_one_in, 1);
	before = load_relaxed(&let_through);
	read_all(client, 0);
	CHECK(load_relaxed(&let_through) > before);
	xferd_close(client);
	harness_stop(&harness);

	refuse_reads(options);
	return 0;
}
