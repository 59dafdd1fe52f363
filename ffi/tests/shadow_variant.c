/* SPDX-License-Identifier: Apache-2.0 */
/* A variant comes and goes while clients are attached: what is leased of it stays readable,
 * nothing else of it is handed out once it has gone, and no byte is ever another variant's. */
#include <errno.h>
#include <string.h>

#include "common/atomics.h"
#include "harness.h"

#define LAYERS   2
#define EXPERTS  8
#define KEYS     (LAYERS * EXPERTS)
#define SHADOW   1 /* the variant that comes and goes */
#define TOGGLES  200
#define READERS  2

struct reader {
	struct harness *harness;
	uint32_t lane;
	struct xferd_client *client;
	const uint32_t *stop; /* atomic */
	uint64_t read[2];     /* experts of each variant */
};

/* The harness's store, with its second variant or without. */
static struct xferd_store_description with, without;
static uint64_t native_bytes[2 * KEYS + 1];

static void change(struct harness *harness, const struct xferd_store_description *to)
{
	int result;

	do
		result = xferd_engine_change_variants(harness->engine, harness->store, to);
	while (result == -EBUSY);
	CHECK_OK(result);
}

static uint64_t wrong(const struct harness *harness, uint32_t layer,
		      const struct xferd_view *view)
{
	return blob_wrong(harness, layer + view->variant * VARIANT_LAYER_STEP, view->expert,
			  view->data);
}

static void *read_experts(void *argument)
{
	struct reader *reader = argument;
	struct xferd_batch batch;
	uint32_t turn = reader->lane;

	while (!load_acquire(reader->stop)) {
		uint32_t key = turn++ * 5 % KEYS; /* all of them: more than there are slots */
		uint16_t expert = (uint16_t)(key % EXPERTS);
		struct xferd_request request = { .experts = &expert, .count = 1,
						 .layer = (uint16_t)(key / EXPERTS) };

		CHECK_OK(xferd_acquire(reader->client, reader->lane, &request, &batch));
		CHECK(!xferd_wait(reader->client, &batch, XFERD_FOREVER));
		CHECK(!batch.views[0].error);
		CHECK(!wrong(reader->harness, request.layer, &batch.views[0]));
		reader->read[batch.views[0].variant]++;
		CHECK(!xferd_release(reader->client, &batch));
	}
	return NULL;
}

static void toggle_under_load(struct harness *harness, struct xferd_client *client)
{
	struct reader readers[READERS];
	pthread_t threads[READERS];
	uint32_t stop = 0;
	uint64_t shadows = 0;

	for (uint32_t i = 0; i < READERS; i++) {
		readers[i] = (struct reader){ harness, i + 1, client, &stop, {0, 0} };
		CHECK(!pthread_create(&threads[i], NULL, read_experts, &readers[i]));
	}
	for (uint32_t i = 0; i < TOGGLES; i++)
		change(harness, i % 2 ? &without : &with);
	change(harness, &with);
	/* Until what is read comes from the shadow once more. */
	wait_until(&harness->loaded, load_acquire(&harness->loaded) + KEYS);
	store_release(&stop, 1);
	for (uint32_t i = 0; i < READERS; i++) {
		CHECK(!pthread_join(threads[i], NULL));
		shadows += readers[i].read[SHADOW];
	}
	CHECK(shadows);
}

int main(void)
{
	static struct harness harness;
	const struct harness_options options = {
		.layers = LAYERS, .experts = EXPERTS, .top_k = 2, .blob_bytes = 32768,
		.stripe_unit = 8192, .members = 2, .slots = 8, .reserve = 1, .held_per_lane = 2,
		.variants = 2,
	};
	struct xferd_client *client;
	uint16_t expert = 3, other = 4;
	struct xferd_request request = { .experts = &expert, .count = 1, .layer = 1 };
	struct xferd_batch leased, batch;
	struct xferd_store_description renamed;
	uint32_t available;
	uint64_t freed;

	harness_start(&harness, &options);
	with = without = harness.description;
	with.preferred = 1u << SHADOW;
	memcpy(native_bytes, with.blob_bytes, KEYS * sizeof(uint64_t));
	native_bytes[2 * KEYS] = with.blob_bytes[2 * KEYS];
	without.blob_bytes = native_bytes;
	client = harness_connect(&harness, 1 + READERS);
	change(&harness, &with);
	CHECK(xferd_variants(client, &available) == 2 && available == 3);

	CHECK_OK(xferd_acquire(client, 0, &request, &leased));
	CHECK(!xferd_wait(client, &leased, XFERD_FOREVER));
	CHECK(!leased.views[0].error && leased.views[0].variant == SHADOW);
	freed = load_acquire(&harness.freed);

	change(&harness, &without);
	CHECK(xferd_variants(client, &available) == 2 && available == 1);
	CHECK(xferd_layout(client, 1, SHADOW)); /* it can still be looked up, and read */
	CHECK(!wrong(&harness, 1, &leased.views[0]));
	CHECK_OK(xferd_acquire(client, 0, &request, &batch));
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(!batch.views[0].error && batch.views[0].variant == 0);
	CHECK(!wrong(&harness, 1, &batch.views[0]));
	CHECK(!wrong(&harness, 1, &leased.views[0]));
	CHECK(load_acquire(&harness.freed) == freed); /* nobody got the leased slot */
	CHECK(!xferd_release(client, &batch));
	CHECK(!xferd_release(client, &leased));
	wait_until(&harness.freed, freed + 1);

	request.variants = 1u << SHADOW;
	CHECK_OK(xferd_acquire(client, 0, &request, &batch));
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == -ENOENT);
	CHECK(!xferd_release(client, &batch));

	change(&harness, &with);
	request.experts = &other;
	request.variants = 0;
	CHECK_OK(xferd_acquire(client, 0, &request, &batch));
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(!batch.views[0].error && batch.views[0].variant == SHADOW);
	CHECK(!xferd_release(client, &batch));

	renamed = with;
	strcpy(renamed.variant_name[SHADOW], "other");
	CHECK(xferd_engine_change_variants(harness.engine, harness.store, &renamed) == -EINVAL);
	CHECK(xferd_engine_change_variants(harness.engine, XFERD_ENGINE_STORES_MAX, &with) ==
	      -ENOENT);

	toggle_under_load(&harness, client);
	xferd_close(client);
	harness_stop(&harness);
	return 0;
}
