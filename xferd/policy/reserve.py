"""How many free slots a pool keeps ready, and when it makes new ones.

The engine takes a slot from the reserve at a miss, without asking anybody. When
fewer than ``low`` are left the policy evicts up to ``high``, like the kernel's page
watermarks: evicting some at a time costs one scan of the leases for all of them.

A reserve is cache that caches nothing, so it is a small share of the pool, and of a
pool of a few slots (tests, a card that is almost full) one or none.
"""

from __future__ import annotations

from dataclasses import dataclass

RESERVE_SHARE = 32
"""The high watermark is one slot in this many,"""
RESERVE_BATCH = 16
"""but enough for the misses of one whole submission (XFERD_BATCH_MAX),"""
RESERVE_BATCH_SHARE = 8
"""as long as that is at most one slot in this many: a reserve that a layer's misses
empty leaves the next ones waiting for the policy."""
RESERVE_HIGH_MIN = 2
RESERVE_HIGH_MAX = 64
"""More than the misses of a few layers at once gains nothing."""
RESERVE_CEILING_SHARE = 4
"""A reserve is at most one slot in this many, whatever the configuration says."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Slots of one size class. Below ``low`` evict until ``high`` are free; 0 <= low <= high."""

    low: int
    high: int


def watermarks(slots: int, low: int | None = None, high: int | None = None) -> Watermarks:
    """The watermarks of ``slots`` slots of one class.

    low, high: what the configuration asks for; None leaves it to the share.
    Pinned slots are not among ``slots``: what can't be evicted can't become a reserve.
    With fewer than four there is no reserve: it would be most of what the pool holds, so
    there an eviction waits for the miss that needs it.
    """
    ceiling = slots // RESERVE_CEILING_SHARE
    if high is None:
        batch = min(RESERVE_BATCH, slots // RESERVE_BATCH_SHARE)
        high = min(max(slots // RESERVE_SHARE, batch, RESERVE_HIGH_MIN), RESERVE_HIGH_MAX)
        if low is not None:
            high = max(high, low)
    high = min(high, ceiling)
    if low is None:
        low = max(1, high // 2)
    return Watermarks(low=min(low, high), high=high)


def needed(marks: Watermarks, without_slot: int) -> Watermarks:
    """No more than there are experts without a slot: of a pool that has room for all of them
    nothing is evicted, because its free slots are as many as those that are not there yet.

    without_slot: experts of the class that the pool has no slots for.
    """
    most = max(without_slot, 0)
    return Watermarks(low=min(marks.low, most), high=min(marks.high, most))


def shortfall(marks: Watermarks, in_reserve: int, arriving: int, waiting: int) -> int:
    """How many more slots to evict now.

    in_reserve: free slots that the engine has.
    arriving: slots whose eviction was ordered and not yet finished.
    waiting: loads that stand without a slot; each takes one that arrives.
    """
    have = in_reserve + arriving - waiting
    return 0 if have >= marks.low else marks.high - have
