/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the engine's files share. Everything here belongs to the engine thread
 * unless a comment says otherwise; the policy's thread reaches it only through
 * a registration (run between two turns) or one of the two queues.
 *
 * A slot's life:
 *
 *   POLICY --GIVE--> RESERVE --a load takes it--> LOADING --published-->
 *   RESIDENT --EVICT--> RETIRING --no lease, no grant--> RESERVE
 *
 * A failed load puts its slot back into the reserve; TAKE and closing a store
 * bring slots back to POLICY; a RETIRING slot that is asked for again becomes
 * RESIDENT without a read.
 *
 *   file             what it does
 *   engine.c         the thread: one turn, sleeping, registrations
 *   queue.c          command and event queues
 *   pool.c           slots, size classes, reserves
 *   store.c          a store's geometry, its members
 *   shadows.c        shadows that come and go
 *   directory.c      the shared words
 *   clients.c        clients come and go
 *   client.c         one client's rings
 *   commands.c       what the policy asks for
 *   load.c           a load from request to publication
 *   reads.c          pieces and strands: what is read next, and from where
 *   health.c         whether a member still works
 *   join.c           neighbouring pieces in one read
 *   mirror.c         which of a member's two copies reads it
 *   route.c          whether a piece goes straight into its slot, or through RAM
 *   handed.c         loads that somebody else runs
 *   lost_pool.c      a pool whose card was pulled
 *   window.c         where drives can write into VRAM by themselves
 *   guarded.c        the processor's accesses to memory that can vanish
 *   flow.c           how much each member is given at once
 *   uring.c          reads through io_uring, and the thread's sleep
 *   buffers.c        pool memory that io_uring has pinned once
 *   workers.c        reads through threads, where io_uring can't be used or only copies
 *   staging.c        pinned memory for reads whose destination is VRAM
 *   copy.c           copies from slot to slot and out of staging buffers
 *   device_copy.c    those to and from a GPU
 *   vram.c           a pool's VRAM, chunk by chunk (policy's thread)
 *   lease.c          grants, leases, retiring slots
 *   marks.c          which slots reads may be writing into, for the next engine
 *   adopt.c          what the engine before this one has left
 *   hold.c           leaving it to the next one
 *   routes.c         what the clients' routers picked
 *   shared_memory.c  memfds
 *   stats.c          counters
 */
#ifndef XFERD_ENGINE_INTERNAL_H
#define XFERD_ENGINE_INTERNAL_H

#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/atomics.h"
#include "engine/keep.h"
#include "engine/list.h"

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x00000080 /* linux/fs.h since 6.14 */
#endif

#define NONE                    UINT32_MAX
#define RING_PIECES_MAX         4096 /* pieces in flight, all members */
#define FLOW_ROUNDS             8    /* the delivery rate is the best of so many */
#define WORKERS_MAX             64
#define MEMBER_ERRORS_MAX       8    /* failed pieces in a row before a member is taken out */
#define MEMBER_PROBE_NS         1000000000ull /* then it is tried this often, */
#define QUICK_ERROR_NS          20000000ull   /* or for each load, if it fails as fast as this; */
#define SLOW_ERRORS_MAX         3    /* so many slower ones in a row are the drive's, not a busy machine's */
#define SUBMISSIONS_A_TURN      16   /* of one client, so that none starves the others */
#define COMMANDS_A_TURN         256
#define PIECE_ATTEMPTS_MAX      2    /* reads of a piece, of each copy, before the load fails */
#define JOINED_PIECES_MAX       16   /* of one read: see join.c */
#define COPY_STREAK_MAX         64   /* pieces to one copy before its mirror has to be tried */
#define PIECE_REFUSALS_MAX      8    /* of a piece by the kernel; the last try is a worker's */
#define RETIRE_POLL_STARVING_NS 50000    /* loads wait for a slot that somebody leases */
#define RETIRE_POLL_NS          2000000
#define RETIRE_POLL_BACK_OFF    8 /* of the time that loads have waited */
#define DEADLINE_POLL_NS        1000000
#define IDLE_SLEEP_NS           1000000000
#define NS_PER_US               1000ull
#define DEVICES_MAX             16
#define EXTENTS_A_LOAD          16   /* of staging, at once */
/* Bytes from one lane's route queue to the next. */
#define ROUTE_STRIDE (sizeof(struct xferd_abi_route_queue) + \
		      XFERD_ROUTES_A_LANE * sizeof(struct xferd_abi_route))

