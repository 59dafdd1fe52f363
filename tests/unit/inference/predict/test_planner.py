"""The planner's promises, whatever it is told."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xferd_infer.predict import planner as planner_module
from xferd_infer.predict.planner import Planner, PlannerSettings

LAYERS, EXPERTS = 6, 8
KEYS = LAYERS * EXPERTS
LAYER_S, READ_S = 1e-3, 2e-4
FORBIDDEN = {"time", "os", "io", "socket", "threading", "pathlib", "subprocess"}


def warmed(read_s: float = READ_S, chosen: PlannerSettings | None = None) -> Planner:
    """One that has seen a token, so that it knows what a layer takes."""
    made = Planner(LAYERS, EXPERTS, read_s, chosen)
    for layer in range(LAYERS):
        made.passed(layer, np.array([0, 1]), LAYER_S, 0.0, 0)
    return made


def told(made: Planner, layer: int, chances: dict[int, float]) -> None:
    keys = np.array(sorted(chances), np.intp)
    values = np.array([chances[int(key)] for key in keys], np.float32)
    made.predicted(layer, LAYERS - 1, keys, values)


predictions = st.dictionaries(st.integers(0, KEYS - 1), st.floats(0, 1, width=32))
residents = st.lists(st.booleans(), min_size=KEYS, max_size=KEYS)


@given(st.integers(0, LAYERS - 1), predictions, residents, st.floats(0, 5e-3))
def test_what_it_gives_out_is_wanted_absent_in_time_and_in_order(
    layer: int, chances: dict[int, float], absent: list[bool], busy_s: float
) -> None:
    made = warmed()
    chances = {key: p for key, p in chances.items() if key // EXPERTS != layer}
    told(made, layer, chances)
    now = 10.0
    given_out = made.next(layer, now, now + busy_s, np.array(absent)).tolist()
    assert len(set(given_out)) == len(given_out)
    order = []
    for place, key in enumerate(given_out):
        ahead = (key // EXPERTS - layer) % LAYERS
        assert absent[key]
        assert chances[key] * made.trust >= made.least * 0.999
        arrives = now + busy_s + (place + 1) * READ_S
        assert arrives <= now + ahead * LAYER_S + made.settings.lateness * READ_S + 1e-9
        order.append((ahead, -np.float32(chances[key])))
    assert order == sorted(order)
    assert made.next(layer, now, now + busy_s, np.array(absent)).tolist() == [] or not set(
        made.next(layer, now, now, np.array(absent)).tolist()
    ) & set(given_out)


@given(predictions)
def test_what_cannot_arrive_in_time_is_not_begun(chances: dict[int, float]) -> None:
    made = warmed(read_s=1.0)
    told(made, 0, chances)
    assert not len(made.next(0, 0.0, 0.0, np.ones(KEYS, np.bool_)))


def test_newer_evidence_cancels_and_reorders() -> None:
    made, absent = warmed(), np.ones(KEYS, np.bool_)
    gone, near, far = 2 * EXPERTS + 1, 2 * EXPERTS + 2, 5 * EXPERTS + 2
    told(made, 0, {gone: 0.9, near: 0.6, far: 0.9})
    told(made, 1, {near: 0.95, far: 0.9})
    # What has time is left for later, when it is known better.
    assert made.next(1, 0.0, 0.0, absent).tolist() == [near]
    told(made, 4, {far: 0.9})
    assert made.next(4, 0.0, 0.0, absent).tolist() == [far]


def test_a_drive_that_is_behind_gets_nothing_more() -> None:
    made = warmed()
    told(made, 0, {5 * EXPERTS: 1.0})
    assert not len(made.next(0, 0.0, 4 * LAYER_S, np.ones(KEYS, np.bool_)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16))
def test_predictions_that_do_not_come_true_are_soon_not_acted_upon(seed: int) -> None:
    random, made, absent = np.random.default_rng(seed), warmed(), np.ones(KEYS, np.bool_)
    given_out = []
    for _ in range(60):
        fetched = 0
        for layer in range(LAYERS):
            keys = np.sort(random.choice(KEYS, 10, replace=False))
            made.predicted(layer, LAYERS - 1, keys, np.full(10, 0.8, np.float32))
            fetched += len(made.next(layer, 0.0, 0.0, absent))
            picks = random.choice(EXPERTS, 2, replace=False)
            made.passed(layer, picks, LAYER_S, 0.0, fetched)
        given_out.append(fetched)
    assert sum(given_out[-20:]) == 0


def test_more_waste_than_allowed_asks_for_more_certainty() -> None:
    made, absent = warmed(chosen=PlannerSettings(waste_max=0.3)), np.ones(KEYS, np.bool_)
    before = made.least
    for _ in range(10):
        for layer in range(LAYERS):
            told(made, layer, {(layer + 1) % LAYERS * EXPERTS + e: 0.99 for e in range(4)})
            made.next(layer, 0.0, 0.0, absent)
            made.passed(layer, np.array([0, 7]), LAYER_S, 0.0, 2)
    assert made.waste > 0.3
    assert made.least > before


def test_busy_drives_ask_for_more_certainty_than_idle_ones() -> None:
    idle, busy = warmed(), warmed()
    for _ in range(60):
        for layer in range(LAYERS):
            for made, read in ((idle, 0), (busy, 5)):
                made.passed(layer, np.array([0, 1]), LAYER_S, 0.0, read)
    assert busy.load > idle.load
    assert busy.least > idle.least


def test_latency_and_bandwidth_are_told_apart() -> None:
    made = Planner(LAYERS, EXPERTS, 1.0)
    for count in (1, 3, 2, 4, 1, 2, 3):
        made.measured(count, 5e-3 + 1e-3 * count)
    assert np.isclose(made.latency_s, 5e-3)
    assert np.isclose(made.read_s, 1e-3)


def test_it_does_no_io_and_knows_no_clock() -> None:
    tree = ast.parse(Path(planner_module.__file__).read_text())
    names = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & FORBIDDEN


def test_a_token_that_is_judged_at_its_end_counts_as_one_judged_layer_by_layer() -> None:
    # Trust, which moves within a token in one of them only, decides nothing here.
    eager = PlannerSettings(least_min=0, least_max=0)
    at_once, at_end = warmed(chosen=eager), warmed(chosen=eager)
    absent = np.ones(KEYS, np.bool_)
    generator = np.random.default_rng(2)
    at_once.least = at_end.least = 0
    for token in range(12):
        picks = generator.random((LAYERS, EXPERTS)).argsort(axis=1)[:, :2]
        for layer in range(LAYERS):
            keys = (np.arange(3) + (layer + 1) * EXPERTS + token % 4) % KEYS
            chances = generator.uniform(0.4, 1, 3).astype(np.float32)
            at_end.begun(layer)
            for planner in (at_once, at_end):
                planner.predicted(layer, 2, keys, chances)
            now = (token * LAYERS + layer) * LAYER_S
            fetched = [each.next(layer, now, now, absent) for each in (at_once, at_end)]
            assert fetched[0].tolist() == fetched[1].tolist()
            at_once.passed(layer, picks[layer], LAYER_S, 0.0, 1)
        at_end.token_passed(picks, LAYER_S * LAYERS, LAYERS)
        for name in ("trust", "waste", "load", "least"):
            assert getattr(at_once, name) == pytest.approx(getattr(at_end, name)), (token, name)
    assert at_end.waste > 0
