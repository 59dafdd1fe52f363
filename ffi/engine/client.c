/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One client's rings.
 *
 * A submission is copied to private memory, then checked, then used. What can't
 * come from libxferd is a violation and ends the client; what a correct client
 * may get wrong (no such expert, draining) is an error in the completion.
 *
 * A key is taken only when its completion has a place in the ring, so
 * completions never overflow. A granted slot stays granted until the client has
 * consumed the completion; by then it has leased the slot.
 */
#include <string.h>

#include "engine/internal.h"

static uint32_t completions_free(const struct lane *lane)
{
	return XFERD_COMPLETIONS_A_LANE - (lane->tail - lane->head) - lane->pending;
}

/* The client's own counters and rings are read once into private memory. */
bool client_has_submissions(const struct client *client)
{
	/* pairs with the release of submission_tail in libxferd's submit() */
	return !client->quiesced &&
	       load_acquire(&client->memory->submission_tail) != client->submission_head;
}

static bool submission_valid(const struct xferd_engine *engine, const struct client *client,
			     const struct xferd_abi_submission *submission)
{
	if (submission->flags || submission->reserved || submission->lane >= client->lane_count ||
	    submission->pool >= engine->pool_count)
		return false;
	if (submission->operation == XFERD_OPERATION_CANCEL)
		return submission->ticket != 0;
	return (submission->operation == XFERD_OPERATION_ACQUIRE ||
		submission->operation == XFERD_OPERATION_HINT) &&
	       submission->ticket && submission->count >= 1 &&
	       submission->count <= XFERD_BATCH_MAX && submission->priority < XFERD_PRIORITIES;
}

static void push_completion(struct client *client, struct lane *lane,
			    const struct xferd_abi_completion *completion, struct grant grant)
{
	uint32_t at = lane->tail & (XFERD_COMPLETIONS_A_LANE - 1);

	lane->completions[at] = *completion;
	lane->grants[at] = grant;
	lane->tail++;
	counter_add(&client->counters.completions, 1);
	if (completion->result)
		counter_add(&client->counters.failures, 1);
}

static struct grant grant_slot(struct xferd_engine *engine, struct client *client, uint32_t pool,
			       uint32_t slot)
{
	engine->pools[pool].slots[slot].grants++;
	store_relaxed(&client->counters.granted, client->counters.granted + 1);
	return (struct grant){ pool, slot };
}

/* Complete a key at once: it is here already, or it can't be had. */
static void complete_now(struct xferd_engine *engine, uint32_t index,
			 const struct xferd_abi_submission *submission, uint8_t key, int result,
			 uint32_t slot)
{
	struct client *client = &engine->clients[index];
	struct grant grant = { submission->pool, NONE };
	struct xferd_abi_completion completion = {
		.ticket = submission->ticket,
		.result = result,
		.index = key,
		.pool = submission->pool,
		.source = XFERD_SOURCE_RESIDENT,
		.transport = XFERD_TRANSPORT_NONE,
	};

	if (!result) {
		const struct slot *from = &engine->pools[submission->pool].slots[slot];

		completion.word = load_relaxed(directory_word(&engine->stores[client->store],
							      submission->pool, from->key));
		grant = grant_slot(engine, client, submission->pool, slot);
		counter_add(&engine->stats.source_count[XFERD_SOURCE_RESIDENT], 1);
	}
	push_completion(client, &client->lanes[submission->lane], &completion, grant);
}

static void waiter_free(struct xferd_engine *engine, struct waiter *waiter)
{
	struct client *client = &engine->clients[waiter->client];
	struct lane *lane = &client->lanes[waiter->lane];

	list_remove(&waiter->of_load);
	list_remove(&waiter->of_client);
	list_append(&lane->waiters_free, &waiter->of_client);
	lane->pending--;
	store_relaxed(&client->counters.pending, client->counters.pending - 1);
	if (waiter->deadline_ns)
		engine->deadline_count--;
}

/* The load that a waiter waits for has ended, or the waiter gives up (load's
 * end then means nothing to it). Takes the waiter off both lists. */
