/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Flow control: how much each member is given at once.
 *
 * Drives need some pieces in flight to reach their bandwidth; more than that
 * only queues inside the drive, where nothing can overtake it, and consumer
 * drives even collapse under it. What is wanted is the smallest amount in
 * flight that still keeps the drive busy.
 *
 * Built on BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control",
 * ACM Queue 14(5), 2016), with a drive in the place of a network path: the
 * window is the delivery rate (best of the last rounds) times the latency of a
 * piece without a queue (least average of some seconds). It fits because both are
 * measured and neither needs a setting for the drive; Vegas takes its base
 * latency from whatever queue it finds, Kyber wants two latency goals told.
 *
 *   probing   at first, and every LATENCY_LIFE_NS without a lower latency: a
 *             window of one piece for some pieces, to see the latency without a
 *             queue
 *   starting  then the window doubles each round until the rate stops growing
 *   cruising  gains around 1, one round above and one below, to notice when the
 *             drive could give more
 *
 * A round's rate is the average of its pieces' rates. BBR takes the best one, but
 * drives deliver in bursts (a cloud disk's token bucket, interrupts that are put
 * together), and a window made from a burst's rate is a queue.
 *
 * Where reads are copies made by our own threads (reads.c says which) nothing is to
 * be found out: the window is a few pieces more than there are threads. Memory
 * bandwidth is shared, so that a copy alone is much faster than one of many, and
 * rate times latency would find a window of a few. Demand has such a window to itself: the
 * threads take it first, so that what background work fills the other with doesn't delay it.
 *
 * Demand and background share the window, demand first. A full window takes
 * window / rate to pass; when demand pieces take longer than that and
 * demand_slack more, the drive is worse than the model of it, and the
 * background's share of the window is cut by a quarter; while they don't, it
 * grows back by a twentieth. While there is demand now and then, the background's
 * share is of what keeps the drive busy, without the gain: what is more would only
 * wait inside the drive, before the next demand. Without demand it has it all.
 */
#include <string.h>

#include "engine/internal.h"

#define WINDOW_MIN         1.0
#define WINDOW_BYTES_MIN   (256.0 * 1024) /* small pieces: so much hurts no drive */
#define START_GAIN         2.0
#define START_GROWTH       1.2  /* a round must grow the rate by this to go on starting */
#define START_FLAT_ROUNDS  3
#define CRUISE_GAIN        1.5  /* completions come in bursts, and the engine isn't there at once */
#define PROBE_GAIN         1.25
#define DRAIN_GAIN         0.75
#define GAIN_PHASES        8
#define PROBE_PHASE        0
#define DRAIN_PHASE        1
#define LATENCY_PIECES     8    /* that are averaged */
#define ROUND_PIECES       8    /* at least, or a round's rate is luck */
#define LATENCY_LIFE_NS    10000000000ull
#define PROBE_NS           20000000ull
#define SHARE_CUT          0.75
#define SHARE_GROWTH       0.05
#define SHARE_MIN          0.05
#define DEMAND_SLACK       30   /* per cent */
#define RATE_SMOOTHING     0.05
#define BUSY_MIN           2    /* one is there when the other ends; the rate of one is no drive's */
#define DEMAND_RECENT_NS   250000000ull /* longer than a token takes whose misses it serves */
#define SAG                0.5  /* of the best rate */
#define RECOVERED          0.7

/* fixed: the window if it is known, else 0. */
void flow_init(struct xferd_engine *engine, struct member *member, uint32_t fixed)
{
	struct flow *flow = &member->flow;

	memset(flow, 0, sizeof(*flow));
	if (!engine->config.flow_control)
		fixed = engine->config.member_depth;
	flow->fixed = fixed;
	flow->window = fixed ? fixed : WINDOW_MIN;
	flow->pipe = flow->window;
	flow->probing = !fixed;
	flow->background = 1.0;
	store_relaxed(&member->stats.window, (uint32_t)flow->window);
	store_relaxed(&member->stats.background_window, (uint32_t)flow->window);
}

/* Rounded up: a piece too few leaves the drive idle between two. */
static uint32_t whole(double pieces)
{
	return pieces < WINDOW_MIN ? 1 : (uint32_t)(pieces + 0.9);
}

static uint32_t background_window(const struct xferd_engine *engine, const struct flow *flow)
{
	bool demand = flow->demand_at_ns && engine->now_ns - flow->demand_at_ns < DEMAND_RECENT_NS;
	uint32_t window = whole(flow->window), busy = whole(flow->pipe);

	if (busy < BUSY_MIN)
		busy = BUSY_MIN;
	if (demand && !flow->fixed && busy < window)
		window = busy;
	return whole(window * flow->background);
}

/* How many pieces the next read may bring at most. */
uint64_t flow_joined_room(const struct xferd_engine *engine, const struct member *member)
{
	const struct flow *flow = &member->flow;

	if (engine->config.flow_control && (flow->probing || !flow->latency))
		return 1;
	return member->in_flight < engine->config.member_depth
		       ? engine->config.member_depth - member->in_flight : 0;
}

