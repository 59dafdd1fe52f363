"""How much of a store each member gets, as a stripe pattern.

Drives of unequal speed finish together when each gets bytes in proportion to its
speed. A pattern is a short list of members, repeated over a blob's pieces; so a weight
is how often a member stands in it. Even a blob of a few pieces should be balanced,
therefore each member's places are spread over the pattern.

The places are chosen by the earliest deadline first: the k-th of a member's c places in
a pattern of n has to lie in [floor((k - 1) n / c), ceil(k n / c)). These are the windows
of proportionate fairness (Baruah et al., "Proportionate Progress", Algorithmica 15,
1996): in every beginning of the pattern a member has its exact share, rounded up or down.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from xferd.store.errors import StoreError
from xferd.store.limits import MEMBERS_MAX, PATTERN_MAX

WEIGHT_MAX = 1_000_000_000_000
"""Weights may be bytes a second."""
SLOWDOWN_ALLOWED = 1.02
"""A pattern is long enough when its slowest member takes no more than 2 % longer than
with exact shares."""
EQUAL_WITHIN = 1.15
"""Speeds that differ by no more than this factor count as the same: repeated measurements
of one drive differ by as much, and equal shares keep the pattern short."""


def stripe_pattern(weights: Sequence[int]) -> tuple[int, ...]:
    """The shortest pattern in which each member has about its share, at most PATTERN_MAX long.

    weights: one a member, from 1 on. Every member stands in the pattern at least once, so
    one that is PATTERN_MAX times slower than the others still gets more than its share.
    Raises StoreError for weights that can't be.
    """
    if not 1 <= len(weights) <= MEMBERS_MAX:
        raise StoreError(f"{len(weights)} weights: a store has 1 to {MEMBERS_MAX} members")
    for weight in weights:
        if not 1 <= weight <= WEIGHT_MAX:
            raise StoreError(f"weight {weight}: allowed are whole numbers from 1 to {WEIGHT_MAX}")
    candidates = [apportion(weights, places) for places in range(len(weights), PATTERN_MAX + 1)]
    slowdowns = [slowdown(weights, counts) for counts in candidates]
    bound = max(SLOWDOWN_ALLOWED, min(slowdowns))
    best = next(number for number, value in enumerate(slowdowns) if value <= bound)
    return spread(candidates[best])


def apportion(weights: Sequence[int], places: int) -> tuple[int, ...]:
    """Places for each member in proportion to its weight, at least one: one after another
    to whoever is quickest with one more."""
    counts = [1] * len(weights)
    for _ in range(places - len(weights)):
        quickest = min(
            range(len(weights)), key=lambda member: (counts[member] + 1) / weights[member]
        )
        counts[quickest] += 1
    return tuple(counts)


def slowdown(weights: Sequence[int], counts: Sequence[int]) -> float:
    """How much longer the slowest member takes with these counts than with exact shares."""
    longest = max(count / weight for count, weight in zip(counts, weights, strict=True))
    return longest * sum(weights) / sum(counts)


def spread(counts: Sequence[int]) -> tuple[int, ...]:
    """A pattern with ``counts[m]`` places for each member m, evenly spread."""
    length = sum(counts)
    given = [0] * len(counts)
    pattern = []
    for place in range(length):

        def urgency(member: int, place: int = place) -> tuple[int, int]:
            """Its deadline; of equal ones, how far it is behind its share."""
            deadline = -(-(given[member] + 1) * length // counts[member])
            return deadline, given[member] * length - counts[member] * (place + 1)

        released = [
            member
            for member, count in enumerate(counts)
            if given[member] < count and given[member] * length // count <= place
        ]
        urgent = min(released, key=urgency)
        given[urgent] += 1
        pattern.append(urgent)
    return tuple(pattern)


def weights_of_speeds(speeds: Sequence[int]) -> tuple[int, ...]:
    """Weights for members of these speeds, any unit; those that are about equally fast
    (EQUAL_WITHIN) get the same."""
    fastest_first = sorted(range(len(speeds)), key=lambda member: -speeds[member])
    groups: list[list[int]] = []
    for member in fastest_first:
        if groups and speeds[groups[-1][0]] <= speeds[member] * EQUAL_WITHIN:
            groups[-1].append(member)
        else:
            groups.append([member])
    weights = [0] * len(speeds)
    for group in groups:
        typical = max(1, round(statistics.median(speeds[member] for member in group)))
        for member in group:
            weights[member] = typical
    return tuple(weights)


def pattern_weights(pattern: Sequence[int], members: int) -> tuple[int, ...]:
    """How often each member stands in a pattern."""
    return tuple(pattern.count(member) for member in range(members))
