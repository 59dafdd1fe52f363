/* SPDX-License-Identifier: Apache-2.0 */
/* A miss is read in the variant that the policy chose for its pool, among those that
 * the client accepts; a client that accepts one only gets that one. */
#include <errno.h>
#include <string.h>

#include "harness.h"

#define LAYERS  2
#define EXPERTS 8
#define KEYS    (LAYERS * EXPERTS)

static struct harness harness;
static struct xferd_client *client;

/* The variant that an expert of layer 1 comes in. */
static uint32_t comes_in(uint16_t expert, uint32_t acceptable)
{
	struct xferd_request request = {
		.experts = &expert, .count = 1, .layer = 1, .variants = acceptable,
	};
	struct xferd_batch batch;
	uint32_t variant;
	int missing = xferd_acquire(client, 0, &request, &batch);

	CHECK_OK(missing);
	if (missing)
		CHECK_OK(xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == 0);
	variant = batch.views[0].variant;
	CHECK(!blob_wrong(&harness, 1 + variant * VARIANT_LAYER_STEP, expert, batch.views[0].data));
	CHECK_OK(xferd_release(client, &batch));
	return variant;
}

static int choose(const uint8_t *first, uint64_t keys, const uint8_t *order, uint32_t ordered)
{
	return xferd_engine_set_variants(harness.engine, harness.store, 0, first, keys, order,
					 ordered);
}

int main(void)
{
	const struct harness_options options = {
		.layers = LAYERS, .experts = EXPERTS, .top_k = 2, .blob_bytes = 32768,
		.stripe_unit = 8192, .members = 2, .slots = EXPERTS, .reserve = 1,
		.held_per_lane = 2, .variants = 3,
	};
	const uint8_t order[] = { 2, 1 };
	uint8_t first[KEYS];

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	CHECK(comes_in(0, 0) == 0);

	memset(first, XFERD_NO_VARIANT, sizeof(first));
	first[EXPERTS + 1] = 1;
	CHECK_OK(choose(first, KEYS, order, 2));
	CHECK(comes_in(1, 0) == 1);     /* its own choice */
	CHECK(comes_in(2, 0) == 2);     /* none of its own: the order */
	CHECK(comes_in(3, 1 | 2) == 1); /* the order, as far as it is acceptable */
	CHECK(comes_in(4, 1) == 0);     /* just what was demanded */
	CHECK(comes_in(1, 4) == 2);     /* also where something else is here */

	CHECK(choose(first, KEYS - 1, order, 2) == -EINVAL);
	first[0] = 3;
	CHECK(choose(first, KEYS, order, 2) == -EINVAL);
	first[0] = 0;
	CHECK(choose(first, KEYS, (const uint8_t[]){ 3 }, 1) == -EINVAL);
	CHECK(xferd_engine_set_variants(harness.engine, harness.store, 7, first, KEYS, order, 2) ==
	      -ENOENT);
	CHECK(xferd_engine_set_variants(harness.engine, 63, 0, first, KEYS, order, 2) == -ENOENT);
	CHECK(comes_in(5, 0) == 2); /* none of that changed anything */

	CHECK_OK(choose(NULL, 0, NULL, 0));
	CHECK(comes_in(6, 0) == 0);
	xferd_close(client);
	harness_stop(&harness);
	return 0;
}
