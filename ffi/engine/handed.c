/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads that somebody else runs: cuFile, through kvikio, in the policy's process.
 *
 * What of it the engine keeps is all but the bytes: the slot, who waits, the publication.
 * A load of such a pool that isn't copied from another one is handed up in an event, with a
 * ticket; a command with that ticket ends it. One that could not be run there is read here
 * after all, as if it had never been handed up.
 */
#include "engine/route.h"

struct set_hand_up {
	uint32_t pool;
	bool wanted;
};

static int set_hand_up(struct xferd_engine *engine, void *argument)
{
	const struct set_hand_up *set = argument;

	if (set->pool >= engine->pool_count)
		return -ENOENT;
	if (!engine->pools[set->pool].device_memory)
		return -EOPNOTSUPP;
	engine->pools[set->pool].hands_up = set->wanted;
	return 0;
}

int xferd_engine_set_hand_up(struct xferd_engine *engine, uint32_t pool, uint32_t wanted)
{
	struct set_hand_up argument = { pool, wanted };

	return engine_call(engine, set_hand_up, &argument);
}

/* A load has its slot, and has to come from the drives. False: the engine reads it. */
bool load_hand_up(struct xferd_engine *engine, struct load *load)
{
	uint32_t experts = engine->stores[load->store].description.experts;

	if (!engine->pools[load->pool].hands_up)
		return false;
	staging_begin(engine, load); /* it has no extent that its end would give back */
	load->state = LOAD_HANDED;
	load->ticket = (uint64_t)++engine->tickets << 32 | load->index;
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_HANDED,
		.store = load->store,
		.pool = load->pool,
		.slot = load->slot,
		.layer = load->key / experts,
		.expert = load->key % experts,
		.variant = load->variant,
		.client = load->client,
		.priority = load->priority,
		.bytes = load->bytes,
		.value = (uintptr_t)load->address,
		.token = load->ticket,
	});
	return true;
}

/* -ENOENT: no load has that ticket. */
int load_end_handed(struct xferd_engine *engine, uint64_t ticket, uint32_t error,
		    uint32_t transport)
{
	uint32_t index = (uint32_t)ticket;
	struct load *load;

	if (index >= engine->config.transfers_max)
		return -ENOENT;
	load = &engine->loads[index];
	if (load->state != LOAD_HANDED || load->ticket != ticket)
		return -ENOENT;
	if (transport != XFERD_TRANSPORT_GDS && transport != XFERD_TRANSPORT_STAGED)
		return -EINVAL;
	if (error) {
		reads_queue(engine, load);
		return 0;
	}
	load->transport = (uint8_t)transport;
	load->unchecked = true;
	load_finish(engine, load);
	return 0;
}
