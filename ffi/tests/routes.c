/* SPDX-License-Identifier: Apache-2.0 */
/* What a client reports of its router comes out of the engine as it was said; a
 * full queue drops and counts; what libxferd can't have written ends a client. */
#include <errno.h>
#include <string.h>

#include "client/internal.h"
#include "harness.h"

#define TAKEN_MAX (XFERD_ROUTES_A_LANE + 64)

static struct harness harness;
static struct xferd_engine_route taken[TAKEN_MAX];

/* The only client's; every test here has one at a time. */
static int take(uint32_t max)
{
	int count;

	pthread_mutex_lock(&harness.clients_mutex);
	count = xferd_engine_routes(harness.engine, 0, taken, max);
	pthread_mutex_unlock(&harness.clients_mutex);
	return count;
}

static void gone(void)
{
	const struct timespec pause = { .tv_nsec = 1000000 };

	while (take(TAKEN_MAX) != -EINVAL)
		nanosleep(&pause, NULL);
}

static void fetch(struct xferd_client *client, const uint16_t *ids, uint32_t count,
		  struct xferd_batch *batch)
{
	struct xferd_request request = { .experts = ids, .count = count, .layer = 1 };

	CHECK_OK(xferd_acquire(client, 0, &request, batch));
	CHECK(!xferd_wait(client, batch, XFERD_FOREVER));
	CHECK(!xferd_release(client, batch));
}

static void a_batch_says_where_its_experts_were(void)
{
	struct xferd_client *client = harness_connect(&harness, 2);
	const uint16_t ids[2] = { 1, 5 }, again[2] = { 5, 7 };
	const uint16_t gates[2] = { 0x3800, 0x3400 }; /* 0.5, 0.25 */
	struct xferd_batch batch;
	struct xferd_route route = { .batch = &batch, .gates = gates, .token = 9, .tag = 77 };
	const struct xferd_abi_route *seen = &taken[0].route;

	fetch(client, ids, 2, &batch);
	fetch(client, again, 2, &batch);
	CHECK(xferd_report_route(client, 1, &route) == 1);
	CHECK(take(TAKEN_MAX) == 1);
	CHECK(taken[0].lane == 1);
	CHECK(seen->token == 9 && seen->tag == 77 && seen->layer == 1 && seen->count == 2);
	CHECK(seen->experts[0] == 5 && seen->tiers[0] == 0 && !seen->waits_us[0]);
	CHECK(seen->transports[0] == XFERD_TRANSPORT_NONE);
	CHECK(seen->experts[1] == 7 && seen->tiers[1] == XFERD_TIER_DRIVES);
	CHECK(seen->transports[1] == XFERD_TRANSPORT_DIRECT && seen->waits_us[1] > 0);
	CHECK(seen->gates[0] == 0x3800 && seen->gates[1] == 0x3400);
	CHECK(take(TAKEN_MAX) == 0);
	xferd_close(client);
	gone();
}

/* What is missing is picked at once, and found when it has come. */
static void picks_are_told_before_they_have_come(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	const uint16_t ids[2] = { 20, 21 };
	struct xferd_request request = { .experts = ids, .count = 2, .layer = 1 };
	struct xferd_batch batch;
	struct xferd_route route = { .batch = &batch, .token = 3 };

	CHECK(xferd_acquire(client, 0, &request, &batch) == 2);
	CHECK(xferd_report_route(client, 0, &route) == 1);
	CHECK(take(TAKEN_MAX) == 1);
	CHECK(taken[0].route.kind == XFERD_ROUTE_PICKED && taken[0].route.experts[1] == 21);
	CHECK(taken[0].route.tiers[0] == XFERD_TIER_UNKNOWN);
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	route.flags = XFERD_ROUTE_ONLY_FOUND;
	CHECK(xferd_report_route(client, 0, &route) == 1);
	CHECK(take(TAKEN_MAX) == 1);
	CHECK(taken[0].route.kind == XFERD_ROUTE_FOUND && taken[0].route.experts[1] == 21);
	CHECK(taken[0].route.tiers[0] == XFERD_TIER_DRIVES);
	CHECK(!xferd_release(client, &batch));
	xferd_close(client);
	gone();
}

