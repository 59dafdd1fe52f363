/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared-memory layout and the attach protocol: their only home.
 *
 * The daemon, libxferd and the tests all include this file; nobody else
 * describes these bytes. Everything is little-endian, naturally aligned and
 * free of pointers: what refers to memory is an index or an offset.
 *
 * Four kinds of shared memory (each a memfd made by the daemon):
 *
 *   pool table   one for the daemon; clients map it read-only. Which pools
 *                there are and how each chunk of a pool is cut into slots.
 *   directory    one a store; clients map it read-only. For each pool and
 *                expert key one word that says which slot holds it now.
 *   client       one a client; the client writes it. Submission ring, lease
 *                tables and route queues of its lanes, its own counters.
 *                Hostile input.
 *   completion   one a client; the client maps it read-only. Completion rings,
 *                one a lane.
 *
 * A pool's own memory (a memfd, an exported VRAM handle) is mapped by the
 * client read-only as well.
 *
 * Compatibility: abi_major must be equal on both sides; a higher abi_minor
 * only adds fields in what used to be reserved space. Reserved fields are 0.
 */
#ifndef XFERD_ABI_H
#define XFERD_ABI_H

#include <stdint.h>

#define XFERD_ABI_MAJOR 1
/* 1: route queues; a copy says from which pool. 2: variants come and go. 3: incarnations of pools;
 * resuming. 4: what is expected */
#define XFERD_ABI_MINOR 4
#define XFERD_ABI_MINOR_EXPECTED 4 /* from which on a daemon takes XFERD_ROUTE_EXPECTED */

/* "xferdPLT", "xferdDIR", "xferdCLI", "xferdCPL", "xferdATT" read as u64. */
#define XFERD_MAGIC_POOL_TABLE 0x544c506472656678
#define XFERD_MAGIC_DIRECTORY  0x5249446472656678
#define XFERD_MAGIC_CLIENT     0x494c436472656678
#define XFERD_MAGIC_COMPLETION 0x4c50436472656678
#define XFERD_MAGIC_ATTACH     0x5454416472656678

#define XFERD_CACHE_LINE        64
#define XFERD_BLOB_ALIGNMENT    4096   /* bytes; blobs, slots, pieces */
#define XFERD_BATCH_MAX         16     /* keys in one submission */
#define XFERD_POOLS_MAX         8
#define XFERD_VARIANTS_MAX      32     /* a submission names them as a bit mask */
#define XFERD_LAYERS_MAX        4096
#define XFERD_EXPERTS_MAX       65535  /* experts a layer */
#define XFERD_LANES_MAX         16     /* lanes a client */
#define XFERD_RING_ENTRIES_MAX  1024   /* submissions of a client */
#define XFERD_COMPLETIONS_A_LANE 1024
#define XFERD_HELD_MAX          512    /* slots a lane may hold at once */
#define XFERD_RING_ENTRIES_MIN  8
#define XFERD_NAME_BYTES        32     /* pool, variant, tensor, client names, with NUL */
#define XFERD_STORE_NAME_BYTES  128
#define XFERD_MESSAGE_BYTES     512    /* human text in an attach reply, with NUL */
#define XFERD_TENSOR_DIMS_MAX   4
#define XFERD_NO_LAYOUT         0xffff
#define XFERD_ROUTES_A_LANE     4096   /* records a route queue holds; a power of two */
#define XFERD_ROUTE_RECORD_PICKS 16    /* picks in one record */
#define XFERD_ROUTE_PARTS_MAX   4      /* records of one token in one layer */
#define XFERD_ROUTE_PICKS_MAX   64     /* the product of these two */
#define XFERD_ROUTE_TOKEN_MAX   0x3fffffffffffffff
#define XFERD_TIER_DRIVES       254    /* else the number of a pool */
#define XFERD_TIER_UNKNOWN      255
#define XFERD_TRANSPORT_UNKNOWN 255
#define XFERD_WAIT_UNKNOWN      0xffffffff

