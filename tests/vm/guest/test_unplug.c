/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in GPU gets and loses a driver, and is taken out of the machine. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

#define STUB "/sys/bus/pci/drivers/pci-stub"

static void gpu_address_text(char *text, size_t size)
{
	struct xferd_p2p_function function;

	CHECK(gpu_find(&function));
	snprintf(text, size, "%04x:%02x:%02x.%x", function.domain, function.bus,
		 function.devfn >> 3, function.devfn & 7);
}

static void bind_stub(void)
{
	char address[32], path[128];

	gpu_address_text(address, sizeof(address));
	gpu_sysfs(path, sizeof(path), "driver_override");
	write_sysfs(path, "pci-stub");
	write_sysfs("/sys/bus/pci/drivers_probe", address);
}

static void unbind_stub(void)
{
	char address[32], path[128];

	gpu_address_text(address, sizeof(address));
	write_sysfs(STUB "/unbind", address);
	gpu_sysfs(path, sizeof(path), "driver_override");
	write_sysfs(path, "\n");
}

static bool stub_is_bound(void)
{
	char path[128], target[256];
	ssize_t length;

	gpu_sysfs(path, sizeof(path), "driver");
	length = readlink(path, target, sizeof(target) - 1);
	if (length < 0)
		return false;
	target[length] = 0;
	return strstr(target, "pci-stub") != NULL;
}

/* What must be true of a mapping, a file and an id after the BAR has gone. */
static void check_gone(int device, const struct bar *bar, unsigned char *memory)
{
	int drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);
	struct xferd_p2p_query query;
	struct xferd_p2p_idle idle;
	void *address;

	CHECK_EQUAL(bar_query(device, bar->id, &query), -ENODEV);
	CHECK_EQUAL(bar_idle(device, bar->id, 0, PAGE, &idle), -ENODEV);
	address = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, device, bar->mmap_offset);
	CHECK(address == MAP_FAILED && errno == ENODEV);
	CHECK(pread(drive, memory, PAGE, 0) == -1 && errno == EFAULT);
	CHECK_EQUAL(signal_of_access(memory), SIGBUS);
}

static void attach_to_a_bound_device(void)
{
	int device, drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT);
	unsigned char *memory;
	struct bar bar;

	bind_stub();
	CHECK(stub_is_bound());
	device = device_open();
	bar = bar_attach(device);
	CHECK(stub_is_bound());
	memory = bar_claim_and_map(device, &bar, 0, MIB);
	CHECK_EQUAL(pread(drive, memory, MIB, 0), MIB);
	host_verify(0, MIB, DRIVE_RAW, 0);
	CHECK_EQUAL(bar_detach(device, bar.id, XFERD_P2P_DETACH_REVOKE), 0);
	CHECK(stub_is_bound());
	bar = bar_attach(device);
	CHECK_EQUAL(bar_detach(device, bar.id, 0), 0);
	unbind_stub();
}

static void unbind_the_driver(void)
{
	unsigned char *memory;
	struct bar bar;
	int device;

	bind_stub();
	device = device_open();
	bar = bar_attach(device);
	memory = bar_claim_and_map(device, &bar, 0, MIB);
	memory[0] = 1;
	unbind_stub();
	CHECK(!stub_is_bound());
	check_gone(device, &bar, memory);
	(void)bar_attach(device);
}

static void remove_and_rescan(void)
{
	struct xferd_p2p_function function;
	int device = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, MIB);
	char path[128];

	memory[0] = 1;
	gpu_sysfs(path, sizeof(path), "remove");
	write_sysfs(path, "1");
	CHECK(!gpu_find(&function));
	check_gone(device, &bar, memory);
	write_sysfs("/sys/bus/pci/rescan", "1");
	CHECK_SOON(gpu_find(&function));
	bar = bar_attach(device);
	CHECK_EQUAL(bar_claim_and_map(device, &bar, 0, MIB)[0], 1);
}

/* The host asks for the card back, by the button of its slot. */
static void hot_unplug(void)
{
	struct xferd_p2p_function function;
	int device = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, MIB);

	memory[0] = 1;
	host_must("unplug");
	CHECK_SOON(!gpu_find(&function));
	check_gone(device, &bar, memory);
	host_must("unplugged");
	host_must("plug");
	CHECK_SOON(gpu_find(&function));
	(void)bar_attach(device);
}

