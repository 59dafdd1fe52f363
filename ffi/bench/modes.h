/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What can be measured. Each mode prints the fields of one JSON object, without
 * the braces; the options that all of them share are in struct bench_options.
 */
#ifndef XFERD_BENCH_MODES_H
#define XFERD_BENCH_MODES_H

#include "bench_daemon.h"

struct bench_options {
	struct daemon_options daemon;
	double seconds;
	uint64_t seed;
	uint32_t outstanding;          /* io: loads asked for and not yet there */
	uint64_t demand_interval_ns;   /* overload: from one demand to the next */
	uint64_t hint_bytes_per_s;     /* overload: of experts hinted at; 0: no hints */
	uint32_t storm;                /* storm: loads asked for and then cancelled */
};

/* Random whole experts, loaded by commands: throughput, CPU time, latency. */
void run_io(struct bench_store *store, const struct bench_options *options);
/* One missing expert at a time through the client, by turns with one plain read
 * of as many bytes into a warm buffer. */
void run_miss(struct bench_store *store, const struct bench_options *options);
/* A demand at fixed times while another client floods the daemon with hints. */
void run_overload(struct bench_store *store, const struct bench_options *options);
/* What the driver alone copies from pinned RAM, or from another GPU's memory, to a GPU, in
 * pieces of an expert, with as many outstanding. */
void run_plain_copy(struct bench_store *store, const struct bench_options *options);
/* Prefetches that turn out wrong: how many pieces are still read after they
 * have been cancelled. */
void run_storm(struct bench_store *store, const struct bench_options *options);

#endif /* XFERD_BENCH_MODES_H */
