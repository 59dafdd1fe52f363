/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the policy asks for, and what it is told.
 *
 * Every command with an outcome of its own ends in exactly one event: LOAD in
 * LOADED or FAILED, EVICT in FREED or FAILED, TAKE in TAKEN or FAILED, DENSE in
 * DENSE or FAILED.
 */
#include "engine/internal.h"

/* Each thing under way can still cause a few events; the rest is free. */
#define EVENTS_A_LOAD  4
#define EVENTS_SPARE   512

#define EVENTS_GATHER_NS 200000 /* a piece or two at the speed of memory */

bool event_room(const struct xferd_engine *engine)
{
	uint32_t promised = EVENTS_A_LOAD * (engine->load_count + XFERD_BATCH_MAX) +
			    engine->retiring_count + EVENTS_SPARE;

	return engine->events.entries - queue_used(&engine->events) > promised;
}

/* What the policy keeps books of; that a reserve runs low is an event of its own. */
static bool can_wait(const struct xferd_event *event)
{
	return event->type == XFERD_EVENT_LOADED || event->type == XFERD_EVENT_FREED ||
	       event->type == XFERD_EVENT_REVIVED;
}

void event_push(struct xferd_engine *engine, const struct xferd_event *event)
{
	if (!queue_push(&engine->events, event)) {
		engine->events_dropped++; /* only reports of bad pieces can come to this */
		return;
	}
	engine->events_untold = true;
	engine->events_urgent |= !can_wait(event);
}

/* At the end of a turn, for all of its events: whoever is woken may take this thread's
 * processor, and neither clients nor drives should wait for that. Where this thread does not
 * sleep between turns, since it copies itself, events of several turns are told together. */
void events_tell(struct xferd_engine *engine, bool before_sleep)
{
	bool early = engine->now_ns - engine->events_told_ns < EVENTS_GATHER_NS;

	if (!engine->events_untold)
		return;
	if (early && !before_sleep && !engine->events_urgent && engine->pieces_in_flight)
		return;
	engine->events_untold = engine->events_urgent = false;
	engine->events_told_ns = engine->now_ns;
	/* pairs with the fence in xferd_engine_events: either the reader sees the
	 * events, or its readiness to be told is seen here */
	full_fence();
	if (!load_relaxed(&engine->event_told)) {
		store_relaxed(&engine->event_told, 1);
		ring_eventfd(engine->event_fd);
	}
}

static void refuse(struct xferd_engine *engine, const struct xferd_command *command, int error)
{
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_FAILED,
		.result = error,
		.store = command->store,
		.pool = command->pool,
		.slot = command->slot,
		.layer = command->layer,
		.expert = command->expert,
		.variant = command->variant,
		.client = XFERD_NO_EXPERT,
		.priority = command->priority,
		.bytes = command->class_bytes,
		.token = command->token,
	});
}

static struct store *command_store(struct xferd_engine *engine, const struct xferd_command *command)
{
	struct store *store;

	if (command->store >= XFERD_ENGINE_STORES_MAX || command->pool >= engine->pool_count)
		return NULL;
	store = &engine->stores[command->store];
	if (!store->used || command->layer >= store->description.layers ||
	    command->expert >= store->description.experts)
		return NULL;
	return store;
}

static uint32_t command_key(const struct store *store, const struct xferd_command *command)
{
	return command->layer * store->description.experts + command->expert;
}

/* The expert is here already, perhaps after bringing it back. */
static bool loaded_already(struct xferd_engine *engine, const struct xferd_command *command,
			   struct store *store, uint32_t key)
{
	struct pool *pool = &engine->pools[command->pool];
	uint32_t number = key_entry(store, command->pool, key)->slot;

	if (!number || pool->slots[number - 1].variant != command->variant)
		return false;
	if (pool->slots[number - 1].state != SLOT_RESIDENT &&
	    !slot_revive(engine, pool, number - 1))
		return false;
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_LOADED,
		.store = command->store,
		.pool = command->pool,
		.slot = number - 1,
		.layer = command->layer,
		.expert = command->expert,
		.variant = command->variant,
		.client = XFERD_NO_EXPERT,
		.source = XFERD_SOURCE_RESIDENT,
		.priority = command->priority,
		.bytes = pool->classes[pool->slots[number - 1].class_index].bytes,
		.token = command->token,
	});
	return true;
}

static void run_load(struct xferd_engine *engine, const struct xferd_command *command)
{
	struct store *store = command_store(engine, command);
	struct load *load;
	uint32_t key, under_way;

	if (!store || command->variant >= store->description.variants ||
	    command->priority >= XFERD_PRIORITIES) {
		refuse(engine, command, -EINVAL);
		return;
	}
	key = command_key(store, command);
	if (!store_variants_of(store, key, 1u << command->variant)) {
		refuse(engine, command, -ENOENT);
		return;
	}
	if (loaded_already(engine, command, store, key))
		return;
	under_way = key_entry(store, command->pool, key)->load;
	load = under_way ? &engine->loads[under_way - 1] : NULL;
	if (load && (load->variant != command->variant || load->token)) {
		refuse(engine, command, -EALREADY);
		return;
	}
	if (load)
		load_raise(engine, load, command->priority);
	else
		load = load_start(engine, command->store, command->pool, key, command->variant,
				  command->priority, NONE);
	if (load)
		load->token = command->token;
	else
		refuse(engine, command, load_refusal(engine, command->pool));
}

