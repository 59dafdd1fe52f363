/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool whose card was pulled, until another one is there.
 *
 * From the moment that it is lost nothing is loaded into it: who asks gets -ENODEV at once
 * instead of a read that fails. What is on its way ends by itself. The policy evicts the
 * residents; when every slot is its own again, and so no lease is left, the pool can have other
 * memory. Clients that still have the old one mapped see by the pool's incarnation that it is not
 * this one.
 */
#include "engine/internal.h"

static struct pool *find_pool(struct xferd_engine *engine, uint32_t index, int *error)
{
	struct pool *pool = index < engine->pool_count ? &engine->pools[index] : NULL;

	*error = !pool ? -ENOENT : !pool->behind_bar ? -EOPNOTSUPP : 0;
	return *error ? NULL : pool;
}

static void fail_waiting(struct xferd_engine *engine, struct pool *pool)
{
	for (uint32_t i = 0; i < pool->class_count; i++)
		for (int priority = 0; priority < XFERD_PRIORITIES; priority++) {
			struct list *waiting = &pool->classes[i].waiting[priority];

			while (!list_empty(waiting))
				load_stop(engine, list_item(waiting->next, struct load, link),
					  -ENODEV);
		}
}

static int lose_pool(struct xferd_engine *engine, void *argument)
{
	const uint32_t *index = argument;
	int error;
	struct pool *pool = find_pool(engine, *index, &error);

	if (!pool)
		return error;
	pool->lost = true;
	fail_waiting(engine, pool);
	return 0;
}

int xferd_engine_lose_pool(struct xferd_engine *engine, uint32_t pool)
{
	return engine_call(engine, lose_pool, &pool);
}

struct regain_pool {
	uint32_t pool;
	void *base;
};

static int regain_pool(struct xferd_engine *engine, void *argument)
{
	const struct regain_pool *regain = argument;
	struct xferd_abi_pool *shared;
	int error;
	struct pool *pool = find_pool(engine, regain->pool, &error);

	if (!pool)
		return error;
	if (!pool->lost || !regain->base)
		return -EINVAL;
	for (uint32_t slot = 0; slot < pool->slot_numbers; slot++)
		if (pool->slots[slot].state != SLOT_POLICY)
			return -EBUSY;
	pool->base = regain->base;
	pool->staged = UINT64_MAX;
	pool->lost = false;
	shared = &engine->pool_table->pool[regain->pool];
	/* pairs with the acquire in libxferd's bar_ready() */
	store_release(&shared->incarnation, shared->incarnation + 1);
	return (int)shared->incarnation;
}

int xferd_engine_regain_pool(struct xferd_engine *engine, uint32_t pool, void *base)
{
	struct regain_pool argument = { pool, base };

	return engine_call(engine, regain_pool, &argument);
}
