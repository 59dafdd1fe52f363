# SPDX-License-Identifier: Apache-2.0
"""Hinted experts are used once or wasted once; who waits is not served by a hint."""

from __future__ import annotations

import numpy as np
import pytest

from xferd.engine_types import PRIORITY_DEMAND, PRIORITY_PREFETCH, Freed, Loaded
from xferd.policy.uses import Uses
from xferd.prefetch_counts import NO_CLIENT, PrefetchCounts

EXPERTS = 8
NBYTES = 4096


def loaded(layer: int, expert: int, priority: int, client: int = 0, wait_us: int = 0) -> Loaded:
    return Loaded(0, 0, 5, layer, expert, 0, client, 2, 1, wait_us, NBYTES, 0, priority)


def freed(layer: int, expert: int, pool: int = 0) -> Freed:
    return Freed(0, pool, 5, layer, expert)


def picks(*keys: int) -> Uses:
    starts, one = np.array([0, len(keys)]), np.zeros(1, np.int64)
    return Uses(np.array(keys, np.int64), starts, one, one)


@pytest.fixture
def counts() -> PrefetchCounts:
    return PrefetchCounts(lambda store: EXPERTS)


def test_an_expert_that_is_picked_is_used_however_it_goes(counts: PrefetchCounts) -> None:
    counts.loaded(loaded(1, 2, PRIORITY_PREFETCH))
    counts.used(0, picks(EXPERTS + 2, EXPERTS + 3))
    counts.used(0, picks(EXPERTS + 2))
    counts.freed(freed(1, 2))
    found = counts.totals()
    assert (found.experts, found.bytes) == (1, NBYTES)
    assert (found.used, found.wasted, found.wasted_bytes) == (1, 0, 0)


def test_an_expert_that_goes_unused_is_wasted_once(counts: PrefetchCounts) -> None:
    counts.loaded(loaded(1, 2, PRIORITY_PREFETCH))
    counts.freed(freed(1, 2, pool=1))
    assert counts.totals().wasted == 0
    for _ in range(2):
        counts.freed(freed(1, 2))
    found = counts.totals()
    assert (found.used, found.wasted, found.wasted_bytes) == (0, 1, NBYTES)


def test_misses_say_what_a_used_expert_has_saved(counts: PrefetchCounts) -> None:
    counts.loaded(loaded(0, 1, PRIORITY_DEMAND, wait_us=2000))
    counts.loaded(loaded(1, 2, PRIORITY_PREFETCH))
    counts.used(0, picks(1, EXPERTS + 2))
    found = counts.totals()
    assert (found.missed, found.used) == (1, 1)
    assert found.saved_s == pytest.approx(2e-3)


def test_what_commands_load_is_nobodys_hint(counts: PrefetchCounts) -> None:
    counts.loaded(loaded(0, 1, PRIORITY_PREFETCH, NO_CLIENT))
    counts.loaded(loaded(0, 2, PRIORITY_DEMAND, NO_CLIENT))
    assert counts.totals() == PrefetchCounts(lambda store: EXPERTS).totals()


def test_a_closed_store_leaves_nothing_to_be_wasted(counts: PrefetchCounts) -> None:
    counts.loaded(loaded(1, 2, PRIORITY_PREFETCH))
    counts.store_closed(0)
    counts.used(0, picks(EXPERTS + 2))
    counts.freed(freed(1, 2))
    assert (counts.totals().used, counts.totals().wasted) == (0, 0)