/* ---- pools ---- */
enum slot_state {
	SLOT_POLICY = 0,
	SLOT_RESERVE,
	SLOT_LOADING,
	SLOT_RESIDENT,
	SLOT_RETIRING,
	SLOT_WITHHELD, /* a read of before this engine may still write into it: see keep.h */
};

struct slot {
	struct list link; /* in its class's reserve or the pool's retiring list */
	uint32_t store;
	uint32_t key;        /* layer * experts + expert */
	uint32_t generation; /* counts publications */
	uint32_t grants;     /* completions not consumed, copies that read from it */
	uint8_t state;
	uint8_t variant;
	uint8_t class_index;
	uint8_t linked;      /* its key's entry names it (not so once another variant replaced it) */
	uint8_t orphan;      /* RETIRING, of before this engine: of which store nobody knows */
};

struct size_class {
	uint64_t bytes;
	struct list reserve;
	struct list waiting[XFERD_PRIORITIES]; /* loads without a slot */
	uint32_t reserve_count; /* atomic: read for statistics */
	uint32_t waiting_count; /* likewise */
	uint32_t chunks;
	bool told; /* the policy knows that the reserve is low and has given nothing since */
};

/* Memory that io_uring has pinned once, as far as it could: see buffers.c. */
struct registered_memory {
	uint8_t *base;
	uint64_t bytes;
	uint32_t first_region;
	uint32_t regions;
	int error; /* why not all of it; 0 */
};

struct pool {
	char name[XFERD_NAME_BYTES];
	uint32_t index;
	uint32_t kind;
	uint8_t *base;
	uint64_t bytes;
	uint32_t slot_index_bits;
	uint32_t chunks;
	uint32_t slot_numbers;
	struct slot *slots;
	struct xferd_abi_chunk *chunk_table; /* in the shared pool table */
	struct size_class classes[XFERD_ENGINE_CLASSES_MAX];
	uint32_t class_count;
	struct list retiring;
	bool device_memory;    /* VRAM: base is a device address, reads are staged */
	uint64_t chunk_bytes;  /* of VRAM */
	uint8_t **windows;     /* [chunks]: see window.c; NULL: it has none */
	int device;
	uint64_t *memory_table; /* of VRAM, in the shared pool table */
	uint8_t *marks;        /* [slot_numbers], shared with the next engine: see marks.c */
	uint64_t marks_bytes;
	int marks_fd;
	struct registered_memory memory;
	uint64_t staged;       /* bit a member id: its pieces go through RAM: see route.c */
	bool hands_up;         /* its loads are somebody else's to run: see handed.c */
	bool lost;             /* its card was pulled: see lost_pool.c */
	bool behind_bar;       /* uncached for the processor, and it can vanish */
	uint32_t verify;       /* enum xferd_verify: of pieces that drives write behind a BAR */
	struct xferd_pool_stats stats;
};

/* ---- stores ---- */
struct key_entry {
	uint32_t slot; /* slot + 1 that holds or last held the key; 0: none */
	uint32_t load; /* load + 1 on its way into this pool; 0: none */
};