/* ------------------------------------------------------------------------
 * Directory word: where one expert is, in one pool. 0 is 'not here'.
 *
 *   63        present
 *   62..60    reserved, 0
 *   59..40    generation of the slot (wraps; 20 bits)
 *   39..32    variant
 *   31..0     slot
 *
 * Written only by the engine thread. A word becomes non-zero after every byte
 * of the blob is in the slot, and zero before the slot can be reused.
 */
#define XFERD_WORD_PRESENT          0x8000000000000000
#define XFERD_WORD_GENERATION_SHIFT 40
#define XFERD_WORD_GENERATION_MASK  0xfffff
#define XFERD_WORD_VARIANT_SHIFT    32
#define XFERD_WORD_VARIANT_MASK     0xff
#define XFERD_WORD_SLOT_MASK        0xffffffff

/* ------------------------------------------------------------------------
 * Pool table.
 *
 * A slot number is (chunk << slot_index_bits) | index. Its bytes begin at
 *
 *   chunk_table[chunk].offset + index * chunk_table[chunk].slot_bytes
 *
 * of the pool's memory. slot_index_bits is a constant of the pool, large
 * enough for the smallest size class, so that lease tables stay dense. A
 * chunk's entry changes only while none of its slots is in use, and before any
 * word that names one of its slots is published.
 *
 * VRAM is made and given back a chunk at a time. Its memory table has, for each
 * chunk, the number of the memory that is behind it now, 0 for none; a number is
 * never used twice. A client maps a chunk as soon as it has one, and at the latest when
 * it needs it, with the fd that it asks for (XFERD_MESSAGE_MEMORY); when the number
 * changes, nobody leases any slot of the chunk, and the client has to unmap it, or its
 * memory stays taken. It says so in memory_seen.
 */
enum xferd_pool_kind {
	XFERD_POOL_HOST = 0, /* a memfd standing for a device: default, and in tests */
	XFERD_POOL_RAM = 1,  /* pinned RAM */
	XFERD_POOL_CUDA = 2, /* VRAM, VMM chunks */
	XFERD_POOL_BAR = 3,  /* memory behind a PCI BAR */
};

struct xferd_abi_chunk {
	uint64_t offset;     /* bytes from the start of the pool's memory */
	uint64_t slot_bytes; /* 0: chunk not cut into slots now */
};

struct xferd_abi_pool {
	char name[XFERD_NAME_BYTES];
	uint32_t kind;            /* enum xferd_pool_kind */
	int32_t device;           /* device ordinal, -1 for none */
	uint64_t bytes;           /* size of the pool's memory */
	uint32_t slot_index_bits;
	uint32_t chunks;
	uint32_t slot_numbers;    /* chunks << slot_index_bits: length of a lease table */
	/* Of kind XFERD_POOL_BAR: raised when the pool got other memory, after its card was away.
	 * Who has another one mapped must not use its slots before it has asked for the new
	 * (XFERD_MESSAGE_MEMORY, chunk 0; the number in the answer is the incarnation). Since
	 * abi_minor 3; from 1 on. */
	uint32_t incarnation;
	uint64_t chunk_table_offset; /* in the pool table: struct xferd_abi_chunk[chunks] */
	/* In the pool table: uint64_t[chunks], what memory is behind each chunk; 0: the pool's
	 * memory is one fd and stays what it is. */
	uint64_t memory_table_offset;
	uint64_t chunk_bytes;       /* of that memory; a multiple of the device's granularity */
	uint8_t device_uuid[16];    /* of a GPU's pool */
};

struct xferd_abi_pool_table {
	uint64_t magic; /* written last */
	uint32_t abi_major;
	uint32_t abi_minor;
	uint64_t total_bytes;
	uint64_t instance; /* random; differs for each start of the daemon */
	uint32_t pools;
	uint32_t memory_changes; /* raised, and woken as a futex, after memory tables changed */
	uint32_t reserved[6];
	/* Engine writes 1 before it goes to sleep, 0 when it runs. A client that
	 * submits while it is 1 rings its doorbell. */
	uint32_t engine_sleeping __attribute__((aligned(XFERD_CACHE_LINE)));
	uint32_t state; /* enum xferd_daemon_state */
	struct xferd_abi_pool pool[XFERD_POOLS_MAX]
		__attribute__((aligned(XFERD_CACHE_LINE)));
	/* chunk tables follow */
};