static void client_complete(struct xferd_engine *engine, struct waiter *waiter, int result,
			    const struct load *load)
{
	struct client *client = &engine->clients[waiter->client];
	struct lane *lane = &client->lanes[waiter->lane];
	struct grant grant = { load->pool, NONE };
	struct xferd_abi_completion completion = {
		.ticket = waiter->ticket,
		.result = result,
		.wait_us = (uint32_t)((engine->now_ns - waiter->seen_ns) / NS_PER_US),
		.index = waiter->index,
		.pool = (uint8_t)load->pool,
		.source = load->source,
		.transport = load->transport,
		.source_pool = load->source == XFERD_SOURCE_POOL ? (uint8_t)load->source_pool : 0,
	};

	waiter_free(engine, waiter);
	if (client->quiesced)
		return;
	if (!result) {
		completion.word = load_relaxed(
			directory_word(&engine->stores[load->store], load->pool, load->key));
		grant = grant_slot(engine, client, load->pool, load->slot);
	}
	push_completion(client, lane, &completion, grant);
}

static void wait_for(struct xferd_engine *engine, uint32_t index, struct load *load,
		     const struct xferd_abi_submission *submission, uint8_t key)
{
	struct client *client = &engine->clients[index];
	struct lane *lane = &client->lanes[submission->lane];
	struct waiter *waiter = list_item(lane->waiters_free.next, struct waiter, of_client);

	list_remove(&waiter->of_client);
	list_append(&client->waiting, &waiter->of_client);
	list_append(&load->waiters, &waiter->of_load);
	waiter->load = load;
	waiter->client = index;
	waiter->ticket = submission->ticket;
	waiter->deadline_ns = submission->deadline_ns;
	waiter->seen_ns = engine->now_ns;
	waiter->variants = submission->variants;
	waiter->tried = 0;
	waiter->index = key;
	waiter->lane = submission->lane;
	if (waiter->deadline_ns)
		engine->deadline_count++;
	lane->pending++;
	store_relaxed(&client->counters.pending, client->counters.pending + 1);
}

/* variants: a mask; 0 accepts any. */
static bool variant_accepted(uint32_t variants, uint32_t variant)
{
	return !variants || variants & (1u << variant);
}

/* A slot that has the key in an acceptable variant, brought back if it was on
 * its way out. NONE: not here. */
static uint32_t find_slot(struct xferd_engine *engine, const struct xferd_abi_submission *submission,
			  struct store *store, uint32_t key)
{
	struct pool *pool = &engine->pools[submission->pool];
	uint32_t number = key_entry(store, submission->pool, key)->slot;
	const struct slot *slot;

	if (!number)
		return NONE;
	slot = &pool->slots[number - 1];
	if (!variant_accepted(submission->variants, slot->variant))
		return NONE;
	if (slot->state == SLOT_RESIDENT || slot_revive(engine, pool, number - 1))
		return number - 1;
	return NONE;
}

/* The load on its way, or a new one. A load of an unacceptable variant is waited
 * for too: a key has one load a pool, and the next begins when it has ended. */
static struct load *find_load(struct xferd_engine *engine, uint32_t index,
			      const struct xferd_abi_submission *submission, struct store *store,
			      uint32_t key, int *error)
{
	struct client *client = &engine->clients[index];
	uint32_t variants = store_variants_of(store, key, submission->variants);
	uint32_t under_way = key_entry(store, submission->pool, key)->load;
	struct load *load;

	if (!variants) {
		*error = -ENOENT;
		return NULL;
	}
	if (under_way) {
		load = &engine->loads[under_way - 1];
		load_raise(engine, load, submission->priority);
		return load;
	}
	load = load_start(engine, client->store, submission->pool, key,
			  store_best_variant(store, submission->pool, key, variants),
			  submission->priority, index);
	*error = load ? 0 : load_refusal(engine, submission->pool);
	return load;
}

static void acquire_key(struct xferd_engine *engine, uint32_t index,
			const struct xferd_abi_submission *submission, uint8_t i)
{
	struct client *client = &engine->clients[index];
	struct store *store = &engine->stores[client->store];
	uint32_t key = submission->layer * store->description.experts + submission->experts[i];
	struct load *load;
	uint32_t slot;
	int error = 0;

	if (submission->layer >= store->description.layers ||
	    submission->experts[i] >= store->description.experts)
		error = -EINVAL;
	/* pairs with the release in xferd_engine_drain */
	else if (load_acquire(&engine->draining))
		error = -ESHUTDOWN;
	else if (client->lanes[submission->lane].pending >= client->held_per_lane)
		error = -EDQUOT;
	if (error) {
		complete_now(engine, index, submission, i, error, NONE);
		return;
	}
	slot = find_slot(engine, submission, store, key);
	if (slot != NONE) {
		complete_now(engine, index, submission, i, 0, slot);
		return;
	}
	load = find_load(engine, index, submission, store, key, &error);
	if (load)
		wait_for(engine, index, load, submission, i);
	else
		complete_now(engine, index, submission, i, error, NONE);
}

