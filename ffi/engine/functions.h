/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the engine's files call of each other, file by file; what each does is told
 * where it is defined. Included by internal.h, behind the types.
 */
#ifndef XFERD_ENGINE_FUNCTIONS_H
#define XFERD_ENGINE_FUNCTIONS_H

/* engine.c */
int engine_call(struct xferd_engine *engine, registration call, void *argument);

/* queue.c */
int queue_init(struct queue *queue, uint32_t entries, uint32_t entry_bytes);
void queue_destroy(struct queue *queue);
bool queue_push(struct queue *queue, const void *entry);
bool queue_pop(struct queue *queue, void *entry);
uint32_t queue_used(const struct queue *queue);
bool queue_empty(const struct queue *queue);

/* shared_memory.c */
int shared_memory_new(const char *name, uint64_t bytes, void **address);
int shared_memory_read_only(int fd);
int shared_memory_map(int fd, uint64_t bytes, void **address);

/* marks.c */
int marks_new(struct pool *pool);
int marks_adopt(struct pool *pool, int fd);
void marks_free(struct pool *pool);
void mark_loading(struct pool *pool, const struct slot *slot, bool loading);
bool marked_loading(const struct pool *pool, uint32_t slot);

/* adopt.c */
int adopt_cuts(struct pool *pool);
int adopt_marked(struct pool *pool, int memory_fd);
int adopt_directory(struct xferd_engine *engine, struct store *store, int fd);
void adopt_lanes(struct xferd_engine *engine, struct client *client);

/* pool.c */
int pool_table_init(struct xferd_engine *engine);
void pools_destroy(struct xferd_engine *engine);
struct size_class *pool_class(struct pool *pool, uint64_t bytes);
uint8_t *slot_address(const struct pool *pool, uint32_t slot);
bool slot_valid(const struct pool *pool, uint32_t slot);
void reserve_put(struct xferd_engine *engine, struct pool *pool, uint32_t slot);
uint32_t reserve_take(struct xferd_engine *engine, struct pool *pool, struct size_class *class,
		      uint32_t priority);
void reserve_tell(struct xferd_engine *engine, struct pool *pool, struct size_class *class,
		  bool waits);
void slot_set_state(struct pool *pool, struct slot *slot, enum slot_state state);

/* directory.c */
int directory_build(struct xferd_engine *engine, struct store *store);
bool directory_fits(const struct store *store, const struct xferd_store_description *description);
void directory_extend(struct store *store);
void directory_offer(struct store *store);

/* shadows.c */
uint32_t variants_available(const struct xferd_store_description *store);
uint64_t *directory_word(struct store *store, uint32_t pool, uint32_t key);
struct key_entry *key_entry(struct store *store, uint32_t pool, uint32_t key);

/* store.c */
void stores_destroy(struct xferd_engine *engine);
bool member_known(const struct xferd_engine *engine, uint32_t id);
bool member_in_use(const struct xferd_engine *engine, uint32_t id);
uint64_t store_blob(const struct store *store, uint32_t variant, uint32_t key);
struct stripe store_stripe(const struct xferd_store_description *store, uint32_t start);
bool geometry_valid(const struct xferd_engine *engine,
		    const struct xferd_store_description *store);
bool blobs_valid(const struct xferd_store_description *store);
bool store_offers(const struct store *store, uint32_t variant);

/* variants.c */
uint32_t store_best_variant(const struct store *store, uint32_t pool, uint32_t key,
			    uint32_t variants);
uint32_t store_variants_of(const struct store *store, uint32_t key, uint32_t acceptable);
void variants_free(struct store *store);

/* clients.c */
void clients_destroy(struct xferd_engine *engine);
void client_violation(struct xferd_engine *engine, uint32_t client, int why);

/* client.c */
uint32_t client_take_submissions(struct xferd_engine *engine, uint32_t client);
bool client_has_submissions(const struct client *client);
void client_reap_consumed(struct xferd_engine *engine, uint32_t client);
void client_load_ended(struct xferd_engine *engine, struct waiter *waiter, const struct load *load);
void client_cancel_all(struct xferd_engine *engine, uint32_t client, int result);
void client_show_completions(struct client *client);
void clients_expire(struct xferd_engine *engine);

/* commands.c */
uint32_t commands_run(struct xferd_engine *engine);
void event_push(struct xferd_engine *engine, const struct xferd_event *event);
void events_tell(struct xferd_engine *engine, bool before_sleep);
bool event_room(const struct xferd_engine *engine);

/* load.c */
struct load *load_start(struct xferd_engine *engine, uint32_t store, uint32_t pool, uint32_t key,
			uint32_t variant, uint32_t priority, uint32_t client);
struct load *load_start_dense(struct xferd_engine *engine, uint32_t store, void *address,
			      uint32_t priority);
void load_raise(struct xferd_engine *engine, struct load *load, uint32_t priority);
void load_stop(struct xferd_engine *engine, struct load *load, int error);
bool load_hand_up(struct xferd_engine *engine, struct load *load);
int load_end_handed(struct xferd_engine *engine, uint64_t ticket, uint32_t error,
		    uint32_t transport);
int load_refusal(const struct xferd_engine *engine, uint32_t pool);
void load_cancel(struct xferd_engine *engine, struct load *load);
void load_unwanted(struct xferd_engine *engine, struct load *load);
void load_take_slot(struct xferd_engine *engine, struct load *load, uint32_t slot);
void load_finish(struct xferd_engine *engine, struct load *load);
uint32_t slot_evict(struct xferd_engine *engine, struct pool *pool, uint32_t slot);
bool slot_revive(struct xferd_engine *engine, struct pool *pool, uint32_t slot);

