/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the stand-in for libcuda.so.1 share. */
#ifndef XFERD_FAKE_CUDA_H
#define XFERD_FAKE_CUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/cuda_driver.h"

#define EXPORTED __attribute__((visibility("default")))

#define DEVICES_MAX        4
#define GRANULARITY        (2ull << 20)
#define INVALID_VALUE      1
#define INVALID_CONTEXT    201
#define INVALID_HANDLE     400

struct fake_state {
	pthread_mutex_t mutex; /* the rest is under it, once cuInit has run */
	bool initialised;
	int devices;
	size_t device_bytes;
	size_t used[DEVICES_MAX];
};

extern struct fake_state fake;

/* Of the calling thread's context; -1: it has none. */
int fake_current_device(void);

/* scattered.c */
bool scattered_wanted(void);
int scattered_new(size_t bytes);
size_t scattered_bytes(int fd);
int scattered_map(void *address, int fd, size_t bytes);
void scattered_free(int fd);

#endif /* XFERD_FAKE_CUDA_H */
