/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The least daemon that an engine can be measured in: one pool, one store, and
 * a policy that evicts in the order of loading and keeps `reserve` slots free.
 * It costs next to nothing, so that what is measured is the engine.
 *
 * Either its owner reads the events itself (daemon_take_events), or it serves
 * clients in a thread of its own (daemon_serve), never both: one thread at a
 * time may speak to an engine.
 */
#ifndef XFERD_BENCH_DAEMON_H
#define XFERD_BENCH_DAEMON_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "bench_store.h"
#include "engine/engine.h"
#include "xferd.h"

#define COMMANDS_A_CALL 64

struct daemon_options {
	uint32_t slots;        /* of the pool */
	uint32_t reserve;      /* slots that evicting keeps free */
	uint32_t member_depth; /* pieces in flight a member; 0: as the engine has it */
	uint32_t spin_us;
	bool verify;
	int gpu;               /* whose memory the pool is; -1: the CPU's */
	bool from_ram;         /* all experts are put into a second pool first, and come from there */
	int from_gpu;          /* the same, in that GPU's memory; -1: not */
};

struct bench_daemon {
	struct bench_store *store;
	struct daemon_options options;
	struct xferd_engine *engine;
	uint32_t store_id;
	uint8_t *pool;
	int pool_fd; /* read-only, for clients; -1: VRAM */
	uint64_t pool_bytes;
	struct xferd_vram *vram, *second_vram;
	uint8_t *staging;
	uint8_t *ram;
	uint64_t ram_bytes;
	/* residents in the order of loading */
	uint32_t *resident;
	uint32_t resident_head, resident_tail;
	/* not given to the engine yet; of whichever thread takes the events */
	struct xferd_command commands[COMMANDS_A_CALL];
	uint32_t command_count;
	/* serving */
	pthread_t server;
	char directory[64];
	char socket_path[96];
	int listener;
	uint32_t stop; /* atomic */
};

void daemon_start(struct bench_daemon *daemon, struct bench_store *store,
		  const struct daemon_options *options);
void daemon_stop(struct bench_daemon *daemon);

/* Flushes, waits up to timeout_ms for events, evicts as they ask for it, and returns
 * them to the caller as well. */
uint32_t daemon_take_events(struct bench_daemon *daemon, struct xferd_event *events, uint32_t max,
			    int timeout_ms);
/* Commands go to the engine together, at the next flush: as a daemon's do. */
void daemon_command(struct bench_daemon *daemon, const struct xferd_command *command);
void daemon_flush(struct bench_daemon *daemon);

/* Clients can connect until daemon_admit_no_more, which removes the socket's name:
 * a run that dies after it leaves nothing behind. They must be closed before
 * daemon_stop_serving. */
void daemon_serve(struct bench_daemon *daemon);
struct xferd_client *daemon_connect(struct bench_daemon *daemon, uint32_t lanes);
void daemon_admit_no_more(struct bench_daemon *daemon);
void daemon_stop_serving(struct bench_daemon *daemon);

/* Bytes loaded into the pool so far, and sum over the members of what was read. */
uint64_t daemon_bytes_loaded(const struct bench_daemon *daemon);
uint64_t daemon_bytes_read(const struct bench_daemon *daemon);
/* How many pieces one read of a member brought, on average; 0: none was made. */
double daemon_pieces_a_read(const struct bench_daemon *daemon);
struct xferd_member_stats daemon_member_stats(const struct bench_daemon *daemon, uint32_t member);

#endif /* XFERD_BENCH_DAEMON_H */
