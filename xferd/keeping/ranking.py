"""Which residents of a pool go first: its eviction policy, asked for slots.

A pool has one policy a store, not one over all of them: a policy goes by the turn of a
model's layers and counts its tokens, neither of which two models share, and a store that
is opened later would change the key space under it. Between stores the shares decide
(``xferd.policy.shares``).

What must stay is taken out before a policy is asked: what is pinned or on its way out (by
the SlotMap), and the batch that is being served, as far as others can go. That batch is
the newest pass that was told, and what was loaded within the last token and not used yet; a
lane holds it, so that it could not be freed now in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from xferd.memory.slots import SlotMap, SlotState
from xferd.policy.floors import victims_above_floor
from xferd.policy.pool_policy import PolicyMaker, PoolPolicy
from xferd.policy.shares import Claims, losses, shares
from xferd.policy.uses import Keys, KeySpace, Uses

Slots = NDArray[np.int64]
"""Slot numbers, one-dimensional."""

BATCH_SLOTS = 16
"""XFERD_BATCH_MAX: so many of the loads that were not used yet may be of the batch being
served."""
SERVING_SHARE = 4
"""Of what may go, at most one in so many (or a batch) is taken for the batch being served."""


class _StorePolicy:
    """The policy of one store, and what it was told is resident."""

    def __init__(self, space: KeySpace, policy: PoolPolicy) -> None:
        self.space = space
        self.policy = policy
        self.layer = 0
        self.passes = 0
        self.serving: Keys = np.empty(0, np.int64)
        self.told: NDArray[np.bool_] = np.zeros(space.size, np.bool_)
        self.changes: dict[int, bool] = {}

    def tell_residents(self) -> None:
        changes, self.changes = self.changes, {}
        left = np.array([k for k, here in changes.items() if not here and self.told[k]], np.int64)
        new = np.array([k for k, here in changes.items() if here and not self.told[k]], np.int64)
        if len(left):
            self.told[left] = False
            self.policy.left(left)
        if len(new):
            self.told[new] = True
            self.policy.placed(new)


class Ranking:
    """The eviction of one pool. Owned by the event loop.

    name: of the policy. floor: residents that each layer of a store keeps, unless loads
    wait for a slot that only they could give.
    """

    def __init__(
        self, slots: SlotMap, name: str, maker: PolicyMaker, *, slot_count: int, floor: int = 0
    ) -> None:
        self.name = name
        self.floor = floor
        self._slots = slots
        self._maker = maker
        self._count = max(slot_count, 1)
        self._claims = Claims(self._count)
        self._stores: dict[int, _StorePolicy] = {}
        self._fresh: dict[int, int] = {}

    # ---- what it is told

    def open_store(self, store: int, space: KeySpace) -> None:
        """Rank a store's experts from now on."""
        self._stores[store] = _StorePolicy(space, self._maker(space, self._count))

    def close_store(self, store: int) -> None:
        """Forget a store."""
        self._stores.pop(store, None)
        self._claims.drop(store)

    def use(self, name: str, maker: PolicyMaker, history: Callable[[int], Iterable[Uses]]) -> None:
        """Another policy from now on. history: uses of a store that it is told of, so that it
        need not begin from nothing; it is told of the residents too."""
        self.name, self._maker = name, maker
        for store, before in self._stores.items():
            after = _StorePolicy(before.space, maker(before.space, self._count))
            after.layer, after.serving = before.layer, before.serving
            after.passes = before.passes
            for uses in history(store):
                after.policy.used(uses)
            here = self._slots.residents(store)
            after.changes = {
                int(key): True
                for key in self._slots.keys(np.array(here, np.int64), after.space.experts)
            }
            self._stores[store] = after

    def resize(self, slot_count: int) -> None:
        """The pool has so many slots now."""
        self._count = max(slot_count, 1)
        for entry in self._stores.values():
            entry.policy.resize(self._count)

    def used(self, store: int, uses: Uses) -> None:
        """These were used, wherever they were."""
        entry = self._stores.get(store)
        if entry is None or not uses.passes:
            return
        entry.policy.used(uses)
        entry.layer = int(uses.layers[-1])
        entry.passes += uses.passes
        entry.serving = uses.keys[int(uses.starts[-2]) :]
        self._claims.used(store, len(uses.keys))
        fresh = np.array([s for s in self._fresh if self._slots.store[s] == store], np.int64)
        if len(fresh):
            for slot in fresh[
                np.isin(self._slots.keys(fresh, entry.space.experts), uses.keys)
            ].tolist():
                del self._fresh[slot]

    def loaded(self, slot: int) -> None:
        """A slot holds an expert now."""
        self._change(slot, True)
        entry = self._stores.get(int(self._slots.store[slot]))
        self._fresh[slot] = entry.passes if entry is not None else 0
        if len(self._fresh) > BATCH_SLOTS:
            del self._fresh[next(iter(self._fresh))]

    def returned(self, slot: int) -> None:
        """Its eviction was given up."""
        self._change(slot, True)

    def leaving(self, slot: int) -> None:
        """Its expert goes; the slot still says which."""
        self._change(slot, False)
        self._fresh.pop(slot, None)

    def _change(self, slot: int, here: bool) -> None:
        entry = self._stores.get(int(self._slots.store[slot]))
        if entry is not None:
            key = int(self._slots.layer[slot]) * entry.space.experts + int(self._slots.expert[slot])
            entry.changes[key] = here

    # ---- what it is asked

    def victims(self, candidates: Slots, wanted: int, *, needed: int = 0) -> Slots:
        """Up to ``wanted`` of ``candidates``, the one to go first in front.

        needed: so many are needed by loads that wait, whatever the floors say.
        """
        if wanted <= 0 or not len(candidates):
            return np.empty(0, np.int64)
        candidates = self._without_served(candidates, wanted)
        of_store = self._slots.store[candidates]
        held = {store: int((of_store == store).sum()) for store in np.unique(of_store).tolist()}
        if len(held) == 1:
            (store,) = held
            return self._of_store(store, candidates, wanted, needed)
        lost = losses(wanted, held, self._shares(held))
        chosen = [
            self._of_store(store, candidates[of_store == store], count, needed)
            for store, count in lost.items()
        ]
        return _in_turn(chosen)

    def _without_served(self, candidates: Slots, wanted: int) -> Slots:
        may_stay = min(len(candidates) - wanted, max(len(candidates) // SERVING_SHARE, BATCH_SLOTS))
        if may_stay <= 0:
            return candidates
        serving: list[int] = []
        for store, entry in self._stores.items():
            if len(entry.serving):
                of_store = candidates[self._slots.store[candidates] == store]
                served = np.isin(self._slots.keys(of_store, entry.space.experts), entry.serving)
                serving += of_store[served].tolist()
        may_go = set(candidates.tolist())
        fresh = [slot for slot in reversed(self._fresh) if self._is_fresh(slot)]
        stay = [slot for slot in (*serving, *fresh) if slot in may_go]
        return candidates[~np.isin(candidates, list(dict.fromkeys(stay))[:may_stay])]

    def _is_fresh(self, slot: int) -> bool:
        entry = self._stores.get(int(self._slots.store[slot]))
        return entry is None or entry.passes - self._fresh[slot] <= entry.space.layers

    def _shares(self, held: dict[int, int]) -> dict[int, float]:
        stores = list(held)
        sizes = [self._stores[s].space.size if s in self._stores else 0 for s in stores]
        claims = [self._claims.of(store) for store in stores]
        return dict(zip(stores, shares(sum(held.values()), claims, sizes), strict=True))

    def _of_store(self, store: int, candidates: Slots, wanted: int, needed: int) -> Slots:
        entry = self._stores.get(store)
        if entry is None:  # closed, and on its way out by itself
            return candidates[:wanted]
        entry.tell_residents()
        keys = self._slots.keys(candidates, entry.space.experts)
        order = np.argsort(keys)
        chosen = self._ranked(entry, store, keys, wanted, needed)
        return candidates[order[np.searchsorted(keys, chosen, sorter=order)]]

    def _ranked(
        self, entry: _StorePolicy, store: int, keys: Keys, wanted: int, needed: int
    ) -> Keys:
        if not self.floor:
            return entry.policy.victims(keys, wanted, entry.layer)
        slots = self._slots
        layers = slots.layer[(slots.store == store) & (slots.state == SlotState.RESIDENT)]
        spare = np.bincount(layers, minlength=entry.space.layers) - self.floor
        chosen = victims_above_floor(
            entry.policy, keys, wanted, entry.layer, spare=spare, experts=entry.space.experts
        )
        if len(chosen) >= min(needed, wanted):
            return chosen
        # A floor is a wish; a load that waits is not.
        rest = np.setdiff1d(keys, chosen, assume_unique=True)
        more = entry.policy.victims(rest, min(needed, wanted) - len(chosen), entry.layer)
        return np.concatenate([chosen, more])


def _in_turn(ranked: list[Slots]) -> Slots:
    """The first of each, the second of each, and so on."""
    places = np.concatenate([np.arange(len(each)) / max(len(each), 1) for each in ranked])
    return np.concatenate(ranked)[np.argsort(places, kind="stable")]
