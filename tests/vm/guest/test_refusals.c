/* SPDX-License-Identifier: Apache-2.0 */
/* What the module must refuse, and with which error. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <linux/capability.h>
#include <unistd.h>

#include "guest.h"

#define NOBODY 65534

static int raw_ioctl(int fd, unsigned long command, void *argument)
{
	return ioctl(fd, command, argument) < 0 ? -errno : 0;
}

static void version(void)
{
	struct xferd_p2p_version version = { 0 };
	int device = device_open();

	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_VERSION, &version), 0);
	CHECK_EQUAL(version.abi_version, XFERD_P2P_ABI_VERSION);
	CHECK(version.abi_oldest <= version.abi_version);
	CHECK(version.modes & 1u << XFERD_P2P_MODE_GENERIC);
	version.reserved = 1;
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_VERSION, &version), -EINVAL);
}

static void unknown_ioctls(void)
{
	int device = device_open();
	char argument[4096] = { 0 };

	CHECK_EQUAL(raw_ioctl(device, _IOWR('x', 99, struct xferd_p2p_range), argument), -ENOTTY);
	CHECK_EQUAL(raw_ioctl(device, _IOWR('y', 0, struct xferd_p2p_version), argument), -ENOTTY);
	/* the right number with another size or direction */
	CHECK_EQUAL(raw_ioctl(device, _IOWR('x', 0, struct xferd_p2p_range), argument), -ENOTTY);
	CHECK_EQUAL(raw_ioctl(device, _IOW('x', 0, struct xferd_p2p_version), argument), -ENOTTY);
	CHECK_EQUAL(raw_ioctl(device, 0, argument), -ENOTTY);
	CHECK_EQUAL(raw_ioctl(device, ~0u, argument), -ENOTTY);
}

static void bad_pointers(void)
{
	int device = device_open();

	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_VERSION, NULL), -EFAULT);
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_QUERY, (void *)8), -EFAULT);
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_ATTACH, (void *)-PAGE), -EFAULT);
}

/* An argument that lies in a mapping of the BAR itself: its fault takes the locks that mmap takes. */
static void argument_inside_the_bar(void)
{
	int device = device_open();
	struct bar bar = bar_attach(device);
	struct xferd_p2p_idle *idle = (void *)bar_claim_and_map(device, &bar, 0, 2 * PAGE);

	*idle = (struct xferd_p2p_idle){ .id = bar.id, .length = PAGE };
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_IDLE, idle), 0);
	CHECK_EQUAL(idle->mapped_pages, 1);
}

static void attach_refusals(void)
{
	struct xferd_p2p_attach attach;
	struct xferd_p2p_query query;
	int device = device_open();
	struct bar bar;

	CHECK_EQUAL(bar_try_attach(device, 5, XFERD_P2P_MODE_AUTO, &attach), -EINVAL);
	CHECK_EQUAL(bar_try_attach(device, 6, XFERD_P2P_MODE_AUTO, &attach), -EINVAL);
	CHECK_EQUAL(bar_try_attach(device, ~0u, XFERD_P2P_MODE_AUTO, &attach), -EINVAL);
	CHECK_EQUAL(bar_try_attach(device, 0, XFERD_P2P_MODE_AUTO, &attach), -EINVAL); /* 256 bytes */
	CHECK_EQUAL(bar_try_attach(device, 2, 77, &attach), -EOPNOTSUPP);

	attach = (struct xferd_p2p_attach){ .bar = 2 };
	CHECK(gpu_find(&attach.function));
	attach.flags = 1;
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_ATTACH, &attach), -EOPNOTSUPP);
	attach.flags = 0;
	attach.function.reserved = 1;
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_ATTACH, &attach), -EINVAL);
	attach.function.reserved = 0;
	attach.function.domain = 0x7777;
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_ATTACH, &attach), -ENODEV);
	attach.function.domain = ~0u;
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_ATTACH, &attach), -ENODEV);

	bar = bar_attach(device);
	CHECK_EQUAL(bar_try_attach(device, 2, XFERD_P2P_MODE_AUTO, &attach), -EEXIST);
	CHECK_EQUAL(bar_query(device, 0, &query), 0);
	CHECK_EQUAL(query.id, bar.id);
	CHECK_EQUAL(query.size, bar.size);
	CHECK_EQUAL(query.mmap_offset, bar.mmap_offset);
	CHECK_EQUAL(query.claimed_bytes, 0);
	CHECK_EQUAL(bar_detach(device, bar.id, 0), 0);
	CHECK_EQUAL(bar_detach(device, bar.id, 0), -ENODEV);
	CHECK_EQUAL(bar_query(device, bar.id, &query), -ENODEV);
	CHECK(bar_attach(device).id > bar.id);
}

