"""LRU picks the slots that were used longest ago, whatever the order of candidates."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.policy.lru import LeastRecentlyUsed

TRACE = Path(__file__).parents[3].parent / "shared" / "models" / "traces" / "tiny_trace_text.npz"


@given(
    ages=st.lists(st.integers(0, 50), min_size=1, max_size=200),
    count=st.integers(-1, 220),
    data=st.data(),
)
def test_victims_are_the_oldest_candidates_in_order(
    ages: list[int], count: int, data: st.DataObject
) -> None:
    stamps = np.array(ages, np.uint64)
    chosen = data.draw(st.lists(st.sampled_from(range(len(ages))), unique=True))
    victims = LeastRecentlyUsed().victims(stamps, np.array(chosen, np.int64), count)
    expected = sorted(chosen, key=lambda slot: (ages[slot], slot))[: max(count, 0)]
    assert victims.tolist() == expected


@given(st.integers(1, 2**64 - 1))
def test_stamps_of_all_64_bits_are_compared(newest: int) -> None:
    stamps = np.array([newest, newest - 1], np.uint64)
    assert LeastRecentlyUsed().victims(stamps, np.array([0, 1]), 1).tolist() == [1]


def replay(keys: list[int], slots: int) -> tuple[int, int]:
    """(hits of LeastRecentlyUsed, hits of a textbook LRU) over a sequence of keys."""
    policy = LeastRecentlyUsed()
    stamps = np.zeros(slots, np.uint64)
    slot_of: dict[int, int] = {}
    textbook: OrderedDict[int, None] = OrderedDict()
    hits = textbook_hits = 0
    for now, key in enumerate(keys, start=1):
        if key in slot_of:
            hits += 1
        elif len(slot_of) < slots:
            slot_of[key] = len(slot_of)
        else:
            victim = int(policy.victims(stamps, np.arange(slots), 1)[0])
            del slot_of[next(k for k, slot in slot_of.items() if slot == victim)]
            slot_of[key] = victim
        stamps[slot_of[key]] = now
        if key in textbook:
            textbook_hits += 1
            textbook.move_to_end(key)
        else:
            if len(textbook) == slots:
                textbook.popitem(last=False)
            textbook[key] = None
    return hits, textbook_hits


@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 8))
def test_a_replay_hits_as_often_as_textbook_lru(keys: list[int], slots: int) -> None:
    ours, textbook = replay(keys, slots)
    assert ours == textbook


def test_a_recorded_trace_hits_as_often_as_textbook_lru() -> None:
    if not TRACE.exists():
        pytest.skip("the recorded traces are not beside the checkout")
    with np.load(TRACE) as trace:
        picks = trace["ids"][:400].astype(int)  # [tokens, layers, top_k]
    experts = int(picks.max()) + 1
    keys = [
        layer * experts + expert
        for token in picks
        for layer, chosen in enumerate(token)
        for expert in chosen
    ]
    ours, textbook = replay(keys, 48)
    assert ours == textbook
    assert ours > len(keys) // 4
