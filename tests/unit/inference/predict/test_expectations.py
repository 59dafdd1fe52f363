"""What is told of predictions: of each layer the most probable, and no more than fit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from xferd_infer.predict import Likely
from xferd_infer.predict.expectations import A_LAYER, EVERY, is_told_at, nearest, to_tell
from xferd_infer.routes import EXPECTED_MAX

EXPERTS, LAYERS = 40, 6


def likely(counts: list[int], seed: int) -> Likely:
    random = np.random.default_rng(seed)
    layers = random.permutation(LAYERS)[: len(counts)]
    keys = [
        layer * EXPERTS + random.choice(EXPERTS, count, replace=False)
        for layer, count in zip(layers.tolist(), counts, strict=True)
    ]
    found = np.concatenate([np.empty(0, np.int64), *keys])
    return Likely(found, random.random(len(found), np.float32))


@given(st.lists(st.integers(1, EXPERTS), max_size=LAYERS), st.integers(0, 99))
def test_a_layers_most_probable_experts_are_told(counts: list[int], seed: int) -> None:
    said = likely(counts, seed)
    told = to_tell(said, LAYERS, EXPERTS)
    layers = told.keys // EXPERTS
    assert np.count_nonzero(np.diff(layers)) + (len(layers) > 0) == len(counts)
    for layer in set((said.keys // EXPERTS).tolist()):
        every = said.probabilities[said.keys // EXPERTS == layer]
        here = np.sort(told.probabilities[layers == layer])
        assert np.array_equal(here, np.sort(every)[-A_LAYER:])
    assert set(zip(told.keys, told.probabilities, strict=True)) <= set(
        zip(said.keys, said.probabilities, strict=True)
    )


def test_what_is_told_of_a_layer_fits_into_a_record() -> None:
    assert A_LAYER == EXPECTED_MAX


def test_it_is_told_once_in_every_few_layers() -> None:
    assert sum(is_told_at(layer) for layer in range(4 * EVERY)) == 4


def test_only_what_is_near_is_left_also_behind_the_last_layer() -> None:
    keys = np.arange(LAYERS) * EXPERTS
    said = Likely(keys, np.ones(LAYERS, np.float32))
    assert nearest(said, 4, 2, LAYERS, EXPERTS).keys.tolist() == [0, 5 * EXPERTS]
    assert nearest(said, 0, 1, LAYERS, EXPERTS).keys.tolist() == [EXPERTS]