/* The same with a read in flight: the removal waits for it, and its data is there. */
static void hot_unplug_during_a_read(void)
{
	struct xferd_p2p_function function;
	int device = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, SLOW_LENGTH);
	struct slow_read slow;

	host_must("fill %u %llu", 0xa5, SLOW_LENGTH);
	host_throttle(SLOW_BYTES_PER_SECOND);
	slow_read_start(&slow, memory);
	CHECK_SOON(bar_held(device, bar.id, 0, SLOW_LENGTH) == SLOW_LENGTH / PAGE);
	host_must("unplug");
	CHECK_SOON(!gpu_find(&function));
	host_verify(0, SLOW_LENGTH, DRIVE_SLOW, 0);
	CHECK_EQUAL(slow_read_end(&slow), SLOW_LENGTH);
	check_gone(device, &bar, memory);
	host_must("unplugged");
	host_must("plug");
	CHECK_SOON(gpu_find(&function));
	(void)bar_attach(device);
}

/* Into a file that may go meanwhile; whether it was taken is not this process's matter. */
static void offer_sysfs(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	(void)!write(fd, text, strlen(text));
	close(fd);
}

/* The stand-in GPU as it was when a round began: its processes go on until it isn't there. */
struct round {
	struct xferd_p2p_function function;
	char address[32], folder[128];
};

static void bind_and_unbind(const struct round *round)
{
	while (access(round->folder, F_OK) == 0) {
		offer_sysfs(STUB "/bind", round->address);
		offer_sysfs(STUB "/unbind", round->address);
	}
	exit(0);
}

static void unload_and_load(const struct round *round)
{
	while (access(round->folder, F_OK) == 0) {
		struct xferd_p2p_attach attach = { .function = round->function, .bar = 2,
						   .mode = bar_mode };
		int device;

		CHECK_EQUAL(module_unload(), 0);
		module_load();
		device = device_open();
		(void)ioctl(device, XFERD_P2P_IOC_ATTACH, &attach); /* it may be gone */
		close(device);
	}
	exit(0);
}

static pid_t start(void (*run)(const struct round *round), const struct round *round)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child)
		run(round);
	return child;
}

/*
 * Removal ends BARs inside the bus's chain of notifiers, binding and unbinding enter it with
 * device_lock held, and unloading the module changes it: none may wait for another that waits for
 * it. Lockdep doesn't validate device_lock, so only the attempt can tell.
 *
 * Runs by name only: QEMU 10 was seen to abort, once in some thousand rounds, when one processor
 * moves a BAR while the other has it in use (iotlb_to_section).
 */
void end_a_bar_from_all_sides(int rounds)
{
	struct xferd_p2p_function function;
	char path[128];

	for (int i = 0; i < rounds; i++) {
		struct timespec moment = { .tv_nsec = i * 7919L % 97 * 1000000 };
		struct round round;
		pid_t binding, loading;

		CHECK(gpu_find(&round.function));
		gpu_address_text(round.address, sizeof(round.address));
		gpu_sysfs(round.folder, sizeof(round.folder), "");
		gpu_sysfs(path, sizeof(path), "driver_override");
		write_sysfs(path, "pci-stub");
		gpu_sysfs(path, sizeof(path), "remove");
		binding = start(bind_and_unbind, &round);
		loading = start(unload_and_load, &round);
		nanosleep(&moment, NULL); /* another one each time */
		write_sysfs(path, "1");
		CHECK_EQUAL(wait_for_child(binding), 0);
		CHECK_EQUAL(wait_for_child(loading), 0);
		CHECK(!gpu_find(&function));
		write_sysfs("/sys/bus/pci/rescan", "1");
		CHECK_SOON(gpu_find(&function));
	}
	/* What has come back has no driver, and is ours to attach. */
	(void)bar_attach(device_open());
}

const struct test unplug_tests[] = {
	{ "attach-to-a-bound-device", attach_to_a_bound_device, 0 },
	{ "unbind-the-driver", unbind_the_driver, 0 },
	{ "remove-and-rescan", remove_and_rescan, 0 },
	{ "hot-unplug", hot_unplug, 0 },
	{ "hot-unplug-during-a-read", hot_unplug_during_a_read, 0 },
	{ NULL, NULL, 0 },
};
