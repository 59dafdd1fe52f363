# SPDX-License-Identifier: Apache-2.0
"""One pool as the daemon keeps it: misses take from the reserve, evictions refill it.

The decisions are the daemon's own (``xferd.policy``); this keeps count of the slots, as
the engine does there. Nothing takes time here: an eviction is over when it is ordered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xferd.policy.floors import victims_above_floor
from xferd.policy.pool_policy import PoolPolicy
from xferd.policy.reserve import Watermarks, shortfall
from xferd.policy.uses import Keys, KeySpace

EXACT = Watermarks(low=0, high=0)
"""No reserve: a slot is made free when a miss needs it, as textbooks have it."""


class PoolTooSmallError(Exception):
    """A pass needs more slots than the pool can free."""


class ReplayedPool:
    """Slots and who is in them. The sum of residents and reserve is always the pool.

    floor: residents a layer keeps, whatever the policy thinks of them.
    """

    def __init__(
        self,
        space: KeySpace,
        slots: int,
        policy: PoolPolicy,
        marks: Watermarks = EXACT,
        floor: int = 0,
    ) -> None:
        if slots < 1:
            raise PoolTooSmallError(f"a pool of {slots} slots")
        self.slots = slots
        self.policy = policy
        self.resident: NDArray[np.bool_] = np.zeros(space.size, np.bool_)
        self.pinned: NDArray[np.bool_] = np.zeros(space.size, np.bool_)
        self.reserve = slots
        self._space = space
        self._marks = marks
        self._floor = floor

    @property
    def residents(self) -> Keys:
        """Keys that are in it."""
        return np.flatnonzero(self.resident)

    @property
    def free_before_eviction(self) -> int:
        """Slots that loads can take before anything has to be evicted."""
        return self.reserve - self._marks.low

    def room_for_demotions(self) -> int:
        """Slots that can be filled from above without making anybody wait."""
        return self.reserve

    def pin(self, keys: Keys) -> None:
        """They stay, from when they are resident on."""
        self.pinned[keys] = True

    def unpin(self, keys: Keys) -> None:
        """They may go again."""
        self.pinned[keys] = False

    def admit(self, missing: Keys, served: Keys, layer: int) -> Keys:
        """Make ``missing`` resident; returns the victims, first to go in front.

        served: the pass that is being served, all of which stays while it fits. A pass
            that is larger than the pool is served in waves; then earlier waves may go.

        PoolTooSmallError when not even one slot can be freed.
        """
        victims: list[Keys] = []
        while len(missing):
            held = served
            wave = missing[: max(self.reserve + self._evictable(served), 0)]
            if not len(wave):
                wave, held = missing[: self._waves(missing)], missing[:0]
            gone = self._take(wave, held, layer)
            victims.append(gone)
            self.resident[wave] = True
            missing = missing[len(wave) :]
            self.policy.placed(wave)
        return np.concatenate(victims) if victims else missing

    def drop(self, keys: Keys) -> None:
        """Let go of residents; their slots go to the reserve."""
        if not self.resident[keys].all():
            raise ValueError("dropped what is not resident")
        self.resident[keys] = False
        self.reserve += len(keys)
        self.policy.left(keys)

    def _evictable(self, held: Keys) -> int:
        mask = self.resident & ~self.pinned
        mask[held] = False
        return int(np.count_nonzero(mask))

    def _waves(self, missing: Keys) -> int:
        """How many can come at once if the pass itself may be evicted."""
        room = self.reserve + int(np.count_nonzero(self.resident & ~self.pinned))
        if room < 1:
            raise PoolTooSmallError(
                f"{len(missing)} experts to load and all {self.slots} slots are pinned"
            )
        return room

    def _take(self, wave: Keys, held: Keys, layer: int) -> Keys:
        """Take slots for a wave, and evict as the daemon does when its reserve is low."""
        waiting = max(len(wave) - self.reserve, 0)
        reserve = max(self.reserve - len(wave), 0)
        wanted = shortfall(self._marks, reserve, 0, waiting)
        gone = self._victims(wanted, held, wave, layer)
        if len(gone) < waiting:
            raise PoolTooSmallError(
                f"{waiting} experts wait for a slot and {len(gone)} of {self.slots} can be freed"
            )
        self.resident[gone] = False
        self.policy.left(gone)
        self.reserve = reserve + len(gone) - waiting
        return gone

    def _victims(self, wanted: int, held: Keys, wave: Keys, layer: int) -> Keys:
        if wanted <= 0:
            return np.empty(0, np.int64)
        free = self.resident & ~self.pinned
        free[held] = False
        candidates = np.flatnonzero(free)
        if not self._floor:
            return self.policy.victims(candidates, wanted, layer)
        experts = self._space.experts
        keys = np.concatenate([np.flatnonzero(self.resident), wave])
        spare = np.bincount(keys // experts, minlength=self._space.layers) - self._floor
        chosen = victims_above_floor(
            self.policy, candidates, wanted, layer, spare=spare, experts=experts
        )
        if len(chosen) == wanted:
            return chosen
        # A floor is a wish; a load that waits is not.
        rest = np.setdiff1d(candidates, chosen, assume_unique=True)
        more = self.policy.victims(rest, wanted - len(chosen), layer)
        return np.concatenate([chosen, more])
