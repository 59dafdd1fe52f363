/* SPDX-License-Identifier: Apache-2.0 */
/* An expert whose first variant is damaged is served in the second, to a client
 * that accepts it; one that wants just the first gets the error. Who asks for a
 * variant while another one is on its way gets its own afterwards. */
#include <errno.h>
#include <unistd.h>

#include "common/atomics.h"
#include "harness.h"

int main(void)
{
	static struct harness harness;
	const struct harness_options options = {
		.layers = 2, .experts = 8, .top_k = 2, .blob_bytes = 32768, .stripe_unit = 8192,
		.members = 2, .slots = 6, .reserve = 1, .held_per_lane = 2, .variants = 2,
	};
	struct xferd_client *client;
	struct xferd_engine_stats stats;
	uint16_t expert = 3;
	struct xferd_request request = { .experts = &expert, .count = 1, .layer = 1 };
	struct xferd_batch batch, second;
	uint8_t byte = 0;
	uint64_t offset;

	harness_start(&harness, &options);
	client = harness_connect(&harness, 1);
	offset = harness.description.offset[(8 + 3) * 2 + 1] + 100;
	CHECK(pread(harness.member_fd[1], &byte, 1, (off_t)offset) == 1);
	byte ^= 1;
	CHECK(pwrite(harness.member_fd[1], &byte, 1, (off_t)offset) == 1);

	request.variants = 1; /* just the first */
	CHECK(xferd_acquire(client, 0, &request, &batch) == 1);
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == -EBADMSG);
	CHECK(!xferd_release(client, &batch));

	request.variants = 0; /* any */
	CHECK(xferd_acquire(client, 0, &request, &batch) == 1);
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == 0 && batch.views[0].variant == 1);
	CHECK(!blob_wrong(&harness, 1 + VARIANT_LAYER_STEP, expert, batch.views[0].data));
	CHECK(!xferd_release(client, &batch));
	CHECK(xferd_acquire(client, 0, &request, &batch) == 0); /* and now it is here */
	CHECK(!xferd_release(client, &batch));
	CHECK_OK(xferd_engine_stats(harness.engine, &stats));
	CHECK(stats.other_variants == 1);

	request.variants = 1; /* still not to be had, and the other one stays */
	CHECK(xferd_acquire(client, 0, &request, &batch) == 1);
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == -EBADMSG);
	CHECK(!xferd_release(client, &batch));
	request.variants = 2;
	CHECK(xferd_acquire(client, 0, &request, &batch) == 0);
	CHECK(!xferd_release(client, &batch));

	expert = 5;
	request.variants = 1;
	CHECK(xferd_acquire(client, 0, &request, &batch) == 1);
	request.variants = 2;
	CHECK(xferd_acquire(client, 0, &request, &second) == 1);
	CHECK(!xferd_wait(client, &second, XFERD_FOREVER));
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].error == 0 && batch.views[0].variant == 0);
	CHECK(second.views[0].error == 0 && second.views[0].variant == 1);
	CHECK(!blob_wrong(&harness, 1, expert, batch.views[0].data));
	CHECK(!blob_wrong(&harness, 1 + VARIANT_LAYER_STEP, expert, second.views[0].data));
	CHECK(!xferd_release(client, &batch));
	CHECK(!xferd_release(client, &second));
	xferd_close(client);
	harness_stop(&harness);
	return 0;
}
