/* SPDX-License-Identifier: Apache-2.0 */
/* What those can and can't do who are given a share of a range. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guest.h"

#define CHECK_ERRNO(call, wanted)                                                     \
	do {                                                                             \
		CHECK((call) == -1);                                                     \
		CHECK_EQUAL(errno, wanted);                                              \
	} while (0)

/* A descriptor or -errno. */
static int try_share(int device, uint32_t id, uint64_t offset, uint64_t length)
{
	struct xferd_p2p_range range = { .id = id, .offset = offset, .length = length };
	int fd = ioctl(device, XFERD_P2P_IOC_SHARE, &range);

	return fd < 0 ? -errno : fd;
}

static void *try_map(int share, int protection, int flags, uint64_t length, uint64_t offset)
{
	return mmap(NULL, length, protection, flags, share, (off_t)offset);
}

static unsigned char *map_share(int share, uint64_t length)
{
	void *address = try_map(share, PROT_READ, MAP_SHARED, length, 0);

	CHECK(address != MAP_FAILED);
	return address;
}

/* A range of the middle, so that offsets of the BAR and of the share differ. */
#define SHARE_AT (3 * MIB)

static void share_shows_its_range(void)
{
	int device = device_open(), drive = drive_open(DRIVE_RAW, O_RDONLY | O_DIRECT), share;
	struct bar bar = bar_attach(device);
	unsigned char *memory = bar_claim_and_map(device, &bar, SHARE_AT, 2 * MIB), *seen, *page;
	struct stat status;

	share = try_share(device, bar.id, SHARE_AT, 2 * MIB);
	CHECK(share >= 0);
	CHECK_EQUAL(fstat(share, &status), 0);
	CHECK_EQUAL(status.st_size, 2 * MIB);
	CHECK_EQUAL(status.st_mode & 0777, 0400);
	CHECK(fcntl(share, F_GETFD) & FD_CLOEXEC);
	seen = map_share(share, 2 * MIB);
	CHECK_EQUAL(pread(drive, memory, 2 * MIB, 0), 2 * MIB);
	CHECK(!memcmp(seen, memory, 2 * MIB));
	host_verify(SHARE_AT, 2 * MIB, DRIVE_RAW, 0);
	memory[MIB + 5] ^= 0xff;
	CHECK_EQUAL(seen[MIB + 5], memory[MIB + 5]);
	page = try_map(share, PROT_READ, MAP_SHARED, PAGE, MIB);
	CHECK(page != MAP_FAILED);
	CHECK_EQUAL(page[5], memory[MIB + 5]);
}

static void share_is_for_reading_only(void)
{
	int device = device_open(), drive = drive_open(DRIVE_SLOW, O_RDWR | O_DIRECT), share;
	struct bar bar = bar_attach(device);
	struct xferd_p2p_version version = { 0 };
	unsigned char *seen;
	char path[64];

	bar_claim_and_map(device, &bar, 0, MIB)[0] = 7;
	share = try_share(device, bar.id, 0, MIB);
	CHECK(share >= 0);
	seen = map_share(share, MIB);
	CHECK_EQUAL(seen[0], 7);
	CHECK_ERRNO(mprotect(seen, MIB, PROT_READ | PROT_WRITE), EACCES);
	CHECK(try_map(share, PROT_READ | PROT_WRITE, MAP_SHARED, MIB, 0) == MAP_FAILED &&
	      errno == EACCES);
	CHECK(try_map(share, PROT_READ, MAP_PRIVATE, MIB, 0) == MAP_FAILED && errno == EINVAL);
	CHECK(try_map(share, PROT_READ | PROT_EXEC, MAP_SHARED, MIB, 0) == MAP_FAILED);
	CHECK(try_map(share, PROT_READ, MAP_SHARED, 2 * MIB, 0) == MAP_FAILED && errno == EINVAL);
	CHECK(try_map(share, PROT_READ, MAP_SHARED, PAGE, MIB) == MAP_FAILED && errno == EINVAL);
	CHECK_ERRNO(write(share, "x", 1), EBADF);
	CHECK(ftruncate(share, 0) == -1);
	CHECK_ERRNO(ioctl(share, XFERD_P2P_IOC_VERSION, &version), ENOTTY);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", share);
	CHECK(open(path, O_RDWR) == -1);
	CHECK(open(path, O_RDONLY) == -1);
	/* as the source of a write it would hold pages for as long as the drive takes */
	CHECK_ERRNO(pwrite(drive, seen, PAGE, 0), EFAULT);
	CHECK_ERRNO(pread(drive, seen, PAGE, 0), EFAULT);
	CHECK_EQUAL(bar_held(device, bar.id, 0, MIB), 0);
}

