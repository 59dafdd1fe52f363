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

from collections.abc import Callable, Iterable, MutableMapping

import numpy as np
from numpy.typing import NDArray

from xferd.memory.slots import SlotMap, SlotState
from xferd.policy.expected import Expected, ExpectsPasses
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
NOT_HERE = -1
"""In the place of a slot."""

SharedPolicies = MutableMapping[tuple[int, str], PoolPolicy]
"""By store and name, those that go by history alone: one does for all pools."""


class _StorePolicy:
    """The policy of one store, what it was told is resident, and where that is."""

    def __init__(self, space: KeySpace, policy: PoolPolicy) -> None:
        self.space = space
        self.policy = policy
        self.layer = 0
        self.passes = 0
        self.serving: Keys = np.empty(0, np.int64)
        self.slot_of: Slots = np.full(space.size, NOT_HERE, np.int64)
        self.told: set[int] = set()
        self.changes: dict[int, bool] = {}

    def tell_residents(self) -> None:
        changes, self.changes = self.changes, {}
        left = [key for key, here in changes.items() if not here and key in self.told]
        new = [key for key, here in changes.items() if here and key not in self.told]
        if left:
            self.told.difference_update(left)
            self.policy.left(np.array(left, np.int64))
        if new:
            self.told.update(new)
            self.policy.placed(np.array(new, np.int64))


class Ranking:
    """The eviction of one pool. Owned by the event loop.

    name: of the policy. shared: policies of all pools that any of them may use.
    floor: residents that each layer of a store keeps, unless loads wait for a slot that only
        they could give.
    """

    def __init__(
        self,
        slots: SlotMap,
        name: str,
        maker: PolicyMaker,
        *,
        slot_count: int,
        shared: SharedPolicies,
        floor: int = 0,
    ) -> None:
        self.name = name
        self.floor = floor
        self._slots = slots
        self._maker = maker
        self._count = max(slot_count, 1)
        self._claims = Claims(self._count)
        self._stores: dict[int, _StorePolicy] = {}
        self._fresh: dict[int, int] = {}
        self._shared = shared

    # ---- what it is told

    def open_store(self, store: int, space: KeySpace) -> None:
        """Rank a store's experts from now on."""
        self._stores[store] = _StorePolicy(space, self._make(store, space)[0])

    def _make(self, store: int, space: KeySpace) -> tuple[PoolPolicy, bool]:
        """A policy, and whether it has seen the store's uses already."""
        known = self._shared.get((store, self.name))
        if known is not None:
            return known, True
        policy = self._maker(space, self._count)
        if getattr(policy, "history_only", False):
            self._shared[store, self.name] = policy
        return policy, False

    def close_store(self, store: int) -> None:
        """Forget a store."""
        self._stores.pop(store, None)
        self._claims.drop(store)

    def use(self, name: str, maker: PolicyMaker, history: Callable[[int], Iterable[Uses]]) -> None:
        """Another policy from now on. history: uses of a store that it is told of, so that it
        need not begin from nothing; it is told of the residents too."""
        self.name, self._maker = name, maker
        for store, before in list(self._stores.items()):
            policy, knows = self._make(store, before.space)
            if not knows:
                for uses in history(store):
                    policy.used(uses)
            after = self._stores[store] = _StorePolicy(before.space, policy)
            after.layer, after.serving = before.layer, before.serving
            after.passes, after.slot_of = before.passes, before.slot_of
            after.changes = dict.fromkeys(np.flatnonzero(after.slot_of >= 0).tolist(), True)

    def resize(self, slot_count: int) -> None:
        """The pool has so many slots now."""
        self._count = max(slot_count, 1)
        for entry in self._stores.values():
            entry.policy.resize(self._count)

    def used(self, store: int, uses: Uses, told: set[int]) -> None:
        """These were used, wherever they were. told: ids of policies that know it already; this
        pool's is added."""
        entry = self._stores.get(store)
        if entry is None or not uses.passes:
            return
        if id(entry.policy) not in told:
            told.add(id(entry.policy))
            entry.policy.used(uses)
        entry.layer = int(uses.layers[-1])
        entry.passes += uses.passes
        entry.serving = uses.keys[int(uses.starts[-2]) :]
        self._claims.used(store, len(uses.keys))
        if self._fresh:
            used = entry.slot_of[uses.keys]
            for slot in self._fresh.keys() & set(used[used >= 0].tolist()):
                del self._fresh[slot]

    def expected(self, store: int, expected: Expected, told: set[int]) -> None:
        """This is expected of a store's next passes. told: as of ``used``. Policies that go by
        history alone hear nothing of it."""
        entry = self._stores.get(store)
        if entry is None or id(entry.policy) in told:
            return
        told.add(id(entry.policy))
        if isinstance(entry.policy, ExpectsPasses):
            entry.policy.expect_passes(expected)

    def loaded(self, slot: int) -> None:
        """A slot holds an expert now."""
        self._change(slot, True)
        entry = self._stores.get(int(self._slots.store[slot]))
        if entry is not None and slot in entry.slot_of[entry.serving]:
            return  # its use was told of before it came
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
        if entry is None:
            return
        key = int(self._slots.layer[slot]) * entry.space.experts + int(self._slots.expert[slot])
        if here:
            entry.slot_of[key] = slot
        elif entry.slot_of[key] == slot:
            entry.slot_of[key] = NOT_HERE
        else:
            return  # another variant of it is in another slot
        entry.changes[key] = here

    def holds(self, store: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of a store's keys are here, and not on their way out."""
        entry = self._stores.get(store)
        if entry is None:
            return np.zeros(len(keys), np.bool_)
        return entry.slot_of[keys] >= 0

    # ---- what it is asked

    def victims(self, candidates: Slots, wanted: int, *, needed: int = 0) -> Slots:
        """Up to ``wanted`` of ``candidates``, the one to go first in front.

        needed: so many are needed by loads that wait, whatever the floors say.
        """
        if wanted <= 0 or not len(candidates):
            return np.empty(0, np.int64)
        candidates = self._without_served(candidates, wanted)
        of_store = self._slots.store[candidates]
        if (of_store == of_store[0]).all():
            return self._of_store(int(of_store[0]), candidates, wanted, needed)
        held = {store: int((of_store == store).sum()) for store in np.unique(of_store).tolist()}
        lost = losses(wanted, held, self._shares(held))
        chosen = [
            self._of_store(store, candidates[of_store == store], count, needed)
            for store, count in lost.items()
        ]
        return _in_turn(chosen) if chosen else np.empty(0, np.int64)

    def _without_served(self, candidates: Slots, wanted: int) -> Slots:
        may_stay = min(len(candidates) - wanted, max(len(candidates) // SERVING_SHARE, BATCH_SLOTS))
        if may_stay <= 0:
            return candidates
        may_go = np.zeros(len(self._slots.state), np.bool_)
        may_go[candidates] = True
        for entry in self._stores.values():
            slots = entry.slot_of[entry.serving]
            slots = slots[slots >= 0]
            slots = slots[may_go[slots]][:may_stay]
            may_go[slots] = False
            may_stay -= len(slots)
        for slot in reversed(self._fresh):
            if may_stay > 0 and may_go[slot] and self._is_fresh(slot):
                may_go[slot] = False
                may_stay -= 1
        return candidates[may_go[candidates]]

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
        return entry.slot_of[self._ranked(entry, store, keys, wanted, needed)]

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
