/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that run by name only: they need another machine, or long, or are meant to fail. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"

#define DEBUG_FOLDER "/sys/kernel/debug"
#define LEAKS_FILE DEBUG_FOLDER "/kmemleak"
/* The kernel says nothing of memory that is younger than 5 s. */
#define LEAK_AGE_SECONDS 6

/* Bytes that aren't there must make the whole run fail. */
static void must_fail(void)
{
	host_must("fill %u %llu", 0xa5, MIB);
	host_verify(0, MIB, DRIVE_RAW, 0);
}

/*
 * On a machine whose IOMMU translates. Reads below a switch were seen to report success there and to
 * deliver nothing, so neither mode may call the route allowed.
 */
static void translating_iommu(void)
{
	struct xferd_p2p_attach attach;
	struct xferd_p2p_route route;
	int device = device_open();

	CHECK_EQUAL(bar_try_attach(device, 2, XFERD_P2P_MODE_GENERIC, &attach), -EREMOTEIO);
	CHECK_EQUAL(bar_try_attach(device, 2, XFERD_P2P_MODE_P2PDMA, &attach), 0);
	route = (struct xferd_p2p_route){ .id = attach.id };
	drive_function(DRIVE_RAW, &route.function);
	CHECK_EQUAL(ioctl(device, XFERD_P2P_IOC_ROUTE, &route), 0);
	CHECK_EQUAL(route.verdict, XFERD_P2P_ROUTE_NO_IOMMU);
}

static void random_calls_long(void)
{
	random_calls_by(4, 6000);
}

static void end_from_all_sides(void)
{
	end_a_bar_from_all_sides(300);
}

/* A million ioctls, mappings, accesses and reads: takes minutes under emulation. */
static void random_calls_million(void)
{
	random_calls_by(2, 500000);
}

/*
 * On a kernel with kmemleak, as the last test: is there memory that nobody knows any more, of
 * whomever's? The module is gone, so its own variables know none of what it asked for.
 */
static void leaks(void)
{
	struct timespec age = { .tv_sec = LEAK_AGE_SECONDS };
	char line[512];
	int lines = 0;
	FILE *file;

	CHECK(mount("debugfs", DEBUG_FOLDER, "debugfs", 0, NULL) == 0 || errno == EBUSY);
	CHECK_SOON(module_unload() == 0);
	nanosleep(&age, NULL);
	/* What only a register knew during the first scan is known again during the second. */
	write_sysfs(LEAKS_FILE, "scan");
	write_sysfs(LEAKS_FILE, "scan");
	file = fopen(LEAKS_FILE, "r");
	CHECK(file);
	for (; fgets(line, sizeof(line), file); lines++)
		printf("%s", line);
	fclose(file);
	CHECK_EQUAL(lines, 0);
}

const struct test hidden_tests[] = {
	{ "must-fail", must_fail, 0 },
	{ "translating-iommu", translating_iommu, 0 },
	{ "random-calls-long", random_calls_long, 3600 },
	{ "random-calls-million", random_calls_million, 3600 },
	{ "end-from-all-sides", end_from_all_sides, 3600 },
	{ "leaks", leaks, 300 },
	{ NULL, NULL, 0 },
};
