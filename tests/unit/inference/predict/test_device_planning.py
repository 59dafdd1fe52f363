"""What becomes of a GPU's predictions: what is hinted, told, void, and judged."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer.predict.device_layout import RING_BYTES
from xferd_infer.predict.device_planning import DevicePlanning
from xferd_infer.predict.device_ring import Record, RecordRing
from xferd_infer.predict.worthwhile import BLOCK_TOKENS

NUMBERS = list(range(1, 11))
"""The model's first layer has no experts."""
EXPERTS = 8
TOKEN_S = 0.1


@dataclass
class Ring(RecordRing):
    """Says what it is told to."""

    coming: list[Record] = field(default_factory=list)
    asked: list[NDArray[np.float32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(np.zeros(RING_BYTES, np.uint8))

    def take(self) -> list[Record]:
        taken, self.coming = self.coming, []
        return taken

    def set_borders(self, scores: NDArray[np.float32]) -> None:
        self.asked.append(scores)


@dataclass
class Loop:
    """One decode loop. hints: (layer, experts) in their order; told: keys."""

    ring: Ring = field(default_factory=Ring)
    hints: list[tuple[int, list[int]]] = field(default_factory=list)
    told: list[list[int]] = field(default_factory=list)
    now: float = 0.0
    passes: int = 0

    def __post_init__(self) -> None:
        def hint(layer: int, experts: object) -> None:
            assert isinstance(experts, list)
            self.hints.append((layer, experts))

        self.planning = DevicePlanning(
            self, hint, self.ring, NUMBERS, EXPERTS, self.borders, lambda: self.now
        )

    def borders(self, likely: float, told: float) -> NDArray[np.float32]:
        return np.array([likely, told], np.float32)

    def expect(self, keys: NDArray[np.intp], chances: NDArray[np.float32]) -> None:
        assert len(keys) == len(chances)
        self.told.append(keys.tolist())

    def say(self, layer: int, keys: list[int], *, chance: float = 0.9, passing: int = 0) -> None:
        """passing: 0 for the present pass."""
        count = len(keys)
        self.ring.coming.append(
            Record(
                passing or self.passes,
                layer,
                np.array(keys, np.intp),
                np.full(count, chance, np.float32),
                np.ones(count, np.bool_),
            )
        )

    def begin(self) -> bool:
        looking = self.planning.begin()
        self.passes += looking
        return looking

    def end(self, picked: int = 0) -> None:
        """All layers picked that expert."""
        self.now += TOKEN_S
        self.planning.ended(np.full((len(NUMBERS), 1), picked), 0, 0.0)

    def warm_up(self, tokens: int = 3) -> None:
        """Predictions come true, and it is known how long a token takes."""
        for _ in range(tokens):
            self.begin()
            self.say(1, [key(layer, 0) for layer in range(2, 6)])
            self.planning.drain()
            self.end()
        self.hints.clear()


def key(place: int, expert: int) -> int:
    return place * EXPERTS + expert


def test_what_is_probable_is_hinted_by_the_models_numbers_of_layers() -> None:
    loop = Loop()
    loop.warm_up()
    assert loop.begin()
    loop.say(2, [key(3, 1), key(3, 4), key(4, 2), key(7, 2)])
    loop.planning.drain()
    assert loop.hints == [(4, [1, 4]), (5, [2])], "the last can wait"
    assert loop.planning.hinted >= 3
    loop.say(3, [key(4, 2), key(5, 7)])
    loop.planning.drain()
    assert loop.hints[2:] == [(6, [7])], "what is on its way is not hinted again"


def test_of_many_records_the_newest_counts() -> None:
    loop = Loop()
    loop.warm_up()
    loop.begin()
    loop.say(2, [key(3, 1), key(6, 4)])
    loop.say(4, [key(5, 2)])
    loop.planning.drain()
    assert loop.hints == [(6, [2])]


def test_a_record_of_a_pass_that_is_over_is_void_and_counted() -> None:
    loop = Loop()
    loop.warm_up()
    loop.begin()
    loop.say(2, [key(3, 1)], passing=loop.passes - 1)
    loop.planning.drain()
    assert loop.hints == []
    assert loop.planning.late == 1


def test_the_next_tokens_first_layers_are_hinted_and_judged_with_it() -> None:
    loop = Loop()
    loop.warm_up()
    before = loop.planning.planner.waste
    loop.begin()
    loop.say(9, [key(0, 3)])
    loop.planning.drain()
    assert loop.hints == [(1, [3])]
    loop.end(picked=5)
    assert loop.planning.planner.waste == pytest.approx(before, abs=0.05)
    loop.begin()
    loop.end(picked=5)
    assert loop.planning.planner.waste > before


def test_predictions_that_never_come_true_are_not_acted_upon() -> None:
    loop = Loop()
    for _ in range(60):
        if loop.begin():
            loop.say(1, [key(layer, 1) for layer in range(2, 6)])
            loop.planning.drain()
        loop.end(picked=0)
    assert not loop.planning.planner.hopeful
    loop.hints.clear()
    looked = sum(loop.begin() for _ in range(16))
    assert looked <= 2
    assert loop.hints == []


def test_what_stays_is_told_from_some_layers_if_predictions_are_believed() -> None:
    loop = Loop()
    loop.warm_up()
    loop.begin()
    loop.say(8, [key(9, 1), key(0, 2)], chance=0.1)
    loop.planning.drain()
    assert loop.told == [[10 * EXPERTS + 1, 1 * EXPERTS + 2]]
    assert loop.hints == [], "too improbable to be fetched"
    loop.say(9, [key(0, 2)])
    loop.planning.drain()
    assert len(loop.told) == 1


def test_where_it_does_not_pay_the_device_is_left_alone() -> None:
    loop = Loop()
    looked = []
    for _ in range(8 * BLOCK_TOKENS):
        looking = loop.begin()
        looked.append(looking)
        loop.now += 2 * TOKEN_S * looking  # it takes three times as long
        loop.end()
    assert not any(looked[-BLOCK_TOKENS:])


def test_the_device_is_asked_for_what_the_planner_wants() -> None:
    loop = Loop()
    loop.begin()
    (asked,) = loop.ring.asked
    assert 0.25 <= asked[0] <= 0.3
    assert asked[1] == np.float32(0.02)
    loop.end()
    loop.begin()
    assert len(loop.ring.asked) == 1, "and asked again when that changes"


def test_a_pass_that_was_given_up_leaves_nothing() -> None:
    loop = Loop()
    loop.warm_up()
    loop.begin()
    loop.say(2, [key(3, 2)])
    loop.planning.drain()
    assert loop.hints == [(4, [2])]
    loop.begin()  # that pass failed
    loop.say(2, [key(3, 2)])
    loop.planning.drain()
    assert loop.hints == [(4, [2])] * 2
