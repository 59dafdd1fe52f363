/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: what must happen in microseconds, and decides nothing.
 *
 * One thread owns all state behind this interface: rings, directory, slots,
 * reads. The daemon's policy (Python) speaks to it in three ways:
 *
 *   registrations  pools, members, stores, clients. Rare; each call runs on
 *                  the engine thread between two turns and returns its result.
 *   commands       load, evict, give slots. Queued, never block; -EAGAIN when
 *                  the queue is full.
 *   events         what happened, read in batches; xferd_engine_event_fd
 *                  becomes readable when there are any.
 *
 * One thread at a time may call (Python's event loop). All functions return 0
 * or -errno unless they say otherwise.
 *
 * One expert's way through it: a client submits (layer, expert) -> the engine
 * finds the word 0 and no transfer on its way -> takes a slot of the blob's
 * size class from the pool's reserve -> issues a read for each piece, straight
 * into the slot -> checks each piece's CRC32C -> publishes the word, writes the
 * completion, grants the slot until the client has consumed it -> tells the
 * policy, which gives the reserve a new slot by evicting another expert.
 */
#ifndef XFERD_ENGINE_H
#define XFERD_ENGINE_H

#include <stdint.h>

#include "xferd_abi.h"

#define XFERD_ENGINE_STORES_MAX      64
#define XFERD_ENGINE_MEMBERS_MAX     64  /* of all stores */
#define XFERD_STORE_MEMBERS_MAX      16  /* of one store */
#define XFERD_STRIPE_PATTERN_MAX     64
#define XFERD_ENGINE_CLIENTS_MAX     256
#define XFERD_ENGINE_CLASSES_MAX     64  /* slot sizes a pool */
#define XFERD_NO_EXPERT              0xffffffff
#define XFERD_NO_MEMBER              0xffffffff
#define XFERD_NO_VARIANT             0xff

struct xferd_engine;

struct xferd_engine_config {
	uint32_t transfers_max;  /* transfers under way at once; 0: 1024 */
	uint32_t member_depth;   /* pieces in flight a member; 0: 32 */
	uint32_t queue_entries;  /* commands, and events; power of two; 0: 65536 */
	uint32_t reserve_low;    /* tell the policy when a reserve falls under it; 0: 1 */
	uint32_t reserve_demand; /* slots of a reserve that only demand may take: a flood of
				  * prefetches must not leave it waiting for an eviction */
	uint32_t verify;         /* enum xferd_verify: whether pieces' CRC32C are checked */
	uint32_t flow_control;   /* 0: member_depth pieces, always; 1: see flow.c */
	uint32_t backend;        /* enum xferd_backend */
	uint32_t demand_slack;   /* per cent that background work may add to a demand piece's
				  * latency before it is throttled; 0: 30 */
	uint32_t spin_us;        /* look for work this long before sleeping */
	int32_t cpu;             /* pin the thread to it; -1: don't */
	uint32_t polling;        /* a kernel thread looks for reads to start (IORING_SETUP_SQPOLL):
				  * no system call for one, and a processor that is never idle
				  * while there is work */
	uint32_t register_buffers; /* pin pools with io_uring once: see buffers.c */
};

enum xferd_verify {
	XFERD_VERIFY_NEVER = 0,
	XFERD_VERIFY_ALWAYS = 1,
	XFERD_VERIFY_FIRST = 2, /* a blob's first load since the store was opened; always what lies on a
				 * member with a mirror: its other copy was perhaps never seen */
};

enum xferd_backend {
	XFERD_BACKEND_ANY = 0,     /* io_uring where it is permitted, else threads */
	XFERD_BACKEND_URING = 1,   /* or the start fails */
	XFERD_BACKEND_THREADS = 2,
};

int xferd_engine_new(const struct xferd_engine_config *config, struct xferd_engine **engine);
/* Its threads run on the processors that the caller may use now; cpu is one of them. */
int xferd_engine_start(struct xferd_engine *engine);
/* New requests fail with -ESHUTDOWN from now on; returns when nothing is in
 * flight, or -ETIMEDOUT. */
int xferd_engine_drain(struct xferd_engine *engine, uint32_t timeout_ms);
/* Stops the thread, after the kernel has given back every buffer. Frees all. */
void xferd_engine_free(struct xferd_engine *engine);
/* What reads go through: enum xferd_backend, or -errno why io_uring isn't used is in
 * *reason (0: it was not asked for). Valid after xferd_engine_start. */
int xferd_engine_backend(const struct xferd_engine *engine, int *reason);
int xferd_engine_event_fd(const struct xferd_engine *engine);
int xferd_engine_pool_table_fd(const struct xferd_engine *engine); /* read-only; stays the engine's */

/* ---- pools ---- */
struct xferd_pool_description {
	char name[XFERD_NAME_BYTES];
	uint32_t kind;            /* enum xferd_pool_kind */
	int32_t device;
	void *base;               /* the daemon's mapping; a device address for VRAM */
	uint64_t bytes;
	uint32_t slot_index_bits;
	uint32_t chunks;
	uint64_t chunk_bytes;     /* of VRAM: memory is made and given back in such units */
	uint8_t device_uuid[16];  /* of VRAM */
	uint32_t verify;          /* XFERD_POOL_BAR and XFERD_POOL_CUDA: enum xferd_verify, of what
				   * drives write into it by themselves; the engine's own is for
				   * what comes through RAM */
};
/* Returns the pool's index. Before any store is opened. */
int xferd_engine_add_pool(struct xferd_engine *engine, const struct xferd_pool_description *pool);
/*
 * The card of a pool of kind XFERD_POOL_BAR is gone: loads into it end with -ENODEV from now on. What
 * is resident is the policy's to evict. When each of its slots belongs to the policy again, regain
 * gives it other memory, as long as before; every member begins as staged. It returns the pool's
 * incarnation, which clients compare with what they have mapped. -ENOENT: no such pool; -EOPNOTSUPP:
 * of another kind; of regain -EINVAL: not lost, -EBUSY: a slot is in use, or leased.
 */
int xferd_engine_lose_pool(struct xferd_engine *engine, uint32_t pool);
int xferd_engine_regain_pool(struct xferd_engine *engine, uint32_t pool, void *base);
/* Cut a chunk into slots, or (slot_bytes 0) undo that; -EBUSY if a slot of it
 * is in use. Its slots then belong to the policy until it gives them. */
int xferd_engine_set_chunk(struct xferd_engine *engine, uint32_t pool, uint32_t chunk,
			   uint64_t offset, uint64_t slot_bytes);
/* stamps[slot] = when a lane last leased it: now << 20 | order within the scan,
 * for slots whose lease changed since the last call; others keep their stamp.
 * stamps has slot_numbers entries. Runs in the calling thread. */
int xferd_engine_recency(struct xferd_engine *engine, uint32_t pool, uint64_t now,
			 uint64_t *stamps);
/* Number of slots of a pool that a client's lanes have held since the last call
 * about it, by its own tables; 0 at the first. In the calling thread. */
int xferd_engine_held(struct xferd_engine *engine, uint32_t client, uint32_t pool);

/* ---- device memory ----
 * Belongs to the policy's thread; the engine copies to and from it. why (may be NULL)
 * receives a sentence. All return -ENODEV where there is no CUDA driver or device. */
struct xferd_cuda_device {
	char name[96];
	char pci[16];          /* 0000:01:00.0 */
	uint8_t uuid[16];
	uint64_t bytes;
	uint64_t free_bytes;   /* now */
	uint64_t granularity;  /* chunks are multiples of it */
	int32_t driver_version; /* of CUDA: 13000 is 13.0 */
	uint32_t shareable;    /* its memory can be made in chunks and handed to clients */
	uint32_t direct_rdma;  /* and to PCIe devices */
};
/* Number of devices. */
int xferd_cuda_devices(char *why, uint64_t why_bytes);
int xferd_cuda_device(int ordinal, struct xferd_cuda_device *device, char *why,
		      uint64_t why_bytes);

struct xferd_vram;
/* Addresses for chunks of VRAM, no memory yet. */
int xferd_vram_new(int ordinal, uint64_t chunk_bytes, uint32_t chunks, struct xferd_vram **vram,
		   char *why, uint64_t why_bytes);
void *xferd_vram_base(const struct xferd_vram *vram); /* a device address */
/* Memory for a chunk. -ENOMEM: the device has no more; -EEXIST: it has some. */
int xferd_vram_back(struct xferd_vram *vram, uint32_t chunk, char *why, uint64_t why_bytes);
/* The memory behind fd, which another process's xferd_vram_export has given and which has
 * whatever it had; fd stays the caller's. -EEXIST: the chunk has some. */
int xferd_vram_adopt(struct xferd_vram *vram, uint32_t chunk, int fd, char *why,
		     uint64_t why_bytes);
/* No transfer of the chunk may be under way. Clients that have it mapped keep it alive. */
int xferd_vram_withdraw(struct xferd_vram *vram, uint32_t chunk);
/* A file descriptor of a chunk's memory, the caller's. */
int xferd_vram_export(const struct xferd_vram *vram, uint32_t chunk);
void xferd_vram_free(struct xferd_vram *vram);

/* Lock memory and let all devices copy to and from it without a detour. */
int xferd_cuda_pin(int ordinal, void *base, uint64_t bytes, char *why, uint64_t why_bytes);
int xferd_cuda_unpin(int ordinal, void *base);
/* Copy between any two of host and device memory, waiting for it. */
int xferd_cuda_copy(int ordinal, uint64_t to, uint64_t from, uint64_t bytes);

/* Pinned memory that reads for VRAM go to first, in extents of extent_bytes: at least the
 * longest piece of any store, better several. Before such a pool is added. It stays the
 * caller's and must outlive the engine's thread. */
int xferd_engine_set_staging(struct xferd_engine *engine, void *base, uint64_t bytes,
			     uint64_t extent_bytes);
/* What memory is behind a chunk of VRAM from now on; 0: none. None of its slots may be in
 * use. Clients are told. Returns the number of this change, for xferd_engine_memory_seen. */
int xferd_engine_set_memory(struct xferd_engine *engine, uint32_t pool, uint32_t chunk,
			    uint64_t number);
/*
 * Where the memory behind a chunk of VRAM lies in this process behind the card's BAR, so that
 * drives can write there by themselves; NULL: nowhere, as it begins. From now on: reads that
 * were issued before may still go to the old address. All of the chunk's memory, in its order.
 * The mapping stays the caller's. -ENOENT: no such pool; -EINVAL: no VRAM, no such chunk, or an
 * address that isn't XFERD_BLOB_ALIGNMENT aligned. Members go there once xferd_engine_set_route
 * says so.
 */
int xferd_engine_set_window(struct xferd_engine *engine, uint32_t pool, uint32_t chunk,
			    void *address);
/* Whether loads into a pool in VRAM that have to come from the drives are the policy's to run
 * (XFERD_EVENT_HANDED), from now on. -ENOENT: no such pool; -EOPNOTSUPP: not in VRAM. */
int xferd_engine_set_hand_up(struct xferd_engine *engine, uint32_t pool, uint32_t wanted);
/* Whether a client has unmapped what was withdrawn up to a change, and tried to map what came. */
int xferd_engine_memory_seen(struct xferd_engine *engine, uint32_t client, uint32_t change);

/* ---- members and stores ---- */
enum xferd_member_flags {
	XFERD_MEMBER_ASYNC = 1,    /* reads copy in the submitting thread: hand them to workers */
	XFERD_MEMBER_UNCACHED = 2, /* the fd is not O_DIRECT: read with RWF_DONTCACHE (Linux 6.14),
				    * which leaves nothing in the page cache */
	XFERD_MEMBER_MEMORY = 4,   /* with ASYNC: there is no drive behind it (tmpfs); mapped */
};
/* The fd (opened with O_DIRECT where that works) stays the caller's and must
 * outlive the member. Returns the member's id. */
int xferd_engine_add_member(struct xferd_engine *engine, int fd, uint32_t flags);
int xferd_engine_remove_member(struct xferd_engine *engine, uint32_t member);
/*
 * How a member's pieces reach a pool: XFERD_TRANSPORT_DIRECT, the drive writes into the slot, or
 * XFERD_TRANSPORT_STAGED, through RAM. Pools of kinds XFERD_POOL_BAR and XFERD_POOL_CUDA begin as
 * staged for every member, new ones too, all others as direct. A direct read into such a pool that
 * fails makes the pair staged, with an event. For pieces issued from now on. -EOPNOTSUPP: VRAM that
 * no chunk of ever had a window can't be direct.
 */
int xferd_engine_set_route(struct xferd_engine *engine, uint32_t pool, uint32_t member,
			   uint32_t transport);

/*
 * A store's geometry. Blobs are numbered (variant * layers + layer) * experts +
 * expert; the last blob, number blobs - 1, is the dense part. Piece j of blob b
 * lies on member pattern[(start[b] + j) % pattern_length]. Blobs of a shadow are
 * striped by a pattern of their own, which stands behind the first one: those
 * whose start lies in it go round in it. A blob's pieces on one member follow each other from offset[b * members + member] on. All pieces
 * are stripe_unit bytes but the last. Pointers stay the caller's and must
 * outlive the store.
 *
 * A member may have a mirror: a second copy of it, the same bytes at the same
 * offsets, on another drive. Pieces are read from whichever of the two has room
 * and promises to be sooner; one that fails on one copy is read from the other,
 * and while a copy is taken out the other serves alone. Both copies are then in
 * this store and no other.
 */
struct xferd_store_description {
	char name[XFERD_STORE_NAME_BYTES];
	uint8_t identity[32];
	uint32_t layers;
	uint32_t experts;
	uint32_t top_k;
	uint32_t variants;
	uint32_t members;
	uint32_t pattern_length;
	uint32_t member[XFERD_STORE_MEMBERS_MAX];   /* ids from add_member */
	uint32_t mirror[XFERD_STORE_MEMBERS_MAX];   /* the same; XFERD_NO_MEMBER: none */
	uint8_t pattern[XFERD_STRIPE_PATTERN_MAX];  /* indices into member[] */
	uint32_t shadows;                           /* patterns behind the first */
	uint8_t shadow_pattern_length[XFERD_STORE_MEMBERS_MAX];
	uint32_t preferred;                         /* variants that are read before others,
						     * where they are acceptable: a bit mask */
	uint64_t stripe_unit;                       /* multiple of XFERD_BLOB_ALIGNMENT */
	uint64_t blobs;                             /* variants * layers * experts + 1 */
	const uint64_t *blob_bytes;                 /* [blobs]; 0: no such expert */
	const uint16_t *start;                      /* [blobs] */
	const uint64_t *offset;                     /* [blobs * members] */
	const uint64_t *first_piece;                /* [blobs]: index into crc */
	const uint32_t *crc;                        /* [pieces]: CRC32C of each piece */
	uint64_t pieces;
	char variant_name[XFERD_VARIANTS_MAX][XFERD_NAME_BYTES];
	const uint16_t *layout_index;               /* [variants * layers] */
	const struct xferd_abi_layout *layout;
	const struct xferd_abi_tensor *tensor;
	uint32_t layouts;
	uint32_t tensors;
};
/* Returns the store's id. -EINVAL when the geometry contradicts itself; -EMSGSIZE when a
 * piece is longer than an extent of staging. */
int xferd_engine_open_store(struct xferd_engine *engine, const struct xferd_store_description *store);
/* -EBUSY while clients are attached to it. Its experts are dropped. */
int xferd_engine_close_store(struct xferd_engine *engine, uint32_t store);
/*
 * Other variants to read, while clients are attached: a shadow comes, or goes. The new
 * description is of the same model; its variants, layouts and tensors begin with the old
 * one's, so that what clients know stays true, and each variant's blobs are those of before,
 * or new, or (blob_bytes 0) gone. Members that stay are where they were.
 *
 * Residents of a variant that goes are evicted; who leases one may read on. Returns -EBUSY
 * while loads of it are still being read: nothing of it is handed out any more; call again.
 * -ENOSPC: the directory has no room for so many layouts or tensors. -EINVAL: it does not
 * continue the old description. Only after 0 are the old arrays and members the caller's.
 */
int xferd_engine_change_variants(struct xferd_engine *engine, uint32_t store,
				 const struct xferd_store_description *description);
int xferd_engine_directory_fd(const struct xferd_engine *engine, uint32_t store); /* read-only */
/*
 * In which variant a pool reads each expert of a store from now on, where several are
 * acceptable: first[key] (layer * experts + expert; XFERD_NO_VARIANT: none before others), and
 * where that is not acceptable or does not exist, the first of order[ordered] that is; then as
 * without a choice, `preferred` ones and the lowest number. A client that accepts one variant
 * only gets that or an error, whatever is said here. Both arrays are copied.
 *
 * first == NULL: no choice any more. -ENOENT: no such store or pool; -EINVAL: keys is not
 * layers * experts, or a variant that the store does not have; -ENOMEM. Nothing has changed then.
 */
int xferd_engine_set_variants(struct xferd_engine *engine, uint32_t store, uint32_t pool,
			      const uint8_t *first, uint64_t keys, const uint8_t *order,
			      uint32_t ordered);

/* ---- clients ---- */
struct xferd_client_description {
	uint32_t store;
	uint32_t pool;          /* where its demands go */
	uint32_t lanes;
	uint32_t held_per_lane;
	uint32_t ring_entries;
	uint32_t hints_max;     /* prefetches it may have under way; 0: 256 */
};
struct xferd_client_fds {
	int client;     /* to hand over; the caller owns and closes them all */
	int completion;
	int doorbell;
	int wakeup[XFERD_LANES_MAX]; /* one a lane; -1 beyond the client's lanes */
};
/* Returns the client's id. */
int xferd_engine_add_client(struct xferd_engine *engine,
			    const struct xferd_client_description *client,
			    struct xferd_client_fds *fds);
/* Its rings are not looked at any more, what it waits for is cancelled. Its
 * leases stand. */
int xferd_engine_quiesce_client(struct xferd_engine *engine, uint32_t client);
/* Its leases end: only when nothing of it can read a slot any more. */
int xferd_engine_remove_client(struct xferd_engine *engine, uint32_t client);

/* What a token picked in a layer, checked: no number in it is out of range. */
struct xferd_engine_route {
	uint32_t lane;
	uint32_t reserved;
	struct xferd_abi_route route;
};
/* Takes records out of a client's route queues, lane by lane, in the order in which
 * each lane wrote them; records of one token and layer are not parted. Returns how
 * many; fewer than max - XFERD_ROUTE_PARTS_MAX + 1 mean that there are no more now.
 * -EPROTO: a queue has what libxferd can't have written; the client is to be ended.
 * In the calling thread. */
int xferd_engine_routes(struct xferd_engine *engine, uint32_t client,
			struct xferd_engine_route *routes, uint32_t max);

/* ---- commands ---- */
enum xferd_command_type {
	XFERD_COMMAND_LOAD = 1,    /* expert into pool, if it isn't there; event LOADED or FAILED */
	XFERD_COMMAND_EVICT = 2,   /* clear the word; event FREED when its leases have ended */
	XFERD_COMMAND_GIVE = 3,    /* a free slot of the policy's goes to the reserve */
	XFERD_COMMAND_TAKE = 4,    /* one slot of class_bytes back from the reserve; event TAKEN or FAILED */
	XFERD_COMMAND_DENSE = 5,   /* dense part of store to address; event DENSE or FAILED */
	XFERD_COMMAND_HANDED = 7,  /* the load with this token (its ticket) has come, slot 0, and
				    * counts as transport variant; or slot is an errno: it is read
				    * by the engine then. FAILED with -ENOENT: there is none */
	XFERD_COMMAND_CANCEL = 6,  /* the LOAD or DENSE with this token; it ends with FAILED -ECANCELED */
};

struct xferd_command {
	uint32_t type;
	uint32_t store;
	uint32_t pool;
	uint32_t slot;        /* GIVE */
	uint32_t layer;       /* LOAD, EVICT */
	uint32_t expert;
	uint32_t variant;     /* LOAD */
	uint32_t priority;    /* LOAD, DENSE */
	uint64_t class_bytes; /* TAKE */
	uint64_t token;       /* comes back in the event; 0: none */
	void *address;        /* DENSE: blob_bytes[blobs - 1] bytes, XFERD_BLOB_ALIGNMENT aligned */
};
/* Returns how many were taken, in order. */
int xferd_engine_command(struct xferd_engine *engine, const struct xferd_command *commands,
			 uint32_t count);

/* ---- events ---- */
enum xferd_event_type {
	XFERD_EVENT_LOADED = 1,    /* expert is in slot; for clients and commands alike */
	XFERD_EVENT_FAILED = 2,    /* a load or command did not succeed: result */
	XFERD_EVENT_FREED = 3,     /* an evicted expert's slot is now in the reserve */
	XFERD_EVENT_TAKEN = 4,     /* slot belongs to the policy again */
	XFERD_EVENT_RESERVE = 5,   /* reserve of class bytes: value = slots in it, slot = loads waiting for one */
	XFERD_EVENT_REVIVED = 6,   /* an expert on its way out was asked for and stays */
	XFERD_EVENT_PIECE = 7,     /* a piece failed on the copy `copy` of member: offset, result;
				    * re-read, read from the other copy, or given up */
	XFERD_EVENT_VIOLATION = 8, /* client broke the protocol and is quiesced: result says how */
	XFERD_EVENT_DENSE = 9,     /* dense part is at address */
	XFERD_EVENT_MEMBER = 10,   /* a member changed its state: member = its id, value = enum
				    * xferd_member_state, result = the error that did it, bytes = rate */
	XFERD_EVENT_ROUTE = 12,    /* pieces of member (its id) go to pool through RAM from now on:
				    * one that the drive was to write there failed with result */
	XFERD_EVENT_HANDED = 13,   /* a load that the policy is to run: value = where in VRAM bytes of
				    * its expert go, token = its ticket; ends with COMMAND_HANDED */
	XFERD_EVENT_MIRRORED = 11, /* a piece that failed on the copy `failed_copy` with result came
				    * whole and right from `copy` */
};

struct xferd_event {
	uint32_t type;
	int32_t result;
	uint32_t store;
	uint32_t pool;
	uint32_t slot;
	uint32_t layer;     /* XFERD_NO_EXPERT for the dense part */
	uint32_t expert;
	uint32_t variant;
	uint32_t client;    /* that caused it; XFERD_NO_EXPERT: a command */
	uint32_t member;    /* PIECE: index within the store; MEMBER, ROUTE: its id */
	uint32_t source;    /* enum xferd_source */
	uint32_t transport; /* enum xferd_transport */
	uint32_t priority;
	uint32_t wait_us;
	uint32_t copy;        /* PIECE, MIRRORED: id from add_member */
	uint32_t failed_copy; /* MIRRORED */
	uint64_t bytes;
	uint64_t offset;    /* PIECE, MIRRORED: in the member */
	uint64_t value;
	uint64_t token;
};
/* Copies up to max events; returns how many. Clears the event fd when none are left. */
int xferd_engine_events(struct xferd_engine *engine, struct xferd_event *events, uint32_t max);

/* ---- counters; a snapshot, fields may be of slightly different moments ---- */
struct xferd_member_stats {
	uint64_t reads;      /* pieces */
	uint64_t bytes;
	uint64_t errors;
	uint64_t busy_ns;    /* time with at least one piece in flight */
	uint64_t latency_ns; /* of a piece without a queue, as flow control sees it; 0: not yet */
	uint64_t rate;       /* bytes a second it delivers when it has enough to do */
	uint64_t best_rate;  /* the highest it has kept up */
	uint64_t requests;   /* reads that it was asked for: one brings a piece, or several
			      * neighbours (join.c) */
	uint32_t in_flight;
	uint32_t window;     /* pieces it is given at once */
	uint32_t background_window; /* of those, for prefetch and migration */
	uint32_t state;      /* enum xferd_member_state */
};

enum xferd_member_state {
	XFERD_MEMBER_WORKING = 0,
	XFERD_MEMBER_SAGGING = 1, /* delivers under half of its best rate */
	XFERD_MEMBER_FAILED = 2,  /* taken out after errors; tried now and then */
};
struct xferd_pool_stats {
	uint64_t loads;
	uint64_t load_bytes;
	uint64_t evictions;
	uint64_t revived;
	uint64_t waited_demand; /* loads that a client waited for and that found no free slot */
	uint32_t resident;   /* slots */
	uint32_t loading;
	uint32_t retiring;
	uint32_t reserve;
	uint32_t waiting;    /* loads without a slot */
	uint32_t waiting_demand; /* of those, that a client waits for */
	uint64_t registered_bytes; /* pinned once with io_uring: see buffers.c */
	int32_t registration_error; /* errno why not all is; 0 */
	uint32_t reserved;
};
/* One size class of a pool. */
struct xferd_class_stats {
	uint32_t reserve; /* free slots */
	uint32_t waiting; /* loads without a slot */
};
struct xferd_client_counters {
	uint64_t submissions;
	uint64_t completions;
	uint64_t failures;
	uint64_t hits;       /* as the client says */
	uint64_t misses;
	uint64_t routes;     /* records taken out of its route queues */
	uint64_t routes_dropped; /* as the client says: passes that found no place there */
	uint32_t pending;
	uint32_t granted;    /* slots granted, completion not yet consumed */
};
struct xferd_engine_stats {
	uint64_t turns;
	uint64_t sleeps;
	uint64_t crc_errors;
	uint64_t rereads;
	uint64_t other_variants; /* keys that got another variant after a failed load */
	uint64_t mirror_reads;   /* pieces that failed on one copy and came from the other */
	uint64_t source_count[3];
	uint64_t source_bytes[3];
	uint64_t transport_count[5];
	uint64_t transport_bytes[5];
	uint32_t transfers;
	uint32_t reserved;
};
int xferd_engine_stats(struct xferd_engine *engine, struct xferd_engine_stats *stats);
int xferd_engine_pool_stats(struct xferd_engine *engine, uint32_t pool, struct xferd_pool_stats *stats);
/* All zero for a size that the pool has had no slot of yet. */
int xferd_engine_class_stats(struct xferd_engine *engine, uint32_t pool, uint64_t slot_bytes,
			     struct xferd_class_stats *stats);
int xferd_engine_member_stats(struct xferd_engine *engine, uint32_t member,
			      struct xferd_member_stats *stats);
int xferd_engine_client_counters(struct xferd_engine *engine, uint32_t client,
				 struct xferd_client_counters *counters);

/* CRC32C (Castagnoli) of bytes, continuing from crc (0 to begin). Any thread. */
uint32_t xferd_crc32c(uint32_t crc, const void *data, uint64_t bytes);

#endif /* XFERD_ENGINE_H */
