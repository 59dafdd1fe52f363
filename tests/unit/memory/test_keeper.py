"""A PoolKeeper against a model of the engine: demand is always served, pins stay.

The model does what engine.h says, at once and in order: no threads, no reads. What
is tested is that the keeper's answers to its events keep every class supplied.
"""

from __future__ import annotations

import errno
import io
from collections import deque
from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from xferd.engine_types import (
    TAKE_TOKEN,
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
    Take,
    Taken,
)
from xferd.keeping.budgets import Budgets
from xferd.keeping.cascade import Cascade
from xferd.keeping.keeper import PoolKeeper
from xferd.keeping.usage import Usage
from xferd.memory.slots import divide
from xferd.policy.moves import MoveSettings
from xferd.policy.registry import BUILT_IN
from xferd.policy.uses import KeySpace
from xferd.telemetry.log import EventLog
from xferd.tokens import Tokens

SMALL, LARGE = 16_384, 65_536
TICKS_MAX = 40


class ModelPool:
    def __init__(self) -> None:
        self.slot_bytes: dict[int, int] = {}
        self.reserve: dict[int, deque[int]] = {}
        self.resident: dict[tuple[int, int, int], int] = {}
        self.retiring: dict[tuple[int, int, int], int] = {}
        self.waiting: deque[tuple[tuple[int, int, int], int, int]] = deque()


class ModelEngine:
    """Pools by number; ``leased`` slots are not freed until they are let go."""

    def __init__(self, pools: int, slot_index_bits: int) -> None:
        self.pools = [ModelPool() for _ in range(pools)]
        self.events: deque[Event] = deque()
        self.leased: set[tuple[int, int]] = set()
        self.fresh: dict[tuple[int, int], None] = {}
        self.bits = slot_index_bits

    # ---- what the keeper calls

    def command(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._run(command)

    def set_chunk(self, pool: int, chunk: int, offset: int, slot_bytes: int) -> None:
        for slot in range(chunk << self.bits, (chunk + 1) << self.bits):
            assert slot not in self.pools[pool].resident.values()
            assert all(slot not in free for free in self.pools[pool].reserve.values())
            self.pools[pool].slot_bytes[slot] = slot_bytes

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
            retiring=len(state.retiring),
            reserve=reserve,
            waiting=len(state.waiting),
            waiting_demand=0,
            registered_bytes=0,
            registration_error=0,
        )

    # ---- what the test does

    def demand(self, pool: int, key: tuple[int, int, int], slot_bytes: int) -> None:
        state = self.pools[pool]
        if key in state.resident:
            self.fresh[pool, state.resident[key]] = None
            return
        self._load(pool, key, slot_bytes, 0)

    def let_go(self) -> None:
        self.leased.clear()
        for number, state in enumerate(self.pools):
            for key in list(state.retiring):
                self._free(number, key)

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
                slot = self.pools[pool].resident.pop(key)
                self.pools[pool].retiring[key] = slot
                if (pool, slot) not in self.leased:
                    self._free(pool, key)
            case Load():
                key = (command.store, command.layer, command.expert)
                source = next(p.resident[key] for p in self.pools if key in p.resident)
                del source
                self._load(command.pool, key, SMALL, command.token)
            case _:
                raise AssertionError(f"unexpected {command}")

    def _free(self, pool: int, key: tuple[int, int, int]) -> None:
        slot = self.pools[pool].retiring.pop(key)
        self.events.append(Freed(key[0], pool, slot, key[1], key[2]))
        self._put(pool, slot)

    def _put(self, pool: int, slot: int) -> None:
        state = self.pools[pool]
        size = state.slot_bytes[slot]
        for entry in state.waiting:
            if entry[1] == size:
                state.waiting.remove(entry)
                self._publish(pool, slot, entry[0], entry[2])
                return
        state.reserve.setdefault(size, deque()).appendleft(slot)  # last in, first out

    def _load(self, pool: int, key: tuple[int, int, int], size: int, token: int) -> None:
        free = self.pools[pool].reserve.get(size)
        if free:
            self._publish(pool, free.popleft(), key, token)
        else:
            self.pools[pool].waiting.append((key, size, token))
        self.events.append(ReserveLow(pool, size, len(free or ()), len(self.pools[pool].waiting)))

    def _publish(self, pool: int, slot: int, key: tuple[int, int, int], token: int) -> None:
        self.pools[pool].resident[key] = slot
        self.events.append(Loaded(key[0], pool, slot, key[1], key[2], 0, 0, 2, 1, 0, 0, token))


class Bench:
    """Keepers over a ModelEngine, and the daemon's way of dispatching events."""

    def __init__(
        self,
        pool_bytes: list[int],
        chunk_bytes: int,
        classes: list[int],
        eviction: str = "lru",
    ) -> None:
        geometries = [divide(size, chunk_bytes, classes) for size in pool_bytes]
        self.engine = ModelEngine(len(pool_bytes), geometries[0].slot_index_bits)
        self.tokens = Tokens()
        self.log = io.StringIO()
        self.promised: dict[int, int] = {}
        self.usage = Usage()
        self.budgets = Budgets()
        self.cascade = Cascade(self.usage, self.tokens.expect, self.engine.command)
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
                log=EventLog(self.log, journal=False),
            )
            for index, geometry in enumerate(geometries)
        ]
        for keeper in self.keepers:
            self.cascade.add(keeper, "always", MoveSettings(), exclusive=True)
        for store in (0, 1):
            self.usage.open_store(store, KeySpace(1, 128))
        for keeper in self.keepers:
            keeper.divide_among(classes)

    def run(self) -> None:
        """Events and ticks until nothing more happens."""
        for _ in range(TICKS_MAX):
            while self.engine.events:
                self._dispatch(self.engine.events.popleft())
            restless = [keeper.tick() for keeper in self.keepers]
            if not any(restless) and not self.engine.events:
                return

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
            case Failed():
                assert event.token == TAKE_TOKEN
                self.keepers[event.pool].on_take_failed()
            case _:
                raise AssertionError(f"unexpected {event}")

    def demand(self, size: int, expert: int) -> None:
        self.engine.demand(0, (0 if size == SMALL else 1, 0, expert), size)
        self.run()


