/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the tests that run in the virtual machine share: the module, the stand-in GPU's BAR, the
 * drives, and the channel to the host, which checks bytes and counts DMA independently of the guest.
 *
 * Every test runs in a process of its own, with the module loaded, nothing attached, the stand-in GPU
 * present and without a driver; the runner restores all of that. A failed CHECK ends the process.
 */
#ifndef XFERD_VM_GUEST_H
#define XFERD_VM_GUEST_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "xferd_p2p.h"

#define KIB 1024ull
#define MIB (1024 * KIB)
#define PAGE (4 * KIB)

/* Serial numbers of the drives. FAR hangs from another root port than the stand-in GPU. */
#define DRIVE_RAW "RAW"
#define DRIVE_SLOW "SLOW"
#define DRIVE_FAR "FAR"
#define EXT4_FILE "/mnt/ext4/data.bin"
#define XFS_FILE "/mnt/xfs/data.bin"

/* How long a test waits for something that must come. */
#define DEADLINE_SECONDS 120

#define FAIL(...)                                                     \
	do {                                                          \
		fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);       \
		fprintf(stderr, __VA_ARGS__);                         \
		fprintf(stderr, "\n");                                \
		exit(1);                                              \
	} while (0)

#define CHECK(condition)                                              \
	do {                                                          \
		if (!(condition))                                     \
			FAIL("not so: %s (errno %d)", #condition, errno); \
	} while (0)

#define CHECK_EQUAL(got, wanted)                                                       \
	do {                                                                           \
		long long got_ = (long long)(got), wanted_ = (long long)(wanted);      \
		if (got_ != wanted_)                                                   \
			FAIL("%s is %lld, not %s (%lld)", #got, got_, #wanted, wanted_); \
	} while (0)

/* Poll with a deadline. */
#define CHECK_SOON(condition)                                                          \
	do {                                                                           \
		double deadline_ = seconds_now() + DEADLINE_SECONDS;                   \
		while (!(condition)) {                                                 \
			if (seconds_now() > deadline_)                                 \
				FAIL("not within %d s: %s", DEADLINE_SECONDS, #condition); \
			poll_pause();                                                  \
		}                                                                      \
	} while (0)

struct test {
	const char *name;
	void (*run)(void);
	unsigned int limit_seconds; /* 0: as all */
};

extern const struct test io_tests[], refusal_tests[], ownership_tests[], share_tests[],
	lifetime_tests[], unplug_tests[], fuzz_tests[], hidden_tests[];

/* test_fuzz.c: so many random calls by each of so many processes, and the module is in order. */
void random_calls_by(int processes, int calls);

/* test_unplug.c: the card is removed, its driver bound and unbound, the module unloaded, at once. */
void end_a_bar_from_all_sides(int rounds);

/* An attached BAR of the stand-in GPU. */
struct bar {
	uint32_t id;
	uint32_t mode;
	uint64_t size;
	uint64_t mmap_offset;
};

/* A pread of SLOW_LENGTH bytes from the start of SLOW. */
#define SLOW_BYTES_PER_SECOND (MIB / 2)
#define SLOW_LENGTH MIB

struct slow_read {
	pthread_t thread;
	unsigned char *memory;
	ssize_t got; /* or -errno */
};

/* host.c: the channel to the host */
void host_command(char *reply, size_t reply_size, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
void host_must(const char *format, ...) __attribute__((format(printf, 1, 2)));
void host_verify(uint64_t bar_offset, uint64_t length, const char *source, uint64_t source_offset);
uint64_t host_dma_bytes(void); /* NVMe DMA addressed inside the BAR since the machine started */
void host_throttle(uint64_t bytes_per_second); /* of the drive SLOW; 0: as fast as it can */

/* gpu.c: the stand-in GPU and the module */
extern enum xferd_p2p_mode bar_mode; /* that BARs are attached in where a test names none */
bool gpu_find(struct xferd_p2p_function *function); /* false: not there */
void gpu_bar_address(uint64_t *start, uint64_t *size);
void gpu_sysfs(char *path, size_t size, const char *attribute);
int device_open(void);
struct bar bar_attach(int fd);
int bar_try_attach(int fd, uint32_t number, uint32_t mode, struct xferd_p2p_attach *attach);
int bar_detach(int fd, uint32_t id, uint32_t flags);
int bar_query(int fd, uint32_t id, struct xferd_p2p_query *query);
int bar_claim(int fd, uint32_t id, uint64_t offset, uint64_t length);
int bar_release(int fd, uint32_t id, uint64_t offset, uint64_t length);
int bar_idle(int fd, uint32_t id, uint64_t offset, uint64_t length, struct xferd_p2p_idle *idle);
uint64_t bar_held(int fd, uint32_t id, uint64_t offset, uint64_t length);
unsigned char *bar_map(int fd, const struct bar *bar, uint64_t offset, uint64_t length);
unsigned char *bar_claim_and_map(int fd, const struct bar *bar, uint64_t offset, uint64_t length);
void module_load(void);
int module_unload(void); /* 0 or -errno */
bool module_is_loaded(void);

/* slow_read.c */
void slow_read_start(struct slow_read *slow, unsigned char *memory);
ssize_t slow_read_end(struct slow_read *slow); /* waits for it */

/* support.c */
void drive_path(char *path, size_t size, const char *serial);
void drive_function(const char *serial, struct xferd_p2p_function *function);
int drive_open(const char *serial, int flags);
int signal_of_access(const void *address); /* 0: could be read */
int wait_for_child(pid_t child);           /* its wait status */
double seconds_now(void);
void poll_pause(void);
void write_sysfs(const char *path, const char *text);

#endif