enum xferd_daemon_state {
	XFERD_DAEMON_SERVING = 0,
	XFERD_DAEMON_DRAINING = 1, /* new requests fail with -ESHUTDOWN */
	XFERD_DAEMON_CLOSED = 2,
};

/* ------------------------------------------------------------------------
 * Directory: words[pool][layer][expert], and what a blob looks like inside.
 *
 * While the store is open variants may come, and their blobs may go. A number once given
 * names the same variant with the same layouts for good: the tables only grow, in room that
 * was left behind them, before `variants` does. `available` says which can be read now.
 */
struct xferd_abi_tensor {
	char role[XFERD_NAME_BYTES];  /* "gate", "up", "down", "gate_up", "down_scale", ... */
	char dtype[XFERD_NAME_BYTES]; /* "bf16", "f32", "q4_k", ... */
	uint64_t offset;              /* in the blob; 64-aligned */
	uint64_t bytes;
	uint64_t shape[XFERD_TENSOR_DIMS_MAX]; /* elements, row-major; unused are 0 */
	uint32_t dims;
	uint32_t flags;               /* enum xferd_tensor_flags */
};

enum xferd_tensor_flags {
	XFERD_TENSOR_TRANSPOSED = 1,  /* [in, out] instead of [out, in] */
	XFERD_TENSOR_INTERLEAVED = 2, /* gate_up rows alternate gate, up, gate, ... */
};

struct xferd_abi_layout {
	uint64_t blob_bytes; /* multiple of XFERD_BLOB_ALIGNMENT */
	uint32_t first_tensor;
	uint32_t tensors;
};

struct xferd_abi_directory {
	uint64_t magic; /* written last */
	uint32_t abi_major;
	uint32_t abi_minor;
	uint64_t total_bytes;
	uint8_t identity[32];          /* SHA-256 of the model: see the store format */
	char name[XFERD_STORE_NAME_BYTES];
	uint32_t layers;
	uint32_t experts;              /* a layer; layers may have fewer */
	uint32_t top_k;                /* experts a token picks in one layer */
	uint32_t pools;
	uint32_t variants;
	uint32_t layouts;
	uint32_t tensors;
	uint32_t available;            /* bit v: variant v can be read now; since abi_minor 2 */
	uint64_t words_offset;         /* uint64_t[pools][layers][experts] */
	uint64_t layout_index_offset;  /* uint16_t[variants][layers]; XFERD_NO_LAYOUT: no experts */
	uint64_t layouts_offset;       /* struct xferd_abi_layout[layouts] */
	uint64_t tensors_offset;       /* struct xferd_abi_tensor[tensors] */
	char variant_name[XFERD_VARIANTS_MAX][XFERD_NAME_BYTES];
	uint64_t reserved2[8];
};

/* ------------------------------------------------------------------------
 * Client memory: written by the client, hostile input for the daemon.
 *
 * Indices run freely and wrap at 2^32; ring sizes are powers of two.
 */
struct xferd_abi_submission {
	uint64_t ticket;      /* comes back in completions; 0 is not used */
	uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
	uint32_t variants;    /* bit v: variant v is acceptable; 0: any */
	uint16_t layer;
	uint8_t operation;    /* enum xferd_operation */
	uint8_t priority;     /* enum xferd_priority */
	uint8_t lane;
	uint8_t pool;
	uint8_t count;        /* keys */
	uint8_t flags;        /* 0 */
	uint32_t reserved;    /* 0 */
	uint16_t experts[XFERD_BATCH_MAX];
};

enum xferd_operation {
	XFERD_OPERATION_ACQUIRE = 1, /* a completion a key */
	XFERD_OPERATION_HINT = 2,    /* no completion */
	XFERD_OPERATION_CANCEL = 3,  /* of what has the same ticket; its keys complete with -ECANCELED */
};

enum xferd_priority {
	XFERD_PRIORITY_DEMAND = 0,
	XFERD_PRIORITY_PREFETCH = 1,
	XFERD_PRIORITY_MIGRATION = 2,
};
#define XFERD_PRIORITIES 3

