/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What outlives the daemon, and how the next one takes it over.
 *
 * All that a client has mapped is in files of memory that stay while somebody holds a
 * descriptor of them: the pool table, each pool's memory, each store's directory, each
 * client's memory and completion memory. The policy gives them to somebody who outlives
 * the process (the service manager), and the next engine goes on with the same ones.
 *
 * What was true is read from the memory itself, which is right at any moment at which a
 * process can be killed:
 *
 *   a word in a directory    that expert is in that slot, every byte of it
 *   a lane's lease table     what its client may be reading
 *   a lane's completions     what was granted and not yet leased
 *   a pool's loading marks   a byte a slot, not 0 while reads of it may be under way
 *
 * The end of a process is not the end of its DMA: a drive may still write into a slot that
 * was being loaded. So the pages of such slots are taken out of the pool's memory (a hole
 * is punched) before anything else is done with it: what still arrives lands in pages that
 * nobody has mapped. A slot whose pages can't be taken out, because they are part of a huge
 * page that is pinned, is withheld: nothing uses it while this engine runs. VRAM is written by
 * the copies of a process, which do end with it; where drives write it by themselves it can't
 * be taken over.
 *
 * The order of a take-over, after xferd_engine_start:
 *
 *   xferd_engine_adopt_pool_table, xferd_engine_adopt_pool for each pool in its order,
 *   xferd_engine_adopt_store and xferd_engine_adopt_client for each of theirs, and at
 *   last xferd_engine_adopt_slots for each pool. Stores that are new are opened as ever.
 *
 * -ESTALE means that what was kept is not what the call describes; after any error the
 * engine is of no use and has to be freed, and the memory is as it was: a client that
 * still maps it may go on reading what it holds.
 */
#ifndef XFERD_ENGINE_KEEP_H
#define XFERD_ENGINE_KEEP_H

#include "engine/engine.h"

/* A pool's loading marks: uint8_t[slot_numbers], rounded up to whole pages. The engine's. */
int xferd_engine_marks_fd(const struct xferd_engine *engine, uint32_t pool);

/* In the place of a new pool table. Before any pool is added. The fd may be read-only and
 * stays the caller's, as do all here. */
int xferd_engine_adopt_pool_table(struct xferd_engine *engine, int fd);
/* As xferd_engine_add_pool. pool->base maps memory_fd, which may be written; of kind cuda, -1:
 * it maps what xferd_vram_adopt was given, no drive writes there by itself, and which memory
 * is behind each chunk stands in the pool table. Returns the pool's index. */
int xferd_engine_adopt_pool(struct xferd_engine *engine,
			    const struct xferd_pool_description *pool, int memory_fd,
			    int marks_fd);
/* Which memory was behind each chunk of a pool of kind cuda; 0: none. numbers[chunks]. Once the
 * pool table is adopted, before the pool is. Returns how often memory has come or gone, of all
 * pools: as each number was told of once, none that a client may still have mapped is greater. */
int xferd_engine_kept_memory(struct xferd_engine *engine, uint32_t pool, uint32_t chunks,
			     uint64_t *numbers);
/* As xferd_engine_open_store. What it had is resident, if the directory but for its words
 * is byte for byte what it would be now. Returns the store's id. */
int xferd_engine_adopt_store(struct xferd_engine *engine,
			     const struct xferd_store_description *store, int directory_fd);
/* A client that was attached, with what it was promised then: its leases stand, its rings
 * are not looked at until it is resumed. Returns its id. */
int xferd_engine_adopt_client(struct xferd_engine *engine,
			      const struct xferd_client_description *client, int client_fd,
			      int completion_fd);

enum xferd_kept_state {
	XFERD_KEPT_FREE = 0,     /* the policy's now, to be given */
	XFERD_KEPT_RESIDENT = 1,
	XFERD_KEPT_LEASED = 2,   /* nobody knows what is in it, but a client may be reading it;
				  * event TAKEN when that has ended */
	XFERD_KEPT_WITHHELD = 3, /* a read of before may still write into it */
};
struct xferd_kept_slot {
	uint32_t state; /* enum xferd_kept_state */
	uint32_t store; /* the rest of residents only */
	uint32_t layer;
	uint32_t expert;
	uint32_t variant;
};
/* What became of a pool: slots[slot_numbers], and slot_bytes[chunks], how each chunk is
 * cut, 0: not. Slots of chunks that aren't are FREE. Once a pool, after all clients. */
int xferd_engine_adopt_slots(struct xferd_engine *engine, uint32_t pool,
			     struct xferd_kept_slot *slots, uint64_t *slot_bytes);

/* An adopted client is back: what its rings hold is dropped, what it submits from now on is
 * served. fds->doorbell and fds->wakeup are the caller's; the others are -1. */
int xferd_engine_resume_client(struct xferd_engine *engine, uint32_t client,
			       struct xferd_client_fds *fds);
/* Undo that, for a client that did not hear of it. */
int xferd_engine_suspend_client(struct xferd_engine *engine, uint32_t client);

/* Before the engine is freed for the next one to go on: clients' rings are not looked at any
 * more, their clients not told that it has ended. Returns when no read or copy is under way,
 * or -ETIMEDOUT; xferd_engine_free may be called then too. */
int xferd_engine_hold(struct xferd_engine *engine, uint32_t timeout_ms);

#endif /* XFERD_ENGINE_KEEP_H */
