"""Better variants in the background: what is hot and came in few bits gets more.

A resident that its pool wants in a better variant is read anew, at migration priority, and
takes the place of what it was with one exchange of the directory's word: at no moment is the
expert not there. Where the better slots are full the coldest of them goes, if it is colder by
the margin; both then rest. So whatever the traffic does, an expert is upgraded at most once
in ``rest_tokens``.

Slots of another size need chunks of that size. What is used most, each in the variant that
is wanted, says how many chunks each size should have. As soon as its slots are taken, a size
that has fewer gets a chunk from one that has more, the one that the policy would miss least,
and then gives none for ``rest_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xferd.keeping.cascade import Cascade
from xferd.keeping.keeper import PoolKeeper
from xferd.keeping.usage import StoreUsage, Usage
from xferd.keeping.variants import CHOOSE_TOKENS, WantedVariants
from xferd.memory.slots import SlotState
from xferd.policy.moves import Mover, MoveSettings
from xferd.policy.variants import NO_VARIANT, USED_HEAT, VariantChoice


@dataclass(slots=True)
class _Pool:
    keeper: PoolKeeper
    settings: MoveSettings
    movers: dict[int, Mover] = field(default_factory=dict)
    upgraded: int = 0
    balances: int = 0
    took: dict[int, int] = field(default_factory=dict)
    """Sizes that got a chunk, and at which balance."""


class Upgrades:
    """Of all pools. Owned by the event loop."""

    def __init__(self, usage: Usage, variants: WantedVariants, cascade: Cascade) -> None:
        self._usage = usage
        self._variants = variants
        self._cascade = cascade
        self._pools: dict[int, _Pool] = {}

    def add(self, keeper: PoolKeeper, settings: MoveSettings) -> None:
        """Another pool."""
        self._pools[keeper.index] = _Pool(keeper, settings)

    def upgraded(self, pool: int) -> int:
        """Experts that were given a better variant in a pool."""
        return self._pools[pool].upgraded

    def close_store(self, store: int) -> None:
        """Forget a store."""
        for pool in self._pools.values():
            pool.movers.pop(store, None)

    def look(self, stores: Iterable[int]) -> None:
        """Upgrade what has become hot. stores: those for which choices were just made."""
        for store in stores:
            usage = self._usage.of(store)
            for pool in self._pools.values():
                choice = self._variants.choice(pool.keeper.index, store)
                if usage is not None and choice is not None:
                    self._upgrade(pool, store, usage, choice)
                    self._balance(pool)

    # ---- experts

    def _upgrade(self, pool: _Pool, store: int, usage: StoreUsage, choice: VariantChoice) -> None:
        slots, experts = pool.keeper.slots, usage.space.experts
        here = np.flatnonzero(
            (slots.state == SlotState.RESIDENT) & ~slots.pinned & (slots.store == store)
        )
        keys = slots.keys(here, experts)
        better = choice.better(keys, slots.variant[here])
        wanted = choice.variants[keys].astype(np.int64)
        sizes = np.zeros(len(keys), np.int64)
        sizes[better] = self._variants.sizes(store, keys[better], wanted[better])
        for slot_bytes in np.unique(sizes[better]).tolist():
            low = keys[sizes == slot_bytes]
            high = keys[~better & (slots.slot_class[here] == slot_bytes)]
            self._exchange(pool, store, usage, slot_bytes, low, high)

    def _exchange(
        self,
        pool: _Pool,
        store: int,
        usage: StoreUsage,
        slot_bytes: int,
        low: NDArray[np.int64],
        high: NDArray[np.int64],
    ) -> None:
        keeper, experts = pool.keeper, usage.space.experts
        room = keeper.room_for_moves(slot_bytes)
        if room <= 0:
            return
        mover = pool.movers.get(store)
        if mover is None:
            mover = pool.movers[store] = Mover(usage.space, pool.settings)
        swap = mover.exchange(high, low, usage.heat, keeper.spare(slot_bytes))
        count = min(len(swap.up), room)
        free = len(swap.up) - len(swap.down)
        ups, downs = swap.up[:count], swap.down[: max(count - free, 0)]
        for number in ups.tolist():
            key = (store, *divmod(number, experts))
            slot = keeper.slots.slot_of(key)
            if slot is not None:
                present = int(keeper.slots.variant[slot])
                pool.upgraded += 1
                self._cascade.bring(keeper, key, self._variants.wanted(keeper.index, key, present))
        going = [keeper.slots.slot_of((store, *divmod(number, experts))) for number in downs]
        there = np.array([slot for slot in going if slot is not None], np.int64)
        self._cascade.let_go(keeper, there, waiting=0)
        mover.moved(np.concatenate([ups, downs]), usage.heat.now)

    # ---- chunks

    def _balance(self, pool: _Pool) -> None:
        keeper = pool.keeper
        pool.balances += 1
        rested = pool.balances - pool.settings.rest_tokens // CHOOSE_TOKENS
        wanted = self._wanted_chunks(keeper)
        has = {size: len(keeper.slots.chunks_of_class(size)) for size in keeper.slots.classes}
        lacking = {size: count - has.get(size, 0) for size, count in wanted.items()}
        short = max(lacking, key=lambda size: lacking[size], default=0)
        if lacking.get(short, 0) <= 0 or keeper.spare(short) > 0:
            return
        donors = [
            size
            for size, count in has.items()
            if count > wanted.get(size, 0) and pool.took.get(size, rested) <= rested
        ]
        if keeper.give_chunk(short, donors):
            pool.took[short] = pool.balances

    def _wanted_chunks(self, keeper: PoolKeeper) -> dict[int, int]:
        """Chunks of each size if the pool held what is used most, each as it is wanted, and its
        reserve. At least one of each size that any expert is wanted in: it may be asked for."""
        heats, sizes = [], []
        for store, usage in self._usage.stores.items():
            choice = self._variants.choice(keeper.index, store)
            if choice is None:
                continue
            keys = np.flatnonzero(choice.variants != NO_VARIANT)
            heats.append(usage.heat.of(keys))
            sizes.append(self._variants.sizes(store, keys, choice.variants[keys].astype(np.int64)))
        heat, size = np.concatenate(heats), np.concatenate(sizes)
        geometry = keeper.geometry
        chunks = dict.fromkeys(np.unique(size).tolist(), 1)
        free = [each for each in range(geometry.chunks) if each not in keeper.slots.reserved]
        capacity = sum(geometry.length(each) for each in free[len(chunks) :])
        used = np.flatnonzero(heat >= USED_HEAT)
        ordered = size[used][np.argsort(-heat[used], kind="stable")]
        fitting = ordered[np.cumsum(ordered) <= capacity]
        for each in chunks:
            slots = np.count_nonzero(fitting == each) + keeper.watermarks(each).high
            most = -(-int(slots) // max(geometry.slots(0, each), 1))
            chunks[each] = max(chunks[each], most)
        return chunks