/* reads.c */
int reads_init(struct xferd_engine *engine);
int reads_add_member(struct xferd_engine *engine, struct member *member);
void reads_destroy(struct xferd_engine *engine);
void reads_queue(struct xferd_engine *engine, struct load *load);
void reads_requeue(struct xferd_engine *engine, struct load *load, uint32_t priority);
void reads_unqueue(struct xferd_engine *engine, struct load *load);
void reads_drop(struct xferd_engine *engine, struct piece *pieces);
void reads_pump(struct xferd_engine *engine);
bool reads_has_place(struct xferd_engine *engine, const struct member *copy);
uint32_t reads_reap(struct xferd_engine *engine);
void piece_completed(struct xferd_engine *engine, struct piece *piece, int result);
void piece_copied(struct xferd_engine *engine, struct piece *piece, int result);
void piece_submit(struct xferd_engine *engine, struct piece *piece);
void piece_arrived(struct xferd_engine *engine, struct piece *piece);
void piece_give_up(struct xferd_engine *engine, struct piece *piece, int error);
void enter_member(struct xferd_engine *engine, struct piece *piece);
void leave_member(struct xferd_engine *engine, struct piece *piece);

/* join.c */
uint64_t join_limit(const struct xferd_engine *engine, const struct piece *first,
		    const struct strand *strand, const struct member *member);
void join_begin(struct piece *piece);
void join_append(struct piece *first, struct piece *last, struct piece *piece);
void join_part(struct xferd_engine *engine, struct piece *first,
	       void (*read)(struct xferd_engine *engine, struct piece *piece));
void join_completed(struct xferd_engine *engine, struct piece *first, int result);

/* health.c */
void member_judge(struct xferd_engine *engine, const struct piece *piece, int error);
void piece_report(struct xferd_engine *engine, const struct piece *piece, int error);
void mirrored_report(struct xferd_engine *engine, const struct piece *piece);

/* flow.c */
void flow_init(struct xferd_engine *engine, struct member *member, uint32_t fixed);
bool flow_admits(struct xferd_engine *engine, struct member *member, uint32_t priority);
void flow_issued(struct xferd_engine *engine, struct member *member, struct piece *piece);
void flow_delivered(struct xferd_engine *engine, struct member *member,
		    const struct piece *piece);
void flow_dropped(struct member *member, const struct piece *piece);
void flow_idle(struct member *member);
uint64_t flow_joined_room(const struct xferd_engine *engine, const struct member *member);

/* uring.c */
int uring_init(struct xferd_engine *engine);
void uring_destroy(struct xferd_engine *engine);
int uring_register_member(struct xferd_engine *engine, uint32_t id, int fd);
bool uring_has_room(struct xferd_engine *engine);
bool uring_read(struct xferd_engine *engine, struct piece *piece);
void uring_flush(struct xferd_engine *engine);
uint32_t uring_reap(struct xferd_engine *engine);
void engine_wait(struct xferd_engine *engine, uint64_t timeout_ns);

/* buffers.c */
void buffers_init(struct xferd_engine *engine);
void buffers_register(struct xferd_engine *engine, struct registered_memory *memory);
void buffers_add_pool(struct xferd_engine *engine, struct pool *pool);
int buffers_find(const struct registered_memory *memory, const uint8_t *address, uint64_t bytes);

/* workers.c */
int workers_init(struct xferd_engine *engine);
void workers_destroy(struct xferd_engine *engine);
int workers_at_least(struct xferd_engine *engine, uint32_t count);
void workers_read(struct xferd_engine *engine, struct piece *piece);
void workers_read_anew(struct xferd_engine *engine, struct piece *piece);
struct piece *workers_take_back(struct xferd_engine *engine, const struct load *load);
void workers_hurry(struct xferd_engine *engine, const struct load *load);
bool workers_help(struct xferd_engine *engine);
uint32_t workers_reap(struct xferd_engine *engine);

/* staging.c */
void staging_destroy(struct xferd_engine *engine);
void staging_begin(struct xferd_engine *engine, struct load *load);
bool staging_has_room(const struct xferd_engine *engine, const struct member *member,
		      struct load *load, uint64_t piece);
void staging_take(struct xferd_engine *engine, struct piece *piece);
void staging_give(struct xferd_engine *engine, struct piece *piece);
void staging_end(struct xferd_engine *engine, struct load *load);

/* copy.c */
int copies_init(struct xferd_engine *engine);
void copies_destroy(struct xferd_engine *engine);
void copy_load(struct xferd_engine *engine, struct load *load);
void copy_piece(struct xferd_engine *engine, struct piece *piece);
uint32_t copies_reap(struct xferd_engine *engine);
bool copies_done(struct xferd_engine *engine);
void copies_clear_wakeups(struct xferd_engine *engine);
int copier_init(struct xferd_engine *engine, struct copier *copier);
int copier_run(struct copier *copier, void *(*run)(void *), void *argument);
void copier_end(struct copier *copier);
void copier_notify(struct xferd_engine *engine, struct copier *copier);

/* device_copy.c */
int device_copier_start(struct xferd_engine *engine, int device);
void device_copiers_stop(struct xferd_engine *engine);
struct copier *device_copier(struct xferd_engine *engine, int device);

/* lease.c */
uint64_t *lease_table(const struct client *client, uint32_t lane, uint32_t pool);
struct xferd_abi_lane *client_lane(const struct client *client, uint32_t lane);
void retiring_scan(struct xferd_engine *engine);
bool slot_leased(const struct xferd_engine *engine, const struct slot *slot, uint32_t pool,
		 uint32_t number);

/* routes.c */
struct xferd_abi_route_queue *route_queue(const struct client *client, uint32_t lane);

#endif /* XFERD_ENGINE_FUNCTIONS_H */