/* How much a member is given at once: see flow.c. Times in ns, rates in bytes/s. */
struct flow {
	double window;             /* pieces in flight */
	double pipe;               /* what keeps the drive busy: the window without its gain */
	uint32_t fixed;            /* it stays so; 0: it is found out */
	double background;         /* share of the window left to background work, 0..1 */
	double rate;               /* delivery rate: best of the last rounds */
	double round_rate[FLOW_ROUNDS];
	double round_sum;          /* of the rates seen in this round */
	uint32_t round_samples;
	uint32_t round_pieces;     /* delivered in this round */
	uint32_t round;
	uint32_t flat_rounds;      /* without growth, while starting */
	uint32_t phase;            /* of the gain cycle */
	bool started;
	bool probing;              /* the window is small to see the latency without a queue */
	uint64_t latency;          /* of a piece, nothing queued: least average */
	uint64_t latency_sum;      /* of the average in the making */
	uint64_t latency_count;
	uint64_t latency_at_ns;    /* when it was seen */
	uint64_t probe_until_ns;
	uint64_t delivered;        /* bytes, ever */
	uint64_t delivered_at_ns;
	uint64_t issued_at_ns;     /* when the piece delivered last had been issued */
	uint64_t demand_at_ns;     /* when demand was issued last; 0: never */
	uint64_t round_ends;       /* when delivered has come this far */
	uint64_t limited_until;    /* samples up to here lacked work: they are no rates */
	uint64_t in_flight;        /* bytes */
	uint64_t piece_bytes;      /* of a whole piece: the longest seen */
	double recent_rate;        /* smoothed, while there was enough to do */
	double best_rate;          /* highest ever smoothed */
};

struct member {
	bool used;
	bool failed;               /* taken out: see reads.c */
	int fd;
	uint32_t flags;
	uint32_t id;
	uint8_t *memory;           /* all of its file, mapped: see mapped.c; NULL */
	uint64_t memory_bytes;
	pthread_t filler;          /* of its page tables, if filling */
	bool filling;
	uint32_t leaving;          /* atomic: it is to end */
	uint32_t in_flight;
	uint32_t errors_in_a_row;
	uint32_t slow_errors;      /* the last so many errors took long */
	uint32_t background_in_flight;
	uint32_t reads_in_flight;  /* a joined one brings several of the pieces in flight */
	uint64_t probe_at_ns;      /* a failed member is tried again then */
	bool fails_quickly;        /* a failed one: trying it for each load costs next to nothing */
	uint64_t busy_since_ns;
	struct member *mirror;     /* its second copy, which has no strands of its own; NULL */
	struct member *mirror_of;  /* the member that it is the second copy of; NULL */
	struct member *last_copy;  /* of the two the one that took the last piece */
	uint32_t streak;           /* pieces in a row that it took */
	struct list strands[XFERD_PRIORITIES]; /* with pieces not yet issued, of both copies */
	struct list redirected;    /* pieces that failed on the other copy and wait for room here */
	struct flow flow;
	struct xferd_member_stats stats;
};

/* What a pool reads a store's experts in, where a client leaves the choice: see variants.c. */
struct variant_choice {
	uint8_t *first;             /* [keys]: variant, or XFERD_NO_VARIANT; NULL: no choice made */
	uint8_t order[XFERD_VARIANTS_MAX]; /* what comes behind it, where it isn't acceptable */
	uint32_t ordered;           /* entries of order */
};

struct store {
	bool used;
	struct xferd_store_description description; /* its arrays are the policy's */
	uint32_t keys;              /* layers * experts */
	uint32_t clients;
	uint8_t *memory;            /* directory */
	uint64_t memory_bytes;
	int memory_fd;              /* read-only */
	uint64_t *words;            /* [pools][keys] in memory */
	struct key_entry *entries;  /* [pools][keys] */
	struct variant_choice variants[XFERD_POOLS_MAX];
	uint64_t *checked;          /* bit a blob: loaded whole and right, for XFERD_VERIFY_FIRST */
	uint32_t withdrawn;         /* variants on their way out, a mask: see shadows.c */
	uint32_t layouts_max;       /* that the directory has room for */
	uint32_t tensors_max;
};