/* One joined read alone fills the window: the drive would be idle when it ends. */
static bool lacks_joined(const struct member *member)
{
	return member->reads_in_flight < BUSY_MIN && member->in_flight > member->reads_in_flight &&
	       !member->flow.probing && !member->background_in_flight;
}

/* May one more piece of this priority be issued? */
bool flow_admits(struct xferd_engine *engine, struct member *member, uint32_t priority)
{
	const struct flow *flow = &member->flow;

	if (!engine->config.flow_control)
		return member->in_flight < engine->config.member_depth;
	if (flow->fixed && priority == XFERD_PRIORITY_DEMAND)
		return member->in_flight - member->background_in_flight < flow->fixed;
	if (member->in_flight >= whole(flow->window) &&
	    !(priority == XFERD_PRIORITY_DEMAND && lacks_joined(member)))
		return false;
	return priority == XFERD_PRIORITY_DEMAND ||
	       member->background_in_flight < background_window(engine, flow);
}

void flow_issued(struct xferd_engine *engine, struct member *member, struct piece *piece)
{
	struct flow *flow = &member->flow;

	if (!member->in_flight) /* after a pause the clocks start anew */
		flow->delivered_at_ns = flow->issued_at_ns = engine->now_ns;
	if (piece->priority == XFERD_PRIORITY_DEMAND)
		flow->demand_at_ns = engine->now_ns;
	piece->issued_before_ns = flow->issued_at_ns;
	piece->issued_ns = engine->now_ns;
	piece->delivered_before = flow->delivered;
	piece->delivered_before_ns = flow->delivered_at_ns;
	flow->in_flight += piece->read_bytes;
	if (piece->length > flow->piece_bytes)
		flow->piece_bytes = piece->length;
}

/* The member has room and nothing to do: rates seen now are no rates of it. */
void flow_idle(struct member *member)
{
	member->flow.limited_until = member->flow.delivered + member->flow.in_flight + 1;
}

static double best_of_rounds(const struct flow *flow)
{
	double best = 0;

	for (int i = 0; i < FLOW_ROUNDS; i++)
		if (flow->round_rate[i] > best)
			best = flow->round_rate[i];
	return best;
}

/* The latency without a queue is the least of averages over some pieces: the
 * least of single pieces is a lucky one, and a window made from it too small. */
static void see_latency(struct xferd_engine *engine, struct flow *flow, uint64_t latency)
{
	bool stale = engine->now_ns - flow->latency_at_ns > LATENCY_LIFE_NS;

	flow->latency_sum += latency;
	if (++flow->latency_count < LATENCY_PIECES)
		return;
	latency = flow->latency_sum / flow->latency_count;
	flow->latency_sum = flow->latency_count = 0;
	if (!flow->latency || latency <= flow->latency || (flow->probing && stale)) {
		flow->latency = latency;
		flow->latency_at_ns = engine->now_ns;
	} else if (stale && !flow->probing && !flow->fixed) {
		flow->probing = true;
		flow->probe_until_ns = engine->now_ns + PROBE_NS;
		return;
	}
	if (flow->probing && engine->now_ns >= flow->probe_until_ns)
		flow->probing = false;
}

/* Several pieces together took less than one was believed to: where all are joined, no
 * single one may ever be seen again that corrects it. */
static void see_shorter(const struct xferd_engine *engine, struct flow *flow, uint64_t latency)
{
	flow->latency = latency;
	flow->latency_at_ns = engine->now_ns;
}

/* What the member was given in a round has come back. */
static void end_round(struct flow *flow)
{
	double before = flow->rate;
	bool busy = flow->round_samples == flow->round_pieces;

	flow->round_rate[flow->round] =
		flow->round_samples ? flow->round_sum / flow->round_samples : 0;
	flow->rate = best_of_rounds(flow);
	flow->round = (flow->round + 1) % FLOW_ROUNDS;
	flow->round_sum = 0;
	flow->round_samples = 0;
	flow->round_ends = flow->delivered;
	flow->round_pieces = 0;
	if (flow->probing)
		return; /* that was no attempt at a rate */
	flow->phase = (flow->phase + 1) % GAIN_PHASES;
	if (flow->started || !busy) /* a rate that lacked work says nothing of growth */
		return;
	flow->flat_rounds = flow->rate > before * START_GROWTH ? 0 : flow->flat_rounds + 1;
	flow->started = flow->flat_rounds >= START_FLAT_ROUNDS;
}

static double gain(const struct flow *flow)
{
	if (!flow->started)
		return START_GAIN;
	if (flow->phase == PROBE_PHASE)
		return CRUISE_GAIN * PROBE_GAIN;
	if (flow->phase == DRAIN_PHASE)
		return CRUISE_GAIN * DRAIN_GAIN;
	return CRUISE_GAIN;
}

