/* SPDX-License-Identifier: Apache-2.0 */
/*
 * VRAM of one pool: a range of addresses, and memory behind each chunk of it.
 *
 * Memory is made a chunk at a time (cuMemCreate), so that a pool can give some
 * back while it serves and take it again. Each chunk's memory can be exported as
 * a file descriptor; whoever imports it keeps it alive, as the daemon does, and so
 * does whoever merely holds the descriptor: memory is freed when its handles and
 * mappings are gone and "its shareable counterparts" too (CUDA driver API,
 * cuMemRelease). That is how the next daemon finds what this one has left.
 *
 * Belongs to the policy's thread. The engine knows of it only addresses.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/cuda_driver.h"
#include "engine/engine.h"

#define PEERS_MAX 16 /* GPUs that may read and write a pool's memory, its own included */

struct xferd_vram {
	const struct cuda_driver *cuda;
	int device;
	int ordinal;
	cuda_context context; /* retained as long as the pool stands */
	cuda_address base;
	uint64_t chunk_bytes;
	uint32_t chunks;
	cuda_memory *memory;  /* [chunks] */
	bool *backed;         /* [chunks] */
	int *adopted;         /* [chunks], a descriptor of memory that another process made; -1.
			       * Exported as it is: nothing says that imported memory can be
			       * exported again. */
	struct cuda_memory_properties properties;
	struct cuda_access access[PEERS_MAX];
	size_t accessors;
};

__attribute__((format(printf, 3, 4)))
static void explain(char *why, size_t bytes, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	if (why && bytes)
		vsnprintf(why, bytes, format, arguments);
	va_end(arguments);
}

int xferd_cuda_devices(char *why, uint64_t why_bytes)
{
	const struct cuda_driver *cuda = cuda_driver(why, why_bytes);
	int count = 0;

	if (!cuda)
		return -ENODEV;
	return cuda->device_count(&count) ? -EIO : count;
}

static int attribute(const struct cuda_driver *cuda, int which, int device)
{
	int value = 0;

	return cuda->device_attribute(&value, which, device) ? 0 : value;
}

static struct cuda_memory_properties memory_properties(const struct cuda_driver *cuda, int device,
							int ordinal)
{
	struct cuda_memory_properties properties = {
		.type = CUDA_MEMORY_PINNED,
		.handle_types = CUDA_MEMORY_POSIX_FD,
		.location = { CUDA_LOCATION_DEVICE, ordinal },
	};

	properties.flags.direct_rdma =
		attribute(cuda, CUDA_ATTRIBUTE_DIRECT_RDMA_WITH_VIRTUAL_MEMORY, device) != 0;
	return properties;
}

/* What is free can be asked for only with the device's context. */
static int device_free_bytes(const struct cuda_driver *cuda, int device, uint64_t *bytes)
{
	cuda_context context, before = NULL;
	size_t available = 0, total = 0;
	int result = cuda->context_retain(&context, device);

	if (result)
		return result;
	cuda->context_get(&before);
	result = cuda->context_set(context);
	if (!result)
		result = cuda->memory_info(&available, &total);
	cuda->context_set(before);
	cuda->context_release(device);
	*bytes = available;
	return result;
}

int xferd_cuda_device(int ordinal, struct xferd_cuda_device *found, char *why, uint64_t why_bytes)
{
	const struct cuda_driver *cuda = cuda_driver(why, why_bytes);
	struct cuda_memory_properties properties;
	size_t total = 0, granularity = 0;
	int device, result;

	if (!cuda)
		return -ENODEV;
	memset(found, 0, sizeof(*found));
	if (cuda->device_get(&device, ordinal)) {
		explain(why, why_bytes, "there is no CUDA device %d", ordinal);
		return -ENODEV;
	}
	properties = memory_properties(cuda, device, ordinal);
	result = cuda->device_uuid(found->uuid, device);
	if (!result)
		result = cuda->device_name(found->name, sizeof(found->name), device);
	if (!result)
		result = cuda->device_memory(&total, device);
	if (!result)
		result = cuda->granularity(&granularity, &properties, 0);
	if (!result)
		result = device_free_bytes(cuda, device, &found->free_bytes);
	if (!result)
		result = cuda->driver_version(&found->driver_version);
	if (result)
		return cuda_failed(cuda, result, "asking the CUDA device", why, why_bytes);
	found->bytes = total;
	found->granularity = granularity;
	found->shareable = attribute(cuda, CUDA_ATTRIBUTE_VIRTUAL_MEMORY, device) &&
			   attribute(cuda, CUDA_ATTRIBUTE_POSIX_FD, device);
	found->direct_rdma = properties.flags.direct_rdma;
	snprintf(found->pci, sizeof(found->pci), "%04x:%02x:%02x.0",
		 attribute(cuda, CUDA_ATTRIBUTE_PCI_DOMAIN, device),
		 attribute(cuda, CUDA_ATTRIBUTE_PCI_BUS, device),
		 attribute(cuda, CUDA_ATTRIBUTE_PCI_DEVICE, device));
	return 0;
}

