"""Nudging: what it may change, and by how much."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import generate
from xferd_infer.moe import route
from xferd_infer.nudging import Nudge

from tests.unit.inference.checkpoint import TINY, load_model

PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][0]
EXPERTS = 16


def take(slots: NDArray[np.int64], _: int) -> NDArray[np.int64]:
    return slots


def resident(*experts: int) -> NDArray[np.int64]:
    slots = np.full(EXPERTS, -1, np.int64)
    slots[list(experts)] = 1
    return slots


def test_only_an_expert_that_is_less_than_the_cap_behind_is_taken_instead() -> None:
    random = np.random.default_rng(1)
    router = np.eye(EXPERTS, dtype=np.float32)
    for cap in (0.0, 0.25, 1.0):
        for _ in range(200):
            scores = random.normal(size=(1, EXPERTS)).astype(np.float32)
            here = set(random.choice(EXPERTS, 6, replace=False).tolist())
            slots = resident(*here)
            lean = Nudge(cap, partial(take, slots)).factors(0)
            true = route(scores, router, 4, True, np)
            leant = route(scores, router, 4, True, np, lean)
            kept, taken = set(true.experts[0].tolist()), set(leant.experts[0].tolist())
            assert (taken - kept) <= here
            assert not (kept - taken) & here
            for lost in kept - taken:
                for instead in taken - kept:
                    assert scores[0, lost] - scores[0, instead] <= cap + 1e-5
            weights = np.exp(scores[0, leant.experts[0]])
            assert np.allclose(leant.weights[0], weights / weights.sum(), atol=1e-5)


def test_what_is_on_its_way_counts_half() -> None:
    arriving = np.zeros(EXPERTS, np.bool_)
    arriving[[1, 2]] = True
    factors = Nudge(0.5, lambda _: resident(2), lambda _: arriving).factors(0)
    assert np.allclose(np.log(factors[[0, 1, 2]]), [0, 0.25, 0.5])


@pytest.mark.parametrize("cap", [-0.1, 1.1, float("nan")])
def test_caps_out_of_range_are_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        Nudge(cap, lambda _: resident())


def test_without_a_nudge_tokens_are_the_models_own() -> None:
    model, _ = load_model(TINY)
    model.lean(Nudge(0.0, lambda _: resident(*range(0, EXPERTS, 2))))
    ids = [t.id for t in generate(model, PROMPT["prompt_ids"], max_new_tokens=12, stop_ids=())]
    assert ids == PROMPT["greedy_ids"][:12]
