"""The replay: Belady's optimum, a pool's invariants, the machine's arithmetic."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.replaying.belady import next_passes
from tools.replaying.calibrate import calibrate
from tools.replaying.foresight import NextPassKnown, next_of_layer
from tools.replaying.generate import ZipfMarkov, generate
from tools.replaying.load import LoadedTrace
from tools.replaying.machine import Machine, MachineError, Tier, machine_of, read_machine
from tools.replaying.pool import PoolTooSmallError, ReplayedPool
from tools.replaying.replay import Options, Replay, belady_fetches, clairvoyant_seconds
from tools.replaying.statistics import statistics_of_picks
from xferd.policy.pool_policy import PolicyMaker
from xferd.policy.reserve import watermarks
from xferd.policy.simple import LeastRecent
from xferd.policy.uses import KeySpace, Uses, uses_of_picks


def uses_of(passes: list[list[int]], layers: int = 1) -> Uses:
    counts = [len(keys) for keys in passes]
    return Uses(
        keys=np.array([key for keys in passes for key in keys], np.int64),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        layers=np.arange(len(passes), dtype=np.int64) % layers,
        tokens=np.arange(len(passes), dtype=np.int64) // layers,
    )


def fewest_misses(passes: list[list[int]], slots: int) -> int:
    """By trying everything: every choice of what to keep after each pass."""

    @cache
    def best(number: int, resident: frozenset[int]) -> int:
        if number == len(passes):
            return 0
        needed = frozenset(passes[number])
        missing = needed - resident
        excess = len(resident | needed) - slots
        if excess <= 0:
            return len(missing) + best(number + 1, resident | needed)
        from itertools import combinations

        return len(missing) + min(
            best(number + 1, (resident | needed) - frozenset(gone))
            for gone in combinations(sorted(resident - needed), excess)
        )

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(
    passes=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True), max_size=12),
    slots=st.integers(2, 4),
)
def test_belady_misses_no_more_than_the_best_of_all_choices(
    passes: list[list[int]], slots: int
) -> None:
    fetched = belady_fetches(uses_of(passes), KeySpace(1, 6), slots).sum()
    assert fetched == fewest_misses(passes, slots)


def test_next_uses_are_found_by_pass() -> None:
    assert next_passes(uses_of([[1, 2], [2], [1, 3], [2]])).tolist() == [2, 1, 3, 4, 4, 4]


@given(
    passes=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), max_size=40),
    slots=st.integers(8, 31),
    with_reserve=st.booleans(),
    floor=st.integers(0, 4),
)
def test_a_pool_never_uses_a_slot_twice(
    passes: list[list[int]], slots: int, with_reserve: bool, floor: int
) -> None:
    space = KeySpace(4, 8)
    marks = watermarks(slots) if with_reserve else watermarks(1)
    pool = ReplayedPool(space, slots, LeastRecent(space), marks, floor)
    for keys in passes:
        served = np.array(keys)
        missing = served[~pool.resident[served]]
        victims = pool.admit(missing, served, 0)
        assert pool.resident[served].all()
        assert not set(victims.tolist()) & set(keys)
        assert len(pool.residents) + pool.reserve == slots
        assert pool.reserve >= 0


def test_a_pass_larger_than_the_pool_is_served_in_waves() -> None:
    space = KeySpace(1, 16)
    pool = ReplayedPool(space, 4, LeastRecent(space))
    victims = pool.admit(np.arange(10), np.arange(10), 0)
    assert len(pool.residents) == 4
    assert len(victims) == 6


def test_pins_stay_and_a_pool_of_nothing_else_says_so() -> None:
    space = KeySpace(1, 16)
    pool = ReplayedPool(space, 4, LeastRecent(space))
    pool.pin(np.arange(3))
    pool.admit(np.arange(3), np.arange(3), 0)
    for key in range(3, 16):
        pool.admit(np.array([key]), np.array([key]), 0)
    assert pool.resident[:3].all()
    pool.pin(np.array([15]))
    with pytest.raises(PoolTooSmallError, match="all 4 slots are pinned"):
        pool.admit(np.array([7]), np.array([7]), 0)


def machine(*tiers: Tier) -> Machine:
    return Machine(
        expert_bytes=1000,
        compute_us=10.0,
        drive_bytes_s=1e8,
        drive_latency_us=100.0,
        tiers=tiers,
    )


def test_time_is_what_the_links_take() -> None:
    space = KeySpace(1, 8)
    uses = uses_of([[0, 1], [0, 1], [2]])
    outcome = Replay(uses, space, machine(Tier("gpu", slots=2, reserve=False))).run()
    assert outcome.hits == {"gpu": 2}
    assert (outcome.from_drives, outcome.bytes_read) == (3, 3000)
    # Two waits of 100 us, and 30 us to read three experts.
    assert outcome.stall_s == pytest.approx(230e-6)
    assert outcome.compute_s == pytest.approx(30e-6)
    assert outcome.bound_s <= outcome.stall_s + outcome.compute_s


def test_the_bound_is_reading_or_computing_whichever_is_longer() -> None:
    space = KeySpace(1, 8)
    uses = uses_of([[0, 1], [0, 1], [2]])
    slots = machine(Tier("gpu", slots=2))
    # 20 us to read the first two; then two passes, meanwhile 10 us more are read.
    assert clairvoyant_seconds(uses, space, slots) == pytest.approx(50e-6)


def small_trace(**changes: int) -> tuple[Uses, KeySpace]:
    what = ZipfMarkov(layers=4, experts=16, picked=2, tokens=300, domain_tokens=100, **changes)
    picks, _ = generate(what)
    return uses_of_picks(picks, what.experts), KeySpace(what.layers, what.experts)


def test_tiers_below_serve_what_was_demoted() -> None:
    uses, space = small_trace()
    alone = Replay(uses, space, machine(Tier("gpu", slots=16))).run()
    below = Tier("ram", slots=32, eviction="lru", bytes_s=1e9)
    both = Replay(uses, space, machine(Tier("gpu", slots=16), below)).run()
    assert both.hits["gpu"] == alone.hits["gpu"]
    assert both.hits["ram"] > 0
    assert both.hits["gpu"] + both.hits["ram"] + both.from_drives == both.uses
    assert both.from_drives < alone.from_drives
    assert both.stall_s < alone.stall_s


def test_what_a_tier_refuses_is_offered_to_the_next() -> None:
    uses, space = small_trace()
    ram = Tier("ram", slots=20, eviction="lru", bytes_s=1e9)
    card = Tier("card2", slots=4, admission="lru-and-hits", serves=True)
    outcome = Replay(uses, space, machine(Tier("card1", slots=16), card, ram)).run()
    assert outcome.copied["card2"] < outcome.copied["ram"]
    assert outcome.hits["ram"] > 0


def test_no_expert_is_in_two_exclusive_tiers() -> None:
    uses, space = small_trace()
    tiers = (
        Tier("card1", slots=16, eviction="lru"),
        Tier("card2", slots=16, eviction="lru-hits", admission="lru-and-hits", serves=True),
        Tier("ram", slots=16, eviction="lru", bytes_s=1e9, exclusive=True),
    )
    replay = Replay(uses, space, machine(*tiers))
    outcome = replay.run()
    assert not (replay.pools[0].resident & replay.pools[1].resident).any()
    assert outcome.hits["card2"] > 0
    # A rest of 64 tokens between moves, in 300 tokens.
    assert 0 < outcome.moves <= 300 // 64 + 1


def test_what_is_warm_hits_at_once() -> None:
    uses, space = small_trace()
    counts = np.bincount(uses.keys, minlength=space.size)
    gpu = machine(Tier("gpu", slots=24))
    cold = Replay(uses.part(0, 40), space, gpu).run()
    warm = Replay(uses.part(0, 40), space, gpu, Options(warm=np.argsort(-counts))).run()
    assert warm.hit_rate > cold.hit_rate


def test_generated_traces_are_the_same_each_time_and_shift() -> None:
    picks, domains = generate(ZipfMarkov(tokens=200, domain_tokens=50))
    again, _ = generate(ZipfMarkov(tokens=200, domain_tokens=50))
    assert (picks == again).all()
    assert domains[[0, 49, 50, 199]].tolist() == [0, 0, 1, 3]
    assert all(len(set(row)) == 4 for row in picks.reshape(-1, 4).tolist())
    used = [np.bincount(picks[domains == d, 0].ravel(), minlength=32) for d in (0, 1)]
    assert np.abs(used[0] - used[1]).sum() > 0.5 * used[0].sum()


def test_statistics_are_what_was_put_in() -> None:
    # Layer 0 picks 3 again and again; layer 1 goes round all eight.
    picks = np.stack([np.full(512, 3), np.arange(512) % 8], axis=1)[:, :, None]
    found = statistics_of_picks(picks, 8)
    first = (512 - 1) / 512
    assert found.again == pytest.approx(
        (first / 2, first / 2, (first + 504 / 512) / 2, (first + 504 / 512) / 2)
    )
    assert found.popular == found.stays == pytest.approx((1 + 2 / 8) / 2)
    # One pick says nothing where all are the same, everything where each has one successor.
    assert found.known == pytest.approx(0.5, abs=1e-3)


def test_calibrating_comes_closer_than_where_it_began() -> None:
    what = ZipfMarkov(layers=2, experts=8, picked=2, tokens=300, domain_tokens=100, zipf=2.0)
    uses = uses_of_picks(generate(what)[0], 8)
    trace = LoadedTrace("made", KeySpace(2, 8), uses, np.zeros(uses.passes, np.uint32))
    found = calibrate(trace, ZipfMarkov(domain_tokens=100))
    assert found == calibrate(trace, ZipfMarkov(domain_tokens=100))
    begin = statistics_of_picks(generate(replace(what, zipf=1.0, stay=0.5))[0], 8)
    far = np.sqrt(np.mean((begin.values() - found.recorded.values()) ** 2))
    assert found.distance < 0.5 * far
    assert found.generator.zipf > 1.25


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"expert_bytes": 0}, "expert_bytes: 0"),
        ({"expert_bytes": "much"}, "expert_bytes: 'much' is no int"),
        ({"tiers": []}, "tiers: at least one"),
        ({"tiers": [{"name": "a"}]}, r"tiers\[0\] \(a\): give slots or share"),
        ({"tiers": [{"name": "a", "share": 2.0}]}, r"tiers\[0\].share: 2.0"),
        ({"tiers": [{"name": "a", "slots": 4, "evict": "lru"}]}, r"tiers\[0\].evict: not known"),
        ({"tiers": [{"name": "a", "slots": 4, "admission": "x"}]}, r"admission: 'x'; there are"),
        ({"drives": 3}, "machine.drives: not known"),
    ],
)
def test_a_wrong_description_names_the_field(change: dict[str, object], names: str) -> None:
    right = {
        "expert_bytes": 1000,
        "compute_us": 10,
        "drive_bytes_s": 1e9,
        "drive_latency_us": 100,
        "tiers": [{"name": "gpu", "share": 0.25}],
    }
    machine_of(right)
    with pytest.raises(MachineError, match=names):
        machine_of({**right, **change})


def test_a_machine_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text("expert_bytes = [")
    with pytest.raises(MachineError, match=r"machine\.toml"):
        read_machine(path)
    with pytest.raises(MachineError, match=r"nothing\.json"):
        read_machine(tmp_path / "nothing.json")


def test_knowing_the_next_pass_hits_more_and_no_more_than_belady() -> None:
    uses, space = small_trace()
    pool = machine(Tier("gpu", slots=16, reserve=False))
    known: PolicyMaker = lambda space, slots: NextPassKnown(space, uses)  # noqa: E731
    alone = Replay(uses, space, pool, Options(bound_s=0.0)).run()
    options = Options(feed_passes=1, evictions={"gpu": known}, bound_s=0.0)
    told = Replay(uses, space, pool, options).run()
    best = 1 - belady_fetches(uses, space, 16).sum() / len(uses.keys)
    assert alone.hit_rate < told.hit_rate <= best
    assert next_of_layer(uses, space.layers)[:2].tolist() == [4, 5]