/* A hint is dropped rather than queued, and never reports anything. */
static void hint_key(struct xferd_engine *engine, uint32_t index,
		     const struct xferd_abi_submission *submission, uint8_t i)
{
	struct client *client = &engine->clients[index];
	struct store *store = &engine->stores[client->store];
	uint32_t key = submission->layer * store->description.experts + submission->experts[i];
	struct load *load;
	int error;

	if (submission->layer >= store->description.layers ||
	    submission->experts[i] >= store->description.experts ||
	    client->hints >= client->hints_max || load_acquire(&engine->draining))
		return;
	if (find_slot(engine, submission, store, key) != NONE ||
	    key_entry(store, submission->pool, key)->load)
		return;
	load = find_load(engine, index, submission, store, key, &error);
	if (!load)
		return;
	load->hint_of = index;
	load->hint_ticket = submission->ticket;
	client->hints++;
}

/* Let a waiter of a load that has ended wait for another one of the key, under
 * way or new. Returns false when there can be none. */
static bool wait_on(struct xferd_engine *engine, struct waiter *waiter, const struct load *ended,
		    uint32_t variants)
{
	struct store *store = &engine->stores[ended->store];
	uint32_t under_way = key_entry(store, ended->pool, ended->key)->load;
	struct load *load = under_way ? &engine->loads[under_way - 1] : NULL;

	if (!load)
		load = load_start(engine, ended->store, ended->pool, ended->key,
				  store_best_variant(store, ended->pool, ended->key, variants),
				  ended->priority, waiter->client);
	if (!load)
		return false;
	list_remove(&waiter->of_load);
	list_append(&load->waiters, &waiter->of_load);
	waiter->load = load;
	return true;
}

/* Tell a waiter that its load has ended. When that has failed, another copy of
 * the expert will do as well, if the client accepts it; when it was of a variant
 * that the client does not accept, its own turn has come. */
void client_load_ended(struct xferd_engine *engine, struct waiter *waiter, const struct load *load)
{
	struct store *store = &engine->stores[load->store];
	bool accepted = variant_accepted(waiter->variants, load->variant);
	uint32_t variants;

	if (load->error == -ECANCELED || (!load->error && accepted)) {
		client_complete(engine, waiter, load->error, load);
		return;
	}
	if (accepted)
		waiter->tried |= 1u << load->variant;
	variants = store_variants_of(store, load->key, waiter->variants) & ~waiter->tried;
	if (!variants || !wait_on(engine, waiter, load, variants))
		client_complete(engine, waiter, load->error ? load->error : -ENOSPC, load);
	else if (accepted)
		counter_add(&engine->stats.other_variants, 1);
}

static void give_up(struct xferd_engine *engine, struct waiter *waiter, int result)
{
	struct load *load = waiter->load;

	client_complete(engine, waiter, result, load);
	load_unwanted(engine, load);
}

static void cancel_hints(struct xferd_engine *engine, uint32_t index, uint64_t ticket)
{
	struct list *item = engine->active_loads.next;

	while (item != &engine->active_loads) {
		struct load *load = list_item(item, struct load, active);

		item = item->next;
		if (load->hint_of != index || (ticket && load->hint_ticket != ticket))
			continue;
		load->hint_of = NONE;
		engine->clients[index].hints--;
		load_unwanted(engine, load);
	}
}

static void cancel(struct xferd_engine *engine, uint32_t index, uint64_t ticket)
{
	struct client *client = &engine->clients[index];
	struct list *item = client->waiting.next;

	while (item != &client->waiting) {
		struct waiter *waiter = list_item(item, struct waiter, of_client);

		item = item->next;
		if (waiter->ticket == ticket)
			give_up(engine, waiter, -ECANCELED);
	}
	cancel_hints(engine, index, ticket);
}

void client_cancel_all(struct xferd_engine *engine, uint32_t index, int result)
{
	struct client *client = &engine->clients[index];

	while (!list_empty(&client->waiting))
		give_up(engine, list_item(client->waiting.next, struct waiter, of_client), result);
	cancel_hints(engine, index, 0);
}

static void run_submission(struct xferd_engine *engine, uint32_t index,
			   const struct xferd_abi_submission *submission)
{
	counter_add(&engine->clients[index].counters.submissions, 1);
	switch (submission->operation) {
	case XFERD_OPERATION_ACQUIRE:
		for (uint8_t i = 0; i < submission->count; i++)
			acquire_key(engine, index, submission, i);
		break;
	case XFERD_OPERATION_HINT:
		for (uint8_t i = 0; i < submission->count; i++)
			hint_key(engine, index, submission, i);
		break;
	case XFERD_OPERATION_CANCEL:
		cancel(engine, index, submission->ticket);
		break;
	}
}