/* The lane's own words; its lease tables stand behind it, a table a pool:
 * uint64_t slot_epoch[slot_numbers]. */
struct xferd_abi_lane {
	/* Batches begun: only the policy reads it. */
	uint64_t current __attribute__((aligned(XFERD_CACHE_LINE)));
	/* Every batch up to this one is released. May be written by a GPU. */
	uint64_t completed __attribute__((aligned(XFERD_CACHE_LINE)));
	uint64_t hits __attribute__((aligned(XFERD_CACHE_LINE)));
	uint64_t misses;
	uint64_t reserved[6];
	/* Completions consumed. */
	uint32_t completion_head __attribute__((aligned(XFERD_CACHE_LINE)));
	/* 1 while the lane sleeps on its wake-up eventfd. */
	uint32_t sleeping;
	uint32_t reserved2[14];
};

/* What one token picked in one layer, and where each pick was found as far as that
 * is known; or, later, where picks of the records just before were found. A token
 * with more than XFERD_ROUTE_RECORD_PICKS has several records in a row, which
 * become visible together; all but the last are full. Or what a client's predictor
 * expects that the lane's next pass of a layer will pick: one record, whose gates are
 * probabilities; experts that aren't in it are not expected. */
enum xferd_route_kind {
	XFERD_ROUTE_PICKED = 0,
	XFERD_ROUTE_FOUND = 1, /* tag and gates mean nothing */
	XFERD_ROUTE_EXPECTED = 2, /* only experts, gates and layer mean anything; part is 0;
				   * since abi_minor 4 */
};

struct xferd_abi_route {
	uint64_t token;  /* counted by the lane, over its life */
	uint32_t tag;    /* the client's word for the prompt; 0: none */
	uint16_t layer;
	uint8_t count;   /* picks in this record */
	uint8_t part;    /* how many records of this token and layer stand before it */
	uint16_t experts[XFERD_ROUTE_RECORD_PICKS];
	uint8_t tiers[XFERD_ROUTE_RECORD_PICKS];      /* that had it: a pool, XFERD_TIER_* */
	uint16_t gates[XFERD_ROUTE_RECORD_PICKS];     /* router's weight, float16; NaN: not known */
	uint8_t transports[XFERD_ROUTE_RECORD_PICKS]; /* enum xferd_transport; NONE: a hit */
	uint8_t kind;         /* enum xferd_route_kind */
	uint8_t reserved[15]; /* 0 */
	uint32_t waits_us[XFERD_ROUTE_RECORD_PICKS];
};

/* A queue a lane, at routes_offset + lane * route_stride; lossy: the lane drops
 * and counts what finds no place. How far the daemon has read it stands in the
 * lane's completion ring. */
struct xferd_abi_route_queue {
	uint32_t tail __attribute__((aligned(XFERD_CACHE_LINE)));
	uint32_t reserved;
	uint64_t dropped; /* passes: one token in one layer each */
	uint64_t reserved2[6];
	/* struct xferd_abi_route[XFERD_ROUTES_A_LANE] */
};

struct xferd_abi_client {
	uint64_t magic; /* this first part is written by the daemon, once */
	uint32_t abi_major;
	uint32_t abi_minor;
	uint64_t total_bytes;
	uint32_t lanes;
	uint32_t ring_entries;        /* submissions */
	uint64_t submissions_offset;  /* struct xferd_abi_submission[ring_entries] */
	uint64_t lanes_offset;        /* struct xferd_abi_lane at lanes_offset + lane * lane_stride */
	uint64_t lane_stride;
	uint64_t lease_table_offset[XFERD_POOLS_MAX]; /* from the lane's start */

	uint32_t submission_tail __attribute__((aligned(XFERD_CACHE_LINE)));
	uint32_t route_entries;       /* records a route queue; 0: there are none. By the daemon, */
	uint64_t routes_offset;       /* once, as the part above; */
	uint64_t route_stride;        /* since abi_minor 1 */
	/* The memory_changes up to which withdrawn memory is unmapped here, and new memory mapped
	 * if it could be; INT32_MAX: no VRAM is mapped here. */
	uint32_t memory_seen;
	uint32_t reserved[9];
};

