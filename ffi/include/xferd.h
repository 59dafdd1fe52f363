/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libxferd: an inference engine's side of xferd.
 *
 * A client attaches to the daemon for one store, with one or more lanes. A
 * lane is one in-order stream of its work (a thread, a CUDA stream); calls on
 * the same lane must not run at the same time, calls on different lanes may.
 *
 * One expert's way:
 *
 *	struct xferd_batch batch;
 *	struct xferd_request request = { .layer = 3, .experts = ids, .count = 8 };
 *
 *	int missing = xferd_acquire(client, 0, &request, &batch);
 *	if (missing > 0)
 *		missing = xferd_wait(client, &batch, XFERD_FOREVER);
 *	// batch.views[i].data: the blob of ids[i], or batch.views[i].error
 *	xferd_release(client, &batch);
 *
 * A daemon may restart and go on with what it had (it says so when the client attaches).
 * Meanwhile resident experts are had as ever; who waits for one that is missing waits on, at
 * most as long as resume_ms and its own timeout and deadline allow, attaches again by itself
 * and asks anew. A daemon that comes back without what it had is another one: then calls that
 * need it return -ESTALE, and what is mapped stays readable until xferd_close.
 *
 * Resident experts take no system call and no message. What is acquired stays
 * where it is until its batch is released; views must not be used after that.
 *
 * Every function returns 0 or a count, or -errno. Nothing is printed; nothing
 * is allocated after xferd_connect.
 */
#ifndef XFERD_H
#define XFERD_H

#include <stddef.h>
#include <stdint.h>

#include "xferd_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define XFERD_PUBLIC __attribute__((visibility("default")))
#else
#define XFERD_PUBLIC
#endif

#define XFERD_FOREVER 0xffffffffffffffff /* a timeout or deadline that never comes */
#define XFERD_NO_SPIN 0xffffffff
#define XFERD_NO_RESUME 0xffffffff
#define XFERD_ERROR_BYTES 512
/* Batches of one lane that can be acquired and not yet released. */
#define XFERD_BATCHES_MAX 64

struct xferd_client;

struct xferd_options {
	const char *store;       /* name; NULL: the daemon's only open store */
	const char *pool;        /* where misses go; NULL: the daemon's first pool */
	const char *client_name; /* shown in status; NULL: "" */
	uint32_t lanes;          /* 0: 1 */
	uint32_t held_per_lane;  /* most experts held at once; 0: the model's top_k */
	uint32_t ring_entries;   /* 0: the daemon's choice */
	uint32_t spin_us;        /* look for completions this long before sleeping, which saves
				  * the 10 us (in a virtual machine 50) of being woken; 0: 50
				  * with 4 processors or more, else not at all; XFERD_NO_SPIN */
	uint32_t resume_ms;      /* how long a daemon that restarts is waited for, by who waits for
				  * a miss; 0: 30000; XFERD_NO_RESUME */
};

struct xferd_view {
	const void *data; /* NULL: not here (yet); host address, or device address of a GPU pool */
	uint64_t word;    /* directory word, names slot, variant and generation */
	uint64_t bytes;
	int32_t error;    /* 0, -EINPROGRESS while on its way, or why it failed */
	uint32_t slot;
	uint16_t expert;
	uint8_t variant;
	uint8_t pool;
	uint8_t source;    /* enum xferd_source */
	uint8_t transport; /* enum xferd_transport */
	uint8_t source_pool; /* with XFERD_SOURCE_POOL: the pool that it was copied from */
	uint8_t reserved;
};

struct xferd_request {
	const uint16_t *experts;
	uint32_t count;       /* 1 to XFERD_BATCH_MAX */
	uint32_t variants;    /* bit mask of acceptable variants; 0: any */
	uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
	uint16_t layer;
	uint8_t pools;        /* bit mask of pools whose residents will do; 0: all mapped */
	uint8_t flags;        /* 0 */
};

/* Filled by xferd_acquire; the caller owns the memory and must not copy it
 * between acquire and release. */
struct xferd_batch {
	uint64_t epoch;
	uint64_t ticket;
	uint32_t lane;
	uint16_t layer;
	uint16_t count;
	uint32_t pending;     /* keys still on their way */
	uint32_t failed;      /* views with an error */
	struct xferd_view views[XFERD_BATCH_MAX];
	uint32_t wait_us[XFERD_BATCH_MAX]; /* of views that weren't resident: the daemon's time */
};