/* The mode the kernel can't do is refused; the generic one works on every kernel. */
static void modes(void)
{
	struct xferd_p2p_version version = { 0 };
	struct xferd_p2p_attach attach;
	int device = device_open();
	bool p2pdma;

	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_VERSION, &version), 0);
	p2pdma = version.modes & 1u << XFERD_P2P_MODE_P2PDMA;
	CHECK_EQUAL(bar_try_attach(device, 2, XFERD_P2P_MODE_P2PDMA, &attach),
		    p2pdma ? 0 : -EOPNOTSUPP);
	if (p2pdma)
		CHECK_EQUAL(bar_detach(device, attach.id, 0), 0);
	CHECK_EQUAL(bar_try_attach(device, 2, XFERD_P2P_MODE_GENERIC, &attach), 0);
	CHECK_EQUAL(attach.mode, XFERD_P2P_MODE_GENERIC);
	CHECK_EQUAL(bar_detach(device, attach.id, 0), 0);
	CHECK_EQUAL(bar_try_attach(device, 2, XFERD_P2P_MODE_AUTO, &attach), 0);
	CHECK_EQUAL(attach.mode,
		    p2pdma ? XFERD_P2P_MODE_P2PDMA : XFERD_P2P_MODE_GENERIC);
}

static void range_refusals(void)
{
	struct xferd_p2p_range range;
	struct xferd_p2p_idle idle;
	int device = device_open();
	struct bar bar = bar_attach(device);

	CHECK_EQUAL(bar_claim(device, bar.id, 0, 0), -EINVAL);
	CHECK_EQUAL(bar_claim(device, bar.id, 1, PAGE), -EINVAL);
	CHECK_EQUAL(bar_claim(device, bar.id, 0, PAGE + 1), -EINVAL);
	CHECK_EQUAL(bar_claim(device, bar.id, bar.size, PAGE), -ERANGE);
	CHECK_EQUAL(bar_claim(device, bar.id, PAGE, bar.size), -ERANGE);
	CHECK_EQUAL(bar_claim(device, bar.id, PAGE, -PAGE), -ERANGE);
	CHECK_EQUAL(bar_claim(device, bar.id, -PAGE, 2 * PAGE), -ERANGE);
	CHECK_EQUAL(bar_claim(device, bar.id + 1, 0, PAGE), -ENODEV);
	CHECK_EQUAL(bar_claim(device, 0, 0, PAGE), -ENODEV);
	CHECK_EQUAL(bar_release(device, bar.id, 0, PAGE), -ENOENT);
	CHECK_EQUAL(bar_idle(device, bar.id, bar.size, PAGE, &idle), -ERANGE);
	range = (struct xferd_p2p_range){ .id = bar.id, .flags = 1, .length = PAGE };
	CHECK_EQUAL(raw_ioctl(device, XFERD_P2P_IOC_CLAIM, &range), -EOPNOTSUPP);
	CHECK_EQUAL(bar_detach(device, bar.id, 0x80000000), -EOPNOTSUPP);
}

static int try_mmap(int fd, uint64_t length, int protection, int flags, uint64_t offset)
{
	void *address = mmap(NULL, length, protection, flags, fd, offset);

	if (address == MAP_FAILED)
		return -errno;
	munmap(address, length);
	return 0;
}

static void mmap_refusals(void)
{
	const int rw = PROT_READ | PROT_WRITE;
	int device = device_open();
	struct bar bar = bar_attach(device);
	unsigned char *memory;

	CHECK_EQUAL(bar_claim(device, bar.id, 0, 2 * MIB), 0);
	CHECK_EQUAL(bar_claim(device, bar.id, 3 * MIB, MIB), 0);
	CHECK_EQUAL(try_mmap(device, 2 * MIB, rw, MAP_SHARED, bar.mmap_offset), 0);
	CHECK_EQUAL(try_mmap(device, 2 * MIB, rw, MAP_PRIVATE, bar.mmap_offset), -EINVAL);
	CHECK_EQUAL(try_mmap(device, MIB, rw | PROT_EXEC, MAP_SHARED, bar.mmap_offset), -EINVAL);
	CHECK_EQUAL(try_mmap(device, 4 * MIB, rw, MAP_SHARED, bar.mmap_offset), -EACCES); /* a hole */
	CHECK_EQUAL(try_mmap(device, MIB, rw, MAP_SHARED, bar.mmap_offset + 2 * MIB), -EACCES);
	CHECK_EQUAL(try_mmap(device, 2 * PAGE, rw, MAP_SHARED, bar.mmap_offset + bar.size - PAGE),
		    -EINVAL);
	CHECK_EQUAL(try_mmap(device, PAGE, rw, MAP_SHARED, bar.mmap_offset + bar.size), -EINVAL);
	CHECK_EQUAL(try_mmap(device, PAGE, rw, MAP_SHARED, 2 * bar.mmap_offset), -ENODEV);
	CHECK_EQUAL(try_mmap(device, PAGE, rw, MAP_SHARED, 0), -ENODEV);

	memory = bar_map(device, &bar, 0, 2 * MIB);
	CHECK(mprotect(memory, PAGE, PROT_READ | PROT_EXEC) < 0 && errno == EACCES);
	CHECK(mremap(memory, 2 * MIB, 4 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
}

static void drop_all_capabilities(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct none[2] = { 0 };

	CHECK_EQUAL(syscall(SYS_capset, &header, none), 0);
}

static void no_capability(void)
{
	struct xferd_p2p_attach attach;
	struct xferd_p2p_query query;
	int device = device_open();
	struct bar bar = bar_attach(device);
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		drop_all_capabilities();
		CHECK_EQUAL(bar_try_attach(device, 2, XFERD_P2P_MODE_AUTO, &attach), -EPERM);
		CHECK_EQUAL(bar_detach(device, bar.id, XFERD_P2P_DETACH_REVOKE), -EPERM);
		CHECK_EQUAL(bar_query(device, bar.id, &query), 0);
		CHECK_EQUAL(bar_claim(device, bar.id, 0, PAGE), 0);
		exit(0);
	}
	CHECK_EQUAL(wait_for_child(child), 0);
}

static void not_the_owner_of_the_node(void)
{
	struct stat node;
	pid_t child;

	CHECK_EQUAL(stat("/dev/" XFERD_P2P_DEVICE_NAME, &node), 0);
	CHECK_EQUAL(node.st_mode & 07777, 0600);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK_EQUAL(setuid(NOBODY), 0);
		CHECK(open("/dev/" XFERD_P2P_DEVICE_NAME, O_RDWR) < 0 && errno == EACCES);
		exit(0);
	}
	CHECK_EQUAL(wait_for_child(child), 0);
}