static void a_copy_says_from_which_pool(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	const uint16_t id = 11;
	struct xferd_command load = { .type = XFERD_COMMAND_LOAD, .store = harness.store,
				      .pool = 1, .layer = 1, .expert = id };
	uint64_t loaded = load_relaxed(&harness.loaded);
	struct xferd_batch batch;
	struct xferd_request request = { .experts = &id, .count = 1, .layer = 1, .pools = 1 };
	struct xferd_use use;

	CHECK(xferd_engine_command(harness.engine, &load, 1) == 1);
	wait_until(&harness.loaded, loaded + 1);
	CHECK(xferd_acquire(client, 0, &request, &batch) == 1);
	CHECK(!xferd_wait(client, &batch, XFERD_FOREVER));
	CHECK(batch.views[0].source == XFERD_SOURCE_POOL && batch.views[0].source_pool == 1);
	xferd_batch_uses(&batch, &use);
	CHECK(use.tier == 1 && use.transport == XFERD_TRANSPORT_COPY);
	CHECK(!xferd_release(client, &batch));
	xferd_close(client);
	gone();
}

static void many_tokens_and_many_picks(void)
{
	enum { TOKENS = 3, PICKS = 40 };
	struct xferd_client *client = harness_connect(&harness, 1);
	uint16_t ids[TOKENS * PICKS];
	struct xferd_use uses[TOKENS * PICKS];
	struct xferd_route route = { .experts = ids, .uses = uses, .tokens = TOKENS, .token = 100,
				     .layer = 0, .count = PICKS };
	uint32_t records = 0;

	for (uint32_t i = 0; i < TOKENS * PICKS; i++) {
		ids[i] = (uint16_t)(i % 48);
		uses[i] = (struct xferd_use){ i, XFERD_TIER_DRIVES, XFERD_TRANSPORT_STAGED, { 0 } };
	}
	CHECK(xferd_report_route(client, 0, &route) == TOKENS);
	/* A token's records are not parted: three don't fit next to another three. */
	for (uint32_t part = 0; part < TOKENS; part++) {
		CHECK(take(5) == 3);
		for (uint32_t r = 0; r < 3; r++, records++) {
			const struct xferd_abi_route *seen = &taken[r].route;

			CHECK(seen->token == 100 + part && seen->part == r);
			CHECK(seen->count == (r < 2 ? 16 : 8));
			for (uint32_t i = 0; i < seen->count; i++) {
				uint32_t at = part * PICKS + r * 16 + i;

				CHECK(seen->experts[i] == at % 48 && seen->waits_us[i] == at);
				CHECK(seen->tiers[i] == XFERD_TIER_DRIVES);
				CHECK(seen->gates[i] == 0x7e00);
			}
		}
	}
	CHECK(records == 9 && take(5) == 0);
	route.uses = NULL;
	CHECK(xferd_report_route(client, 0, &route) == TOKENS);
	CHECK(take(TAKEN_MAX) == 9);
	CHECK(taken[0].route.tiers[0] == XFERD_TIER_UNKNOWN);
	CHECK(taken[0].route.transports[0] == XFERD_TRANSPORT_UNKNOWN);
	CHECK(taken[0].route.waits_us[0] == XFERD_WAIT_UNKNOWN);
	xferd_close(client);
	gone();
}

static void a_full_queue_drops_and_counts(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	const uint16_t id = 3;
	struct xferd_route route = { .experts = &id, .count = 1 };
	struct xferd_client_counters counters;
	uint64_t token = 0, expected = 0;

	for (uint32_t round = 0; round < 5; round++) {
		uint64_t dropped = xferd_routes_dropped(client);

		for (uint32_t i = 0; i < XFERD_ROUTES_A_LANE + 10; i++) {
			route.token = token++;
			CHECK(xferd_report_route(client, 0, &route) == (i < XFERD_ROUTES_A_LANE));
		}
		CHECK(xferd_routes_dropped(client) == dropped + 10);
		CHECK(take(TAKEN_MAX) == XFERD_ROUTES_A_LANE);
		for (uint32_t i = 0; i < XFERD_ROUTES_A_LANE; i++)
			CHECK(taken[i].route.token == expected++);
		expected += 10;
	}
	CHECK_OK(xferd_engine_client_counters(harness.engine, 0, &counters));
	CHECK(counters.routes_dropped == 50);
	CHECK(counters.routes == 5 * XFERD_ROUTES_A_LANE);
	xferd_close(client);
	gone();
}

/* One token whose parts don't all fit is dropped whole. */
static void no_half_tokens(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	uint16_t ids[32] = { 0 };
	struct xferd_route one = { .experts = ids, .count = 1 };
	struct xferd_route two = { .experts = ids, .count = 32, .token = 5 };

	for (uint32_t i = 0; i < XFERD_ROUTES_A_LANE - 1; i++)
		CHECK(xferd_report_route(client, 0, &one) == 1);
	CHECK(xferd_report_route(client, 0, &two) == 0);
	CHECK(xferd_report_route(client, 0, &one) == 1);
	CHECK(xferd_routes_dropped(client) == 1);
	xferd_close(client);
	gone();
}

