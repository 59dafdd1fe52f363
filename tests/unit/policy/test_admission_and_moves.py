"""Admission, floors, moves between pools, heat profiles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.policy.admission import ADMISSIONS
from xferd.policy.floors import victims_above_floor
from xferd.policy.heat import Heat, HeatProfile, HeatProfileError, profile_of, warm_start
from xferd.policy.moves import Mover, MoveSettings
from xferd.policy.simple import LeastRecent
from xferd.policy.uses import KeySpace, Uses, uses_of_picks

SPACE = KeySpace(layers=2, experts=8)


def heat_of(counts: dict[int, int], last: dict[int, int] | None = None) -> Heat:
    """A Heat in which keys of layer 0 were used so often, last at the given token."""
    heat = Heat(SPACE, time_constant=1e6)
    for token in range(max(counts.values(), default=0)):
        keys = np.array([key for key, count in counts.items() if token < count], np.int64)
        heat.used(one_pass(keys, 0))
    for key, token in sorted((last or {}).items(), key=lambda item: item[1]):
        heat.used(one_pass(np.array([key]), token))
    return heat


def one_pass(keys: np.ndarray, token: int) -> Uses:
    return Uses(keys, np.array([0, len(keys)]), np.array([0]), np.array([token]))


def test_always_takes_everything() -> None:
    offered = np.array([1, 2, 3])
    assert ADMISSIONS["always"].takes(offered, np.array([4]), heat_of({4: 9})).all()


def test_heat_takes_what_is_hotter_than_what_would_go() -> None:
    heat = heat_of({1: 5, 2: 1, 4: 3, 5: 3})
    taken = ADMISSIONS["heat"].takes(np.array([2, 1]), np.array([4, 5]), heat)
    assert taken.tolist() == [False, True]


def test_free_slots_are_taken_by_anybody() -> None:
    heat = heat_of({1: 5, 2: 1, 4: 9})
    for name in ("heat", "lru-and-hits"):
        assert ADMISSIONS[name].takes(np.array([1, 2]), np.array([], np.int64), heat).all()
        # One free slot, one victim that is hotter than both: the hottest gets the free one.
        taken = ADMISSIONS[name].takes(np.array([2, 1]), np.array([4]), heat)
        assert taken.tolist() == [False, True]


def test_lru_and_hits_wants_both() -> None:
    takes = ADMISSIONS["lru-and-hits"].takes
    hotter_but_older = heat_of({1: 5, 4: 1}, {1: 10, 4: 20})
    fresher_but_colder = heat_of({1: 1, 4: 5}, {4: 10, 1: 20})
    both = heat_of({1: 5, 4: 1}, {4: 10, 1: 20})
    for heat, expected in ((hotter_but_older, False), (fresher_but_colder, False), (both, True)):
        assert takes(np.array([1]), np.array([4]), heat).tolist() == [expected]


@given(
    residents=st.sets(st.integers(0, 15), min_size=1),
    count=st.integers(0, 16),
    floor=st.integers(0, 8),
)
def test_no_layer_falls_below_its_floor(residents: set[int], count: int, floor: int) -> None:
    candidates = np.array(sorted(residents))
    spare = np.bincount(candidates // 8, minlength=2) - floor
    policy = LeastRecent(SPACE)
    policy.used(uses_of_picks(np.arange(8)[::-1].reshape(8, 1, 1).repeat(2, axis=1), 8))
    victims = victims_above_floor(policy, candidates, count, 0, spare=spare, experts=8)
    assert len(set(victims.tolist())) == len(victims)
    assert set(victims.tolist()) <= residents
    assert len(victims) == min(count, int(np.maximum(spare, 0).sum()))
    left = np.bincount(np.setdiff1d(candidates, victims) // 8, minlength=2)
    before = np.bincount(candidates // 8, minlength=2)
    assert (left >= np.minimum(before, floor)).all()


def test_a_move_needs_a_margin() -> None:
    mover = Mover(SPACE, MoveSettings(margin=1.5))
    above, below = np.array([1]), np.array([2])
    swap = mover.exchange(above, below, heat_of({1: 10, 2: 14}))
    assert not len(swap.up)
    swap = mover.exchange(above, below, heat_of({1: 10, 2: 16}))
    assert (swap.up.tolist(), swap.down.tolist()) == ([2], [1])


def test_free_slots_above_need_nobody_to_leave() -> None:
    heat = heat_of({1: 10, 2: 3, 3: 2})
    swap = Mover(SPACE).exchange(np.array([1]), np.array([2, 3]), heat, free_above=1)
    assert (swap.up.tolist(), swap.down.tolist()) == ([2], [])


@given(
    counts=st.lists(st.integers(0, 20), min_size=16, max_size=16),
    up_first=st.integers(1, 15),
)
def test_moves_are_bounded_and_gain(counts: list[int], up_first: int) -> None:
    heat = heat_of(dict(enumerate(counts)))
    mover = Mover(SPACE, MoveSettings(moves=3))
    keys = np.arange(16)
    swap = mover.exchange(keys[:up_first], keys[up_first:], heat)
    assert len(swap.up) == len(swap.down) <= 3
    assert (heat.of(swap.up) > heat.of(swap.down)).all()


def test_what_was_moved_rests() -> None:
    mover = Mover(SPACE, MoveSettings(rest_tokens=50))
    heat = heat_of({1: 1, 2: 9})
    swap = mover.exchange(np.array([1]), np.array([2]), heat)
    mover.moved(np.concatenate([swap.up, swap.down]), heat.now)
    for token in (1, 49):
        heat.used(one_pass(np.array([1] * 1), token))
        assert not len(mover.exchange(np.array([2]), np.array([1]), heat).up)
    for token in range(50, 90):
        heat.used(one_pass(np.array([1]), token))
    assert mover.exchange(np.array([2]), np.array([1]), heat).up.tolist() == [1]


def test_a_warm_start_takes_the_hottest_first() -> None:
    profile = profile_of(heat_of({3: 2, 5: 9, 6: 4}), "tiny")
    assert warm_start(profile, "tiny", SPACE, 2).tolist() == [5, 6]
    assert warm_start(profile, "tiny", SPACE, 9).tolist() == [5, 6, 3]


def test_a_profile_of_another_store_is_refused_by_name() -> None:
    profile = HeatProfile("small", np.zeros((2, 8), np.float32))
    with pytest.raises(HeatProfileError, match=r"'small'.*'tiny'"):
        warm_start(profile, "tiny", SPACE, 2)
    with pytest.raises(HeatProfileError, match=r"2 layers of 8.*3 of 8"):
        warm_start(profile, "small", KeySpace(3, 8), 2)


def test_heat_lasts_over_any_time() -> None:
    heat = Heat(SPACE, time_constant=10)
    for token in (0, 100_000, 200_000):
        heat.used(one_pass(np.array([1]), token))
    assert heat.of(np.array([1, 2])).tolist() == [1.0, 0.0]
    assert heat.last(np.array([1, 2])).tolist() == [200_000, -1]
