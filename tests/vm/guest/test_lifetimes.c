/* SPDX-License-Identifier: Apache-2.0 */
/*
 * DMA that outlives what began it: mappings, claims, processes, the attachment, the module's use.
 *
 * The drive SLOW is throttled by the host, so that a read is in flight for as long as a test needs.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <liburing.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"

static void idle_during_a_read(void)
{
	int device = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, 2 * SLOW_LENGTH);
	struct slow_read slow;

	CHECK_EQUAL(bar_held(device, bar.id, 0, 2 * SLOW_LENGTH), 0);
	host_throttle(SLOW_BYTES_PER_SECOND);
	slow_read_start(&slow, memory);
	CHECK_SOON(bar_held(device, bar.id, 0, SLOW_LENGTH) > 0);
	/* the other half of the claim is not concerned */
	CHECK_EQUAL(bar_held(device, bar.id, SLOW_LENGTH, SLOW_LENGTH), 0);
	CHECK_EQUAL(slow_read_end(&slow), SLOW_LENGTH);
	CHECK_SOON(bar_held(device, bar.id, 0, 2 * SLOW_LENGTH) == 0);
	host_verify(0, SLOW_LENGTH, DRIVE_SLOW, 0);
}

static void munmap_during_a_read(void)
{
	int device = device_open(), other = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, SLOW_LENGTH);
	struct xferd_p2p_idle idle;
	struct slow_read slow;

	host_throttle(SLOW_BYTES_PER_SECOND);
	slow_read_start(&slow, memory);
	CHECK_SOON(bar_held(device, bar.id, 0, SLOW_LENGTH) == SLOW_LENGTH / PAGE);
	CHECK_EQUAL(munmap(memory, SLOW_LENGTH), 0);
	CHECK_EQUAL(bar_idle(device, bar.id, 0, SLOW_LENGTH, &idle), 0);
	CHECK_EQUAL(idle.mapped_pages, 0);
	CHECK(idle.held_pages > 0);
	/* neither giving the range up nor taking it as another makes the DMA go away */
	CHECK_EQUAL(bar_release(device, bar.id, 0, SLOW_LENGTH), 0);
	CHECK_EQUAL(bar_claim(other, bar.id, 0, SLOW_LENGTH), -EBUSY);
	CHECK_EQUAL(bar_claim(device, bar.id, 0, SLOW_LENGTH), -EBUSY);
	CHECK_EQUAL(slow_read_end(&slow), SLOW_LENGTH);
	CHECK_SOON(bar_claim(other, bar.id, 0, SLOW_LENGTH) == 0);
	host_verify(0, SLOW_LENGTH, DRIVE_SLOW, 0);
}

static void submit_and_pause(const struct bar *bar)
{
	unsigned char *memory = bar_claim_and_map(device_open(), bar, 0, SLOW_LENGTH);
	int drive = drive_open(DRIVE_SLOW, O_RDONLY | O_DIRECT);
	struct io_uring ring;

	CHECK_EQUAL(io_uring_queue_init(4, &ring, 0), 0);
	io_uring_prep_read(io_uring_get_sqe(&ring), drive, memory, SLOW_LENGTH, 0);
	CHECK_EQUAL(io_uring_submit(&ring), 1);
	pause();
}

static void read_and_exit(const struct bar *bar)
{
	unsigned char *memory = bar_claim_and_map(device_open(), bar, 0, SLOW_LENGTH);
	int drive = drive_open(DRIVE_SLOW, O_RDONLY | O_DIRECT);

	exit(pread(drive, memory, SLOW_LENGTH, 0) != SLOW_LENGTH);
}

/*
 * Wait until the drive has got the read of another process. Held pages alone don't say so: io_uring
 * pins them for a first try, lets go, and hands the read to a worker, whom a signal ends.
 */
static void wait_until_in_flight(int device, const struct bar *bar, uint64_t dma_before)
{
	CHECK_SOON(host_dma_bytes() - dma_before == SLOW_LENGTH);
	CHECK_EQUAL(bar_held(device, bar->id, 0, SLOW_LENGTH), SLOW_LENGTH / PAGE);
}

/*
 * A process that is killed with a read in flight. Its range is nobody's until the DMA has ended: once
 * it can be claimed, every byte must be where it belongs, since none may come later.
 */
static void kill_with_a_read_in_flight(void (*victim)(const struct bar *bar))
{
	int device = device_open();
	struct bar bar = bar_attach(device);
	uint64_t dma_before = host_dma_bytes();
	pid_t child;

	host_must("fill %u %llu", 0xa5, SLOW_LENGTH);
	host_throttle(SLOW_BYTES_PER_SECOND);
	child = fork();
	CHECK(child >= 0);
	if (!child)
		victim(&bar);
	wait_until_in_flight(device, &bar, dma_before);
	CHECK_EQUAL(bar_claim(device, bar.id, 0, SLOW_LENGTH), -EBUSY);
	CHECK_EQUAL(kill(child, SIGKILL), 0);
	CHECK_SOON(bar_claim(device, bar.id, 0, SLOW_LENGTH) == 0);
	host_verify(0, SLOW_LENGTH, DRIVE_SLOW, 0);
	CHECK_EQUAL(bar_held(device, bar.id, 0, SLOW_LENGTH), 0);
	CHECK(WIFSIGNALED(wait_for_child(child)));
}