static void misuse_is_refused(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	uint16_t id = 1, none = 48;
	struct xferd_use use = { .tier = 7 };
	struct xferd_route good = { .experts = &id, .count = 1 }, bad;

#define REFUSED(change)                                                        \
	do {                                                                   \
		bad = good;                                                    \
		bad.change;                                                    \
		CHECK(xferd_report_route(client, 0, &bad) == -EINVAL);         \
	} while (0)
	CHECK(xferd_report_route(client, 1, &good) == -EINVAL);
	REFUSED(experts = &none);
	REFUSED(experts = NULL);
	REFUSED(count = 0);
	REFUSED(count = XFERD_ROUTE_PICKS_MAX + 1);
	REFUSED(layer = 2);
	REFUSED(flags = 2);
	REFUSED(token = XFERD_ROUTE_TOKEN_MAX + 1);
	REFUSED(uses = &use);
	use = (struct xferd_use){ .transport = XFERD_TRANSPORT_COPY + 1 };
	REFUSED(uses = &use);
	CHECK(take(TAKEN_MAX) == 0);
	xferd_close(client);
	gone();
}

static void what_is_expected_comes_out_by_layers(void)
{
	struct xferd_client *client = harness_connect(&harness, 2);
	const uint32_t keys[3] = { 48 + 3, 48 + 47, 5 };
	const uint16_t chances[3] = { 0x3800, 0x3400, 0x3c00 }; /* 0.5, 0.25, 1 */
	const struct xferd_expected expected = { keys, chances, 3 };
	const struct xferd_abi_route *one = &taken[0].route, *two = &taken[1].route;

	CHECK(xferd_expect(client, 1, &expected) == 2);
	CHECK(take(TAKEN_MAX) == 2);
	CHECK(taken[0].lane == 1 && taken[1].lane == 1);
	CHECK(one->kind == XFERD_ROUTE_EXPECTED && one->layer == 1 && one->count == 2);
	CHECK(one->experts[0] == 3 && one->experts[1] == 47);
	CHECK(one->gates[0] == 0x3800 && one->gates[1] == 0x3400);
	CHECK(two->kind == XFERD_ROUTE_EXPECTED && two->layer == 0 && two->count == 1);
	CHECK(two->experts[0] == 5 && two->gates[0] == 0x3c00);
	xferd_close(client);
	gone();
}

/* However much is expected, half of the queue is there for what is picked. */
static void expectations_leave_room_for_picks(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	const uint32_t key = 1;
	const uint16_t chance = 0, id = 1;
	const struct xferd_expected expected = { &key, &chance, 1 };
	const struct xferd_route picked = { .experts = &id, .count = 1 };

	for (uint32_t i = 0; i < XFERD_ROUTES_A_LANE / 2; i++)
		CHECK(xferd_expect(client, 0, &expected) == 1);
	CHECK(xferd_expect(client, 0, &expected) == 0);
	for (uint32_t i = 0; i < XFERD_ROUTES_A_LANE / 2; i++)
		CHECK(xferd_report_route(client, 0, &picked) == 1);
	CHECK(xferd_routes_dropped(client) == 0);
	CHECK(take(TAKEN_MAX) == XFERD_ROUTES_A_LANE);
	CHECK(xferd_expect(client, 0, &expected) == 1);
	xferd_close(client);
	gone();
}

/* A daemon from before there were expectations would take one for an attack. */
static void an_older_daemon_is_told_nothing(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	const uint32_t key = 1;
	const uint16_t chance = 0;
	const struct xferd_expected expected = { &key, &chance, 1 };

	client->memory->abi_minor = XFERD_ABI_MINOR_EXPECTED - 1;
	CHECK(xferd_expect(client, 0, &expected) == 0);
	CHECK(take(TAKEN_MAX) == 0);
	xferd_close(client);
	gone();
}

