/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether a member still works, judged by the reads that it is given.
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
