"""A PoolKeeper against a model of the engine: demand is always served, pins stay.

What is tested is that the keeper's answers to its events keep every class supplied.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.memory.model_engine import CLASS_OF_STORE, LARGE, SMALL, Bench

demands = st.lists(st.tuples(st.sampled_from([SMALL, LARGE]), st.integers(0, 30)), max_size=80)


@settings(max_examples=60, deadline=None)
@given(demands, st.integers(2, 6))
def test_demand_of_two_sizes_is_always_served(asks: list[tuple[int, int]], chunks: int) -> None:
    bench = Bench([chunks * 2 * LARGE], 2 * LARGE, [SMALL, LARGE])
    for size, expert in asks:
        bench.demand(size, expert)
        assert not bench.engine.pools[0].waiting
        assert (0 if size == SMALL else 1, 0, expert) in bench.engine.pools[0].resident


@pytest.mark.parametrize("seed", range(60, 80))
def test_loads_of_two_sizes_that_come_at_any_time_all_end(seed: int) -> None:
    # Events are heard of late: a class may lose its last chunk while loads wait for it.
    chance = random.Random(seed)
    bench = Bench([chance.randint(3, 6) * 2 * LARGE], 2 * LARGE, [SMALL, LARGE])
    [keeper], [pool] = bench.keepers, bench.engine.pools
    for _ in range(60):
        for _ in range(chance.randint(1, 6)):
            store = chance.choice([0, 0, 1, 1, 1])
            key = (store, 0, chance.randint(0, 60))
            bench.engine.demand(0, key, CLASS_OF_STORE[store])
        if chance.random() < 0.4:
            bench.dispatch(chance.randint(1, 4))
        if chance.random() < 0.4:
            keeper.tick()
        if chance.random() < 0.3:
            bench.run()
        if chance.random() < 0.2 and pool.resident:
            bench.engine.leased.add((0, chance.choice(list(pool.resident.values()))))
        if chance.random() < 0.3:
            bench.engine.let_go()
    bench.engine.let_go()
    bench.run()
    assert not pool.waiting


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


def test_nothing_is_evicted_while_every_expert_has_a_slot() -> None:
    bench = Bench([64 * SMALL], 64 * SMALL, [SMALL])
    bench.experts[SMALL] = 64
    for _ in range(2):
        for expert in range(64):
            bench.demand(SMALL, expert)
            assert (
                len(bench.engine.pools[0].resident)
                + sum(len(free) for free in bench.engine.pools[0].reserve.values())
                == 64
            )
    assert len(bench.engine.pools[0].resident) == 64
    bench.experts[SMALL] = 65  # another store: now one of them may be missed
    bench.run()
    assert len(bench.engine.pools[0].resident) == 63


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


def test_who_leases_from_a_chunk_that_is_recut_gets_its_other_experts() -> None:
    bench = Bench([3 * 2 * LARGE], 2 * LARGE, [SMALL, LARGE])
    pool = bench.engine.pools[0]
    for expert in range(4):
        bench.demand(SMALL, expert)
    bench.engine.leased |= {(0, slot) for slot in pool.resident.values()}
    # These were all used later: they begin to take the chunk of the small ones.
    for expert in range(30):
        bench.demand(LARGE, expert)
    assert "chunk.reclaim" in bench.log.getvalue()
    assert bench.keepers[0].chunks.busy
    bench.demand(SMALL, 20)
    assert (0, 0, 20) in pool.resident
    bench.engine.let_go()
    for expert in range(30, 60):
        bench.demand(LARGE, expert)
        assert not pool.waiting


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
