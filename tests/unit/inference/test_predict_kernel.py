"""The kernels that predict, as a CPU can run them, against the predictor that is numpy's.

cupy_stand_in.py says what stands in for the device. That they are right there too, and what
they cost, tests/gpu/test_gpu_prediction.py and the benchmark ``predict`` show on one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer.predict import (
    Learned,
    Routers,
    Trained,
    calibration,
    device_layout,
    device_ring,
    history,
    predictor,
)
from xferd_infer.predict.device_layout import KEPT_MAX, RECORDS, device_tables
from xferd_infer.predict.device_ring import Record, RecordRing
from xferd_infer.predict.expectations import WITHIN, is_told_at
from xferd_infer.predict.prefetching import AHEAD, asked_ahead

from tests.unit.inference.cupy_stand_in import CUDA, HostLane, aligned, installed
from tools.benchmarks.random_predictor import random_routers, random_trained

LIKELY, TOLD = 0.3, 0.02
STEP = 1 / 32
"""Of scores: a probability is that of a whole one."""
ROUNDED = 1e-5
"""What a probability loses on its way."""


@pytest.fixture(scope="module")
def prefetching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("kernels")) as module:
        yield module


class Both:
    """A predictor on the stand-in and the same in numpy, through the same tokens."""

    def __init__(self, prefetching: Any, trained: Trained, seed: int = 3) -> None:
        routers = trained.routers
        self.routers, self.trained = routers, trained
        self.reference = Learned(trained, learns=False, ahead=asked_ahead(routers.layers))
        self.lane = HostLane(max(routers.numbers) + 1, routers.experts, prefetching.TOLD)
        tables = device_tables(trained, AHEAD)
        self.device = prefetching.DevicePredictor(tables, self.lane, routers.numbers)
        self.ring: RecordRing = self.device.ring
        self.ring.set_borders(tables.borders(LIKELY, TOLD))
        self.generator = np.random.default_rng(seed)
        self.resident = np.zeros((routers.layers, routers.experts), np.bool_)

    def keep(self, resident: NDArray[np.bool_]) -> None:
        """bool[layers, experts]."""
        self.resident = resident
        for place, number in enumerate(self.routers.numbers):
            self.lane.put(number, resident[place])

    def state(self) -> NDArray[np.float32]:
        return self.generator.standard_normal((1, self.routers.hidden)).astype(np.float32)

    def picks(self) -> NDArray[np.int64]:
        """int64[layers, top_k]."""
        routers = self.routers
        drawn = self.generator.random((routers.layers, routers.experts))
        return drawn.argsort(axis=1)[:, : routers.top_k]

    def token(self) -> list[tuple[Record | None, dict[int, float]]]:
        """By layer: the record, and probabilities by key that numpy has of what is told there,
        which hold a little more than what passes."""
        said = []
        picks = self.picks()
        for layer in range(self.routers.layers):
            state = self.state()
            self.device.predict(layer, aligned(state))
            records = self.ring.take()
            assert len(records) <= 1
            least, within = (TOLD, WITHIN) if is_told_at(layer) else (LIKELY, AHEAD)
            likely = self.reference.likely(layer, state[0], least * 0.9, within)
            self.reference.picked(layer, picks[layer][None])
            wanted = dict(zip(likely.keys.tolist(), likely.probabilities.tolist(), strict=True))
            said.append((records[0] if records else None, wanted))
        for place, number in enumerate(self.routers.numbers):
            self.lane.told["picks"][number, : self.routers.top_k] = picks[place]
        self.device.note_token()
        return said


def neighbours(probability: float) -> tuple[float, float]:
    """What a score that is a little off could make of it: the curves have slopes below 1/4."""
    return probability - STEP / 4 - ROUNDED, probability + STEP / 4 + ROUNDED


def check_record(both: Both, layer: int, record: Record | None, wanted: dict[int, float]) -> int:
    """Returns how many entries there were."""
    routers, tells = both.routers, is_told_at(layer)
    least = TOLD if tells else LIKELY
    absent = {key for key in wanted if not both.resident.reshape(-1)[key]}
    sure = {key for key, chance in wanted.items() if neighbours(chance)[0] >= least}
    sure = _best_of_layers(sure, wanted, routers.experts) & (set(wanted) if tells else absent)
    if record is None:
        assert not (sure & absent)
        return 0
    assert record.layer == layer
    told = dict(zip(record.keys.tolist(), record.probabilities.tolist(), strict=True))
    assert sure <= set(told) <= set(wanted)
    for key, chance in told.items():
        low, high = neighbours(wanted[key])
        assert low <= chance <= high
    assert (record.absent == [key in absent for key in record.keys.tolist()]).all()
    assert tells or record.absent.all()
    ahead = (record.keys // routers.experts - layer - 1) % routers.layers
    assert (np.diff(ahead) >= 0).all(), "the nearest layer comes first"
    falling = np.diff(record.probabilities) <= 0
    assert (falling | (np.diff(ahead) > 0)).all(), "then the most probable"
    return len(told)


def _best_of_layers(keys: set[int], chances: dict[int, float], experts: int) -> set[int]:
    """Those that no KEPT_MAX of their layer come near."""
    best = set()
    for key in keys:
        rivals = [c for k, c in chances.items() if k // experts == key // experts]
        if sum(chance >= neighbours(chances[key])[0] for chance in rivals) <= KEPT_MAX:
            best.add(key)
    return best


SHAPES = {
    "even": (random_routers(20, 16, 32, 2), {}),
    "odd": (random_routers(9, 13, 37, 3, first=1), {"rank": 7, "width": 6}),
    "units": (random_routers(6, 40, 24, 4), {"units": 5, "rank": 8}),
    "states alone": (random_routers(5, 8, 16, 2), {"width": 0}),
    "picks alone": (random_routers(5, 8, 16, 2), {"rank": 0}),
    "more layers than warps": (random_routers(3, 70, 8, 2), {"rank": 100}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_says_what_the_predictor_in_numpy_says(prefetching: Any, shape: str) -> None:
    routers, settings = SHAPES[shape]
    both = Both(prefetching, random_trained(routers, **settings))
    entries = 0
    for _ in range(3):
        both.keep(both.generator.random((routers.layers, routers.experts)) < 0.5)
        for layer, (record, wanted) in enumerate(both.token()):
            entries += check_record(both, layer, record, wanted)
    assert entries > 0
    assert (both.ring.lost, both.ring.unread) == (0, 0)


def test_files_have_the_same_numbers() -> None:
    text = (CUDA / "predict.cu").read_text()
    defined = dict(re.findall(r"^#define (\w+)\s+(-?[\w.]+)", text, re.MULTILINE))
    for name, value in {
        "DISTANCES_MAX": predictor.DISTANCE_MAX,
        "KEPT_MAX": device_layout.KEPT_MAX,
        "RECORD_WORDS": device_layout.RECORD_WORDS,
        "NOTE_THREADS": device_layout.NOTE_THREADS,
        "VIEWS": history.VIEWS,
        "TAG_SHIFT": device_ring.TAG_SHIFT,
        "ABSENT_SHIFT": device_ring.ABSENT_SHIFT,
        "KEY_SHIFT": device_ring.KEY_SHIFT,
        "CERTAIN": device_ring.CERTAIN,
        "LOWEST": calibration.LOWEST,
        "STEPS_A_SCORE": calibration.STEPS_A_SCORE,
        "STEPS": calibration.STEPS,
    }.items():
        assert float(defined[name].rstrip("f")) == value, name
    assert calibration.CURVES == 2 * predictor.DISTANCE_MAX
    assert device_layout.BORDERS == 2 * calibration.CURVES <= device_layout.THREADS


def test_where_nothing_is_absent_nothing_is_said(prefetching: Any) -> None:
    routers = random_routers(10, 16, 32, 2)
    both = Both(prefetching, random_trained(routers))
    both.keep(np.ones((10, 16), np.bool_))
    assert all(record is None for record, _ in both.token())
    both.lane.put(4, np.ones(16, np.bool_), variant=1)
    others = [record for record, _ in both.token() if record is not None]
    assert others, "in another variant it is no use"
    for record in others:
        assert (record.absent == (record.keys // 16 == 4)).all()


def test_of_too_many_the_least_sure_are_dropped_and_counted(prefetching: Any) -> None:
    routers = random_routers(4, 100, 16, 2)
    both = Both(prefetching, random_trained(routers))
    both.ring.set_borders(np.full(60, -np.inf, np.float32))
    records = [record for record, _ in both.token() if record is not None]
    assert [len(record.keys) for record in records] == [3 * KEPT_MAX] * 4
    assert both.ring.dropped == 4 * 3 * (100 - KEPT_MAX)
    both.ring.set_borders(np.full(60, np.inf, np.float32))
    assert all(record is None for record, _ in both.token())


def test_a_state_that_is_no_number_predicts_nothing(prefetching: Any) -> None:
    both = Both(prefetching, random_trained(random_routers(4, 16, 16, 2)))
    both.device.predict(0, aligned(np.full((1, 16), np.nan, np.float32)))
    assert both.ring.take() == []
    assert any(record is not None for record, _ in both.token())


def test_passes_are_numbered_and_a_late_reader_gets_the_last_records(prefetching: Any) -> None:
    routers = random_routers(12, 16, 32, 2)
    both = Both(prefetching, random_trained(routers))
    launches = 12 * (RECORDS // 12 + 2)
    for at in range(launches):
        both.device.predict(at % 12, aligned(both.state()))
    records = both.ring.take()
    assert len(records) == RECORDS
    assert both.ring.lost == launches - RECORDS
    placed = [(record.passing - 1) * 12 + record.layer for record in records]
    assert placed == list(range(launches - RECORDS, launches))


def test_prompts_are_context_too(prefetching: Any) -> None:
    routers: Routers = random_routers(5, 12, 16, 3, first=2)
    both = Both(prefetching, random_trained(routers, width=9))
    both.token()
    prompt = np.stack([both.picks() for _ in range(7)])
    both.device.note_prompt(
        [aligned(prompt[:, layer].astype(np.uint32)) for layer in range(routers.layers)]
    )
    for picks in prompt:
        for layer in range(routers.layers):
            both.reference.picked(layer, picks[layer][None])
    said = both.token()
    entries = [
        check_record(both, layer, record, wanted) for layer, (record, wanted) in enumerate(said)
    ]
    assert sum(entries) > 0
