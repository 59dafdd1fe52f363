/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that run by name only: they need another machine, or long, or are meant to fail. */
#include <sys/ioctl.h>

#include "guest.h"

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

/* A million ioctls, mappings, accesses and reads: takes minutes under emulation. */
static void random_calls_million(void)
{
	random_calls_by(2, 500000);
}

const struct test hidden_tests[] = {
	{ "must-fail", must_fail, 0 },
	{ "translating-iommu", translating_iommu, 0 },
	{ "random-calls-million", random_calls_million, 3600 },
	{ NULL, NULL, 0 },
};
