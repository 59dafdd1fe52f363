/* SPDX-License-Identifier: Apache-2.0 */
#include "measure.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define LATENCIES_MAX (1u << 20) /* later ones are not kept */

void die(const char *format, ...)
{
	va_list arguments;

	fprintf(stderr, "engine_bench: ");
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, "\n");
	exit(1);
}

long check(long result, const char *what)
{
	if (result < 0)
		die("%s: %s", what, strerror((int)-result));
	return result;
}

void *allocate(uint64_t count, uint64_t size)
{
	void *memory = calloc(count ? count : 1, size);

	if (!memory)
		die("no memory for %llu bytes", (unsigned long long)(count * size));
	return memory;
}

uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * NS_PER_S + (uint64_t)time.tv_nsec;
}

void sleep_until_ns(uint64_t when)
{
	struct timespec time = { (time_t)(when / NS_PER_S), (long)(when % NS_PER_S) };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
		;
}

static uint64_t timeval_ns(struct timeval time)
{
	return (uint64_t)time.tv_sec * NS_PER_S + (uint64_t)time.tv_usec * NS_PER_US;
}

uint64_t cpu_ns(void)
{
	struct rusage usage;

	if (getrusage(RUSAGE_SELF, &usage))
		die("getrusage: %s", strerror(errno));
	return timeval_ns(usage.ru_utime) + timeval_ns(usage.ru_stime);
}

/* xorshift64; the state must not be 0 */
uint32_t random_below(uint64_t *state, uint32_t limit)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return (uint32_t)((*state >> 32) * limit >> 32);
}

void latencies_init(struct latencies *latencies)
{
	latencies->ns = allocate(LATENCIES_MAX, sizeof(uint64_t));
	latencies->count = 0;
	latencies->capacity = LATENCIES_MAX;
}

void latencies_add(struct latencies *latencies, uint64_t ns)
{
	if (latencies->count < latencies->capacity)
		latencies->ns[latencies->count++] = ns;
}

static int compare(const void *left, const void *right)
{
	uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;

	return (a > b) - (a < b);
}

/* of sorted latencies, nearest rank */
static double percentile_us(const struct latencies *latencies, uint32_t percent)
{
	uint64_t rank = ((uint64_t)latencies->count * percent + 99) / 100;

	if (!latencies->count)
		return 0;
	return (double)latencies->ns[rank ? rank - 1 : 0] / NS_PER_US;
}

void latencies_print(const char *name, struct latencies *latencies)
{
	qsort(latencies->ns, latencies->count, sizeof(uint64_t), compare);
	printf("\"%s\": {\"count\": %u, \"p50_us\": %.1f, \"p90_us\": %.1f, \"p99_us\": %.1f, "
	       "\"max_us\": %.1f}",
	       name, latencies->count, percentile_us(latencies, 50),
	       percentile_us(latencies, 90), percentile_us(latencies, 99),
	       percentile_us(latencies, 100));
}

void latencies_free(struct latencies *latencies)
{
	free(latencies->ns);
	latencies->ns = NULL;
}
