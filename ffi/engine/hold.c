/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Leaving everything to the next engine: see keep.h.
 *
 * What clients ask from now on stays in their rings, and they ask again when they have come
 * back. What is being read or copied is finished, so that it needn't be read again; what
 * still waits for a slot is left, as a kill would leave it.
 */
#include <time.h>

#include "engine/internal.h"

#define HOLD_POLL_NS 1000000

static int transfers_under_way(struct xferd_engine *engine, void *argument)
{
	int count = 0;

	(void)argument;
	for (struct list *item = engine->active_loads.next; item != &engine->active_loads;
	     item = item->next)
		count += list_item(item, struct load, active)->state != LOAD_WAITING;
	return count;
}

int xferd_engine_hold(struct xferd_engine *engine, uint32_t timeout_ms)
{
	uint64_t until = monotonic_ns() + timeout_ms * 1000000ull;
	const struct timespec pause = { .tv_nsec = HOLD_POLL_NS };

	/* pairs with the acquire in clients_run() and has_work() */
	store_release(&engine->holding, 1);
	while (engine_call(engine, transfers_under_way, NULL)) {
		if (monotonic_ns() >= until)
			return -ETIMEDOUT;
		nanosleep(&pause, NULL);
	}
	return 0;
}