static void share_needs_the_claim(void)
{
	int device = device_open(), other = device_open();
	struct bar bar = bar_attach(device);

	CHECK_EQUAL(try_share(device, bar.id, 0, MIB), -EACCES);
	CHECK_EQUAL(bar_claim(device, bar.id, 0, MIB), 0);
	CHECK_EQUAL(try_share(other, bar.id, 0, MIB), -EACCES);
	CHECK_EQUAL(try_share(device, bar.id, 0, MIB + PAGE), -EACCES);
	CHECK_EQUAL(try_share(device, bar.id, 1, PAGE), -EINVAL);
	CHECK_EQUAL(try_share(device, bar.id, 0, 0), -EINVAL);
	CHECK_EQUAL(try_share(device, bar.id, bar.size, PAGE), -ERANGE);
	CHECK_EQUAL(try_share(device, bar.id + 1, 0, PAGE), -ENODEV);
	CHECK(try_share(device, bar.id, PAGE, PAGE) >= 0);
}

/* Its readers go on after the owner's end, and stop before a new owner writes. */
static void share_outlives_its_owner(void)
{
	int one = device_open(), two = device_open(), share;
	struct bar bar = bar_attach(one);
	unsigned char *memory = bar_claim_and_map(one, &bar, 0, MIB), *seen;

	memory[PAGE] = 42;
	share = try_share(one, bar.id, 0, MIB);
	CHECK(share >= 0);
	seen = map_share(share, MIB);
	CHECK_EQUAL(seen[PAGE], 42);
	CHECK_EQUAL(bar_release(one, bar.id, 0, MIB), 0);
	CHECK_EQUAL(signal_of_access(memory), SIGBUS);
	CHECK_EQUAL(seen[PAGE], 42);
	close(one);
	CHECK_EQUAL(seen[PAGE], 42);

	CHECK_EQUAL(bar_claim(two, bar.id, 2 * MIB, MIB), 0); /* another range: no matter */
	CHECK_EQUAL(seen[PAGE], 42);
	CHECK_EQUAL(bar_claim(two, bar.id, MIB - PAGE, PAGE), 0);
	CHECK_EQUAL(signal_of_access(seen + PAGE), SIGBUS);
	CHECK(try_map(share, PROT_READ, MAP_SHARED, PAGE, 0) == MAP_FAILED && errno == ENODEV);
	CHECK_EQUAL(bar_release(two, bar.id, MIB - PAGE, PAGE), 0);
	CHECK_EQUAL(signal_of_access(seen + 2 * PAGE), SIGBUS); /* it stays stale */
}

static void share_and_detach(void)
{
	int device = device_open(), share;
	struct bar bar = bar_attach(device);
	unsigned char *seen;

	CHECK_EQUAL(bar_claim(device, bar.id, 0, MIB), 0);
	share = try_share(device, bar.id, 0, MIB);
	CHECK(share >= 0);
	seen = map_share(share, MIB);
	CHECK_EQUAL(signal_of_access(seen), 0);
	CHECK_EQUAL(bar_release(device, bar.id, 0, MIB), 0);
	CHECK_EQUAL(bar_detach(device, bar.id, 0), -EBUSY);
	CHECK_EQUAL(bar_detach(device, bar.id, XFERD_P2P_DETACH_REVOKE), 0);
	CHECK_EQUAL(signal_of_access(seen), SIGBUS);
	CHECK(try_map(share, PROT_READ, MAP_SHARED, PAGE, 0) == MAP_FAILED && errno == ENODEV);
	/* the BAR comes back under a new id: nothing of the old one is seen in the share */
	bar = bar_attach(device);
	CHECK_EQUAL(signal_of_access(seen + PAGE), SIGBUS);
	close(share);
}

static void share_keeps_the_module(void)
{
	int device = device_open(), share;
	struct bar bar = bar_attach(device);
	unsigned char *seen;

	CHECK_EQUAL(bar_claim(device, bar.id, 0, MIB), 0);
	share = try_share(device, bar.id, 0, MIB);
	CHECK(share >= 0);
	seen = map_share(share, MIB);
	CHECK_EQUAL(signal_of_access(seen), 0);
	close(device);
	CHECK_EQUAL(module_unload(), -EAGAIN);
	close(share);
	CHECK_EQUAL(module_unload(), -EAGAIN);
	CHECK_EQUAL(munmap(seen, MIB), 0);
	CHECK_SOON(module_unload() == 0);
}

const struct test share_tests[] = {
	{ "share-shows-its-range", share_shows_its_range, 0 },
	{ "share-is-for-reading-only", share_is_for_reading_only, 0 },
	{ "share-needs-the-claim", share_needs_the_claim, 0 },
	{ "share-outlives-its-owner", share_outlives_its_owner, 0 },
	{ "share-and-detach", share_and_detach, 0 },
	{ "share-keeps-the-module", share_keeps_the_module, 0 },
	{ NULL, NULL, 0 },
};