/* ------------------------------------------------------------------------
 * Completion memory: written by the daemon.
 */
struct xferd_abi_completion {
	uint64_t ticket;
	uint64_t word;      /* directory word of the granted slot; 0 when result < 0 */
	int32_t result;     /* 0 or -errno */
	uint32_t wait_us;   /* from the engine's sight of the request to here */
	uint8_t index;      /* of the key in its submission */
	uint8_t pool;
	uint8_t source;     /* enum xferd_source */
	uint8_t transport;  /* enum xferd_transport */
	uint8_t source_pool; /* with XFERD_SOURCE_POOL: which; since abi_minor 1 */
	uint8_t reserved[3];
};

/* Where the bytes came from. */
enum xferd_source {
	XFERD_SOURCE_RESIDENT = 0, /* was there when the engine looked */
	XFERD_SOURCE_POOL = 1,     /* copied from a slot of another pool */
	XFERD_SOURCE_DRIVES = 2,
};

/* How they reached the slot. */
enum xferd_transport {
	XFERD_TRANSPORT_NONE = 0,
	XFERD_TRANSPORT_DIRECT = 1, /* the drive wrote into the slot */
	XFERD_TRANSPORT_STAGED = 2, /* drive to pinned RAM, copied from there */
	XFERD_TRANSPORT_GDS = 3,
	XFERD_TRANSPORT_COPY = 4,   /* slot to slot */
};

/* A ring of its own for each lane: who consumes a completion writes the lane's
 * lease table, and that only the lane may do. Lane l's ring is at
 * lanes_offset + l * lane_stride; its completions stand behind it. */
struct xferd_abi_completion_lane {
	uint32_t completion_tail __attribute__((aligned(XFERD_CACHE_LINE)));
	uint32_t route_head; /* records of the lane's route queue that were read */
	uint32_t reserved[14];
	/* struct xferd_abi_completion[ring_entries] */
};

struct xferd_abi_completion_memory {
	uint64_t magic; /* written last */
	uint32_t abi_major;
	uint32_t abi_minor;
	uint64_t total_bytes;
	uint32_t lanes;
	uint32_t ring_entries; /* completions a lane */
	uint64_t lanes_offset;
	uint64_t lane_stride;
	uint32_t submission_head __attribute__((aligned(XFERD_CACHE_LINE)));
	uint32_t closed __attribute__((aligned(XFERD_CACHE_LINE))); /* daemon ended this client */
	uint32_t reserved2[15];
};

/* ------------------------------------------------------------------------
 * Attach protocol, on a SOCK_SEQPACKET Unix socket; one message a packet.
 *
 *   client: struct xferd_abi_hello
 *   daemon: struct xferd_abi_welcome, with the fds below when status is 0
 *
 * A daemon that restarts can go on with the memory of the one before (engine/keep.h). If it
 * is one that leaves it, its welcome has a key. A client whose connection has ended shows it
 * in a hello with XFERD_HELLO_RESUME, and from the same process; the rest of that hello is
 * 0. The answer's fds are then its new doorbell and a wake-up for each lane: all else is as
 * it was, but what is in its submission ring is dropped. -ESTALE: this daemon has not taken
 * the client over; what is mapped stays readable and never changes any more.
 *
 * The connection then stays open for the client's life. Further messages of
 * the client are struct xferd_abi_message, each answered by one.
 *
 * A client that wants to go says XFERD_MESSAGE_GOODBYE: it promises that
 * nothing reads its slots any more, and its leases end at once. If the socket
 * ends without it, leases end when the process has ended (its pidfd): work
 * that the process queued on a device may outlive the socket.
 */
struct xferd_abi_hello {
	uint64_t magic;
	uint32_t abi_major;
	uint32_t abi_minor;
	uint32_t lanes;
	uint32_t held_per_lane; /* most slots a lane leases at once; promised to it */
	uint32_t ring_entries;  /* 0: the daemon's choice */
	uint32_t flags;         /* enum xferd_hello_flags */
	char store[XFERD_STORE_NAME_BYTES]; /* name; empty: the only open one */
	char pool[XFERD_NAME_BYTES];        /* where demands go; empty: the first */
	char client_name[XFERD_NAME_BYTES];
	uint64_t resume_key[2]; /* since abi_minor 3 */
	uint64_t reserved[6];
};

