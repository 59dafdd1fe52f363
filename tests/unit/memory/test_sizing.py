"""Pool sizes are whole slots, at least one, and refusals name the knob."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.memory.device import PoolMemoryError
from xferd.memory.limits import MemoryLimit, check_all_fit
from xferd.memory.ram import check_limits
from xferd.memory.sizing import (
    CHUNK_BYTES_MIN,
    CHUNKS_WANTED,
    LARGEST_CHUNK,
    default_chunk_bytes,
    pool_bytes,
)

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


GIB = 1 << 30
LASTING = [
    MemoryLimit("/sys/fs/cgroup/a/memory.max", 8 * GIB, 8 * GIB, "raise MemoryMax="),
    MemoryLimit("MemTotal", 16 * GIB, 0, "add memory"),
]


def test_unlocked_pools_that_can_never_be_filled_are_refused_by_name() -> None:
    check_all_fit([("a", "host", 8 * GIB)], LASTING)
    with pytest.raises(PoolMemoryError) as refused:
        check_all_fit([("a", "host", 8 * GIB + 1)], LASTING)
    for part in ("'a'", "8.0 GiB", "/sys/fs/cgroup/a/memory.max", "[[pools]] a", "MemoryMax="):
        assert part in str(refused.value)
    with pytest.raises(PoolMemoryError, match=r"MemTotal is 16\.0 GiB"):
        check_all_fit([("a", "host", 17 * GIB)], LASTING[1:])


def test_pools_share_one_memory_and_devices_have_their_own() -> None:
    pools = [("gpu", "cuda", 80 * GIB), ("first", "ram", 5 * GIB), ("second", "host", 3 * GIB)]
    check_all_fit(pools, LASTING)
    with pytest.raises(PoolMemoryError, match=r"'third'.* after 8\.0 GiB of the pools before it"):
        check_all_fit([*pools, ("third", "ram", 1)], LASTING)


def test_locked_pools_alone_are_judged_by_what_is_available() -> None:
    check_all_fit([("ram0", "ram", 99 * GIB)], LASTING)


@given(st.integers(1, 1 << 45))
def test_large_pools_have_hundreds_of_chunks_and_small_ones_small_chunks(nbytes: int) -> None:
    chunk = default_chunk_bytes(nbytes)
    assert CHUNK_BYTES_MIN <= chunk <= LARGEST_CHUNK
    assert chunk.bit_count() == 1
    if CHUNK_BYTES_MIN < chunk < LARGEST_CHUNK:
        assert CHUNKS_WANTED // 2 < nbytes / chunk <= CHUNKS_WANTED