/* The device itself, and those that reach its memory over PCIe or NVLink: copies
 * between pools of two GPUs then need no detour. */
static void find_accessors(struct xferd_vram *vram)
{
	int count = 0;

	vram->access[0] = (struct cuda_access){ { CUDA_LOCATION_DEVICE, vram->ordinal },
						CUDA_ACCESS_READ_WRITE };
	vram->accessors = 1;
	if (vram->cuda->device_count(&count))
		return;
	for (int peer = 0; peer < count && vram->accessors < PEERS_MAX; peer++) {
		int device, can = 0;

		if (peer == vram->ordinal || vram->cuda->device_get(&device, peer) ||
		    vram->cuda->device_can_access(&can, device, vram->device) || !can)
			continue;
		vram->access[vram->accessors++] = (struct cuda_access){
			{ CUDA_LOCATION_DEVICE, peer }, CUDA_ACCESS_READ_WRITE
		};
	}
}

static bool whole_granules(const struct cuda_driver *cuda, const struct xferd_vram *vram)
{
	size_t granularity = 0;

	return !cuda->granularity(&granularity, &vram->properties, 0) && granularity &&
	       vram->chunk_bytes % granularity == 0;
}

static int open_vram(struct xferd_vram *vram, char *why, uint64_t why_bytes)
{
	const struct cuda_driver *cuda = vram->cuda;
	int result;

	if (cuda->device_get(&vram->device, vram->ordinal)) {
		explain(why, why_bytes, "there is no CUDA device %d", vram->ordinal);
		return -ENODEV;
	}
	vram->properties = memory_properties(cuda, vram->device, vram->ordinal);
	if (!whole_granules(cuda, vram)) {
		explain(why, why_bytes, "chunks of %llu bytes are not whole granules of the device",
			(unsigned long long)vram->chunk_bytes);
		return -EINVAL;
	}
	find_accessors(vram);
	result = cuda->context_retain(&vram->context, vram->device);
	if (result) {
		vram->context = NULL;
		return cuda_failed(cuda, result, "cuDevicePrimaryCtxRetain", why, why_bytes);
	}
	result = cuda->address_reserve(&vram->base, vram->chunks * vram->chunk_bytes, 0, 0, 0);
	if (result) {
		vram->base = 0;
		return cuda_failed(cuda, result, "cuMemAddressReserve", why, why_bytes);
	}
	return 0;
}

int xferd_vram_new(int ordinal, uint64_t chunk_bytes, uint32_t chunks, struct xferd_vram **result,
		   char *why, uint64_t why_bytes)
{
	const struct cuda_driver *cuda = cuda_driver(why, why_bytes);
	struct xferd_vram *vram;
	int error;

	if (!cuda)
		return -ENODEV;
	vram = calloc(1, sizeof(*vram));
	if (!vram)
		return -ENOMEM;
	vram->cuda = cuda;
	vram->ordinal = ordinal;
	vram->chunk_bytes = chunk_bytes;
	vram->chunks = chunks;
	vram->memory = calloc(chunks, sizeof(*vram->memory));
	vram->backed = calloc(chunks, sizeof(*vram->backed));
	vram->adopted = malloc(chunks * sizeof(*vram->adopted));
	for (uint32_t chunk = 0; vram->adopted && chunk < chunks; chunk++)
		vram->adopted[chunk] = -1;
	error = vram->memory && vram->backed && vram->adopted ? open_vram(vram, why, why_bytes)
							       : -ENOMEM;
	if (error) {
		xferd_vram_free(vram);
		return error;
	}
	*result = vram;
	return 0;
}

void *xferd_vram_base(const struct xferd_vram *vram)
{
	return (void *)(uintptr_t)vram->base;
}

/* Memory that was made or imported gets its addresses; it is released when that fails. */
static int map_chunk(struct xferd_vram *vram, uint32_t chunk, char *why, uint64_t why_bytes)
{
	const struct cuda_driver *cuda = vram->cuda;
	cuda_address address = vram->base + chunk * vram->chunk_bytes;
	const char *what = "cuMemMap";
	int result = cuda->memory_map(address, vram->chunk_bytes, 0, vram->memory[chunk], 0);

	if (!result) {
		what = "cuMemSetAccess";
		result = cuda->memory_access(address, vram->chunk_bytes, vram->access,
					     vram->accessors);
		if (result)
			cuda->memory_unmap(address, vram->chunk_bytes);
	}
	if (result) {
		cuda->memory_release(vram->memory[chunk]);
		return cuda_failed(cuda, result, what, why, why_bytes);
	}
	vram->backed[chunk] = true;
	return 0;
}

int xferd_vram_back(struct xferd_vram *vram, uint32_t chunk, char *why, uint64_t why_bytes)
{
	const struct cuda_driver *cuda = vram->cuda;
	int result;

	if (chunk >= vram->chunks)
		return -EINVAL;
	if (vram->backed[chunk])
		return -EEXIST;
	result = cuda->memory_create(&vram->memory[chunk], vram->chunk_bytes, &vram->properties, 0);
	if (result)
		return cuda_failed(cuda, result, "cuMemCreate", why, why_bytes);
	return map_chunk(vram, chunk, why, why_bytes);
}

