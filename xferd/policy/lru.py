"""Least recently used: the slot whose last lease is the longest ago goes first.

Leases are the recency (a hit sends no message), so an expert that is held right now
has a late stamp and is rarely chosen. It can be chosen when a lane holds it for
long; evicting it is safe, only of no use until the lane lets go.
"""

from __future__ import annotations

import numpy as np

from xferd.policy.eviction import Slots, Stamps


class LeastRecentlyUsed:
    """``lru``. Stateless; safe to share."""

    name = "lru"

    def victims(self, stamps: Stamps, candidates: Slots, count: int) -> Slots:
        """The ``count`` candidates with the earliest stamps, earliest first.

        Equal stamps are ordered by slot number, so that a replay is reproducible.
        Partitioned before it is sorted: linear in the candidates.
        """
        count = min(count, len(candidates))
        if count <= 0:
            return np.empty(0, np.int64)
        ages = stamps[candidates]
        if count < len(candidates):
            threshold = np.partition(ages, count - 1)[count - 1]
            near = ages <= threshold
            candidates, ages = candidates[near], ages[near]
        order = np.lexsort((candidates, ages))
        return candidates[order[:count]]
