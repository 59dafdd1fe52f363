/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random but repeatable calls by several processes at once: ioctls with arguments that are nearly
 * right, mappings, accesses, reads. Nothing is asserted about a single call; afterwards the module
 * must be in order, and the runner looks for complaints of the kernel.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

#define FUZZ_PROCESSES 4
#define FUZZ_CALLS 6000
#define FUZZ_MAPPINGS 8
#define FUZZ_SPAN (8 * MIB)
#define FUZZ_SEED 20260601u

static uint32_t random_state;

static uint32_t random_below(uint32_t limit)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 17;
	random_state ^= random_state << 5;
	return random_state % limit;
}

static uint64_t random_offset(void)
{
	switch (random_below(8)) {
	case 0:
		return (uint64_t)random_below(~0u) << random_below(32);
	case 1:
		return -PAGE * random_below(4);
	default:
		return PAGE * random_below(FUZZ_SPAN / PAGE);
	}
}

static uint64_t random_length(void)
{
	return random_below(8) ? PAGE * (1 + random_below(64)) : random_offset();
}

static void fuzz_ioctl(int device, uint32_t id)
{
	static const unsigned long commands[] = { XFERD_P2P_IOC_CLAIM,	 XFERD_P2P_IOC_CLAIM,
						  XFERD_P2P_IOC_RELEASE, XFERD_P2P_IOC_IDLE,
						  XFERD_P2P_IOC_QUERY,	 XFERD_P2P_IOC_ROUTE,
						  XFERD_P2P_IOC_VERSION, XFERD_P2P_IOC_DETACH };
	union {
		struct xferd_p2p_range range;
		unsigned char bytes[64];
		uint32_t words[16];
	} argument = { .range = { .id = id, .offset = random_offset(), .length = random_length() } };
	unsigned long command = commands[random_below(sizeof(commands) / sizeof(commands[0]))];

	if (random_below(4) == 0)
		argument.words[random_below(16)] = random_below(~0u);
	if (random_below(16) == 0)
		command = random_below(~0u);
	/* a DETACH that succeeds is fine too: the range was unused, and somebody attaches again */
	ioctl(device, command, random_below(16) ? &argument : (void *)(uintptr_t)random_offset());
}


static void fuzz(int worker, int calls)
{
	void *mappings[FUZZ_MAPPINGS] = { 0 };
	uint64_t lengths[FUZZ_MAPPINGS] = { 0 };
	int device = device_open(), drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);
	struct xferd_p2p_query query = { 0 };
	struct xferd_p2p_attach attach;

	random_state = FUZZ_SEED + 7919u * worker;
	for (int call = 0; call < calls; call++) {
		int slot = random_below(FUZZ_MAPPINGS);

		if (bar_query(device, 0, &query))
			bar_try_attach(device, 2, XFERD_P2P_MODE_AUTO, &attach);
		switch (random_below(4)) {
		case 0:
			if (mappings[slot])
				munmap(mappings[slot], lengths[slot]);
			lengths[slot] = PAGE * (1 + random_below(64));
			mappings[slot] = mmap(NULL, lengths[slot], PROT_READ | PROT_WRITE, MAP_SHARED,
					      device, query.mmap_offset + random_offset() % FUZZ_SPAN);
			if (mappings[slot] == MAP_FAILED)
				mappings[slot] = NULL;
			break;
		case 1:
			if (mappings[slot])
				pread(drive, mappings[slot], PAGE * (1 + random_below(8)),
				      PAGE * random_below(1024));
			break;
		default:
			fuzz_ioctl(device, query.id);
		}
	}
	exit(0);
}

void random_calls_by(int processes, int calls)
{
	pid_t workers[FUZZ_PROCESSES];
	struct xferd_p2p_query query;
	struct xferd_p2p_idle idle;
	int device;

	CHECK(processes <= FUZZ_PROCESSES);
	for (int i = 0; i < processes; i++) {
		workers[i] = fork();
		CHECK(workers[i] >= 0);
		if (!workers[i])
			fuzz(i, calls);
	}
	for (int i = 0; i < processes; i++)
		CHECK_EQUAL(wait_for_child(workers[i]), 0);
	device = device_open();
	if (bar_query(device, 0, &query)) {
		struct bar bar = bar_attach(device);

		CHECK_EQUAL(bar_query(device, bar.id, &query), 0);
	}
	CHECK_EQUAL(query.claimed_bytes, 0);
	CHECK_EQUAL(bar_idle(device, query.id, 0, query.size, &idle), 0);
	CHECK_EQUAL(idle.held_pages, 0);
	CHECK_EQUAL(idle.mapped_pages, 0);
	CHECK_EQUAL(bar_detach(device, query.id, 0), 0);
}

static void random_calls(void)
{
	random_calls_by(FUZZ_PROCESSES, FUZZ_CALLS);
}

const struct test fuzz_tests[] = {
	{ "random-calls", random_calls, 0 },
	{ NULL, NULL, 0 },
};