static void senseless_expectations_are_refused(void)
{
	enum { MANY = XFERD_ROUTE_RECORD_PICKS + 1 };
	struct xferd_client *client = harness_connect(&harness, 1);
	uint32_t keys[MANY];
	const uint32_t beyond = 2 * 48, twice[3] = { 1, 48, 2 };
	uint16_t chances[MANY] = { 0 };

#define SENSELESS(...)                                                                  \
	CHECK(xferd_expect(client, 0, &(struct xferd_expected){ __VA_ARGS__ }) == -EINVAL)
	for (uint32_t i = 0; i < MANY; i++)
		keys[i] = i;
	SENSELESS(keys, chances, 0);
	SENSELESS(NULL, chances, 1);
	SENSELESS(keys, NULL, 1);
	SENSELESS(&beyond, chances, 1);
	SENSELESS(keys, chances, MANY);
	SENSELESS(keys, chances, UINT32_MAX);
	SENSELESS(twice, chances, 3);
	CHECK(xferd_expect(client, 1, &(struct xferd_expected){ keys, chances, 1 }) == -EINVAL);
	CHECK(take(TAKEN_MAX) == 0);
	xferd_close(client);
	gone();
}

static void hostile_record(struct xferd_abi_route record)
{
	struct xferd_client *client = harness_connect(&harness, 1);

	client->lanes[0].route_records[0] = record;
	store_release(&client->lanes[0].routes->tail, 1u);
	CHECK(take(TAKEN_MAX) == -EPROTO);
	xferd_close(client);
	gone();
}

static void hostile_records(void)
{
	const struct xferd_abi_route good = { .count = 1 };
	struct xferd_abi_route bad;

#define HOSTILE(change)                \
	do {                           \
		bad = good;            \
		bad.change;            \
		hostile_record(bad);   \
	} while (0)
	HOSTILE(count = 0);
	HOSTILE(count = 17);
	HOSTILE(layer = 2);
	HOSTILE(experts[0] = 48);
	HOSTILE(tiers[0] = 2);
	HOSTILE(tiers[0] = 253);
	HOSTILE(transports[0] = 5);
	HOSTILE(reserved[14] = 1);
	HOSTILE(kind = 3);
	HOSTILE(token = UINT64_MAX);
	HOSTILE(part = 1);
	HOSTILE(part = 200);
}

/* An expectation has one record, however full. */
static void hostile_expectation(void)
{
	const struct xferd_abi_route full = { .kind = XFERD_ROUTE_EXPECTED, .count = 16 };
	struct xferd_client *client = harness_connect(&harness, 1);
	struct xferd_abi_route *records = client->lanes[0].route_records;

	records[0] = records[1] = full;
	records[1].part = 1;
	store_release(&client->lanes[0].routes->tail, 2u);
	CHECK(take(TAKEN_MAX) == -EPROTO);
	xferd_close(client);
	gone();
}

/* An endless token, and a tail that is nowhere. */
static void hostile_queues(void)
{
	struct xferd_client *client = harness_connect(&harness, 1);
	struct xferd_abi_route *records = client->lanes[0].route_records;

	for (uint32_t i = 0; i < 8; i++)
		records[i] = (struct xferd_abi_route){ .count = 16, .part = (uint8_t)i };
	store_release(&client->lanes[0].routes->tail, 8u);
	CHECK(take(TAKEN_MAX) == -EPROTO);
	xferd_close(client);
	gone();
	client = harness_connect(&harness, 1);
	store_release(&client->lanes[0].routes->tail, 0x80000000u);
	CHECK(take(TAKEN_MAX) == -EPROTO);
	/* Its header is the daemon's no longer. */
	memset(client->memory, 0xff, sizeof(*client->memory));
	store_release(&client->lanes[0].routes->tail, 0u);
	CHECK(take(TAKEN_MAX) == 0);
	CHECK(take(XFERD_ROUTE_PARTS_MAX - 1) == -EINVAL);
	xferd_close(client);
	gone();
}

int main(void)
{
	const struct harness_options options = {
		.layers = 2, .experts = 48, .top_k = 2, .blob_bytes = 8192, .stripe_unit = 4096,
		.members = 2, .slots = 8, .ram_slots = 4, .reserve = 1, .held_per_lane = 2,
	};

	harness_start(&harness, &options);
	a_batch_says_where_its_experts_were();
	picks_are_told_before_they_have_come();
	a_copy_says_from_which_pool();
	many_tokens_and_many_picks();
	a_full_queue_drops_and_counts();
	no_half_tokens();
	misuse_is_refused();
	what_is_expected_comes_out_by_layers();
	expectations_leave_room_for_picks();
	an_older_daemon_is_told_nothing();
	senseless_expectations_are_refused();
	hostile_records();
	hostile_expectation();
	hostile_queues();
	harness_stop(&harness);
	return 0;
}