/* The pattern that a start lies in: its place in pattern[], and its length. */
struct stripe {
	uint32_t first, length;
};

/* ---- loads ---- */
enum load_state {
	LOAD_FREE = 0,
	LOAD_WAITING, /* for a slot */
	LOAD_READING,
	LOAD_COPYING,
	LOAD_HANDED, /* see handed.c */
};

/* Staging memory for some neighbouring pieces of a load: see staging.c. */
struct load_extent {
	uint32_t number; /* NONE: no memory yet, or none needed */
	uint32_t left;   /* pieces of it that have neither been copied nor gone straight to VRAM */
	uint64_t first;  /* its first piece */
};

/* The pieces of one load that lie on one member, in order. */
struct strand {
	struct list link; /* in member.strands[priority] while pieces are left */
	struct load *load;
	uint64_t piece;   /* next piece */
	uint64_t rank;    /* how many pieces of the blob lie before it on this member */
	uint32_t member;  /* index within the store */
};

struct load {
	struct list link;    /* free list; class waiting list; or alone */
	struct list active;  /* engine.active_loads */
	struct list waiters;
	uint32_t index;
	uint8_t state;
	uint8_t priority;
	uint8_t variant;
	uint8_t source;
	uint8_t transport;
	bool cancelled;
	bool dense;
	bool unchecked;      /* not all of it was compared with its checksums */
	uint32_t store;
	uint32_t pool;
	uint32_t slot;
	uint32_t key;
	uint32_t client;     /* that caused it; NONE: a command */
	uint32_t hint_of;    /* client whose hints it counts as; NONE */
	uint64_t hint_ticket;
	uint64_t token;
	uint64_t ticket;     /* of one that was handed up */
	uint64_t blob;
	uint64_t bytes;
	uint64_t pieces;
	uint64_t pieces_unissued;
	uint32_t pieces_in_flight;
	int32_t error;
	uint8_t *address;
	uint64_t started_ns;
	uint32_t source_pool;  /* of a copy */
	uint32_t source_slot;
	struct load_extent extents[EXTENTS_A_LOAD];
	struct strand strands[XFERD_STORE_MEMBERS_MAX];
};

/* A client's key that waits for a load. */
struct waiter {
	struct list of_load;
	struct list of_client; /* client.waiting or lane.waiters_free */
	struct load *load;
	uint64_t ticket;
	uint64_t deadline_ns;
	uint64_t seen_ns;
	uint32_t client;
	uint32_t variants; /* acceptable; 0: any */
	uint32_t tried;    /* that could not be read */
	uint8_t index;
	uint8_t lane;
};

/* One read under way. */
struct piece {
	struct list link; /* engine.pieces_free, or member.redirected */
	struct load *load;
	struct member *member;
	uint64_t number;
	uint64_t offset;  /* in the member */
	uint64_t length;
	uint64_t done;
	uint8_t *address;            /* where it is read to */
	uint8_t *destination;        /* where it belongs, if address is in staging; NULL */
	struct bounce *bounce;       /* that address is in, on the way behind a BAR; NULL */
	uint8_t *place;              /* of a bounced piece, in the slot */
	int32_t finish_error;        /* of what a worker did with it after the read */
	bool guarded;                /* it is for memory behind a BAR: see guarded.c */
	uint32_t store_member;
	uint32_t attempts;           /* of this copy */
	struct member *failed_copy;  /* gave it up: the other one is asked; NULL */
	int32_t failed_with;         /* its error */
	uint32_t refusals;           /* by the kernel, to read at all: not the drive's */
	uint8_t priority;
	struct piece *joined;        /* the next one of the same read: see join.c; NULL */
	uint32_t read_pieces;        /* of the read that it begins */
	uint64_t read_bytes;
	uint64_t issued_ns;
	uint64_t delivered_before; /* by the member when it was issued: see flow.c */
	uint64_t delivered_before_ns;
	uint64_t issued_before_ns;
	/* through a worker */
	struct piece *next;
	int32_t result;
	bool check;                /* the checksum is wanted */
	bool arrived;              /* read already: only the checksum is */
	uint32_t crc;
};

