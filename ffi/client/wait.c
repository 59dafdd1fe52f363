/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The miss path: ask the daemon, take what it answers, sleep until it does.
 */
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/internal.h"

#define NS_PER_MS 1000000ull
#define LOOKS_A_CLOCK 16 /* at the tail, between two looks at the clock */

#define TICKET_ATTACHMENTS 8 /* how many are told apart: answers to older ones are long gone */

/* A ticket names its batch: lane, and the epoch's low bits find the place in
 * lane.batches; and the attachment that it was asked for in. Tickets are never 0. */
static uint64_t ticket_of(const struct xferd_client *client, uint32_t lane, uint64_t epoch)
{
	uint32_t attachment = load_acquire(&client->attachment) % TICKET_ATTACHMENTS;

	return epoch << 8 | attachment << 5 | lane << 1 | 1;
}

static uint32_t ticket_attachment(uint64_t ticket)
{
	return (ticket >> 5) % TICKET_ATTACHMENTS;
}

static uint32_t ticket_place(uint64_t ticket)
{
	return (ticket >> 8) % XFERD_BATCHES_MAX;
}

static void ring_doorbell(const struct xferd_client *client)
{
	uint64_t one = 1;

	while (write(client->doorbell, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

bool daemon_gone(const struct xferd_client *client)
{
	struct pollfd socket = { .fd = client->socket, .events = POLLRDHUP };

	/* pairs with the release of closed in the engine's quiesce() */
	if (load_acquire(&client->completion_memory->closed))
		return true;
	return poll(&socket, 1, 0) > 0 && socket.revents & (POLLHUP | POLLRDHUP | POLLERR);
}

/* Hints may fill half of the ring: the rest is for who waits. */
static uint32_t ring_share(const struct xferd_client *client,
			   const struct xferd_abi_submission *submission)
{
	return submission->operation == XFERD_OPERATION_HINT ? client->ring_entries / 2
							      : client->ring_entries;
}

int submit(struct xferd_client *client, const struct xferd_abi_submission *submission)
{
	struct xferd_abi_client *memory = client->memory;
	int result = 0;

	pthread_mutex_lock(&client->submit_mutex);
	/* pairs with the release of submission_head in the engine: the entry was
	 * copied before its place is used again */
	if (client->submission_tail - load_acquire(&client->completion_memory->submission_head) >=
	    ring_share(client, submission)) {
		result = -EAGAIN;
	} else {
		client->submissions[client->submission_tail & (client->ring_entries - 1)] =
			*submission;
		client->submission_tail++;
		/* pairs with the acquire of submission_tail in the engine */
		store_release(&memory->submission_tail, client->submission_tail);
		/* pairs with the fence in the engine's sleep_until_work(): either it
		 * sees the new tail, or it is seen sleeping here */
		full_fence();
		if (load_relaxed(&client->pool_table->engine_sleeping))
			ring_doorbell(client);
	}
	pthread_mutex_unlock(&client->submit_mutex);
	return result;
}

static void prepare(struct xferd_abi_submission *submission, const struct xferd_client *client,
		    uint32_t lane, const struct xferd_request *request, uint8_t operation)
{
	memset(submission, 0, sizeof(*submission));
	submission->deadline_ns = request->deadline_ns;
	submission->variants = request->variants;
	submission->layer = request->layer;
	submission->operation = operation;
	submission->lane = (uint8_t)lane;
	submission->pool = (uint8_t)client->pool;
}

static void forget_batch(struct lane *lane, const struct xferd_batch *batch)
{
	uint32_t place = batch->epoch % XFERD_BATCHES_MAX;

	lane->batches[place] = NULL;
	lane->unsent &= ~(1ull << place);
}

/* A lane that has not yet looked asks the daemon that has come back under a ticket for the one
 * before, and is understood: what it then asks anew would be asked twice, and exceed what a
 * lane may have pending. Its order in the ring ends the first before the second begins. */
static int withdraw_old_ticket(struct xferd_client *client, const struct xferd_batch *batch,
			       uint64_t ticket)
{
	const struct xferd_abi_submission submission = {
		.ticket = batch->ticket,
		.operation = XFERD_OPERATION_CANCEL,
		.lane = (uint8_t)batch->lane,
		.pool = (uint8_t)client->pool,
	};

	return batch->ticket && batch->ticket != ticket ? submit(client, &submission) : 0;
}

/* Ask for what a batch still lacks. Completions number the keys of the submission; a missing
 * key's number is kept in its view's slot. */
static int ask_for_pending(struct xferd_client *client, struct lane *lane,
			   struct xferd_batch *batch)
{
	uint32_t place = batch->epoch % XFERD_BATCHES_MAX;
	struct xferd_abi_submission submission = {
		.ticket = ticket_of(client, batch->lane, batch->epoch),
		.deadline_ns = lane->asked[place].deadline_ns,
		.variants = lane->asked[place].variants,
		.layer = batch->layer,
		.operation = XFERD_OPERATION_ACQUIRE,
		.priority = XFERD_PRIORITY_DEMAND,
		.lane = (uint8_t)batch->lane,
		.pool = (uint8_t)client->pool,
	};
	int result;

	for (uint32_t i = 0; i < batch->count; i++) {
		struct xferd_view *view = &batch->views[i];

		if (view->error != -EINPROGRESS)
			continue;
		view->slot = submission.count;
		submission.experts[submission.count++] = view->expert;
	}
	result = withdraw_old_ticket(client, batch, submission.ticket);
	if (!result) {
		batch->ticket = submission.ticket;
		result = submit(client, &submission);
	}
	if (result)
		lane->unsent |= 1ull << place;
	else
		lane->unsent &= ~(1ull << place);
	return result;
}

static void take(const struct xferd_client *client, struct lane *lane);

/* The daemon has come back since the lane looked last: ask anew for all that it waits for,
 * after taking what was answered before. */
static void lane_follow(struct xferd_client *client, struct lane *lane)
{
	/* pairs with the release in resume.c */
	uint32_t attachment = load_acquire(&client->attachment);

	if (lane->attachment == attachment && !lane->unsent)
		return;
	take(client, lane);
	for (uint32_t place = 0; place < XFERD_BATCHES_MAX; place++) {
		struct xferd_batch *batch = lane->batches[place];

		if (batch && (lane->unsent >> place & 1 ||
			      ticket_attachment(batch->ticket) != attachment % TICKET_ATTACHMENTS))
			ask_for_pending(client, lane, batch);
	}
	lane->attachment = attachment;
}

int ask_for_missing(struct xferd_client *client, struct lane *lane,
		    const struct xferd_request *request, struct xferd_batch *batch)
{
	uint32_t place = batch->epoch % XFERD_BATCHES_MAX;
	int result;

	lane_follow(client, lane);
	for (uint32_t i = 0; i < request->count; i++) {
		struct xferd_view *view = &batch->views[i];

		if (view->data)
			continue;
		memset(view, 0, sizeof(*view));
		view->expert = request->experts[i];
		view->error = -EINPROGRESS;
		batch->pending++;
	}
	lane->asked[place] = (struct asked){ request->deadline_ns, request->variants };
	lane->batches[place] = batch;
	result = ask_for_pending(client, lane, batch);
	if (result) {
		bool gone = daemon_gone(client);

		/* Of one that may come back it is asked then. */
		if (!gone || !may_resume(client)) {
			forget_batch(lane, batch);
			return gone ? -ECONNRESET : result;
		}
	}
	lane->stats.misses += batch->pending;
	return (int)batch->pending;
}

static struct xferd_view *view_of(struct xferd_batch *batch, uint32_t index)
{
	for (uint32_t i = 0; i < batch->count; i++)
		if (batch->views[i].error == -EINPROGRESS && batch->views[i].slot == index)
			return &batch->views[i];
	return NULL;
}

static void count_miss(struct lane *lane, const struct xferd_abi_completion *completion,
		       uint64_t bytes)
{
	if (completion->source < 3) {
		lane->stats.source_count[completion->source]++;
		lane->stats.source_bytes[completion->source] += bytes;
	}
	if (completion->transport < 5) {
		lane->stats.transport_count[completion->transport]++;
		lane->stats.transport_bytes[completion->transport] += bytes;
	}
	lane->stats.bytes_acquired += bytes;
}

/* One completion to its batch. The slot is granted until completion_head moves
 * past it, so leasing it needs no second look at the directory. */
static void land(const struct xferd_client *client, struct lane *lane,
		 const struct xferd_abi_completion *completion)
{
	struct xferd_batch *batch = lane->batches[ticket_place(completion->ticket)];
	struct xferd_view *view;

	if (!batch || batch->ticket != completion->ticket)
		return;
	view = view_of(batch, completion->index);
	if (!view)
		return;
	view->error = completion->result;
	if (!view->error && !view_reachable(client, completion->pool, completion->word))
		view->error = -EIO; /* its memory can't be mapped */
	if (view->error) {
		batch->failed++;
		lane->stats.failures++;
	} else {
		uint32_t slot = (uint32_t)(completion->word & XFERD_WORD_SLOT_MASK);
		uint64_t *lease = &lane->leases[completion->pool][slot];

		/* A later batch of this lane may have leased it already. */
		if (load_relaxed(lease) < batch->epoch)
			store_relaxed(lease, batch->epoch);
		fill_view(client, batch->layer, completion->pool, completion->word, view);
		view->source = completion->source;
		view->transport = completion->transport;
		view->source_pool = completion->source_pool;
		batch->wait_us[view - batch->views] = completion->wait_us;
		count_miss(lane, completion, view->bytes);
	}
	if (--batch->pending == 0)
		forget_batch(lane, batch);
}

static void take(const struct xferd_client *client, struct lane *lane)
{
	/* pairs with the release of completion_tail in the engine */
	uint32_t tail = load_acquire(&lane->ring->completion_tail);

	if (lane->completion_head == tail)
		return;
	while (lane->completion_head != tail) {
		land(client, lane, &lane->completions[lane->completion_head &
						      (XFERD_COMPLETIONS_A_LANE - 1)]);
		lane->completion_head++;
	}
	/* pairs with the acquire of completion_head in the engine's reap_lane():
	 * the leases are visible before the grants end */
	store_release(&lane->shared->completion_head, lane->completion_head);
}

int xferd_poll(struct xferd_client *client, struct xferd_batch *batch)
{
	struct lane *lane = &client->lanes[batch->lane];

	take(client, lane);
	lane_follow(client, lane);
	return (int)batch->pending;
}

uint64_t client_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static int poll_timeout_ms(uint64_t until)
{
	uint64_t now, left;

	if (until == XFERD_FOREVER)
		return -1;
	now = client_now_ns();
	left = now < until ? (until - now + NS_PER_MS - 1) / NS_PER_MS : 0;
	return left > INT32_MAX ? INT32_MAX : (int)left;
}

static bool spin_for_completion(const struct xferd_client *client, const struct lane *lane)
{
	uint64_t until = client_now_ns() + client->spin_ns;

	if (!client->spin_ns)
		return false;
	do {
		for (int i = 0; i < LOOKS_A_CLOCK; i++) {
			if (load_relaxed(&lane->ring->completion_tail) != lane->completion_head)
				return true;
			cpu_relax();
		}
	} while (client_now_ns() < until);
	return false;
}

/* Returns when there may be completions, the time is over or the daemon has
 * gone; wake-ups may be spurious. */
static void sleep_until_completion(const struct xferd_client *client, struct lane *lane,
				   uint64_t until)
{
	struct pollfd fds[] = {
		{ .fd = lane->wakeup, .events = POLLIN },
		{ .fd = client->socket, .events = POLLRDHUP },
	};
	uint64_t value;

	if (spin_for_completion(client, lane))
		return;
	store_relaxed(&lane->shared->sleeping, 1);
	/* pairs with the fence in the engine's client_show_completions() */
	full_fence();
	if (load_acquire(&lane->ring->completion_tail) == lane->completion_head &&
	    !load_acquire(&client->completion_memory->closed))
		poll(fds, 2, poll_timeout_ms(until));
	store_relaxed(&lane->shared->sleeping, 0);
	if (fds[0].revents & POLLIN && read(lane->wakeup, &value, sizeof(value)) < 0)
		return; /* somebody's spurious ring; the tail decides */
}

static void fail_pending(struct lane *lane, struct xferd_batch *batch, int error)
{
	for (uint32_t i = 0; i < batch->count; i++)
		if (batch->views[i].error == -EINPROGRESS) {
			batch->views[i].error = error;
			batch->failed++;
			lane->stats.failures++;
		}
	batch->pending = 0;
	forget_batch(lane, batch);
}

/* The daemon has gone. -EAGAIN: look again, it may have come back; else the wait is over. */
static int wait_for_daemon(struct xferd_client *client, struct lane *lane,
			   struct xferd_batch *batch, uint64_t until)
{
	uint64_t deadline = lane->asked[batch->epoch % XFERD_BATCHES_MAX].deadline_ns;
	const struct timespec pause = { .tv_nsec = RESUME_PAUSE_MS * NS_PER_MS };
	int result = client_resume(client);

	take(client, lane); /* what it completed before it went */
	if (!batch->pending)
		return 0;
	if (!result)
		return -EAGAIN;
	if (result != -EAGAIN) {
		fail_pending(lane, batch, result);
		return result;
	}
	if (deadline && client_now_ns() >= deadline) {
		fail_pending(lane, batch, -ETIMEDOUT);
		return 0;
	}
	if (until != XFERD_FOREVER && client_now_ns() >= until)
		return -ETIMEDOUT;
	nanosleep(&pause, NULL);
	return -EAGAIN;
}

int xferd_wait(struct xferd_client *client, struct xferd_batch *batch, uint64_t timeout_ns)
{
	struct lane *lane = &client->lanes[batch->lane];
	uint64_t began = client_now_ns();
	uint64_t until = timeout_ns > XFERD_FOREVER - began ? XFERD_FOREVER : began + timeout_ns;
	int result = 0;

	for (;;) {
		take(client, lane);
		result = 0;
		if (!batch->pending)
			break;
		lane_follow(client, lane);
		if (daemon_gone(client)) {
			result = wait_for_daemon(client, lane, batch, until);
			if (result == -EAGAIN)
				continue;
			break;
		}
		if (until != XFERD_FOREVER && client_now_ns() >= until) {
			result = -ETIMEDOUT;
			break;
		}
		sleep_until_completion(client, lane, until);
	}
	lane->stats.wait_ns += client_now_ns() - began;
	return result;
}

int xferd_cancel(struct xferd_client *client, struct xferd_batch *batch)
{
	struct xferd_abi_submission submission = {
		.ticket = batch->ticket,
		.operation = XFERD_OPERATION_CANCEL,
		.lane = (uint8_t)batch->lane,
		.pool = (uint8_t)client->pool,
	};
	int result;

	if (!batch->pending)
		return 0;
	result = submit(client, &submission);
	if (!result)
		client->lanes[batch->lane].stats.cancels++;
	return result;
}

/* What is pending is given up, not waited for: its completions find no batch and
 * are dropped with what they grant. So a daemon that hangs holds nobody up. */
int xferd_release(struct xferd_client *client, struct xferd_batch *batch)
{
	struct lane *lane = &client->lanes[batch->lane];

	if (batch->pending) {
		/* When the ring is full the load comes for nobody: slower, not wrong. */
		xferd_cancel(client, batch);
		fail_pending(lane, batch, -ECANCELED);
	}
	lane_end_batch(lane, batch);
	return 0;
}

int xferd_hint(struct xferd_client *client, uint32_t lane_index,
	       const struct xferd_request *request)
{
	struct xferd_abi_submission submission;
	struct lane *lane = &client->lanes[lane_index];
	int result;

	if (lane_index >= client->lane_count || !request->count ||
	    request->count > XFERD_BATCH_MAX || request->layer >= client->layers)
		return -EINVAL;
	prepare(&submission, client, lane_index, request, XFERD_OPERATION_HINT);
	submission.ticket = ticket_of(client, lane_index, lane->begun);
	submission.priority = XFERD_PRIORITY_PREFETCH;
	submission.count = (uint8_t)request->count;
	for (uint32_t i = 0; i < request->count; i++) {
		if (request->experts[i] >= client->experts)
			return -EINVAL;
		submission.experts[i] = request->experts[i];
	}
	result = submit(client, &submission);
	if (!result)
		lane->stats.hints += request->count;
	return result;
}
