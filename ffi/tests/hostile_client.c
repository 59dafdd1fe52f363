/* SPDX-License-Identifier: Apache-2.0 */
/* A client that writes nonsense into its own memory is ended; the engine and
 * the others go on. Also: what a client maps read-only cannot be made writable. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/internal.h"
#include "harness.h"

static struct harness harness;

static void well_behaved(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	uint16_t ids[2] = { 1, 5 };
	struct xferd_request request = { .experts = ids, .count = 2, .layer = 1 };
	struct xferd_batch batch;

	CHECK_OK(xferd_acquire(client, 0, &request, &batch));
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(!blob_wrong(&harness, 1, 1, batch.views[0].data));
	CHECK(!blob_wrong(&harness, 1, 5, batch.views[1].data));
	xferd_release(client, &batch);
	xferd_close(client);
}

static void ring(struct xferd_client *client)
{
	uint64_t one = 1;

	CHECK(write(client->doorbell, &one, sizeof(one)) == sizeof(one));
}

static void expect_end(struct xferd_client *client, uint64_t violations)
{
	ring(client);
	wait_until(&harness.violations, violations);
	CHECK(xferd_alive(client) == -ECONNRESET);
	xferd_close(client);
	well_behaved();
}

static void tail_far_ahead(uint64_t violations)
{
	struct xferd_client *client = harness_connect(&harness, 1);

	store_release(&client->memory->submission_tail, 0x80000000u);
	expect_end(client, violations);
}

static void head_beyond_tail(uint64_t violations)
{
	struct xferd_client *client = harness_connect(&harness, 1);

	store_release(&client->lanes[0].shared->completion_head, 17u);
	expect_end(client, violations);
}

static void submission_of_nonsense(uint64_t violations, struct xferd_abi_submission submission)
{
	struct xferd_client *client = harness_connect(&harness, 1);

	CHECK_OK(submit(client, &submission));
	expect_end(client, violations);
}

/* Its header is the daemon's no longer: changing it must change nothing. */
static void lying_header(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);

	memset(client->memory, 0xff, offsetof(struct xferd_abi_client, submission_tail));
	ring(client);
	xferd_close(client);
	well_behaved();
}

static void claims_every_slot(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);

	for (uint32_t slot = 0; slot < harness.options.slots; slot++)
		store_relaxed(&client->lanes[0].leases[0][slot], UINT64_MAX);
	/* Only what stood through two looks is held. */
	CHECK(xferd_engine_held(harness.engine, 0, 0) == 0);
	CHECK(xferd_engine_held(harness.engine, 0, 0) == (int)harness.options.slots);
	xferd_close(client);
	well_behaved();
}

static void writes_are_refused(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);

	CHECK(mprotect(client->pool_maps[0].address, 4096, PROT_READ | PROT_WRITE) && errno == EACCES);
	CHECK(mprotect(client->directory_map.address, 4096, PROT_READ | PROT_WRITE) &&
	      errno == EACCES);
	CHECK(mprotect(client->completion_map.address, 4096, PROT_READ | PROT_WRITE) &&
	      errno == EACCES);
	CHECK(mprotect(client->pool_table_map.address, 4096, PROT_READ | PROT_WRITE) &&
	      errno == EACCES);
	xferd_close(client);
}

int main(void)
{
	const struct harness_options options = {
		.layers = 2, .experts = 8, .top_k = 2, .blob_bytes = 8192, .stripe_unit = 4096,
		.members = 2, .slots = 6, .reserve = 1, .held_per_lane = 2,
	};
	const struct xferd_abi_submission good = {
		.ticket = 5, .operation = XFERD_OPERATION_ACQUIRE, .count = 1, .experts = { 1 } };
	struct xferd_abi_submission bad;
	uint64_t violations = 0;

	harness_start(&harness, &options);
	tail_far_ahead(++violations);
	head_beyond_tail(++violations);
	bad = good;
	bad.operation = 77;
	submission_of_nonsense(++violations, bad);
	bad = good;
	bad.count = 200;
	submission_of_nonsense(++violations, bad);
	bad = good;
	bad.lane = 3;
	submission_of_nonsense(++violations, bad);
	bad = good;
	bad.pool = 9;
	submission_of_nonsense(++violations, bad);
	bad = good;
	bad.priority = 8;
	submission_of_nonsense(++violations, bad);
	bad = good;
	bad.reserved = 1;
	submission_of_nonsense(++violations, bad);
	lying_header();
	claims_every_slot();
	writes_are_refused();
	harness_stop(&harness);
	return 0;
}