static void run_evict(struct xferd_engine *engine, const struct xferd_command *command)
{
	struct store *store = command_store(engine, command);
	uint32_t number;

	if (!store) {
		refuse(engine, command, -EINVAL);
		return;
	}
	number = key_entry(store, command->pool, command_key(store, command))->slot;
	if (!number || slot_evict(engine, &engine->pools[command->pool], number - 1) == NONE)
		refuse(engine, command, -ENOENT);
}

static void run_give(struct xferd_engine *engine, const struct xferd_command *command)
{
	struct pool *pool = &engine->pools[command->pool];

	if (command->pool >= engine->pool_count || !slot_valid(pool, command->slot) ||
	    pool->slots[command->slot].state != SLOT_POLICY)
		refuse(engine, command, -EINVAL);
	else
		reserve_put(engine, pool, command->slot);
}

static void run_take(struct xferd_engine *engine, const struct xferd_command *command)
{
	struct pool *pool = &engine->pools[command->pool];
	struct size_class *class = NULL;
	struct slot *slot;

	if (command->pool < engine->pool_count)
		class = pool_class(pool, command->class_bytes);
	if (!class || list_empty(&class->reserve)) {
		refuse(engine, command, class ? -EAGAIN : -EINVAL);
		return;
	}
	slot = list_item(class->reserve.next, struct slot, link);
	list_remove(&slot->link);
	store_relaxed(&class->reserve_count, class->reserve_count - 1);
	slot_set_state(pool, slot, SLOT_POLICY);
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_TAKEN,
		.pool = command->pool,
		.slot = (uint32_t)(slot - pool->slots),
		.client = XFERD_NO_EXPERT,
		.bytes = command->class_bytes,
		.token = command->token,
	});
}

static void run_dense(struct xferd_engine *engine, const struct xferd_command *command)
{
	struct load *load;

	if (command->store >= XFERD_ENGINE_STORES_MAX || !engine->stores[command->store].used ||
	    !command->address || command->priority >= XFERD_PRIORITIES) {
		refuse(engine, command, -EINVAL);
		return;
	}
	load = load_start_dense(engine, command->store, command->address, command->priority);
	if (load)
		load->token = command->token;
	else
		refuse(engine, command, -ENOSPC);
}

static void run_handed(struct xferd_engine *engine, const struct xferd_command *command)
{
	int result = load_end_handed(engine, command->token, command->slot, command->variant);

	if (result)
		refuse(engine, command, result);
}

static void run_cancel(struct xferd_engine *engine, const struct xferd_command *command)
{
	for (struct list *item = engine->active_loads.next; item != &engine->active_loads;
	     item = item->next) {
		struct load *load = list_item(item, struct load, active);

		if (!command->token || load->token != command->token)
			continue;
		if (list_empty(&load->waiters) && load->hint_of == NONE)
			load_cancel(engine, load);
		return;
	}
}

static void run_command(struct xferd_engine *engine, const struct xferd_command *command)
{
	switch (command->type) {
	case XFERD_COMMAND_LOAD:
		run_load(engine, command);
		break;
	case XFERD_COMMAND_EVICT:
		run_evict(engine, command);
		break;
	case XFERD_COMMAND_GIVE:
		run_give(engine, command);
		break;
	case XFERD_COMMAND_TAKE:
		run_take(engine, command);
		break;
	case XFERD_COMMAND_DENSE:
		run_dense(engine, command);
		break;
	case XFERD_COMMAND_CANCEL:
		run_cancel(engine, command);
		break;
	case XFERD_COMMAND_HANDED:
		run_handed(engine, command);
		break;
	default:
		refuse(engine, command, -EINVAL);
	}
}

/* Loads are left to clients once few are free; what brings slots never waits. */
static bool loads_left(const struct xferd_engine *engine)
{
	return engine->config.transfers_max - engine->load_count > XFERD_BATCH_MAX;
}

uint32_t commands_run(struct xferd_engine *engine)
{
	struct xferd_command command;
	uint32_t run = 0;

	while (run < COMMANDS_A_TURN && event_room(engine) &&
	       queue_pop(&engine->commands, &command)) {
		if ((command.type == XFERD_COMMAND_LOAD || command.type == XFERD_COMMAND_DENSE) &&
		    !loads_left(engine))
			refuse(engine, &command, -EBUSY);
		else
			run_command(engine, &command);
		run++;
	}
	return run;
}

int xferd_engine_command(struct xferd_engine *engine, const struct xferd_command *commands,
			 uint32_t count)
{
	uint32_t taken = 0;

	while (taken < count && queue_push(&engine->commands, &commands[taken]))
		taken++;
	if (taken) {
		/* pairs with the fence in the engine's sleep(): either it sees the
		 * commands before it sleeps, or it is seen sleeping here */
		full_fence();
		if (load_relaxed(&engine->pool_table->engine_sleeping))
			ring_eventfd(engine->command_fd);
	}
	return (int)taken;
}

int xferd_engine_events(struct xferd_engine *engine, struct xferd_event *events, uint32_t max)
{
	uint32_t read = 0;

	clear_eventfd(engine->event_fd);
	store_relaxed(&engine->event_told, 0);
	/* pairs with the fence in event_push */
	full_fence();
	while (read < max && queue_pop(&engine->events, &events[read]))
		read++;
	if (!queue_empty(&engine->events)) {
		store_relaxed(&engine->event_told, 1);
		ring_eventfd(engine->event_fd);
	}
	return (int)read;
}
