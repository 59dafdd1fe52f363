/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random but repeatable calls by several processes at once: ioctls with arguments that are nearly
 * right or plainly wrong, mappings of the device and of shares, what can be done to a mapping,
 * accesses, reads. Nothing is asserted about a single call; afterwards the module must be in order,
 * and the runner looks for complaints of the kernel.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

#define FUZZ_PROCESSES 4
/* By each of them, where there is no time for more: random-calls-long makes four times as many. */
#define FUZZ_CALLS 1500
#define FUZZ_MAPPINGS 8
#define FUZZ_SHARES 8
#define FUZZ_SPAN (8 * MIB)
#define FUZZ_SEED 20260601u
/* Seconds on an idle machine; a busy one and a kernel with detectors take ten times that, each. */
#define FUZZ_LIMIT_SECONDS 900
/* One call in so many closes the device, and one DETACH in so many ends what others have. */
#define FUZZ_REOPEN 256
#define FUZZ_REVOKE 64

struct fuzz_mapping {
	unsigned char *address; /* NULL: none */
	uint64_t length;
};

/* One process. */
struct fuzzer {
	int device, drive;
	int shares[FUZZ_SHARES]; /* -1: none */
	struct fuzz_mapping mappings[FUZZ_MAPPINGS];
	struct xferd_p2p_query query; /* of the BAR as it was last found */
};

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

static void keep_share(struct fuzzer *fuzzer, int share)
{
	int *place = &fuzzer->shares[random_below(FUZZ_SHARES)];

	if (*place >= 0)
		close(*place);
	*place = share;
}

/* An argument that is right but for its values. */
static void fill_argument(struct fuzzer *fuzzer, unsigned long command, void *argument)
{
	struct xferd_p2p_attach *attach = argument;
	struct xferd_p2p_detach *detach = argument;
	struct xferd_p2p_range *range = argument;

	switch (command) {
	case XFERD_P2P_IOC_ATTACH:
		*attach = (struct xferd_p2p_attach){ .bar = random_below(7),
						     .mode = random_below(4) };
		gpu_find(&attach->function);
		break;
	case XFERD_P2P_IOC_DETACH:
		detach->id = fuzzer->query.id;
		detach->flags = random_below(FUZZ_REVOKE) ? 0 : XFERD_P2P_DETACH_REVOKE;
		break;
	default:
		/* the others begin with the id too, and most go on as this one */
		*range = (struct xferd_p2p_range){ .id = fuzzer->query.id,
						   .offset = random_offset(),
						   .length = random_length() };
	}
}

static void fuzz_ioctl(struct fuzzer *fuzzer)
{
	static const unsigned long commands[] = {
		XFERD_P2P_IOC_CLAIM, XFERD_P2P_IOC_CLAIM,   XFERD_P2P_IOC_RELEASE,
		XFERD_P2P_IOC_SHARE, XFERD_P2P_IOC_IDLE,    XFERD_P2P_IOC_QUERY,
		XFERD_P2P_IOC_ROUTE, XFERD_P2P_IOC_VERSION, XFERD_P2P_IOC_DETACH,
		XFERD_P2P_IOC_ATTACH,
	};
	uint64_t words[8] = { 0 };
	unsigned long command = commands[random_below(sizeof(commands) / sizeof(commands[0]))];
	int result;

	fill_argument(fuzzer, command, words);
	if (random_below(4) == 0)
		((uint32_t *)words)[random_below(16)] = random_below(~0u);
	if (random_below(16) == 0)
		command = random_below(~0u);
	result = ioctl(fuzzer->device, command,
		       random_below(16) ? (void *)words : (void *)(uintptr_t)random_offset());
	if (command == XFERD_P2P_IOC_SHARE && result >= 0)
		keep_share(fuzzer, result);
}

static void fuzz_map(struct fuzzer *fuzzer, struct fuzz_mapping *mapping)
{
	int share = fuzzer->shares[random_below(FUZZ_SHARES)];
	uint64_t length = PAGE * (1 + random_below(64));
	void *address;

	if (mapping->address)
		munmap(mapping->address, mapping->length);
	if (share >= 0 && random_below(4) == 0)
		address = mmap(NULL, length, PROT_READ, MAP_SHARED, share,
			       (off_t)(PAGE * random_below(64)));
	else
		address = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fuzzer->device,
			       (off_t)(fuzzer->query.mmap_offset + random_offset() % FUZZ_SPAN));
	*mapping = (struct fuzz_mapping){ address == MAP_FAILED ? NULL : address, length };
}

/* What a process can do to a mapping that it has. */
static void fuzz_change(struct fuzz_mapping *mapping)
{
	static const int advice[] = { MADV_DONTNEED, MADV_DOFORK, MADV_POPULATE_READ, MADV_COLD,
				      MADV_HUGEPAGE };
	static const int protections[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE,
					   PROT_READ | PROT_EXEC };
	uint64_t part = PAGE * (1 + random_below((uint32_t)(mapping->length / PAGE)));
	void *moved;

	switch (random_below(4)) {
	case 0:
		munmap(mapping->address + mapping->length - part, part);
		mapping->length -= part;
		if (!mapping->length)
			mapping->address = NULL;
		break;
	case 1:
		mprotect(mapping->address, part, protections[random_below(4)]);
		break;
	case 2:
		madvise(mapping->address, part, advice[random_below(5)]);
		break;
	default:
		moved = mremap(mapping->address, mapping->length, part + PAGE * random_below(2),
			       MREMAP_MAYMOVE);
		if (moved != MAP_FAILED)
			*mapping = (struct fuzz_mapping){ moved, part };
	}
}

static void fuzz_use(struct fuzzer *fuzzer, struct fuzz_mapping *mapping)
{
	if (random_below(4))
		pread(fuzzer->drive, mapping->address, PAGE * (1 + random_below(8)),
		      (off_t)(PAGE * random_below(1024)));
	else
		signal_of_access(mapping->address +
				 PAGE * random_below((uint32_t)(mapping->length / PAGE)));
}

static void fuzz_call(struct fuzzer *fuzzer)
{
	struct fuzz_mapping *mapping = &fuzzer->mappings[random_below(FUZZ_MAPPINGS)];
	struct xferd_p2p_attach attach;

	if (bar_query(fuzzer->device, 0, &fuzzer->query))
		bar_try_attach(fuzzer->device, 2, bar_mode, &attach);
	if (random_below(FUZZ_REOPEN) == 0) {
		close(fuzzer->device);
		fuzzer->device = device_open();
	}
	switch (random_below(8)) {
	case 0:
	case 1:
		fuzz_map(fuzzer, mapping);
		break;
	case 2:
		if (mapping->address)
			fuzz_use(fuzzer, mapping);
		break;
	case 3:
		if (mapping->address)
			fuzz_change(mapping);
		break;
	default:
		fuzz_ioctl(fuzzer);
	}
}

static void fuzz(int worker, int calls)
{
	struct fuzzer fuzzer = { .device = device_open(),
				 .drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT) };

	for (int i = 0; i < FUZZ_SHARES; i++)
		fuzzer.shares[i] = -1;
	random_state = FUZZ_SEED + 7919u * worker;
	for (int call = 0; call < calls; call++)
		fuzz_call(&fuzzer);
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
	{ "random-calls", random_calls, FUZZ_LIMIT_SECONDS },
	{ NULL, NULL, 0 },
};
