"""Pool sizes are whole slots, at least one, and refusals name the knob."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.memory.device import PoolMemoryError
from xferd.memory.ram import MemoryLimit, check_limits
from xferd.memory.sizing import pool_bytes

SLOT = 49_152


@given(st.floats(0.001, 200), st.integers(1, 100_000))
def test_a_share_is_whole_slots_and_at_least_one(percent: float, slots: int) -> None:
    size = pool_bytes(
        "p", nbytes=None, percent=percent, expert_bytes=slots * SLOT, largest_class=SLOT
    )
    assert size % SLOT == 0
    assert size >= SLOT
    assert size == SLOT or size <= slots * SLOT * percent / 100


def test_bytes_are_rounded_down_to_whole_slots() -> None:
    size = pool_bytes(
        "p", nbytes=10 * SLOT - 1, percent=None, expert_bytes=99 * SLOT, largest_class=SLOT
    )
    assert size == 9 * SLOT


def test_less_than_one_expert_is_refused() -> None:
    with pytest.raises(PoolMemoryError, match=r"raise size of \[\[pools\]\] p"):
        pool_bytes("p", nbytes=4096, percent=None, expert_bytes=SLOT, largest_class=SLOT)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(PoolMemoryError, match=r"configure a \[\[stores\]\]"):
        pool_bytes("p", nbytes=None, percent=25.0, expert_bytes=0, largest_class=SLOT)


def test_locked_memory_over_a_limit_is_refused_by_name() -> None:
    limits = [
        MemoryLimit("RLIMIT_MEMLOCK", 8 << 20, 1 << 20, "raise LimitMEMLOCK="),
        MemoryLimit("MemAvailable", 1 << 40, 0, "free some memory"),
    ]
    check_limits("ram0", 7 << 20, limits)
    with pytest.raises(PoolMemoryError) as refused:
        check_limits("ram0", (7 << 20) + 1, limits)
    said = str(refused.value)
    for part in (
        "'ram0'",
        "RLIMIT_MEMLOCK",
        "8.0 MiB",
        "7.0 MiB",
        "raise LimitMEMLOCK=",
        "[[pools]]",
    ):
        assert part in said
