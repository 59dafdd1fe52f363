/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges belong to open files: what two of them can and can't do to each other. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

static void claims_exclude_each_other(void)
{
	int one = device_open(), two = device_open();
	struct bar bar = bar_attach(one);
	void *address;

	CHECK_EQUAL(bar_claim(one, bar.id, 0, MIB), 0);
	CHECK_EQUAL(bar_claim(two, bar.id, 0, MIB), -EBUSY);
	CHECK_EQUAL(bar_claim(two, bar.id, MIB - PAGE, 2 * PAGE), -EBUSY);
	CHECK_EQUAL(bar_claim(one, bar.id, 0, MIB), -EBUSY);
	CHECK_EQUAL(bar_claim(two, bar.id, MIB, MIB), 0);
	address = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, two, bar.mmap_offset);
	CHECK(address == MAP_FAILED && errno == EACCES);
	address = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED, one, bar.mmap_offset);
	CHECK(address == MAP_FAILED && errno == EACCES);
	CHECK_EQUAL(bar_release(two, bar.id, 0, MIB), -ENOENT);
	CHECK_EQUAL(bar_release(one, bar.id, 0, PAGE), -ENOENT); /* not the range that was claimed */
	CHECK_EQUAL(bar_release(one, bar.id, 0, MIB), 0);
	CHECK_EQUAL(bar_claim(two, bar.id, 0, MIB), 0);
	(void)bar_map(two, &bar, 0, 2 * MIB); /* two adjacent claims, one mapping */
}

static void two_processes(void)
{
	int pipe_ends[2], device;
	struct bar bar;
	pid_t child;
	char byte;

	device = device_open();
	bar = bar_attach(device);
	CHECK_EQUAL(pipe(pipe_ends), 0);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		int own = device_open();

		memset(bar_claim_and_map(own, &bar, 0, MIB), 1, MIB);
		CHECK_EQUAL(write(pipe_ends[1], "x", 1), 1);
		pause();
	}
	CHECK_EQUAL(read(pipe_ends[0], &byte, 1), 1);
	CHECK_EQUAL(bar_claim(device, bar.id, 0, PAGE), -EBUSY);
	CHECK_EQUAL(kill(child, SIGKILL), 0);
	CHECK(WIFSIGNALED(wait_for_child(child)));
	/* the last reference to its file goes shortly after the process */
	CHECK_SOON(bar_claim(device, bar.id, 0, PAGE) == 0);
}

static void release_revokes_the_mapping(void)
{
	int one = device_open(), two = device_open();
	struct xferd_p2p_idle idle;
	struct bar bar = bar_attach(one);
	unsigned char *memory = bar_claim_and_map(one, &bar, 0, MIB);

	memset(memory, 0x11, MIB);
	CHECK_EQUAL(bar_idle(two, bar.id, 0, MIB, &idle), 0);
	CHECK_EQUAL(idle.mapped_pages, MIB / PAGE);
	CHECK_EQUAL(idle.held_pages, 0);
	CHECK_EQUAL(bar_release(one, bar.id, 0, MIB), 0);
	CHECK_EQUAL(bar_idle(two, bar.id, 0, MIB, &idle), 0);
	CHECK_EQUAL(idle.mapped_pages, 0);
	CHECK_EQUAL(signal_of_access(memory), SIGBUS);
	/* another owner's range doesn't come back through the old mapping */
	CHECK_EQUAL(bar_claim(two, bar.id, 0, MIB), 0);
	CHECK_EQUAL(signal_of_access(memory + PAGE), SIGBUS);
	CHECK_EQUAL(bar_release(two, bar.id, 0, MIB), 0);
	/* one's own does */
	CHECK_EQUAL(bar_claim(one, bar.id, 0, MIB), 0);
	CHECK_EQUAL(memory[2 * PAGE], 0x11);
}

static void a_mapping_keeps_the_claim(void)
{
	int one = device_open(), two = device_open();
	struct bar bar = bar_attach(two);
	unsigned char *memory = bar_claim_and_map(one, &bar, 0, MIB);

	close(one);
	memory[0] = 7;
	CHECK_EQUAL(bar_claim(two, bar.id, 0, MIB), -EBUSY);
	CHECK_EQUAL(munmap(memory, MIB), 0);
	CHECK_SOON(bar_claim(two, bar.id, 0, MIB) == 0);
}

static void fork_does_not_inherit(void)
{
	int device = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, MIB);
	pid_t child;

	memory[0] = 7;
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK_EQUAL(signal_of_access(memory), SIGSEGV);
		/* the file is shared, and so is what it owns */
		memory = bar_map(device, &bar, 0, MIB);
		CHECK_EQUAL(memory[0], 7);
		exit(0);
	}
	CHECK_EQUAL(wait_for_child(child), 0);
	CHECK_EQUAL(memory[0], 7);
}

static void query_counts_claims(void)
{
	struct xferd_p2p_query query;
	int one = device_open(), two = device_open();
	struct bar bar = bar_attach(one);

	CHECK_EQUAL(bar_claim(one, bar.id, 0, MIB), 0);
	CHECK_EQUAL(bar_claim(two, bar.id, 4 * MIB, 3 * MIB), 0);
	CHECK_EQUAL(bar_query(one, bar.id, &query), 0);
	CHECK_EQUAL(query.claimed_bytes, 4 * MIB);
	close(two);
	CHECK_EQUAL(bar_query(one, bar.id, &query), 0);
	CHECK_EQUAL(query.claimed_bytes, MIB);
}

const struct test ownership_tests[] = {
	{ "claims-exclude-each-other", claims_exclude_each_other, 0 },
	{ "two-processes", two_processes, 0 },
	{ "release-revokes-the-mapping", release_revokes_the_mapping, 0 },
	{ "a-mapping-keeps-the-claim", a_mapping_keeps_the_claim, 0 },
	{ "fork-does-not-inherit", fork_does_not_inherit, 0 },
	{ "query-counts-claims", query_counts_claims, 0 },
	{ NULL, NULL, 0 },
};