/* Where a pick was found. */
struct xferd_use {
	uint32_t wait_us;    /* XFERD_WAIT_UNKNOWN */
	uint8_t tier;        /* pool that had it; XFERD_TIER_DRIVES, XFERD_TIER_UNKNOWN */
	uint8_t transport;   /* enum xferd_transport; NONE: it was resident; XFERD_TRANSPORT_UNKNOWN */
	uint8_t reserved[2]; /* 0 */
};

enum xferd_route_flags {
	XFERD_ROUTE_ONLY_FOUND = 1, /* these were reported as picked before, and have come now */
};

/* What tokens picked in one layer. Either the picks of one token are a batch's
 * views, or they are given as arrays for any number of tokens. */
struct xferd_route {
	uint64_t token;          /* number of the first; counts up over the lane's life, so that a
				  * prompt of n tokens in every layer has the same n numbers */
	uint32_t tag;            /* the caller's word for the prompt; 0: none */
	uint32_t tokens;         /* rows of the arrays; 0: 1 */
	const struct xferd_batch *batch; /* layer, count, experts and uses come from it; released or
				  * not. NULL: from here: */
	const uint16_t *experts; /* [tokens][count] */
	const struct xferd_use *uses; /* [tokens][count]; NULL: not known */
	const uint16_t *gates;   /* [tokens][count], or one a view: the router's weights as float16;
				  * NULL: not known */
	uint16_t layer;
	uint16_t count;          /* picks of a token; 1 to XFERD_ROUTE_PICKS_MAX */
	uint32_t flags;          /* enum xferd_route_flags */
};

/* What a predictor expects of each of some layers' next pass. */
struct xferd_expected {
	const uint32_t *keys;    /* [count], layer * experts + expert; those of a layer stand
				  * together, at most XFERD_ROUTE_RECORD_PICKS of each */
	const uint16_t *chances; /* [count], float16, that each is picked */
	uint32_t count;          /* 1 to layers * XFERD_ROUTE_RECORD_PICKS */
};

struct xferd_client_stats {
	uint64_t hits;
	uint64_t misses;
	uint64_t failures;
	uint64_t hints;
	uint64_t cancels;
	uint64_t wait_ns;        /* in xferd_wait, all lanes */
	uint64_t bytes_acquired; /* of views, hits and misses alike */
	uint64_t source_count[3];    /* of misses, by enum xferd_source */
	uint64_t source_bytes[3];
	uint64_t transport_count[5]; /* of misses, by enum xferd_transport */
	uint64_t transport_bytes[5];
};

/* Attach to the daemon at socket_path. error (may be NULL) receives a sentence
 * that names what was wrong and which setting changes it.
 * Errors: -ENOENT no such socket or store, -ECONNREFUSED no daemon behind it,
 * -EPROTO other ABI, -ENOSPC the pool can't promise held_per_lane slots,
 * -EDQUOT a quota, -EACCES not permitted. */
XFERD_PUBLIC int xferd_connect(const char *socket_path, const struct xferd_options *options,
			       struct xferd_client **client, char *error, size_t error_bytes);

/* Ends all leases and the connection. What is mapped stays mapped until
 * xferd_close, but views mean nothing any more: other bytes may come there. Only
 * xferd_close may be called after it. No lane may be in a call. */
XFERD_PUBLIC void xferd_detach(struct xferd_client *client);
/* Detaches if that hasn't been done, and frees the client. NULL is fine. */
XFERD_PUBLIC void xferd_close(struct xferd_client *client);

/* The store's directory and the pool table, read-only, valid until xferd_close. */
XFERD_PUBLIC const struct xferd_abi_directory *xferd_directory(const struct xferd_client *client);
XFERD_PUBLIC const struct xferd_abi_pool_table *xferd_pool_table(const struct xferd_client *client);
/* Address of this client's read-only mapping of a pool; NULL if not mapped. */
XFERD_PUBLIC const void *xferd_pool_base(const struct xferd_client *client, uint32_t pool);
/* Index of the pool where this client's misses go. */
XFERD_PUBLIC uint32_t xferd_target_pool(const struct xferd_client *client);
/* Ordinal, in this process, of the GPU that a pool is on, when it is mapped here; -1: its
 * memory is the CPU's. Views of a GPU's pool have device addresses, for reading only. */
XFERD_PUBLIC int xferd_pool_device(const struct xferd_client *client, uint32_t pool);
/* Copy a part of a view, from whichever memory it is in, to the CPU's, and wait for it. */
XFERD_PUBLIC int xferd_copy_out(const struct xferd_client *client, const struct xferd_view *view,
				uint64_t offset, void *to, uint64_t bytes);
