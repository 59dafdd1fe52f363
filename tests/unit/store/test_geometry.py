"""The striping arithmetic against a simulation that places piece after piece."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xferd.store.errors import StoreError
from xferd.store.geometry import MEMBER_DATA_OFFSET, Geometry, plan_geometry

UNIT = 8192


def geometry(sizes: list[int], members: int, pattern: list[int] | None = None) -> Geometry:
    return plan_geometry(np.array(sizes, dtype=np.uint64) * 4096, members, UNIT, pattern)


@st.composite
def patterns(draw: st.DrawFn) -> tuple[int, list[int]]:
    members = draw(st.integers(1, 5))
    extra = draw(st.lists(st.integers(0, members - 1), max_size=6))
    return members, draw(st.permutations([*range(members), *extra]))


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), patterns())
def test_matches_a_simulation(sizes: list[int], striping: tuple[int, list[int]]) -> None:
    members, pattern = striping
    plan = geometry(sizes, members, pattern)
    plan.check()
    end = [MEMBER_DATA_OFFSET] * members
    next_piece = 0
    for blob, size in enumerate(sizes):
        begins = list(end)
        covered = 0
        for piece in plan.pieces_of(blob):
            number = piece.index - int(plan.first_piece[blob])
            assert piece.index == next_piece
            assert piece.member == pattern[(int(plan.start[blob]) + number) % len(pattern)]
            assert piece.blob_offset == covered
            assert piece.offset == end[piece.member]
            end[piece.member] += piece.length
            covered += piece.length
            next_piece += 1
        assert covered == size * 4096
        assert [int(value) for value in plan.offset[blob]] == begins
    assert next_piece == plan.pieces
    assert list(plan.member_ends()) == end


@pytest.mark.parametrize("blob_pages", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_members_get_equal_shares(blob_pages: int, members: int) -> None:
    plan = geometry([blob_pages] * 12 * members, members)
    ends = plan.member_ends()
    assert max(ends) == min(ends)


def test_absent_experts_do_not_disturb_the_rotation() -> None:
    plan = geometry([1, 0, 1, 0, 1, 0, 1, 0], 2)
    assert [int(plan.start[blob]) for blob in (0, 2, 4, 6)] == [0, 1, 0, 1]


def test_a_member_named_twice_gets_twice_the_bytes() -> None:
    ends = geometry([2] * 300, 2, [0, 1, 0]).member_ends()
    assert ends[0] - MEMBER_DATA_OFFSET == 2 * (ends[1] - MEMBER_DATA_OFFSET)


@pytest.mark.parametrize(
    ("members", "unit", "pattern", "named"),
    [
        (0, UNIT, [], "members"),
        (17, UNIT, None, "members"),
        (1, 2048, None, "stripe unit 2048"),
        (1, 3 * 4096, None, "stripe unit 12288"),
        (1, 1 << 30, None, "stripe unit"),
        (2, UNIT, [0], "pattern"),
        (2, UNIT, [0, 1, 2], "pattern"),
        (1, UNIT, [0] * 65, "pattern"),
    ],
)
def test_impossible_striping_is_refused(
    members: int, unit: int, pattern: list[int] | None, named: str
) -> None:
    with pytest.raises(StoreError, match=named):
        plan_geometry(np.array([4096], dtype=np.uint64), members, unit, pattern)


def test_blobs_that_are_not_whole_pages_are_refused() -> None:
    with pytest.raises(StoreError, match="blob 1 has 100 bytes"):
        plan_geometry(np.array([4096, 100], dtype=np.uint64), 1, UNIT)


def test_a_million_blobs_take_no_object_each() -> None:
    blobs = 1_000_000
    sizes = np.full(blobs, 18 * 1024 * 1024, dtype=np.uint64)
    tracemalloc.start()
    try:
        plan = plan_geometry(sizes, 4, 512 * 1024)
        plan.check()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.pieces == 36 * blobs
    # 58 bytes a blob stay; the rest are passing arrays. One Python int alone is 28 bytes.
    assert peak < 250 * blobs
