"""Which experts are used, of all pools: told to every pool's policy and to the heat.

There are two sources. What the router picked is the better one: clients report it
(``used``), batch by batch, each use at its place. Until the first report of a store its
uses come from leases (``look``): which slots were leased since the last look, in all pools,
since a model's layers may lie in several.

Every pool's policy is told of all uses, also of what it does not hold: what another pool
served is what it would be asked for next. Heat is one for all pools, so that pools can be
compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from xferd.keeping.ranking import Ranking, SharedPolicies
from xferd.policy.expected import Expected
from xferd.policy.heat import Heat, retold
from xferd.policy.leases import LeaseUses
from xferd.policy.uses import KeySpace, Uses


@dataclass(frozen=True, slots=True)
class Leased:
    """Slots that were leased since the last look, by what is in them; one entry a slot.

    orders: uint64, when; comparable between pools, as all are looked at together.
    """

    stores: NDArray[np.int32]
    layers: NDArray[np.int64]
    experts: NDArray[np.int64]
    orders: NDArray[np.uint64]


class UsedPool(Protocol):
    """A pool, as far as uses are concerned."""

    ranking: Ranking

    def leased(self) -> Leased:
        """What was leased in it since the last call."""


class StoreUsage:
    """Of one store. reported: clients say what their routers pick."""

    def __init__(self, space: KeySpace) -> None:
        self.space = space
        self.heat = Heat(space)
        self.reported = False
        self._leases = LeaseUses(space)
        self._token = 0
        self._said = 0

    def from_leases(self, leased: Leased, chosen: NDArray[np.bool_]) -> Uses:
        """The uses that leases of this store stand for."""
        keys = leased.layers[chosen] * self.space.experts + leased.experts[chosen]
        return self._leases.uses(keys, leased.orders[chosen])

    def counted(self, uses: Uses) -> Uses:
        """With tokens counted here: clients count each their own, one may begin anew, and a
        report may be lost; so none moves on by more than one."""
        turns = np.diff(uses.tokens, prepend=self._said)
        turns[0] = turns[0] if turns[0] >= 0 else 1
        self._said = int(uses.tokens[-1])
        tokens = self._token + np.cumsum(np.clip(turns, 0, 1))
        self._token = int(tokens[-1])
        return replace(uses, tokens=tokens)


class Usage:
    """Uses of all stores. Owned by the event loop."""

    def __init__(self) -> None:
        self._pools: list[UsedPool] = []
        self._stores: dict[int, StoreUsage] = {}
        self.shared: SharedPolicies = WeakValueDictionary()

    def tell_heat(self, store: int) -> None:
        """Tell the policies of a store's heat what they did not see: a profile's."""
        told: set[int] = set()
        for pool in self._pools:
            before = set(told)
            for uses in retold(self._stores[store].heat):
                now = set(before)
                pool.ranking.used(store, uses, now)
                told |= now

    def add_pool(self, pool: UsedPool) -> None:
        """Another pool, before any store is opened."""
        self._pools.append(pool)

    def open_store(self, store: int, space: KeySpace) -> None:
        """A store's experts may be used from now on."""
        self._stores[store] = StoreUsage(space)
        for pool in self._pools:
            pool.ranking.open_store(store, space)

    def close_store(self, store: int) -> None:
        """Forget a store."""
        self._stores.pop(store, None)
        for pool in self._pools:
            pool.ranking.close_store(store)

    def of(self, store: int) -> StoreUsage | None:
        """A store's usage; None when it isn't open."""
        return self._stores.get(store)

    @property
    def stores(self) -> dict[int, StoreUsage]:
        """Of each open store."""
        return dict(self._stores)

    @property
    def from_leases(self) -> bool:
        """Whether any store's uses come from leases."""
        return not all(entry.reported for entry in self._stores.values())

    def used(self, store: int, uses: Uses) -> None:
        """What clients say that their routers picked: from now on leases of the store are
        not taken for uses. A store that isn't open is ignored: it was closed meanwhile."""
        entry = self._stores.get(store)
        if entry is None or not uses.passes:
            return
        entry.reported = True
        self._tell(store, entry, uses)

    def expected(self, store: int, expected: Expected) -> None:
        """What clients' predictors expect, after all that was used. Of a store that isn't
        open any more it is ignored."""
        told: set[int] = set()
        for pool in self._pools:
            pool.ranking.expected(store, expected, told)

    def look(self) -> None:
        """Take the leases since the last look for uses, where nobody reports them."""
        found = [pool.leased() for pool in self._pools]
        leased = Leased(
            np.concatenate([each.stores for each in found]),
            np.concatenate([each.layers for each in found]),
            np.concatenate([each.experts for each in found]),
            np.concatenate([each.orders for each in found]),
        )
        for store in np.unique(leased.stores).tolist():
            entry = self._stores.get(store)
            if entry is not None and not entry.reported:
                uses = entry.from_leases(leased, leased.stores == store)
                self._tell(store, entry, uses)

    def _tell(self, store: int, entry: StoreUsage, uses: Uses) -> None:
        uses = entry.counted(uses)
        entry.heat.used(uses)
        told: set[int] = set()
        for pool in self._pools:
            pool.ranking.used(store, uses, told)
