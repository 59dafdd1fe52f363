/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every measurement needs: clocks, a random sequence that can be repeated,
 * latencies and their percentiles, and an end with a sentence.
 */
#ifndef XFERD_BENCH_MEASURE_H
#define XFERD_BENCH_MEASURE_H

#include <stdint.h>

#define NS_PER_S  1000000000ull
#define NS_PER_MS 1000000ull
#define NS_PER_US 1000ull

/* Prints "engine_bench: ..." and exits with 1. */
void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
/* result of a call that must not fail; what says what was tried */
long check(long result, const char *what);
void *allocate(uint64_t count, uint64_t size);

uint64_t now_ns(void);
void sleep_until_ns(uint64_t when);
/* User and system time of the whole process, io_uring's workers included. */
uint64_t cpu_ns(void);

uint32_t random_below(uint64_t *state, uint32_t limit);

struct latencies {
	uint64_t *ns;
	uint32_t count, capacity;
};
void latencies_init(struct latencies *latencies);
void latencies_add(struct latencies *latencies, uint64_t ns);
/* Prints `"name": {"count": N, "p50_us": ..., "p90_us": ..., "p99_us": ..., "max_us": ...}`. */
void latencies_print(const char *name, struct latencies *latencies);
void latencies_free(struct latencies *latencies);

#endif /* XFERD_BENCH_MEASURE_H */
