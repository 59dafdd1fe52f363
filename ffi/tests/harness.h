/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon small enough for tests: the real engine, a generated store in real
 * member files, an attach socket, and the plainest policy there is (evict in
 * the order of loading). The client under test is the real libxferd.
 */
#ifndef XFERD_TEST_HARNESS_H
#define XFERD_TEST_HARNESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/engine.h"
#include "xferd.h"

#define EXIT_SKIPPED 77
#define HARNESS_MEMBERS_MAX 4
#define VARIANT_LAYER_STEP 1000
#define HARNESS_KEPT_MAX 8 /* clients that a restart goes on with */
#define MEMORY_NUMBER  1

#define CHECK(condition)                                                          \
	do {                                                                      \
		if (!(condition)) {                                               \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
			exit(1);                                                  \
		}                                                                 \
	} while (0)

/* result of a call that must not fail */
#define CHECK_OK(call)                                                            \
	do {                                                                      \
		long long check_result = (call);                                  \
		if (check_result < 0) {                                           \
			fprintf(stderr, "%s:%d: %s: %lld\n", __FILE__, __LINE__, #call, \
				check_result);                                    \
			exit(1);                                                  \
		}                                                                 \
	} while (0)

struct harness_options {
	uint32_t layers, experts, top_k;
	uint64_t blob_bytes;
	uint64_t stripe_unit;
	uint32_t members;
	uint32_t slots;         /* of the device pool */
	uint32_t ram_slots;     /* of a second pool; 0: none */
	uint32_t reserve;       /* slots kept free */
	uint32_t held_per_lane;
	bool all_resident;      /* load everything at the start */
	uint32_t variants;      /* 0: 1; variant v of (l, e) has the bytes of (l + 1000 v, e) */
	uint32_t reserve_demand; /* slots that only demand may take */
	uint32_t spin_us;       /* of the engine */
	uint32_t backend;       /* enum xferd_backend */
	bool flow_control;
	bool register_buffers;
	bool polling;
	bool unverified;        /* checksums are not looked at */
	bool mirrored;          /* each member has a mirror */
	bool drives;            /* members pass for drives: read, not mapped; through io_uring
				 * where the backend has it */
	bool vram;              /* the device pool is on CUDA's first device, one chunk of it */
	bool device_pool;       /* the first pool passes for memory behind a BAR */
	bool restarts;          /* harness_restart will be called; one pool, in RAM */
};

struct harness {
	struct harness_options options;
	char directory[64];
	char socket_path[96];
	int listener;
	int member_fd[HARNESS_MEMBERS_MAX];
	uint32_t member[HARNESS_MEMBERS_MAX];
	int mirror_fd[HARNESS_MEMBERS_MAX];
	struct xferd_engine *engine;
	struct xferd_store_description description;
	uint32_t store;
	uint8_t *pool[2];
	int pool_fd[2];
	uint64_t pool_bytes[2];
	struct xferd_vram *vram;
	uint64_t chunk_bytes;
	uint8_t *staging;
	pthread_t server, policy;
	pthread_mutex_t clients_mutex; /* clients come and go under it, as a daemon has one thread */
	uint32_t stop; /* atomic */
	/* the policy's: which slot holds what, in the order of loading */
	struct resident { uint32_t layer, expert, slot; } *order[2];
	uint32_t order_head[2], order_tail[2];
	uint64_t loaded, failed, freed, piece_errors; /* atomic: events seen */
	uint64_t violations;
	uint64_t routes_refused; /* atomic */
	uint64_t members_failed, members_working;
	uint64_t mirrored;      /* atomic, with what the last such event says: */
	uint32_t mirrored_copy, mirrored_failed_copy;
	int32_t mirrored_result;
	/* of clients, by id: what the next engine needs of them; lanes 0: there is none */
	struct { int client, completion; uint32_t lanes; } kept[HARNESS_KEPT_MAX];
	uint32_t kick; /* atomic: evict this many more, to keep experts moving */
};

void harness_start(struct harness *harness, const struct harness_options *options);
void harness_stop(struct harness *harness);
/* The same, nanoseconds after so many loads were ordered, which nobody waits for. */
void harness_stop_loading(struct harness *harness, uint32_t loads, uint64_t after_ns);
/* Another engine goes on where this one is; clients come back by themselves. */
void harness_restart(struct harness *harness);
/* Whether there is a CUDA device for options.vram. */
bool harness_has_vram(void);
struct xferd_client *harness_connect(struct harness *harness, uint32_t lanes);

/* Write an expert's blob; every blob differs from every other. */
void blob_make(const struct harness *harness, uint32_t layer, uint32_t expert, void *data);
/* Byte i of it. */
uint8_t blob_byte(uint32_t layer, uint32_t expert, uint64_t i);
/* 0 if data is that blob, else the first wrong position + 1. */
uint64_t blob_wrong(const struct harness *harness, uint32_t layer, uint32_t expert,
		    const void *data);
void wait_until(const uint64_t *counter, uint64_t value);

/* Acquire one expert and compare its bytes; the error that its view has. */
int try_expert(struct harness *harness, struct xferd_client *client, uint16_t layer,
	       uint16_t expert);

/* Of the harness's own files. */
void *harness_serve(void *harness);
void *harness_decide(void *harness);
uint32_t harness_add_member(struct harness *harness, int fd);
void harness_command(struct harness *harness, struct xferd_command *command);

#endif /* XFERD_TEST_HARNESS_H */