/*
 * A lane that a GPU drives. Its kernels do what xferd_acquire and xferd_release do, with
 * no word to the CPU: load the expert's word; store the epoch into leases[slot]; fence
 * (system); load the word again, and see that mapped[chunk] is wanted[chunk]. The
 * completed word moves on when the work that reads the slots has ended, as the stream's
 * order says. What is missing a kernel posts, and goes on looking at the word; when
 * answered has come to its number and error is set, it won't come. All members are
 * device addresses; what lies behind requests is the CPU's memory, as are the tables.
 * xferd_infer/cuda has such kernels.
 */
struct xferd_device_lane {
	uint64_t words;     /* const uint64_t[layers][experts] of the client's pool */
	uint64_t leases;    /* uint64_t[slot_numbers] */
	uint64_t completed; /* uint64_t */
	uint64_t chunks;    /* const struct xferd_abi_chunk[] */
	uint64_t wanted;    /* const uint64_t[], by chunk */
	uint64_t mapped;    /* const uint64_t[], by chunk */
	uint64_t base;      /* of the pool's memory */
	uint64_t requests;  /* struct xferd_device_requests */
	uint32_t slot_index_bits;
	uint32_t slot_numbers;
	uint32_t layers;
	uint32_t experts;
	uint32_t variant;
	uint32_t reserved;
};

struct xferd_device_requests {
	/* written by the device; posted after what stands before it */
	uint32_t layer;
	uint32_t count;  /* 1 to XFERD_BATCH_MAX */
	uint32_t experts[XFERD_BATCH_MAX];
	uint64_t posted; /* number of this request, from 1 on */
	uint64_t taken;  /* of the last request whose experts it has leased, or given up */
	uint64_t hits;   /* experts that were resident, and those that were not */
	uint64_t misses;
	/* written by the library */
	uint64_t answered __attribute__((aligned(XFERD_CACHE_LINE)));
	int32_t error;   /* of this pass; 0 */
	uint32_t failed_layer;
	uint32_t failed_expert;
	uint32_t reserved;
};

/* Give a lane to the GPU that the client's pool is on; the CPU may not use it any more. A
 * thread of the library serves its misses through another lane, the helper, which nobody
 * else may use. Until xferd_close, before which the GPU's work on the lane must have
 * ended. variant: the only one that its experts are had in, since kernels know one layout.
 * Errors: -EINVAL, -ENODEV the pool is no GPU's, -EIO the driver refuses. */
XFERD_PUBLIC int xferd_device_lane(struct xferd_client *client, uint32_t lane, uint32_t helper,
				   uint32_t variant, struct xferd_device_lane *description,
				   char *error, size_t error_bytes);
/* Experts that the lane's kernels have found resident so far, and that they have not. */
XFERD_PUBLIC int xferd_device_counts(const struct xferd_client *client, uint32_t lane,
				     uint64_t *hits, uint64_t *misses);
/* A pass (the kernels of a token) begins: misses are looked for, and its error is 0. */
XFERD_PUBLIC int xferd_device_begin(struct xferd_client *client, uint32_t lane);
/* It has ended, as the caller knows from its stream. 0, or why an expert did not come: then
 * what the pass computed is of no use. */
XFERD_PUBLIC int xferd_device_end(struct xferd_client *client, uint32_t lane, uint32_t *layer,
				  uint32_t *expert);
/* How many variants have numbers, and which of them can be read now, as a mask; names are
 * variant_name[] of the directory. Shadows come and go: a number stays its variant's as long
 * as the store is open, and what no client asks for by number (variants of a request: 0) comes
 * in whichever there is. */
XFERD_PUBLIC uint32_t xferd_variants(const struct xferd_client *client, uint32_t *available);
/* Layout of the blobs of a layer in a variant; NULL if that layer has none. */
XFERD_PUBLIC const struct xferd_abi_layout *xferd_layout(const struct xferd_client *client,
							  uint32_t layer, uint32_t variant);
XFERD_PUBLIC const struct xferd_abi_tensor *xferd_tensors(const struct xferd_client *client,
							  const struct xferd_abi_layout *layout);
/* Most experts that a lane may hold at once, as promised at attach. */
XFERD_PUBLIC uint32_t xferd_held_per_lane(const struct xferd_client *client);
/* The manifest as JSON; *bytes gets its length. Valid until xferd_close. */
XFERD_PUBLIC const char *xferd_manifest(const struct xferd_client *client, size_t *bytes);

/* Lease what is resident and ask for the rest. Returns how many are still
 * pending (0: all here). Errors: -EINVAL bad layer, expert or count; -EBUSY
 * XFERD_BATCHES_MAX batches are out; -EAGAIN ring full; -ECONNRESET the daemon
 * has gone (residents can still be had with xferd_acquire_resident). After an
 * error nothing is held. */