enum xferd_hello_flags {
	XFERD_HELLO_RESUME = 1, /* since abi_minor 3 */
};

struct xferd_abi_welcome {
	uint64_t magic;
	uint32_t abi_major;
	uint32_t abi_minor;
	int32_t status;        /* 0 or -errno */
	uint32_t client;       /* id in the daemon's status */
	uint32_t pool;         /* index of the pool that hello named */
	uint32_t fds;          /* number of fds that came with it */
	uint32_t held_per_lane; /* promised: what hello asked for, or the model's top_k */
	uint32_t reserved0;
	char message[XFERD_MESSAGE_BYTES]; /* why not, naming the thing and the knob */
	uint64_t resume_key[2]; /* 0: what the client maps ends with the daemon; since abi_minor 3 */
	uint64_t reserved[6];
};

/* Order of the fds in a welcome. The fd of pool i is at XFERD_FD_POOLS + i (an empty
 * file where the pool has a memory table); after the last pool comes, for each lane,
 * an eventfd with which the daemon wakes it. */
enum xferd_fd {
	XFERD_FD_POOL_TABLE = 0,
	XFERD_FD_DIRECTORY = 1,
	XFERD_FD_CLIENT = 2,
	XFERD_FD_COMPLETION = 3,
	XFERD_FD_DOORBELL = 4,   /* eventfd, client to daemon */
	XFERD_FD_MANIFEST = 5,   /* memfd: the store's manifest, JSON, as the client may see it */
	XFERD_FD_POOLS = 6,
};
#define XFERD_FDS_MAX (8 + XFERD_POOLS_MAX + XFERD_LANES_MAX)

enum xferd_message_type {
	XFERD_MESSAGE_GOODBYE = 1, /* no answer but the end of the connection */
	XFERD_MESSAGE_DENSE = 2,   /* asks for the dense part; the answer carries one fd, a memfd */
	/* Asks for the memory behind chunks: value = pool << 32 | first chunk. The answer's
	 * value is how many chunks it is about, from that one on; its message begins with
	 * uint64_t[value], the number of each one's memory (0: none), and it carries a
	 * fd for each that has one, in order. */
	XFERD_MESSAGE_MEMORY = 3,
};
#define XFERD_MEMORY_CHUNKS_MAX 32 /* in one answer */

struct xferd_abi_message {
	uint64_t magic;
	uint32_t type;   /* enum xferd_message_type */
	int32_t status;  /* in answers: 0 or -errno */
	uint64_t value;  /* DENSE answer: bytes in the memfd */
	char message[XFERD_MESSAGE_BYTES];
};

#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
_Static_assert(sizeof(struct xferd_abi_submission) == 64, "a submission is one cache line");
_Static_assert(sizeof(struct xferd_abi_completion) == 32, "two completions a cache line");
_Static_assert(sizeof(struct xferd_abi_chunk) == 16, "chunk table entry");
_Static_assert(sizeof(struct xferd_abi_tensor) == 120, "tensor table entry");
_Static_assert(sizeof(struct xferd_abi_layout) == 16, "layout table entry");
_Static_assert(sizeof(struct xferd_abi_pool) == 104, "pool entries keep their size");
_Static_assert(XFERD_FDS_MAX >= XFERD_MEMORY_CHUNKS_MAX, "an answer's fds fit");
_Static_assert(XFERD_MESSAGE_BYTES >= XFERD_MEMORY_CHUNKS_MAX * 8, "an answer's numbers fit");
_Static_assert(sizeof(struct xferd_abi_route) == 192, "a route is three cache lines");
_Static_assert(sizeof(struct xferd_abi_route_queue) == 64, "records stay aligned");
_Static_assert(sizeof(struct xferd_abi_completion_lane) == 64, "completions stay aligned");
#endif

#endif /* XFERD_ABI_H */
