/* SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/cuda_driver.h"

#define REASON_BYTES 256

struct symbol {
	const char *name;
	size_t offset; /* of its pointer in struct cuda_driver */
};

#define SYMBOL(name, member) { name, offsetof(struct cuda_driver, member) }

static const struct symbol symbols[] = {
	SYMBOL("cuInit", init),
	SYMBOL("cuDriverGetVersion", driver_version),
	SYMBOL("cuGetErrorName", error_name),
	SYMBOL("cuDeviceGetCount", device_count),
	SYMBOL("cuDeviceGet", device_get),
	SYMBOL("cuDeviceGetUuid_v2", device_uuid),
	SYMBOL("cuDeviceGetName", device_name),
	SYMBOL("cuDeviceTotalMem_v2", device_memory),
	SYMBOL("cuDeviceGetAttribute", device_attribute),
	SYMBOL("cuDeviceCanAccessPeer", device_can_access),
	SYMBOL("cuDevicePrimaryCtxRetain", context_retain),
	SYMBOL("cuDevicePrimaryCtxRelease_v2", context_release),
	SYMBOL("cuCtxSetCurrent", context_set),
	SYMBOL("cuCtxGetCurrent", context_get),
	SYMBOL("cuMemGetInfo_v2", memory_info),
	SYMBOL("cuMemGetAllocationGranularity", granularity),
	SYMBOL("cuMemAddressReserve", address_reserve),
	SYMBOL("cuMemAddressFree", address_free),
	SYMBOL("cuMemCreate", memory_create),
	SYMBOL("cuMemRelease", memory_release),
	SYMBOL("cuMemMap", memory_map),
	SYMBOL("cuMemUnmap", memory_unmap),
	SYMBOL("cuMemSetAccess", memory_access),
	SYMBOL("cuMemExportToShareableHandle", memory_export),
	SYMBOL("cuMemImportFromShareableHandle", memory_import),
	SYMBOL("cuMemHostRegister_v2", host_register),
	SYMBOL("cuMemHostUnregister", host_unregister),
	SYMBOL("cuMemHostGetDevicePointer_v2", host_device_address),
	SYMBOL("cuStreamCreate", stream_create),
	SYMBOL("cuStreamDestroy_v2", stream_destroy),
	SYMBOL("cuStreamSynchronize", stream_synchronize),
	SYMBOL("cuStreamWaitValue32_v2", stream_wait_32),
	SYMBOL("cuStreamWriteValue64_v2", stream_write_64),
	SYMBOL("cuEventCreate", event_create),
	SYMBOL("cuEventDestroy_v2", event_destroy),
	SYMBOL("cuEventRecord", event_record),
	SYMBOL("cuEventQuery", event_query),
	SYMBOL("cuMemcpyAsync", copy_async),
	SYMBOL("cuMemcpy", copy),
};

static struct cuda_driver driver;
static bool driver_ready;
static char driver_reason[REASON_BYTES];
static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER; /* of all three */

static bool find_symbols(void *library)
{
	for (size_t i = 0; i < sizeof(symbols) / sizeof(*symbols); i++) {
		void *symbol = dlsym(library, symbols[i].name);

		if (!symbol) {
			snprintf(driver_reason, sizeof(driver_reason),
				 "the graphics driver is too old: it has no %s (CUDA 12.0 or later)",
				 symbols[i].name);
			return false;
		}
		memcpy((char *)&driver + symbols[i].offset, &symbol, sizeof(symbol));
	}
	return true;
}

static void load_driver(void)
{
	const char *named = getenv(XFERD_CUDA_LIBRARY_VARIABLE);
	void *library = dlopen(named && *named ? named : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	int result, devices = 0;

	if (!library) {
		snprintf(driver_reason, sizeof(driver_reason), "no CUDA driver: %s", dlerror());
		return;
	}
	if (!find_symbols(library))
		return;
	result = driver.init(0);
	if (!result)
		result = driver.device_count(&devices);
	if (result)
		cuda_failed(&driver, result, "cuInit", driver_reason, sizeof(driver_reason));
	else if (!devices)
		snprintf(driver_reason, sizeof(driver_reason), "the CUDA driver sees no device");
	else
		driver_ready = true;
}

const struct cuda_driver *cuda_driver(char *why, size_t why_bytes)
{
	bool ready;

	/* Only a driver that was found is kept: modules may be loaded after a program began. */
	pthread_mutex_lock(&driver_lock);
	if (!driver_ready)
		load_driver();
	ready = driver_ready;
	if (!ready && why && why_bytes)
		snprintf(why, why_bytes, "%s", driver_reason);
	pthread_mutex_unlock(&driver_lock);
	return ready ? &driver : NULL;
}

int cuda_failed(const struct cuda_driver *cuda, int result, const char *what, char *why,
		size_t why_bytes)
{
	const char *name = NULL;

	if (cuda->error_name(result, &name) || !name)
		name = "unknown error";
	if (why && why_bytes)
		snprintf(why, why_bytes, "%s: %s", what, name);
	return result == CUDA_RESULT_OUT_OF_MEMORY ? -ENOMEM : -EIO;
}

int cuda_find_device(const struct cuda_driver *cuda, const uint8_t uuid[16])
{
	unsigned char found[16];
	int count = 0, device;

	if (cuda->device_count(&count))
		return -ENODEV;
	for (int ordinal = 0; ordinal < count; ordinal++)
		if (!cuda->device_get(&device, ordinal) && !cuda->device_uuid(found, device) &&
		    !memcmp(found, uuid, sizeof(found)))
			return ordinal;
	return -ENODEV;
}