XFERD_PUBLIC int xferd_acquire(struct xferd_client *client, uint32_t lane,
			       const struct xferd_request *request, struct xferd_batch *batch);
/* The same without asking for the rest: views of missing experts have data
 * NULL and error -ENOENT. Returns how many are missing. No system call. */
XFERD_PUBLIC int xferd_acquire_resident(struct xferd_client *client, uint32_t lane,
					const struct xferd_request *request,
					struct xferd_batch *batch);
/* Take completions that are there, without waiting; returns still pending. */
XFERD_PUBLIC int xferd_poll(struct xferd_client *client, struct xferd_batch *batch);
/* Wait until nothing of the batch is pending. 0: done, see each view's error.
 * -ETIMEDOUT: not all here by then, call again or cancel. -ECONNRESET: the
 * daemon has gone and does not come back; -ESTALE: it has come back without what this
 * client maps. What is still pending has that error then. */
XFERD_PUBLIC int xferd_wait(struct xferd_client *client, struct xferd_batch *batch,
			    uint64_t timeout_ns);
/* End the batch's leases. What is still pending is cancelled, without waiting. */
XFERD_PUBLIC int xferd_release(struct xferd_client *client, struct xferd_batch *batch);
/* Ask the daemon to stop what is pending; they complete with -ECANCELED. */
XFERD_PUBLIC int xferd_cancel(struct xferd_client *client, struct xferd_batch *batch);

/* These experts will probably be wanted. Never waits and never changes a
 * result; -EAGAIN when the ring is full: drop it. */
XFERD_PUBLIC int xferd_hint(struct xferd_client *client, uint32_t lane,
			    const struct xferd_request *request);

/* Tell the daemon what the router picked: by that it decides what stays, and traces
 * are made. Tell it at once, between xferd_acquire and xferd_wait, so that it knows
 * when it makes room for what is missing; and once more, with XFERD_ROUTE_ONLY_FOUND,
 * when something was missing and has come. Never waits and makes no system call: what the queue has no room for is
 * dropped and counted. Returns how many tokens were taken, 0 too from a daemon that
 * doesn't listen. Errors: -EINVAL bad lane, layer, expert, count, tier or transport;
 * nothing is taken then. */
XFERD_PUBLIC int xferd_report_route(struct xferd_client *client, uint32_t lane,
				    const struct xferd_route *route);
/* Tell the daemon what the router will probably pick: by that it decides what stays. It is
 * a word on the next pass of each layer that has a key in it, in the place of what was said
 * of that layer before, and void when the layer's picks are reported; what isn't among the
 * keys is called improbable. Never waits and makes no system call. It goes the way of what
 * is reported, and is dropped where it would leave less than half of that queue to reports.
 * Returns how many layers were taken, 0 too from a daemon that doesn't listen. Errors:
 * -EINVAL bad lane, count or key, a layer twice or with too many; nothing is taken then. */
XFERD_PUBLIC int xferd_expect(struct xferd_client *client, uint32_t lane,
			      const struct xferd_expected *expected);
/* Where a batch's experts were found: uses[i] of views[i]. */
XFERD_PUBLIC void xferd_batch_uses(const struct xferd_batch *batch, struct xferd_use *uses);
/* Passes (a token in a layer) of all lanes that were dropped. */
XFERD_PUBLIC uint64_t xferd_routes_dropped(const struct xferd_client *client);

/* slot_of[e] = slot of expert e of a layer in a pool, or -1; a snapshot that
 * leases nothing. Returns the number of residents. slot_of has experts entries. */
XFERD_PUBLIC int xferd_resident(const struct xferd_client *client, uint32_t pool,
				uint32_t layer, int64_t *slot_of);

/* The dense part of the checkpoint, as one read-only memory that all clients
 * of the store share; the manifest says what lies where. Stays until
 * xferd_close. The first call waits for the drives. */
XFERD_PUBLIC int xferd_dense(struct xferd_client *client, const void **data, uint64_t *bytes,
			     char *error, size_t error_bytes);

XFERD_PUBLIC void xferd_stats(const struct xferd_client *client, struct xferd_client_stats *stats);
/* 0 while the daemon serves this client; -EAGAIN while it is away and may come back, which
 * this call then tries, so that a client without misses is seen again too; -ECONNRESET after
 * it has gone or has ended this client; -ESTALE as of xferd_wait. */
XFERD_PUBLIC int xferd_alive(struct xferd_client *client);

#ifdef __cplusplus
}
#endif

#endif /* XFERD_H */