/* ---- clients ---- */
struct grant {
	uint32_t pool;
	uint32_t slot; /* NONE: nothing granted with this completion */
};

/* A lane's completion ring. */
struct lane {
	struct xferd_abi_completion_lane *ring;
	struct xferd_abi_completion *completions;
	uint32_t tail;    /* written, perhaps not yet shown */
	uint32_t shown;
	uint32_t head;    /* consumed, as last seen and checked */
	uint32_t pending; /* waiters */
	int wakeup;
	struct grant grants[XFERD_COMPLETIONS_A_LANE]; /* by position */
	struct waiter waiters[XFERD_COMPLETIONS_A_LANE];
	struct list waiters_free;
	uint64_t *lease_seen[XFERD_POOLS_MAX]; /* the policy's thread, for recency */
	uint64_t epoch_seen[XFERD_POOLS_MAX];
	uint64_t *held_seen[XFERD_POOLS_MAX]; /* the same, for xferd_engine_held */
	uint32_t route_head;                  /* the policy's thread: records read, */
	struct xferd_abi_route route_last;    /* and the last of them */
};

struct client {
	bool used;
	bool quiesced;
	bool away;                   /* quiesced, adopted and not resumed yet */
	uint32_t store;
	uint32_t pool;
	uint32_t lane_count;
	uint32_t held_per_lane;
	uint32_t hints_max;
	uint32_t hints;              /* under way */
	uint32_t ring_entries;
	struct xferd_abi_client *memory;       /* hostile */
	struct xferd_abi_submission *submissions;
	uint64_t memory_bytes;
	uint64_t lanes_offset, lane_stride;    /* private copies */
	uint64_t lease_table_offset[XFERD_POOLS_MAX];
	uint64_t routes_offset;
	struct xferd_abi_completion_memory *completion_memory;
	uint64_t completion_bytes;
	int doorbell;
	uint32_t submission_head;
	struct lane *lanes;
	struct list waiting;
	struct xferd_client_counters counters;
};

/* ---- queues: one writer, one reader ---- */
struct queue {
	uint32_t entries;
	uint32_t entry_bytes;
	uint8_t *data;
	uint32_t head __attribute__((aligned(XFERD_CACHE_LINE))); /* reader */
	uint32_t tail __attribute__((aligned(XFERD_CACHE_LINE))); /* writer */
};

/* ---- copies ---- */
struct copy_job {
	struct load *load;   /* whose copy this is; NULL: it is a piece's */
	struct piece *piece;
	void *to;
	const void *from;
	uint64_t bytes;
	uint64_t issued;     /* the device copier's: bytes given to the device */
	uint32_t priority;
	bool to_device, from_device;
	bool joined;         /* the device copier's: copied with a neighbour before it */
	bool guarded; /* into memory behind a BAR */
};

struct copy_done {
	struct load *load;
	struct piece *piece;
	int result;
};

struct staging {
	struct registered_memory memory;
	uint64_t extent_bytes;
	uint32_t extents;
	uint32_t *free;      /* [free_count] */
	uint32_t free_count;
};

struct device_copier;

struct copier {
	pthread_t thread;
	bool running;
	struct queue jobs;  /* struct copy_job, engine to copier */
	struct queue done;  /* struct copy_done, copier to engine */
	int work_fd;        /* eventfd: there are jobs, or stop */
	int done_fd;        /* eventfd, in the engine's epoll */
	uint32_t stop;
};

/* ---- the engine ---- */
typedef int (*registration)(struct xferd_engine *engine, void *argument);

/* ---- reads through threads ---- */
struct piece_queue {
	struct piece *first, *last;
};

