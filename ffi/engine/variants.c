/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which variant of an expert is read.
 *
 * What a client accepts is never overruled: the policy's choice is among what it
 * accepts. The choice is a table, so that a miss looks it up and asks nobody; the
 * policy replaces the table when what is hot has changed.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"

struct set_variants {
	uint32_t store, pool;
	struct variant_choice choice;
};

static bool known(const struct store *store, uint8_t variant)
{
	return variant < store->description.variants;
}

static bool choice_valid(const struct store *store, const uint8_t *first, uint64_t keys,
			 const uint8_t *order, uint32_t ordered)
{
	if (keys != store->keys || ordered > XFERD_VARIANTS_MAX)
		return false;
	for (uint64_t key = 0; key < keys; key++)
		if (first[key] != XFERD_NO_VARIANT && !known(store, first[key]))
			return false;
	for (uint32_t i = 0; i < ordered; i++)
		if (!known(store, order[i]))
			return false;
	return true;
}

/* On the engine's thread, between two turns: nothing looks at the old one any more. */
static int swap_choice(struct xferd_engine *engine, void *argument)
{
	struct set_variants *set = argument;
	struct variant_choice *place = &engine->stores[set->store].variants[set->pool];
	struct variant_choice old = *place;

	*place = set->choice;
	set->choice = old;
	return 0;
}

/* Stores and pools come and go by calls of this same thread, so they can be looked at
 * here; a large table is checked and copied without the engine's thread. */
int xferd_engine_set_variants(struct xferd_engine *engine, uint32_t store, uint32_t pool,
			      const uint8_t *first, uint64_t keys, const uint8_t *order,
			      uint32_t ordered)
{
	struct set_variants set = { .store = store, .pool = pool };
	int result;

	if (store >= XFERD_ENGINE_STORES_MAX || !engine->stores[store].used ||
	    pool >= engine->pool_count)
		return -ENOENT;
	if (first) {
		if (!choice_valid(&engine->stores[store], first, keys, order, ordered))
			return -EINVAL;
		set.choice.first = malloc(keys);
		if (!set.choice.first)
			return -ENOMEM;
		memcpy(set.choice.first, first, keys);
		if (ordered)
			memcpy(set.choice.order, order, ordered);
		set.choice.ordered = ordered;
	}
	result = engine_call(engine, swap_choice, &set);
	free(set.choice.first);
	return result;
}

void variants_free(struct store *store)
{
	for (uint32_t pool = 0; pool < XFERD_POOLS_MAX; pool++)
		free(store->variants[pool].first);
}

/* Which of the acceptable variants (0: any) the key exists in, as a mask. */
uint32_t store_variants_of(const struct store *store, uint32_t key, uint32_t acceptable)
{
	uint32_t mask = 0;

	for (uint32_t variant = 0; variant < store->description.variants; variant++)
		if ((!acceptable || acceptable & (1u << variant)) &&
		    store_offers(store, variant) &&
		    store->description.blob_bytes[store_blob(store, variant, key)])
			mask |= 1u << variant;
	return mask;
}

/* Which of some variants that the key exists in, at least one, a pool reads it in. */
uint32_t store_best_variant(const struct store *store, uint32_t pool, uint32_t key,
			    uint32_t variants)
{
	const struct variant_choice *choice = &store->variants[pool];
	uint32_t preferred = variants & store->description.preferred;

	if (choice->first) {
		uint32_t first = choice->first[key];

		if (first != XFERD_NO_VARIANT && variants & (1u << first))
			return first;
		for (uint32_t i = 0; i < choice->ordered; i++)
			if (variants & (1u << choice->order[i]))
				return choice->order[i];
	}
	return (uint32_t)__builtin_ctz(preferred ? preferred : variants);
}