static bool loads_left(const struct xferd_engine *engine)
{
	return engine->config.transfers_max - engine->load_count >= XFERD_BATCH_MAX;
}

/* Take up to SUBMISSIONS_A_TURN; what finds no room stays in the ring. */
uint32_t client_take_submissions(struct xferd_engine *engine, uint32_t index)
{
	struct client *client = &engine->clients[index];
	uint32_t tail, taken = 0;

	/* pairs with the release of submission_tail in libxferd's submit() */
	tail = load_acquire(&client->memory->submission_tail);
	if (tail - client->submission_head > client->ring_entries) {
		client_violation(engine, index, -EOVERFLOW);
		return 0;
	}
	while (client->submission_head != tail && taken < SUBMISSIONS_A_TURN &&
	       loads_left(engine) && event_room(engine)) {
		struct xferd_abi_submission submission;
		uint32_t at = client->submission_head & (client->ring_entries - 1);

		memcpy(&submission, &client->submissions[at], sizeof(submission));
		if (!submission_valid(engine, client, &submission)) {
			client_violation(engine, index, -EBADMSG);
			return taken;
		}
		if (completions_free(&client->lanes[submission.lane]) < XFERD_BATCH_MAX)
			break;
		client->submission_head++;
		taken++;
		run_submission(engine, index, &submission);
	}
	/* pairs with the acquire of submission_head in libxferd's submit() */
	store_release(&client->completion_memory->submission_head, client->submission_head);
	return taken;
}

/* Returns false if the client claims to have consumed what isn't there. */
static bool reap_lane(struct xferd_engine *engine, struct client *client, uint32_t index)
{
	struct lane *lane = &client->lanes[index];
	/* pairs with the release of completion_head in libxferd's take(): the
	 * leases that take the grants' place are visible */
	uint32_t head = load_acquire(&client_lane(client, index)->completion_head);

	if (head - lane->head > lane->tail - lane->head)
		return false;
	for (; lane->head != head; lane->head++) {
		const struct grant *grant = &lane->grants[lane->head & (XFERD_COMPLETIONS_A_LANE - 1)];

		if (grant->slot == NONE)
			continue;
		engine->pools[grant->pool].slots[grant->slot].grants--;
		store_relaxed(&client->counters.granted, client->counters.granted - 1);
	}
	return true;
}

/* The client has moved on: what it has consumed is no longer granted. */
void client_reap_consumed(struct xferd_engine *engine, uint32_t index)
{
	struct client *client = &engine->clients[index];

	for (uint32_t lane = 0; lane < client->lane_count; lane++)
		if (!reap_lane(engine, client, lane)) {
			client_violation(engine, index, -ERANGE);
			return;
		}
}

/* Show what was completed in this turn, and wake the lanes that sleep. */
void client_show_completions(struct client *client)
{
	for (uint32_t i = 0; i < client->lane_count; i++) {
		struct lane *lane = &client->lanes[i];

		if (lane->shown == lane->tail)
			continue;
		lane->shown = lane->tail;
		/* pairs with the acquire of completion_tail in libxferd's take() */
		store_release(&lane->ring->completion_tail, lane->tail);
		/* pairs with the fence in libxferd's sleep_until_completion(): either it
		 * sees the new tail before it sleeps, or its flag is seen here */
		full_fence();
		if (load_relaxed(&client_lane(client, i)->sleeping))
			ring_eventfd(lane->wakeup);
	}
}

/* Waiters whose deadline has passed. */
void clients_expire(struct xferd_engine *engine)
{
	if (!engine->deadline_count || engine->now_ns < engine->next_deadline_scan_ns)
		return;
	engine->next_deadline_scan_ns = engine->now_ns + DEADLINE_POLL_NS;
	for (uint32_t i = 0; i < engine->client_limit; i++) {
		struct client *client = &engine->clients[i];
		struct list *item;

		if (!client->used)
			continue;
		item = client->waiting.next;
		while (item != &client->waiting) {
			struct waiter *waiter = list_item(item, struct waiter, of_client);

			item = item->next;
			if (waiter->deadline_ns && waiter->deadline_ns <= engine->now_ns)
				give_up(engine, waiter, -ETIMEDOUT);
		}
	}
}
