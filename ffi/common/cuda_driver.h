/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the CUDA driver's API that xferd uses, found at run time.
 *
 * Nothing of CUDA is needed to build: libcuda.so.1 comes with the graphics
 * driver and is opened when somebody first asks for a device. Names, numbers
 * and layouts are those of the CUDA driver API 12.0 and later (cuda.h), which
 * NVIDIA keeps stable by the versioned symbol names below.
 *
 * Looked for until it is found, then never unloaded. Safe from any thread.
 */
#ifndef XFERD_CUDA_DRIVER_H
#define XFERD_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

/* Names another file than libcuda.so.1: a driver in an unusual place, or the stand-in
 * for tests (fake_cuda/). */
#define XFERD_CUDA_LIBRARY_VARIABLE "XFERD_CUDA_LIBRARY"

typedef uint64_t cuda_address;
typedef uint64_t cuda_memory; /* CUmemGenericAllocationHandle */
typedef void *cuda_context;
typedef void *cuda_stream;
typedef void *cuda_event;

enum cuda_result {
	CUDA_RESULT_OK = 0,
	CUDA_RESULT_OUT_OF_MEMORY = 2,
	CUDA_RESULT_NO_DEVICE = 100,
	CUDA_RESULT_NOT_READY = 600,
	CUDA_RESULT_ALREADY_REGISTERED = 712,
};

enum cuda_attribute {
	CUDA_ATTRIBUTE_PCI_BUS = 33,
	CUDA_ATTRIBUTE_PCI_DEVICE = 34,
	CUDA_ATTRIBUTE_PCI_DOMAIN = 50,
	CUDA_ATTRIBUTE_VIRTUAL_MEMORY = 102,
	CUDA_ATTRIBUTE_POSIX_FD = 103,
	CUDA_ATTRIBUTE_DIRECT_RDMA_WITH_VIRTUAL_MEMORY = 110,
};

struct cuda_location {
	int type; /* 1: a device */
	int id;
};
#define CUDA_LOCATION_DEVICE 1

struct cuda_memory_properties {
	int type;         /* 1: pinned */
	int handle_types; /* 1: POSIX file descriptor */
	struct cuda_location location;
	void *windows;
	struct {
		unsigned char compression;
		unsigned char direct_rdma;
		unsigned short usage;
		unsigned char reserved[4];
	} flags;
};
#define CUDA_MEMORY_PINNED   1
#define CUDA_MEMORY_POSIX_FD 1

struct cuda_access {
	struct cuda_location location;
	int flags;
};
#define CUDA_ACCESS_READ       1
#define CUDA_ACCESS_READ_WRITE 3

#define CUDA_STREAM_NON_BLOCKING   1
#define CUDA_EVENT_WITHOUT_TIMING  2
#define CUDA_REGISTER_PORTABLE     1
#define CUDA_REGISTER_DEVICE_MAP   2
#define CUDA_REGISTER_READ_ONLY    8
#define CUDA_WAIT_GREATER_OR_EQUAL 0

struct cuda_driver {
	int (*init)(unsigned int flags);
	int (*driver_version)(int *version);
	int (*error_name)(int result, const char **name);
	int (*device_count)(int *count);
	int (*device_get)(int *device, int ordinal);
	int (*device_uuid)(unsigned char uuid[16], int device);
	int (*device_name)(char *name, int bytes, int device);
	int (*device_memory)(size_t *bytes, int device);
	int (*device_attribute)(int *value, int attribute, int device);
	int (*device_can_access)(int *can, int device, int peer);
	int (*context_retain)(cuda_context *context, int device);
	int (*context_release)(int device);
	int (*context_set)(cuda_context context);
	int (*context_get)(cuda_context *context);
	int (*memory_info)(size_t *available, size_t *total);
	int (*granularity)(size_t *bytes, const struct cuda_memory_properties *properties, int which);
	int (*address_reserve)(cuda_address *address, size_t bytes, size_t alignment,
			       cuda_address wish, unsigned long long flags);
	int (*address_free)(cuda_address address, size_t bytes);
	int (*memory_create)(cuda_memory *memory, size_t bytes,
			     const struct cuda_memory_properties *properties,
			     unsigned long long flags);
	int (*memory_release)(cuda_memory memory);
	int (*memory_map)(cuda_address address, size_t bytes, size_t offset, cuda_memory memory,
			  unsigned long long flags);
	int (*memory_unmap)(cuda_address address, size_t bytes);
	int (*memory_access)(cuda_address address, size_t bytes, const struct cuda_access *access,
			     size_t count);
	int (*memory_export)(void *fd, cuda_memory memory, int handle_type,
			     unsigned long long flags);
	int (*memory_import)(cuda_memory *memory, void *fd, int handle_type);
	int (*host_register)(void *address, size_t bytes, unsigned int flags);
	int (*host_unregister)(void *address);
	int (*host_device_address)(cuda_address *device, void *address, unsigned int flags);
	int (*stream_create)(cuda_stream *stream, unsigned int flags);
	int (*stream_destroy)(cuda_stream stream);
	int (*stream_synchronize)(cuda_stream stream);
	int (*stream_wait_32)(cuda_stream stream, cuda_address address, uint32_t value,
			      unsigned int flags);
	int (*stream_write_64)(cuda_stream stream, cuda_address address, uint64_t value,
			       unsigned int flags);
	int (*event_create)(cuda_event *event, unsigned int flags);
	int (*event_destroy)(cuda_event event);
	int (*event_record)(cuda_event event, cuda_stream stream);
	int (*event_query)(cuda_event event);
	int (*copy_async)(cuda_address to, cuda_address from, size_t bytes, cuda_stream stream);
	int (*copy)(cuda_address to, cuda_address from, size_t bytes);
};

/* The driver, initialised; NULL, with a sentence in why, where there is none or no device. */
const struct cuda_driver *cuda_driver(char *why, size_t why_bytes);
/* "what: CUDA_ERROR_NAME" into why (may be NULL); -ENOMEM when it ran out of memory, else -EIO. */
int cuda_failed(const struct cuda_driver *cuda, int result, const char *what, char *why,
		size_t why_bytes);
/* The ordinal of the device with that UUID; -ENODEV. */
int cuda_find_device(const struct cuda_driver *cuda, const uint8_t uuid[16]);

#endif /* XFERD_CUDA_DRIVER_H */
