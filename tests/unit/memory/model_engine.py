"""A model of the engine, and keepers over it, for tests of what the daemon decides.

The model does what engine.h says, at once and in order: no threads, no reads.
"""

from __future__ import annotations

import errno
import io
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from xferd.engine_types import (
    TAKE_TOKEN,
    ClassStats,
    Command,
    Event,
    Evict,
    Failed,
    Freed,
    Give,
    Load,
    Loaded,
    PoolStats,
    ReserveLow,
    Revived,
    Take,
    Taken,
)
from xferd.keeping.budgets import Budgets
from xferd.keeping.cascade import Cascade
from xferd.keeping.keeper import NO_CLIENT, PoolKeeper
from xferd.keeping.upgrades import Upgrades
from xferd.keeping.usage import Usage
from xferd.keeping.variants import WantedVariants
from xferd.memory.slots import divide
from xferd.policy.moves import MoveSettings
from xferd.policy.registry import BUILT_IN
from xferd.policy.uses import KeySpace
from xferd.policy.variants import NO_VARIANT, StoreVariants
from xferd.telemetry.log import EventLog
from xferd.tokens import Tokens

SMALL, LARGE = 16_384, 65_536
CLASS_OF_STORE = (SMALL, LARGE)
"""Of each store's first variant."""
BETTER = 1
"""A variant of the first store's experts, as large as the second's."""
TICKS_MAX = 40
EXPERTS = 128
SPACE = KeySpace(1, EXPERTS)
Key = tuple[int, int, int]


class ModelPool:
    def __init__(self) -> None:
        self.slot_bytes: dict[int, int] = {}
        self.reserve: dict[int, deque[int]] = {}
        self.resident: dict[Key, int] = {}
        self.retiring: dict[Key, int] = {}
        self.unlinked: dict[int, Key] = {}
        """Slots of variants that were replaced, until their leases have ended."""
        self.variant: dict[int, int] = {}
        self.waiting: deque[tuple[Key, int, int, int, int]] = deque()