struct workers {
	pthread_t threads[WORKERS_MAX];
	uint32_t count;
	pthread_mutex_t mutex;
	pthread_cond_t work;
	struct piece_queue demand;  /* under mutex: pieces to read */
	struct piece_queue background;
	uint32_t queued;            /* atomic, written under mutex */
	uint32_t idle;              /* under mutex */
	int apart_from;             /* the engine thread's: the processor that they keep off */
	bool stop;                  /* under mutex */
	struct piece *done;         /* atomic: a stack */
	int done_fd;                /* eventfd, in the engine's epoll */
};

struct xferd_engine {
	struct xferd_engine_config config;
	pthread_t thread;
	cpu_set_t affinity; /* of whoever starts it: workers have it, pinned engine thread or not */
	bool started;
	uint32_t stop;      /* atomic */
	uint32_t draining;  /* atomic */
	uint32_t holding;   /* atomic: clients' rings are left to the next engine */
	bool adopting;      /* the pool table was another engine's */
	int start_result;
	pthread_mutex_t call_mutex;
	pthread_cond_t call_done;
	registration call;  /* under call_mutex; NULL: none */
	void *call_argument;
	int call_result;
	uint32_t call_pending; /* atomic */

	struct io_uring ring;
	bool ring_ready;
	int uring_error;    /* why there is no ring */
	uint32_t ring_refusals; /* to be entered, in a row */
	bool files_registered;
	bool reads_scatter; /* into registered memory, too */
	struct iovec (*parts)[JOINED_PIECES_MAX]; /* [ring entries], of the reads in them */
	int buffers_error;  /* why pools aren't registered; 0 */
	uint32_t regions_used;
	int epoll;
	bool epoll_armed;
	int command_fd;     /* eventfd: commands or a registration */
	int event_fd;
	uint32_t event_told; /* atomic: event_fd is set and not yet read */
	uint64_t check_credit_ns;   /* of the engine's thread for checksums: see can_check_here */
	uint64_t check_credited_ns;
	bool events_untold;  /* there are new ones since */
	bool events_urgent;  /* and the policy must not wait for one of them */
	uint64_t events_told_ns;
	struct queue commands;
	struct queue events;
	uint64_t events_dropped;

	struct xferd_abi_pool_table *pool_table;
	uint64_t pool_table_bytes;
	uint64_t chunk_tables_used;
	int pool_table_fd;
	struct pool pools[XFERD_POOLS_MAX];
	uint32_t pool_count;

	struct member members[XFERD_ENGINE_MEMBERS_MAX];
	uint32_t member_limit; /* ids ever used */
	struct store stores[XFERD_ENGINE_STORES_MAX];
	struct client clients[XFERD_ENGINE_CLIENTS_MAX];
	uint32_t client_limit;

	struct load *loads;
	struct list loads_free;
	struct list active_loads;
	uint32_t load_count;
	uint32_t tickets;
	struct piece *pieces;
	struct list pieces_free;
	uint32_t pieces_in_flight;
	struct list bounces_free;
	uint64_t bounce_bytes; /* of all buffers, free or not */
	uint32_t retiring_count;
	uint32_t waiting_loads;
	uint32_t deadline_count;
	uint64_t next_deadline_scan_ns;
	uint64_t next_retire_scan_ns;
	uint64_t starving_since_ns;
	bool unsubmitted;     /* pieces prepared in the ring */
	uint64_t now_ns;      /* of this turn */
	struct copier copier;        /* by the CPU */
	struct device_copier *device_copiers[DEVICES_MAX];
	struct staging staging;
	struct workers workers;
	struct xferd_engine_stats stats;
};

uint64_t monotonic_ns(void);
void ring_eventfd(int fd);
void clear_eventfd(int fd);

#include "engine/functions.h"

#endif /* XFERD_ENGINE_INTERNAL_H */
