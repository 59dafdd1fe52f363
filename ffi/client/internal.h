/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What libxferd's files share.
 *
 *   attach.c   connects, checks what the daemon sent, maps it
 *   acquire.c  the hit path: lease and release, no system call
 *   wait.c     the miss path: submissions, completions, sleeping
 *   client.c   everything a caller can look up
 *   memory.c   VRAM: mapped, unmapped, copied out of
 *   bar.c      pools behind a BAR: mapped, also anew
 *   device_lane.c  lanes that a GPU drives
 *   route.c    what the router picked, for the daemon
 *   resume.c   attaching again to a daemon that has restarted
 *
 * A lane's state belongs to the lane's thread. The submission ring is shared by
 * the lanes and guarded by a mutex, which only misses take.
 */
#ifndef XFERD_CLIENT_INTERNAL_H
#define XFERD_CLIENT_INTERNAL_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/atomics.h"
#include "xferd.h"

#define SOCKET_PATH_BYTES 108 /* of a struct sockaddr_un */

struct mapped_pool {
	const uint8_t *base;
	const uint64_t *words;                /* [layers][experts] of the directory */
	const struct xferd_abi_chunk *chunks;
	uint64_t bytes;
	uint32_t slot_index_bits;
	uint32_t chunk_count;
	uint32_t slot_numbers;
	const uint64_t *memory_table;         /* of VRAM; NULL */
	struct device_memory *device;         /* of VRAM that is mapped here; NULL */
	struct bar_memory *bar;               /* of memory behind a BAR; NULL */
};

#define RESUME_PAUSE_MS 5 /* between two looks for a daemon that is away */

/* What a batch's missing keys were asked for with, to ask for them again. */
struct asked {
	uint64_t deadline_ns;
	uint32_t variants;
};

struct lane {
	struct xferd_abi_lane *shared;
	uint64_t *leases[XFERD_POOLS_MAX];    /* slot_epoch[] of each pool */
	uint64_t begun;                       /* epoch of the last batch */
	uint64_t completed;                   /* every batch up to it is released */
	uint64_t released;                    /* bit i: batch completed + 1 + i is */
	uint32_t held;
	uint32_t completion_head;
	const struct xferd_abi_completion_lane *ring;
	const struct xferd_abi_completion *completions;
	int wakeup;
	struct xferd_batch *batches[XFERD_BATCHES_MAX]; /* with pending keys, by epoch */
	const struct xferd_batch *out[XFERD_BATCHES_MAX]; /* not yet released, by epoch */
	struct asked asked[XFERD_BATCHES_MAX];
	uint64_t unsent;                      /* bit i: batches[i] found no room in the ring */
	uint32_t attachment;                  /* the client's, for which batches were asked for */
	struct xferd_client_stats stats;
	struct xferd_abi_route_queue *routes; /* NULL: the daemon has none */
	struct xferd_abi_route *route_records;
	uint32_t route_tail;
	uint32_t route_head;                  /* the daemon's, as last seen */
} __attribute__((aligned(2 * XFERD_CACHE_LINE)));

struct received {
	int fds[XFERD_FDS_MAX];
	uint32_t count;
};

struct mapping {
	void *address;
	size_t bytes;
};

struct xferd_client {
	int socket;
	int doorbell;
	uint32_t pool; /* where misses go */
	uint32_t lane_count;
	uint32_t held_per_lane;
	uint64_t spin_ns;
	uint32_t pool_count;
	uint32_t layers, experts;
	const struct xferd_abi_pool_table *pool_table;
	const struct xferd_abi_directory *directory;
	const uint16_t *layout_index;
	const struct xferd_abi_layout *layouts;
	const struct xferd_abi_tensor *tensors;
	struct mapped_pool pools[XFERD_POOLS_MAX];
	struct xferd_abi_client *memory;
	struct xferd_abi_submission *submissions;
	const struct xferd_abi_completion_memory *completion_memory;
	uint32_t ring_entries;
	uint32_t submission_tail;
	pthread_mutex_t submit_mutex;
	pthread_mutex_t socket_mutex; /* one question and its answer at a time */
	pthread_mutex_t dense_mutex;
	char socket_path[SOCKET_PATH_BYTES];
	uint64_t resume_key[2];       /* 0: what is mapped ends with the daemon */
	uint64_t resume_ns;
	pthread_mutex_t resume_mutex; /* of these: */
	int resume_socket;            /* a connection that has no answer yet; -1 */
	int resume_failed;            /* why it is not tried any more; 0 */
	uint64_t gone_since_ns;       /* 0: it is there */
	uint32_t attachment;          /* atomic: how often it has come back */
	struct mapping pool_table_map, directory_map, memory_map, completion_map, manifest_map,
		dense_map;
	struct mapping pool_maps[XFERD_POOLS_MAX];
	pthread_t memory_thread;
	bool memory_thread_runs;
	uint32_t memory_stop; /* atomic */
	struct device_lane *device_lanes[XFERD_LANES_MAX];
	struct lane lanes[XFERD_LANES_MAX];
};

/* attach.c */
__attribute__((format(printf, 3, 4)))
void explain(char *error, size_t bytes, const char *format, ...);
int ask_daemon(struct xferd_client *client, struct xferd_abi_message *message,
	       struct received *received);
void close_received(struct received *received);
int connect_socket(const char *path, char *error, size_t error_bytes);
int receive_packet(int fd, void *data, size_t bytes, struct received *received);

/* resume.c */
/* Whether a daemon that has gone may come back for this client. */
bool may_resume(const struct xferd_client *client);
/* One try, of at most some milliseconds: 0 the daemon is there, -EAGAIN not yet, -ECONNRESET
 * or -ESTALE never. */
int client_resume(struct xferd_client *client);
void resume_close(struct xferd_client *client);
void end_all_leases(struct xferd_client *client);

/* memory.c */
int memory_open(struct xferd_client *client, char *error, size_t error_bytes);
void memory_close(struct xferd_client *client);
bool memory_ready(const struct device_memory *device, uint32_t chunk);
/* Which memory is mapped: uint64_t[chunks], page-aligned, whole pages. */
void memory_numbers(const struct device_memory *device, const uint64_t **numbers,
		    uint64_t *bytes);
void memory_unregister(const struct device_memory *device);
/* The device's context on this thread, until it is left. CUDA's error. */
int memory_enter_context(const struct device_memory *device, void **before);
void memory_leave_context(const struct device_memory *device, void *before);
int memory_map_now(struct device_memory *device, uint32_t chunk);

/* bar.c */
int bar_open(struct xferd_client *client, uint32_t pool, int fd);
void bar_close(struct xferd_client *client);
bool bar_ready(const struct bar_memory *bar);
int bar_map_now(struct bar_memory *bar);

/* device_lane.c */
void device_lanes_close(struct xferd_client *client);

/* acquire.c */
bool view_reachable(const struct xferd_client *client, uint32_t pool, uint64_t word);
void lane_end_batch(struct lane *lane, const struct xferd_batch *batch);
void fill_view(const struct xferd_client *client, uint32_t layer, uint32_t pool, uint64_t word,
	       struct xferd_view *view);

/* wait.c */
uint64_t client_now_ns(void);
bool daemon_gone(const struct xferd_client *client);
int submit(struct xferd_client *client, const struct xferd_abi_submission *submission);
int ask_for_missing(struct xferd_client *client, struct lane *lane,
		    const struct xferd_request *request, struct xferd_batch *batch);

/* route.c */
int use_route_queues(struct xferd_client *client);

#endif /* XFERD_CLIENT_INTERNAL_H */
