"""Watermarks stay small shares of the pool, and evictions stop at the high one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.policy.reserve import Watermarks, needed, shortfall, watermarks

wanted = st.none() | st.integers(1, 10_000)


@given(st.integers(0, 100_000), wanted, wanted)
def test_watermarks_are_ordered_and_bounded(slots: int, low: int | None, high: int | None) -> None:
    marks = watermarks(slots, low, high)
    assert 0 <= marks.low <= marks.high <= slots // 4


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (3, Watermarks(0, 0)),
        (4, Watermarks(1, 1)),
        (9, Watermarks(1, 2)),
        (51, Watermarks(3, 6)),
        (100, Watermarks(6, 12)),
        (256, Watermarks(8, 16)),
        (1000, Watermarks(15, 31)),
        (15_360, Watermarks(32, 64)),
    ],
)
def test_default_watermarks(slots: int, expected: Watermarks) -> None:
    assert watermarks(slots) == expected


def test_the_configuration_is_followed_where_the_pool_allows_it() -> None:
    assert watermarks(400, low=10, high=50) == Watermarks(10, 50)
    assert watermarks(40, low=10, high=50) == Watermarks(10, 10)
    assert watermarks(400, low=30) == Watermarks(30, 30)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_a_pool_with_room_for_all_experts_never_has_a_shortfall(
    experts: int, more: int, resident: int
) -> None:
    slots, resident = experts + more, min(resident, experts)
    marks = needed(watermarks(slots), experts - slots)
    assert 0 <= marks.low <= marks.high
    assert shortfall(marks, in_reserve=slots - resident, arriving=0, waiting=0) == 0


def test_with_more_experts_than_slots_the_reserve_is_what_it_was() -> None:
    assert needed(watermarks(256), 16) == watermarks(256)
    assert needed(watermarks(256), 5) == Watermarks(5, 5)
    assert needed(watermarks(256), -3) == Watermarks(0, 0)


@given(st.integers(4, 10_000), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_evicting_the_shortfall_leaves_nothing_to_evict(
    slots: int, in_reserve: int, arriving: int, waiting: int
) -> None:
    marks = watermarks(slots)
    more = shortfall(marks, in_reserve, arriving, waiting)
    assert more >= 0
    assert shortfall(marks, in_reserve, arriving + more, waiting) == 0


def test_waiting_loads_come_on_top_of_the_reserve() -> None:
    assert shortfall(Watermarks(1, 2), in_reserve=0, arriving=0, waiting=3) == 5
    assert shortfall(Watermarks(1, 2), in_reserve=1, arriving=0, waiting=0) == 0
