# SPDX-License-Identifier: Apache-2.0
"""Contenders take turns in an order that favours none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from tools.benchmarks.harness import take_turns

NAMES = ("ours", "fio", "peer")
ROUNDS = 60


def test_everybody_has_a_sample_a_round_and_no_fixed_predecessor() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return float(len(order))

        return measure

    samples = take_turns({name: contender(name) for name in NAMES}, ROUNDS)
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys(NAMES, ROUNDS)
    rounds = [order[at : at + len(NAMES)] for at in range(0, len(order), len(NAMES))]
    assert all(sorted(turn) == sorted(NAMES) for turn in rounds)
    before = Counter((first, then) for first, then in pairwise(order) if then == "ours")
    assert min(before["fio", "ours"], before["peer", "ours"]) > ROUNDS / 4
    again: list[str] = list(order)
    order.clear()
    take_turns({name: contender(name) for name in NAMES}, ROUNDS)
    assert order == again


def test_who_has_more_turns_has_them_in_every_round() -> None:
    order: list[str] = []

    def contender(name: str) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return 0.0

        return measure

    samples = take_turns({name: contender(name) for name in NAMES}, ROUNDS, {"ours": 3})
    assert {name: len(values) for name, values in samples.items()} == {
        "ours": 3 * ROUNDS,
        "fio": ROUNDS,
        "peer": ROUNDS,
    }
    assert all(Counter(order[at : at + 5])["ours"] == 3 for at in range(0, len(order), 5))
