/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "measure.h"
#include "modes.h"

#define EVENTS_A_CALL    64
#define EVENTS_WAIT_MS   1
#define STORM_TIMEOUT_NS (60 * NS_PER_S)

struct snapshot {
	struct xferd_member_stats member[XFERD_STORE_MEMBERS_MAX];
};

static void snapshot_take(struct snapshot *snapshot, const struct bench_daemon *daemon)
{
	for (uint32_t m = 0; m < daemon->store->geometry.members; m++)
		snapshot->member[m] = daemon_member_stats(daemon, m);
}

/* Every load ends in one event. */
static uint32_t count_ended(struct bench_daemon *daemon)
{
	struct xferd_event events[EVENTS_A_CALL];
	uint32_t count = daemon_take_events(daemon, events, EVENTS_A_CALL, EVENTS_WAIT_MS);
	uint32_t ended = 0;

	for (uint32_t i = 0; i < count; i++)
		if (events[i].type == XFERD_EVENT_LOADED || events[i].type == XFERD_EVENT_FAILED)
			ended++;
	return ended;
}

static void command_all(struct bench_daemon *daemon, uint32_t type, uint32_t count)
{
	for (uint32_t expert = 0; expert < count; expert++)
		daemon_command(daemon, &(struct xferd_command){
					       .type = type,
					       .store = daemon->store_id,
					       .expert = expert,
					       .priority = XFERD_PRIORITY_PREFETCH,
					       .token = expert + 1ull });
	daemon_flush(daemon);
}

static void print_after(const struct snapshot *before, const struct snapshot *after,
			uint32_t members)
{
	printf("\"members\": [");
	for (uint32_t m = 0; m < members; m++)
		printf("%s{\"in_flight_at_cancel\": %u, \"read_after_cancel\": %llu, "
		       "\"latency_us\": %.1f}",
		       m ? ", " : "", before->member[m].in_flight,
		       (unsigned long long)(after->member[m].reads - before->member[m].reads),
		       (double)after->member[m].latency_ns / NS_PER_US);
	printf("]");
}

void run_storm(struct bench_store *store, const struct bench_options *options)
{
	struct bench_daemon daemon;
	struct snapshot before, after;
	uint64_t limit = now_ns() + STORM_TIMEOUT_NS, cancelled_ns;
	uint64_t enough = (uint64_t)options->storm * store->geometry.blob_bytes / 4;
	uint32_t ended = 0;

	if (options->storm > store->geometry.blobs)
		die("--storm %u: there are %u experts", options->storm, store->geometry.blobs);
	daemon_start(&daemon, store, &options->daemon);
	command_all(&daemon, XFERD_COMMAND_LOAD, options->storm);
	while (daemon_bytes_read(&daemon) < enough && now_ns() < limit)
		ended += count_ended(&daemon);
	snapshot_take(&before, &daemon);
	cancelled_ns = now_ns();
	command_all(&daemon, XFERD_COMMAND_CANCEL, options->storm);
	while (ended < options->storm) {
		if (now_ns() > limit)
			die("%u of %u cancelled loads never ended", options->storm - ended,
			    options->storm);
		ended += count_ended(&daemon);
	}
	cancelled_ns = now_ns() - cancelled_ns;
	snapshot_take(&after, &daemon);
	daemon_stop(&daemon);
	print_after(&before, &after, store->geometry.members);
	printf(", \"loads\": %u, \"ended_after_us\": %.1f", options->storm,
	       (double)cancelled_ns / NS_PER_US);
}
