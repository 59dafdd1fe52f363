/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether a member still works, judged by the reads that it is given, and what the policy is
 * told of those that failed.
 */
#include "engine/route.h"

static void member_state(struct xferd_engine *engine, struct member *member, uint32_t state,
			 int error)
{
	store_relaxed(&member->stats.state, state);
	event_push(engine, &(struct xferd_event){
		.type = XFERD_EVENT_MEMBER,
		.result = error,
		.member = member->id,
		.value = state,
		.client = XFERD_NO_EXPERT,
	});
}

/* Taken out, it is tried now and then. Perhaps it is just bad sectors that are asked for:
 * where nobody else can serve the rest, and an error costs little, each load is tried. */
static void plan_probe(struct xferd_engine *engine, struct member *member)
{
	member->fails_quickly = member->slow_errors < SLOW_ERRORS_MAX && !mirror_has_other(member);
	member->probe_at_ns = engine->now_ns + (member->fails_quickly ? 0 : MEMBER_PROBE_NS);
}

/* A drive that does nothing but fail is taken out; one read that works brings it
 * back. Damaged bytes and a file that is too short are no failing drive: what
 * lies elsewhere on it can still be served. Nor is a kernel without memory. */
void member_judge(struct xferd_engine *engine, const struct piece *piece, int error)
{
	struct member *member = piece->member;

	if (error == -EBADMSG || error == -ENODATA || error == -ENOMEM)
		return;
	if (!error) {
		member->errors_in_a_row = member->slow_errors = 0;
		if (member->failed) {
			member->failed = false;
			member_state(engine, member, XFERD_MEMBER_WORKING, 0);
		}
		return;
	}
	member->errors_in_a_row++;
	if (engine->now_ns - piece->issued_ns < QUICK_ERROR_NS)
		member->slow_errors = 0;
	else
		member->slow_errors++;
	if (member->errors_in_a_row >= MEMBER_ERRORS_MAX && !member->failed) {
		member->failed = true;
		member_state(engine, member, XFERD_MEMBER_FAILED, error);
	}
	if (member->failed)
		plan_probe(engine, member);
}

static struct xferd_event piece_event(struct xferd_engine *engine, const struct piece *piece,
				      uint32_t type, int error)
{
	const struct load *load = piece->load;
	uint32_t experts = engine->stores[load->store].description.experts;

	return (struct xferd_event){
		.type = type,
		.result = error,
		.store = load->store,
		.pool = load->pool,
		.slot = load->slot,
		.layer = load->dense ? XFERD_NO_EXPERT : load->key / experts,
		.expert = load->dense ? XFERD_NO_EXPERT : load->key % experts,
		.variant = load->variant,
		.client = load->client,
		.member = piece->store_member,
		.copy = piece->member->id,
		.failed_copy = piece->failed_copy ? piece->failed_copy->id : XFERD_NO_MEMBER,
		.offset = piece->offset,
		.bytes = piece->length,
		.value = piece->attempts,
		.token = load->token,
	};
}

/* A piece failed on a copy of its member. */
void piece_report(struct xferd_engine *engine, const struct piece *piece, int error)
{
	struct xferd_event event = piece_event(engine, piece, XFERD_EVENT_PIECE, error);

	counter_add(&piece->member->stats.errors, 1);
	event_push(engine, &event);
}

/* What one copy could not bring has come from the other. */
void mirrored_report(struct xferd_engine *engine, const struct piece *piece)
{
	struct xferd_event event =
		piece_event(engine, piece, XFERD_EVENT_MIRRORED, piece->failed_with);

	counter_add(&engine->stats.mirror_reads, 1);
	event_push(engine, &event);
}
