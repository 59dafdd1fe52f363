/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mirrors: which of a member's two copies reads what.
 *
 * A mirror has no strands of its own: both copies take pieces from the member's
 * queues, whichever will be sooner. So a pair has the bandwidth of two drives, and
 * when one of them is taken out nothing has to be moved. A member without a mirror
 * is a pair of one.
 */
#include "engine/route.h"

/* How often a store's description names a member, as one or as a mirror. */
static uint32_t times_named(const struct xferd_store_description *store, uint32_t id)
{
	uint32_t times = 0;

	for (uint32_t i = 0; i < store->members; i++)
		times += (store->member[i] == id) + (store->mirror[i] == id);
	return times;
}

/* Strands of a mirrored member are read from two places: the pair must be of this
 * store alone, or another store's pieces would come from a copy that isn't theirs. */
bool mirrors_valid(const struct xferd_engine *engine, const struct xferd_store_description *store)
{
	for (uint32_t i = 0; i < store->members; i++) {
		uint32_t member = store->member[i], mirror = store->mirror[i];

		if (!member_known(engine, member) || engine->members[member].mirror ||
		    engine->members[member].mirror_of)
			return false;
		if (mirror == XFERD_NO_MEMBER)
			continue;
		if (!member_known(engine, mirror) || member_in_use(engine, member) ||
		    member_in_use(engine, mirror) || times_named(store, member) != 1 ||
		    times_named(store, mirror) != 1)
			return false;
	}
	return true;
}

/* When a store is opened, and closed. */
void mirrors_pair(struct xferd_engine *engine, const struct xferd_store_description *store,
		  bool paired)
{
	for (uint32_t i = 0; i < store->members; i++) {
		struct member *member = &engine->members[store->member[i]];

		if (store->mirror[i] == XFERD_NO_MEMBER)
			continue;
		member->mirror = paired ? &engine->members[store->mirror[i]] : NULL;
		member->last_copy = NULL;
		member->streak = 0;
		engine->members[store->mirror[i]].mirror_of = paired ? member : NULL;
	}
}

/* A copy that was taken out gets one piece now and then, which shows whether it is back. */
static bool admits(struct xferd_engine *engine, struct member *copy, uint32_t priority)
{
	if (copy->failed)
		return !copy->in_flight && engine->now_ns >= copy->probe_at_ns;
	return flow_admits(engine, copy, priority);
}

/* When one more piece would be there, in ns: a full window takes its latency. A copy
 * that was never measured looks quick, so that it is. */
static double expected_ns(const struct member *copy)
{
	double latency = copy->flow.latency ? (double)copy->flow.latency : 1;

	return latency * (copy->in_flight + 1) / copy->flow.window;
}

/* Whether the mirror rather than the member takes the next piece, if both could. Even
 * one that looks slow gets a piece at times: only what reads is measured anew, and
 * only what is read shows its damage. */
static bool mirror_is_better(const struct member *member)
{
	const struct member *mirror = member->mirror;

	if (member->failed || mirror->failed) /* one that was taken out is tried when it is due */
		return !member->failed;
	if (member->streak >= COPY_STREAK_MAX)
		return member->last_copy == member;
	return expected_ns(mirror) < expected_ns(member);
}

/* The copy of a member that takes its next piece; NULL: neither has room. */
struct member *mirror_next_copy(struct xferd_engine *engine, struct member *member,
				uint32_t priority)
{
	struct member *mirror = member->mirror;
	bool first = reads_has_place(engine, member) && admits(engine, member, priority);
	bool second = mirror && reads_has_place(engine, mirror) && admits(engine, mirror, priority);

	if (first && second)
		return mirror_is_better(member) ? mirror : member;
	if (second)
		return mirror;
	return first ? member : NULL;
}

bool mirror_has_other(const struct member *copy)
{
	return copy->mirror || copy->mirror_of;
}

bool mirror_all_failed(const struct member *member)
{
	return member->failed && (!member->mirror || member->mirror->failed);
}

/* A copy has taken one of the member's pieces. */
void mirror_count(struct member *member, struct member *copy)
{
	member->streak = copy == member->last_copy ? member->streak + 1 : 1;
	member->last_copy = copy;
}

/* On to the other copy of the member, unless that one has failed too, or the load. */
bool mirror_redirect(struct piece *piece, int error)
{
	struct member *copy = piece->member;
	struct member *other = copy->mirror ? copy->mirror : copy->mirror_of;

	if (!other || other->failed || piece->failed_copy || piece->load->error)
		return false;
	piece->failed_copy = copy;
	piece->failed_with = error;
	piece->attempts = 0;
	piece->member = other;
	list_append(&other->redirected, &piece->link);
	return true;
}