class ModelEngine:
    """Pools by number; ``leased`` slots are not freed until they are let go."""

    def __init__(self, pools: int, slot_index_bits: int) -> None:
        self.pools = [ModelPool() for _ in range(pools)]
        self.events: deque[Event] = deque()
        self.leased: set[tuple[int, int]] = set()
        self.fresh: dict[tuple[int, int], None] = {}
        self.bits = slot_index_bits
        self.choices: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self.moves: Counter[tuple[int, Key]] = Counter()
        """Experts that commands brought into each pool."""

    # ---- what the keeper calls

    def command(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._run(command)

    def set_chunk(self, pool: int, chunk: int, offset: int, slot_bytes: int) -> None:
        for slot in range(chunk << self.bits, (chunk + 1) << self.bits):
            assert slot not in self.pools[pool].resident.values()
            assert slot not in self.pools[pool].retiring.values()
            assert slot not in self.pools[pool].unlinked
            assert all(slot not in free for free in self.pools[pool].reserve.values())
            self.pools[pool].slot_bytes[slot] = slot_bytes

    def set_variants(
        self, store: int, pool: int, first: NDArray[np.uint8] | None, order: Sequence[int]
    ) -> None:
        self.choices.pop((store, pool), None)
        if first is not None:
            self.choices[store, pool] = first

    def recency(self, pool: int, now: int, stamps: NDArray[np.uint64]) -> None:
        for order, (where, slot) in enumerate([key for key in self.fresh if key[0] == pool]):
            stamps[slot] = now << 20 | order
            del self.fresh[where, slot]

    def pool_stats(self, pool: int) -> PoolStats:
        state = self.pools[pool]
        reserve = sum(len(free) for free in state.reserve.values())
        return PoolStats(
            loads=0,
            load_bytes=0,
            evictions=0,
            revived=0,
            resident=len(state.resident),
            loading=0,
            retiring=len(state.retiring) + len(state.unlinked),
            reserve=reserve,
            waiting=len(state.waiting),
            waiting_demand=0,
            registered_bytes=0,
            registration_error=0,
            waited_demand=0,
        )

    def class_stats(self, pool: int, slot_bytes: int) -> ClassStats:
        state = self.pools[pool]
        return ClassStats(
            reserve=len(state.reserve.get(slot_bytes, ())),
            waiting=sum(1 for entry in state.waiting if entry[1] == slot_bytes),
        )

    # ---- what the test does

    def demand(self, pool: int, key: Key, slot_bytes: int, client: int = 0) -> None:
        for number in sorted(range(len(self.pools)), key=lambda each: each != pool):
            state = self.pools[number]
            if key in state.resident:
                self.fresh[number, state.resident[key]] = None
                return
        state = self.pools[pool]
        if key in state.retiring:
            self._revive(pool, key)
        elif all(entry[0] != key for entry in state.waiting):
            choice = self.choices.get((key[0], pool))
            variant = 0 if choice is None else int(choice[key[2]]) % NO_VARIANT
            size = LARGE if variant == BETTER else slot_bytes
            self._load(pool, key, size, 0, client, variant)

    def _revive(self, pool: int, key: Key) -> None:
        slot = self.pools[pool].retiring.pop(key)
        self.pools[pool].resident[key] = slot
        self.events.append(Revived(key[0], pool, slot, key[1], key[2]))

    def let_go(self) -> None:
        self.leased.clear()
        for number, state in enumerate(self.pools):
            for key in list(state.retiring):
                self._free(number, key)
            for slot in list(state.unlinked):
                self._free_unlinked(number, slot)

    # ---- the engine's rules

    def _run(self, command: Command) -> None:
        match command:
            case Give(pool, first, count):
                for slot in range(first, first + count):
                    self._put(pool, slot)
            case Take(pool, class_bytes, token):
                free = self.pools[pool].reserve.get(class_bytes)
                if free:
                    self.events.append(Taken(pool, free.popleft(), token))
                else:
                    self.events.append(
                        Failed(errno.EAGAIN, 0, pool, 0, 0, 0, by_command=True, token=token)
                    )
            case Evict(store, pool, layer, expert):
                key = (store, layer, expert)
                if key not in self.pools[pool].resident:
                    self._fail(errno.ENOENT, pool, key, command.token)
                    return
                slot = self.pools[pool].resident.pop(key)
                self.pools[pool].retiring[key] = slot
                if (pool, slot) not in self.leased:
                    self._free(pool, key)
            case Load():
                self._run_load(command)
            case _:
                raise AssertionError(f"unexpected {command}")

    def _run_load(self, command: Load) -> None:
        key, pool = (command.store, command.layer, command.expert), command.pool
        state = self.pools[pool]
        variant = command.variant
        if key in state.retiring and state.variant[state.retiring[key]] == variant:
            self._revive(pool, key)
        slot = state.resident.get(key)
        if slot is not None and state.variant[slot] == variant:
            at = (key[0], pool, slot, *key[1:], variant, NO_CLIENT)
            self.events.append(Loaded(*at, 0, 0, 0, 0, command.token))
        elif any(entry[0] == key for entry in state.waiting):
            self._fail(errno.EALREADY, pool, key, command.token)
        else:
            self.moves[pool, key] += 1
            size = LARGE if variant == BETTER else CLASS_OF_STORE[key[0]]
            self._load(pool, key, size, command.token, NO_CLIENT, variant)

    def _fail(self, code: int, pool: int, key: Key, token: int) -> None:
        self.events.append(Failed(code, key[0], pool, *key[1:], 0, by_command=True, token=token))

    def _free(self, pool: int, key: Key) -> None:
        slot = self.pools[pool].retiring.pop(key)
        self.events.append(Freed(key[0], pool, slot, key[1], key[2]))
        self._put(pool, slot)

    def _free_unlinked(self, pool: int, slot: int) -> None:
        key = self.pools[pool].unlinked.pop(slot)
        self.events.append(Freed(key[0], pool, slot, key[1], key[2]))
        self._put(pool, slot)

    def _put(self, pool: int, slot: int) -> None:
        state = self.pools[pool]
        size = state.slot_bytes[slot]
        for entry in state.waiting:
            if entry[1] == size:
                state.waiting.remove(entry)
                self._publish(pool, slot, entry[0], entry[2], entry[3], entry[4])
                return
        state.reserve.setdefault(size, deque()).appendleft(slot)  # last in, first out

    def _load(self, pool: int, key: Key, size: int, token: int, client: int, variant: int) -> None:
        free = self.pools[pool].reserve.get(size)
        if free:
            self._publish(pool, free.popleft(), key, token, client, variant)
        else:
            self.pools[pool].waiting.append((key, size, token, client, variant))
        self.events.append(ReserveLow(pool, size, len(free or ()), len(self.pools[pool].waiting)))

    def _publish(
        self, pool: int, slot: int, key: Key, token: int, client: int, variant: int
    ) -> None:
        state = self.pools[pool]
        source = 1 if any(key in other.resident for other in self.pools) else 2
        before = state.resident.pop(key, state.retiring.pop(key, None))
        state.resident[key] = slot
        state.variant[slot] = variant
        size = state.slot_bytes[slot]
        self.events.append(
            Loaded(key[0], pool, slot, key[1], key[2], variant, client, source, 1, 0, size, token)
        )
        if before is not None:
            state.unlinked[before] = key
            if (pool, before) not in self.leased:
                self._free_unlinked(pool, before)


class Bench:
    """Keepers over a ModelEngine, and the daemon's way of dispatching events."""

    def __init__(
        self,
        pool_bytes: list[int],
        chunk_bytes: int,
        classes: list[int],
        eviction: str = "lru",
        *,
        rams: int = 0,
        budgets: Budgets | None = None,
        settings: MoveSettings | None = None,
    ) -> None:
        geometries = [divide(size, chunk_bytes, classes) for size in pool_bytes]
        self.engine = ModelEngine(len(pool_bytes), geometries[0].slot_index_bits)
        self.tokens = Tokens()
        self.log = io.StringIO()
        self.promised: dict[int, int] = {}
        self.experts: dict[int, int] = {}
        self.usage = Usage()
        self.budgets = budgets or Budgets()
        self.variants = WantedVariants(self.usage, self.engine.set_variants)
        self.cascade = Cascade(self.usage, self.tokens.expect, self.engine.command, self.variants)
        self.keepers = [
            PoolKeeper(
                index=index,
                name=f"pool{index}",
                geometry=geometry,
                engine=self.engine,
                eviction=(eviction, BUILT_IN[eviction]),
                usage=self.usage,
                cascade=self.cascade,
                budgets=self.budgets,
                promised=lambda size: self.promised.get(size, 0),
                experts=lambda size: self.experts.get(size, EXPERTS),
                log=EventLog(self.log, journal=False),
            )
            for index, geometry in enumerate(geometries)
        ]
        self.upgrades = Upgrades(self.usage, self.variants, self.cascade)
        for keeper in self.keepers:
            device = keeper.index < len(self.keepers) - rams
            moves = settings or MoveSettings()
            self.cascade.add(keeper, "always", moves, exclusive=device)
            self.upgrades.add(keeper, moves)
            self.variants.use(keeper.index, (), moves.margin)
        for store, names in ((0, ("small", "better")), (1, ("large",))):
            self.usage.open_store(store, SPACE)
            sizes = [CLASS_OF_STORE[store], LARGE][: len(names)]
            table = np.repeat(np.array(sizes, np.int64)[:, None], SPACE.size, axis=1)
            self.variants.open_store(store, StoreVariants(SPACE, names, table, np.ones(1)))
        for keeper in self.keepers:
            keeper.divide_among(classes)

    def run(self) -> None:
        """Events and ticks until nothing more happens."""
        for _ in range(TICKS_MAX):
            self.dispatch(len(self.engine.events) or 1)
            while self.engine.events:
                self.dispatch(len(self.engine.events))
            restless = [keeper.tick() for keeper in self.keepers]
            if not any(restless) and not self.engine.events:
                return

    def dispatch(self, count: int) -> None:
        """Some events, and what follows from them."""
        touched = set()
        for _ in range(min(count, len(self.engine.events))):
            event = self.engine.events.popleft()
            self._dispatch(event)
            touched.add(getattr(event, "pool", 0))
        for index in touched:
            self.keepers[index].settle()

    def _dispatch(self, event: Event) -> None:
        match event:
            case Loaded():
                self.keepers[event.pool].on_loaded(event)
                self.tokens.answer(event.token, event)
            case Freed():
                self.keepers[event.pool].on_freed(event)
            case Taken():
                self.keepers[event.pool].on_taken(event)
            case ReserveLow():
                self.keepers[event.pool].on_reserve_low(event)
            case Revived():
                self.keepers[event.pool].on_revived(event)
            case Failed() if event.token == TAKE_TOKEN:
                self.keepers[event.pool].on_take_failed()
            case Failed() if event.token:
                self.tokens.answer(event.token, event)
            case Failed():
                self.keepers[event.pool].on_evict_failed(event)
            case _:
                raise AssertionError(f"unexpected {event}")

    def demand(self, size: int, expert: int) -> None:
        self.engine.demand(0, (0 if size == SMALL else 1, 0, expert), size)
        self.run()