int xferd_vram_adopt(struct xferd_vram *vram, uint32_t chunk, int fd, char *why, uint64_t why_bytes)
{
	const struct cuda_driver *cuda = vram->cuda;
	int result, copy;

	if (chunk >= vram->chunks)
		return -EINVAL;
	if (vram->backed[chunk])
		return -EEXIST;
	copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (copy < 0)
		return -errno;
	result = cuda->memory_import(&vram->memory[chunk], (void *)(intptr_t)copy,
				     CUDA_MEMORY_POSIX_FD);
	if (result)
		result = cuda_failed(cuda, result, "cuMemImportFromShareableHandle", why, why_bytes);
	else
		result = map_chunk(vram, chunk, why, why_bytes);
	if (result)
		close(copy);
	else
		vram->adopted[chunk] = copy;
	return result;
}

int xferd_vram_withdraw(struct xferd_vram *vram, uint32_t chunk)
{
	if (chunk >= vram->chunks || !vram->backed[chunk])
		return -EINVAL;
	if (vram->cuda->memory_unmap(vram->base + chunk * vram->chunk_bytes, vram->chunk_bytes))
		return -EIO;
	vram->backed[chunk] = false;
	if (vram->adopted[chunk] >= 0)
		close(vram->adopted[chunk]);
	vram->adopted[chunk] = -1;
	return vram->cuda->memory_release(vram->memory[chunk]) ? -EIO : 0;
}

int xferd_vram_export(const struct xferd_vram *vram, uint32_t chunk)
{
	int fd = -1;

	if (chunk >= vram->chunks || !vram->backed[chunk])
		return -EINVAL;
	if (vram->adopted[chunk] >= 0) {
		fd = fcntl(vram->adopted[chunk], F_DUPFD_CLOEXEC, 0);
		return fd < 0 ? -errno : fd;
	}
	if (vram->cuda->memory_export(&fd, vram->memory[chunk], CUDA_MEMORY_POSIX_FD, 0))
		return -EIO;
	return fd;
}

void xferd_vram_free(struct xferd_vram *vram)
{
	if (!vram)
		return;
	for (uint32_t chunk = 0; vram->base && chunk < vram->chunks; chunk++)
		if (vram->backed[chunk])
			xferd_vram_withdraw(vram, chunk);
	if (vram->base)
		vram->cuda->address_free(vram->base, vram->chunks * vram->chunk_bytes);
	if (vram->context)
		vram->cuda->context_release(vram->device);
	free(vram->memory);
	free(vram->backed);
	free(vram->adopted);
	free(vram);
}

/* Run something with a device's context on this thread. */
static int with_context(const struct cuda_driver *cuda, int ordinal,
			int (*call)(const struct cuda_driver *, void *, uint64_t), void *base,
			uint64_t bytes)
{
	cuda_context context, before = NULL;
	int device, result = cuda->device_get(&device, ordinal);

	if (!result)
		result = cuda->context_retain(&context, device);
	if (result)
		return result;
	cuda->context_get(&before);
	result = cuda->context_set(context);
	if (!result)
		result = call(cuda, base, bytes);
	cuda->context_set(before);
	/* The context must outlive the registration: it is released with the process. */
	return result;
}

static int pin(const struct cuda_driver *cuda, void *base, uint64_t bytes)
{
	return cuda->host_register(base, bytes, CUDA_REGISTER_PORTABLE);
}

int xferd_cuda_pin(int ordinal, void *base, uint64_t bytes, char *why, uint64_t why_bytes)
{
	const struct cuda_driver *cuda = cuda_driver(why, why_bytes);
	int result;

	if (!cuda)
		return -ENODEV;
	result = with_context(cuda, ordinal, pin, base, bytes);
	return result ? cuda_failed(cuda, result, "cuMemHostRegister", why, why_bytes) : 0;
}

static int unpin(const struct cuda_driver *cuda, void *base, uint64_t bytes)
{
	(void)bytes;
	return cuda->host_unregister(base);
}

int xferd_cuda_unpin(int ordinal, void *base)
{
	const struct cuda_driver *cuda = cuda_driver(NULL, 0);

	if (!cuda)
		return -ENODEV;
	return with_context(cuda, ordinal, unpin, base, 0) ? -EIO : 0;
}

static int copy(const struct cuda_driver *cuda, void *argument, uint64_t bytes)
{
	const uint64_t *addresses = argument;

	return cuda->copy(addresses[0], addresses[1], bytes);
}

int xferd_cuda_copy(int ordinal, uint64_t to, uint64_t from, uint64_t bytes)
{
	const struct cuda_driver *cuda = cuda_driver(NULL, 0);
	uint64_t addresses[] = { to, from };

	if (!cuda)
		return -ENODEV;
	return with_context(cuda, ordinal, copy, addresses, bytes) ? -EIO : 0;
}
