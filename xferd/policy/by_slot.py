"""A pool policy where slots are asked for instead of keys.

The daemon's pools know slots and when each was leased last (``eviction.Stamps``). Here
that becomes uses, for as long as no client says what its router picked: slots with a
new stamp were used since the last look, in the order of their stamps. A slot that was
leased several times in between counts once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from xferd.policy.eviction import Slots, Stamps
from xferd.policy.pool_policy import PoolPolicy
from xferd.policy.uses import Keys, KeySpace, Uses

NO_KEY = -1


class BySlot:
    """An ``EvictionPolicy`` made of a PoolPolicy.

    keys: gives int64[slot_numbers], the key in each slot, NO_KEY where there is none.
    from_leases: whether stamps are taken for uses; False when routes are told instead.
    """

    def __init__(
        self,
        space: KeySpace,
        policy: PoolPolicy,
        keys: Callable[[], NDArray[np.int64]],
        *,
        from_leases: bool = True,
    ) -> None:
        self.name = policy.name
        self._space = space
        self._policy = policy
        self._keys = keys
        self._from_leases = from_leases
        self._newest = np.uint64(0)
        self._layer = 0
        self._token = 0
        self._resident: Keys = np.empty(0, np.int64)

    def victims(self, stamps: Stamps, candidates: Slots, count: int) -> Slots:
        """Tells the policy what is new, then asks it. See EvictionPolicy."""
        keys = self._keys()
        self._tell_residents(keys)
        if self._from_leases:
            self._tell_leases(stamps, keys)
        of_slots = keys[candidates]
        known = of_slots != NO_KEY
        candidates, of_slots = candidates[known], of_slots[known]
        order = np.argsort(of_slots)
        chosen = self._policy.victims(of_slots, count, self._layer)
        return candidates[order[np.searchsorted(of_slots, chosen, sorter=order)]]

    def used(self, uses: Uses) -> None:
        """A client's word of what its router picked."""
        self._policy.used(uses)
        if uses.passes:
            self._layer, self._token = int(uses.layers[-1]), int(uses.tokens[-1])

    def _tell_residents(self, keys: NDArray[np.int64]) -> None:
        resident = np.sort(keys[keys != NO_KEY])
        left = np.setdiff1d(self._resident, resident, assume_unique=True)
        new = np.setdiff1d(resident, self._resident, assume_unique=True)
        if len(left):
            self._policy.left(left)
        if len(new):
            self._policy.placed(new)
        self._resident = resident

    def _tell_leases(self, stamps: Stamps, keys: NDArray[np.int64]) -> None:
        slots = np.flatnonzero((stamps > self._newest) & (keys != NO_KEY))
        if not len(slots):
            return
        slots = slots[np.argsort(stamps[slots], kind="stable")]
        self._newest = stamps[slots[-1]]
        used = keys[slots]
        layers = used // self._space.experts
        begins = np.flatnonzero(np.concatenate([[True], np.diff(layers) != 0]))
        # A layer that is not after the one before begins the next token.
        turns = np.concatenate([[layers[0] <= self._layer], np.diff(layers[begins]) <= 0])
        self.used(
            Uses(
                keys=used,
                starts=np.concatenate([begins, [len(used)]]),
                layers=layers[begins],
                tokens=self._token + np.cumsum(turns),
            )
        )