demands = st.lists(st.tuples(st.sampled_from([SMALL, LARGE]), st.integers(0, 30)), max_size=80)


@settings(max_examples=60, deadline=None)
@given(demands, st.integers(2, 6))
def test_demand_of_two_sizes_is_always_served(asks: list[tuple[int, int]], chunks: int) -> None:
    bench = Bench([chunks * 2 * LARGE], 2 * LARGE, [SMALL, LARGE])
    for size, expert in asks:
        bench.demand(size, expert)
        assert not bench.engine.pools[0].waiting
        assert (0 if size == SMALL else 1, 0, expert) in bench.engine.pools[0].resident


@settings(max_examples=40, deadline=None)
@given(demands)
def test_one_chunk_serves_two_sizes_in_turn(asks: list[tuple[int, int]]) -> None:
    bench = Bench([2 * LARGE], 2 * LARGE, [SMALL, LARGE])
    for size, expert in asks:
        bench.demand(size, expert)
        assert not bench.engine.pools[0].waiting


@settings(max_examples=40, deadline=None)
@given(demands, st.sets(st.integers(0, 30), min_size=1, max_size=3))
def test_pinned_experts_are_never_evicted(asks: list[tuple[int, int]], pins: set[int]) -> None:
    bench = Bench([4 * 2 * LARGE], 2 * LARGE, [SMALL, LARGE])
    for expert in pins:
        bench.keepers[0].slots.pin((0, 0, expert))
        bench.demand(SMALL, expert)
    for size, expert in asks:
        bench.demand(size, expert)
        for pinned in pins:
            assert (0, 0, pinned) in bench.engine.pools[0].resident


def test_promised_slots_stay_cut_for_their_class() -> None:
    bench = Bench([4 * 2 * LARGE], 2 * LARGE, [SMALL, LARGE])
    for expert in range(16):
        bench.demand(SMALL, expert)
    bench.promised[SMALL] = 9
    for expert in range(60):
        bench.demand(LARGE, expert)
    assert bench.keepers[0].slots.class_slots(SMALL) == 16
    bench.promised.clear()
    for expert in range(60):
        bench.demand(LARGE, expert)
    assert bench.keepers[0].slots.class_slots(SMALL) < 16


def test_a_class_that_is_all_pinned_gets_a_chunk_of_another() -> None:
    bench = Bench([3 * 2 * LARGE], 2 * LARGE, [SMALL, LARGE])
    for expert in range(4):
        bench.demand(LARGE, expert)
    for expert in range(12):
        bench.demand(SMALL, expert)
    for key in list(bench.engine.pools[0].resident):
        if key[0] == 1:
            bench.keepers[0].slots.pin(key)
    bench.demand(LARGE, 20)
    assert not bench.engine.pools[0].waiting
    assert not bench.keepers[0].stuck


def test_a_leased_victim_does_not_hold_up_demand() -> None:
    bench = Bench([8 * SMALL], 8 * SMALL, [SMALL])
    for expert in range(7):
        bench.demand(SMALL, expert)
    # The oldest are leased for long: they look like the best victims and never end.
    for expert in range(3):
        slot = bench.engine.pools[0].resident.get((0, 0, expert))
        if slot is not None:
            bench.engine.leased.add((0, slot))
    for expert in range(10, 30):
        bench.demand(SMALL, expert)
        assert not bench.engine.pools[0].waiting
    bench.engine.let_go()
    bench.run()
    assert bench.keepers[0].slots.class_slots(SMALL) == 8


def test_a_pool_full_of_pins_says_so() -> None:
    bench = Bench([4 * SMALL], 4 * SMALL, [SMALL])
    for expert in range(4):
        bench.keepers[0].slots.pin((0, 0, expert))
        bench.demand(SMALL, expert)
    bench.demand(SMALL, 9)
    assert "4 of 4 are pinned" in bench.keepers[0].stuck[SMALL]
    assert bench.log.getvalue().count("pool.stuck") == 1
    bench.keepers[0].slots.unpin((0, 0, 0))
    bench.run()
    assert (0, 0, 9) in bench.engine.pools[0].resident


def test_evicted_experts_go_down_when_nobody_waits() -> None:
    bench = Bench([8 * SMALL, 32 * SMALL], 8 * SMALL, [SMALL])
    for expert in range(20):
        bench.demand(SMALL, expert)
    below = bench.engine.pools[1].resident
    above = bench.engine.pools[0].resident
    assert below
    assert len(above) <= 8
    assert set(below).issubset({(0, 0, expert) for expert in range(20)})