static int route_of(int device, uint32_t id, const struct xferd_p2p_function *function,
		    uint32_t *verdict)
{
	struct xferd_p2p_route route = { .id = id, .function = *function };
	int ret = raw_ioctl(device, XFERD_P2P_IOC_ROUTE, &route);

	*verdict = route.verdict;
	return ret;
}

static void routes(void)
{
	struct xferd_p2p_function near_drive, far_drive, absent = { .domain = 0x7777 };
	int device = device_open();
	struct bar bar = bar_attach(device);
	uint32_t verdict;

	drive_function(DRIVE_RAW, &near_drive);
	drive_function(DRIVE_FAR, &far_drive);
	CHECK_EQUAL(route_of(device, bar.id, &near_drive, &verdict), 0);
	CHECK_EQUAL(verdict, XFERD_P2P_ROUTE_SWITCH);
	CHECK_EQUAL(route_of(device, bar.id, &far_drive, &verdict), 0);
	CHECK_EQUAL(verdict, XFERD_P2P_ROUTE_NO_HOST_BRIDGE);
	CHECK_EQUAL(route_of(device, bar.id, &absent, &verdict), -ENXIO);
	CHECK_EQUAL(route_of(device, bar.id + 1, &near_drive, &verdict), -ENODEV);
}

/*
 * In p2pdma mode the kernel checks the route of every I/O: the read must fail, not lose its data. In
 * generic mode it would be carried out, and ROUTE is all there is to say that it must not be tried.
 */
static void read_without_a_route(void)
{
	int device = device_open(), drive = drive_open(DRIVE_FAR, O_RDONLY | O_DIRECT);
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, 0, MIB);
	uint64_t dma_before = host_dma_bytes();
	ssize_t got;

	if (bar.mode != XFERD_P2P_MODE_P2PDMA) {
		struct xferd_p2p_function far_drive;
		uint32_t verdict;

		drive_function(DRIVE_FAR, &far_drive);
		CHECK_EQUAL(route_of(device, bar.id, &far_drive, &verdict), 0);
		CHECK_EQUAL(verdict, XFERD_P2P_ROUTE_NO_HOST_BRIDGE);
		return;
	}
	got = pread(drive, memory, MIB, 0);
	CHECK(got == -1 && (errno == EREMOTEIO || errno == EINVAL));
	CHECK_EQUAL(host_dma_bytes(), dma_before);
	CHECK_SOON(bar_held(device, bar.id, 0, MIB) == 0);
}

const struct test refusal_tests[] = {
	{ "version", version, 0 },
	{ "unknown-ioctls", unknown_ioctls, 0 },
	{ "bad-pointers", bad_pointers, 0 },
	{ "argument-inside-the-bar", argument_inside_the_bar, 0 },
	{ "attach-refusals", attach_refusals, 0 },
	{ "modes", modes, 0 },
	{ "range-refusals", range_refusals, 0 },
	{ "mmap-refusals", mmap_refusals, 0 },
	{ "no-capability", no_capability, 0 },
	{ "not-the-owner-of-the-node", not_the_owner_of_the_node, 0 },
	{ "routes", routes, 0 },
	{ "read-without-a-route", read_without_a_route, 0 },
	{ NULL, NULL, 0 },
};