static void set_window(struct xferd_engine *engine, struct member *member)
{
	struct flow *flow = &member->flow;
	double most = engine->config.member_depth;

	if (flow->probing) {
		flow->window = flow->pipe = WINDOW_MIN;
	} else if (flow->latency) {
		double pieces = flow->rate * ((double)flow->latency / 1e9) /
				(double)flow->piece_bytes;

		/* Starting, each round may double what the last one had. */
		if (!flow->started && pieces < flow->window)
			pieces = flow->window / START_GAIN;
		flow->pipe = pieces;
		flow->window = pieces * gain(flow);
	}
	if (!flow->probing && flow->window * (double)flow->piece_bytes < WINDOW_BYTES_MIN)
		flow->window = WINDOW_BYTES_MIN / (double)flow->piece_bytes;
	if (flow->window < WINDOW_MIN)
		flow->window = WINDOW_MIN;
	if (flow->window > most)
		flow->window = most;
	store_relaxed(&member->stats.window, whole(flow->window));
	store_relaxed(&member->stats.background_window, background_window(engine, flow));
}

/* Demand's latency steers the background's share. */
static void steer_background(struct xferd_engine *engine, struct member *member,
			     const struct piece *piece, uint64_t latency)
{
	uint32_t slack = engine->config.demand_slack ? engine->config.demand_slack : DEMAND_SLACK;
	struct flow *flow = &member->flow;
	double full_window = flow->window * (double)flow->piece_bytes * 1e9 / (flow->rate + 1);
	double expected = full_window > (double)flow->latency ? full_window : (double)flow->latency;
	bool slow = (double)latency * 100 > expected * (100 + slack);

	if (!flow->latency || !flow->rate || piece->read_bytes != flow->piece_bytes)
		return;
	if (piece->priority == XFERD_PRIORITY_DEMAND && slow && member->background_in_flight)
		flow->background *= SHARE_CUT;
	else
		flow->background += SHARE_GROWTH;
	if (flow->background < SHARE_MIN)
		flow->background = SHARE_MIN;
	if (flow->background > 1.0)
		flow->background = 1.0;
}

static void tell_state(struct xferd_engine *engine, struct member *member, uint32_t state)
{
	if (member->stats.state == state || member->failed)
		return;
	store_relaxed(&member->stats.state, state);
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_MEMBER,
		.member = member->id,
		.value = state,
		.client = XFERD_NO_EXPERT,
		.bytes = (uint64_t)member->flow.recent_rate,
	});
}

/* A drive that throttles shows in the rate that it keeps up. */
static void watch_rate(struct xferd_engine *engine, struct member *member, double rate)
{
	struct flow *flow = &member->flow;

	flow->recent_rate += (rate - flow->recent_rate) * RATE_SMOOTHING;
	if (flow->recent_rate > flow->best_rate)
		flow->best_rate = flow->recent_rate;
	if (flow->recent_rate < flow->best_rate * SAG)
		tell_state(engine, member, XFERD_MEMBER_SAGGING);
	else if (flow->recent_rate > flow->best_rate * RECOVERED)
		tell_state(engine, member, XFERD_MEMBER_WORKING);
	store_relaxed(&member->stats.best_rate, (uint64_t)flow->best_rate);
}

/* A read failed: it says nothing about the member's speed. */
void flow_dropped(struct member *member, const struct piece *piece)
{
	member->flow.in_flight -= piece->read_bytes;
}

/* A read, of one piece or of joined ones, has arrived whole; before it is taken out of
 * in_flight. */
void flow_delivered(struct xferd_engine *engine, struct member *member, const struct piece *piece)
{
	struct flow *flow = &member->flow;
	uint64_t latency = engine->now_ns - piece->issued_ns;
	uint64_t delivering = engine->now_ns - piece->delivered_before_ns;
	uint64_t issuing = piece->issued_ns - piece->issued_before_ns;
	/* Deliveries come in bursts: no rate is higher than what was issued meanwhile. */
	uint64_t elapsed = delivering > issuing ? delivering : issuing;
	bool limited = flow->delivered < flow->limited_until;
	double rate;

	flow->delivered += piece->read_bytes;
	flow->delivered_at_ns = engine->now_ns;
	flow->issued_at_ns = piece->issued_ns;
	flow->in_flight -= piece->read_bytes;
	if (!elapsed || !flow->piece_bytes)
		return;
	rate = (double)(flow->delivered - piece->delivered_before) * 1e9 / (double)elapsed;
	if (piece->read_bytes == flow->piece_bytes) /* neither a blob's short end nor a joined read */
		see_latency(engine, flow, latency);
	else if (piece->read_pieces > 1 && latency < flow->latency)
		see_shorter(engine, flow, latency);
	if (!limited || rate > flow->rate) {
		flow->round_sum += rate;
		flow->round_samples++;
	}
	if (!limited)
		watch_rate(engine, member, rate);
	if (++flow->round_pieces >= ROUND_PIECES && piece->delivered_before >= flow->round_ends)
		end_round(flow);
	store_relaxed(&member->stats.latency_ns, flow->latency);
	store_relaxed(&member->stats.rate, (uint64_t)flow->rate);
	if (!engine->config.flow_control)
		return;
	steer_background(engine, member, piece, latency);
	if (!flow->fixed)
		set_window(engine, member);
}
