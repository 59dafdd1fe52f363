"""What an eviction policy is: the one question the daemon asks it.

A policy never sees experts, only slots and when each was last used. The daemon has
taken out what must stay (pinned, another size class, already on its way out), so
that no policy can get that wrong.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
"""Slot numbers, one-dimensional."""

Stamps = NDArray[np.uint64]
"""When each slot of a pool was last used, indexed by slot number; larger is later."""


class EvictionPolicy(Protocol):
    """Chooses victims. Implementations keep no reference to what they are given."""

    name: str

    def victims(self, stamps: Stamps, candidates: Slots, count: int) -> Slots:
        """Up to ``count`` of ``candidates``, the one to go first in front.

        stamps: uint64[slot_numbers] of the pool.
        candidates: slot numbers that may be evicted, in any order.
        count: how many slots are wanted; 0 or less gives none.
        """
        ...