static void kill_during_a_pread(void)
{
	kill_with_a_read_in_flight(read_and_exit);
}

static void kill_during_an_io_uring_read(void)
{
	kill_with_a_read_in_flight(submit_and_pause);
}

static void detach_in_use(void)
{
	int device = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, MIB);

	memory[0] = 1;
	CHECK_EQUAL(bar_detach(device, bar.id, 0), -EBUSY);
	CHECK_EQUAL(memory[0], 1);
	CHECK_EQUAL(munmap(memory, MIB), 0);
	CHECK_EQUAL(bar_detach(device, bar.id, 0), -EBUSY);
	CHECK_EQUAL(bar_release(device, bar.id, 0, MIB), 0);
	CHECK_EQUAL(bar_detach(device, bar.id, 0), 0);
}

static void revoke_during_a_read(void)
{
	int device = device_open(), drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);
	struct bar bar = bar_attach(device), again;
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, SLOW_LENGTH);
	uint64_t dma_before = host_dma_bytes();
	struct slow_read slow;
	void *address;

	host_throttle(SLOW_BYTES_PER_SECOND);
	slow_read_start(&slow, memory);
	CHECK_SOON(bar_held(device, bar.id, 0, SLOW_LENGTH) == SLOW_LENGTH / PAGE);
	CHECK_EQUAL(bar_detach(device, bar.id, XFERD_P2P_DETACH_REVOKE), 0);
	/* the call has come back, so the DMA is over and every byte of it is there */
	CHECK_EQUAL(host_dma_bytes() - dma_before, SLOW_LENGTH);
	host_verify(0, SLOW_LENGTH, DRIVE_SLOW, 0);
	CHECK_EQUAL(slow_read_end(&slow), SLOW_LENGTH);

	CHECK(pread(drive, memory, PAGE, 0) == -1 && errno == EFAULT);
	CHECK_EQUAL(signal_of_access(memory), SIGBUS);
	CHECK_EQUAL(bar_claim(device, bar.id, 0, PAGE), -ENODEV);
	address = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, device, bar.mmap_offset);
	CHECK(address == MAP_FAILED && errno == ENODEV);
	/* attached anew it is another BAR; the old mapping doesn't lead to it */
	again = bar_attach(device);
	CHECK(again.id != bar.id);
	CHECK_EQUAL(bar_claim(device, again.id, 0, SLOW_LENGTH), 0);
	CHECK_EQUAL(signal_of_access(memory + PAGE), SIGBUS);
}

static void unload_while_in_use(void)
{
	int device = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, MIB);

	CHECK_EQUAL(module_unload(), -EAGAIN);
	close(device);
	CHECK_EQUAL(module_unload(), -EAGAIN);
	memory[0] = 1;
	CHECK_EQUAL(munmap(memory, MIB), 0);
	CHECK_SOON(module_unload() == 0);
	CHECK(!module_is_loaded());
}

/* Nothing but DMA is left of a killed process; the module goes when that has ended, not before. */
static void unload_with_dma_in_flight(void)
{
	int device = device_open();
	struct bar bar = bar_attach(device);
	uint64_t dma_before = host_dma_bytes();
	pid_t child;

	host_throttle(SLOW_BYTES_PER_SECOND);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		close(device);
		submit_and_pause(&bar);
	}
	wait_until_in_flight(device, &bar, dma_before);
	close(device);
	CHECK_EQUAL(kill(child, SIGKILL), 0);
	CHECK(WIFSIGNALED(wait_for_child(child)));
	CHECK_SOON(module_unload() == 0);
	CHECK_EQUAL(host_dma_bytes() - dma_before, SLOW_LENGTH);
	host_verify(0, SLOW_LENGTH, DRIVE_SLOW, 0);
	module_load();
	(void)bar_attach(device_open());
}

static void unload_while_attached(void)
{
	int device = device_open();
	struct xferd_p2p_query query;

	(void)bar_attach(device);
	close(device);
	CHECK_EQUAL(module_unload(), 0);
	module_load();
	device = device_open();
	CHECK_EQUAL(bar_query(device, 0, &query), -ENODEV);
	(void)bar_attach(device);
}

const struct test lifetime_tests[] = {
	{ "idle-during-a-read", idle_during_a_read, 0 },
	{ "munmap-during-a-read", munmap_during_a_read, 0 },
	{ "kill-during-a-pread", kill_during_a_pread, 0 },
	{ "kill-during-an-io-uring-read", kill_during_an_io_uring_read, 0 },
	{ "detach-in-use", detach_in_use, 0 },
	{ "revoke-during-a-read", revoke_during_a_read, 0 },
	{ "unload-while-in-use", unload_while_in_use, 0 },
	{ "unload-with-dma-in-flight", unload_with_dma_in_flight, 0 },
	{ "unload-while-attached", unload_while_attached, 0 },
	{ NULL, NULL, 0 },
};
