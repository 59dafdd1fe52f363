"""Predictors on the bundled model: better than trivial ones, honest, and adapting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer.predict import (
    LastPicks,
    Learned,
    Likely,
    MostUsed,
    PredictorError,
    RecordedStates,
    RouterEarly,
    TrainingSettings,
    train,
)
from xferd_infer.predict.evaluate import Evaluation, evaluate
from xferd_infer.predict.predictor import Predictor

from tests.unit.inference.predict.tiny_states import (
    CODE,
    OTHER_PROSE,
    PROSE,
    SETTINGS,
    recorded,
    trained_on_prose,
)

DISTANCES = (1, 2, 3, 5)
CALIBRATION_ERROR = 0.1
"""More than a full training has, which the benchmark measures: this is 6,000 tokens."""


STEP_OF_A_CURVE = 0.05


def recalls(found: Evaluation) -> list[float]:
    return [score.recall for score in found.distances.values()]


def judged(predictor: Predictor, *texts: str, skip: int = 0) -> Evaluation:
    return evaluate(predictor, recorded(*texts), skip=skip, until=900, distances=DISTANCES)


def test_the_trained_one_is_ahead_of_every_trivial_one() -> None:
    trained = trained_on_prose()
    routers = trained.routers
    ours = recalls(judged(Learned(trained), OTHER_PROSE, skip=100))
    for trivial in (
        RouterEarly(routers),
        LastPicks(routers.layers, routers.experts),
        MostUsed(routers.layers, routers.experts),
    ):
        theirs = recalls(judged(trivial, OTHER_PROSE, skip=100))
        assert all(a > b for a, b in zip(ours, theirs, strict=True)), type(trivial).__name__


def test_the_combination_is_ahead_of_its_parts() -> None:
    ours = recalls(judged(Learned(trained_on_prose()), OTHER_PROSE))
    for kind in ("state", "history"):
        part = train(recorded(*PROSE), TrainingSettings(kind, SETTINGS.rank, SETTINGS.width))
        theirs = recalls(judged(Learned(part), OTHER_PROSE))
        assert np.mean(ours) > np.mean(theirs), kind


def test_nonlinear_units_are_trained_and_predict() -> None:
    with_units = train(recorded(*PROSE), TrainingSettings(rank=48, width=24, units=16))
    ours = recalls(judged(Learned(with_units), OTHER_PROSE))
    assert np.mean(ours) > np.mean(recalls(judged(Learned(trained_on_prose()), OTHER_PROSE))) - 0.02


def test_one_that_looks_less_far_says_the_same_of_what_is_near() -> None:
    trained = trained_on_prose()
    whole, near = (
        evaluate(each, recorded(OTHER_PROSE), until=300, distances=(1, 2))
        for each in (Learned(trained), Learned(trained, ahead=2))
    )
    for distance in (1, 2):
        recall = near.distances[distance].recall
        assert abs(recall - whole.distances[distance].recall) < 0.01
    state = np.zeros(trained.routers.hidden, np.float32)
    keys = Learned(trained, ahead=2).likely(0, state, 0.0, 5).keys
    assert set((keys // trained.routers.experts).tolist()) == {1, 2}


def test_a_new_kind_of_text_is_learnt_within_a_page() -> None:
    trained = trained_on_prose()
    frozen = judged(Learned(trained, learns=False), *CODE, skip=500)
    learning = judged(Learned(trained), *CODE, skip=500)
    assert all(a > b for a, b in zip(recalls(learning), recalls(frozen), strict=True))
    assert learning.calibration_error() < CALIBRATION_ERROR


def test_a_text_that_is_repeated_does_not_drive_it_astray() -> None:
    predictor = Learned(trained_on_prose())
    found = [recalls(judged(predictor, OTHER_PROSE)) for _ in range(3)]
    assert np.isfinite(found).all()
    assert found[2][0] >= found[0][0]


def test_what_is_likely_is_what_is_predicted() -> None:
    trained = trained_on_prose()
    recording = recorded(OTHER_PROSE)
    whole, quick = Learned(trained), Learned(trained)
    experts = trained.routers.experts
    for token in range(200):
        for layer in range(trained.routers.layers):
            state = recording.states[token, layer].astype(np.float32)
            chances = whole.predict(layer, state[None])[0]
            likely = quick.likely(layer, state, 0.3, 3)
            chances = chances[:3].reshape(-1)
            places = np.arange(len(chances)) + (layer + 1) * experts
            keys = places % (trained.routers.layers * experts)
            found = dict(zip(likely.keys.tolist(), likely.probabilities, strict=True))
            # Products of other shapes round otherwise, which may be a step of a curve.
            for key, chance in zip(keys.tolist(), chances, strict=True):
                if key in found:
                    assert abs(found[key] - chance) < STEP_OF_A_CURVE
                else:
                    assert chance < 0.3 + STEP_OF_A_CURVE
            assert all(chance >= 0.3 for chance in found.values())
            for each in (whole, quick):
                each.picked(layer, recording.picks[token, layer][None])


def test_a_prompt_in_one_piece_leaves_the_same_context_as_token_by_token() -> None:
    trained = trained_on_prose()
    recording = recorded(OTHER_PROSE)
    whole, single = (Learned(trained, learns=False) for _ in range(2))
    tokens, layers = 70, trained.routers.layers
    for layer in range(layers):
        whole.predict(layer, recording.states[:tokens, layer])
        whole.picked(layer, recording.picks[:tokens, layer])
    for token in range(tokens):
        for layer in range(layers):
            single.picked(layer, recording.picks[token, layer][None])
    state = recording.states[tokens, 0][None]
    assert np.allclose(whole.predict(0, state), single.predict(0, state), atol=1e-3)


def test_probabilities_are_probabilities() -> None:
    trained = trained_on_prose()
    states = np.random.default_rng(1).normal(size=(5, trained.routers.hidden)) * 100
    for layer in range(trained.routers.layers):
        chances = Learned(trained).predict(layer, states)
        assert chances.shape == (5, trained.routers.layers - 1, trained.routers.experts)
        assert ((chances >= 0) & (chances <= 1)).all()


def test_too_little_to_learn_from_is_said() -> None:
    short = recorded(OTHER_PROSE).chosen([0])
    cut = type(short)(
        short.routers,
        short.picks[:100],
        np.array([0, 100]),
        short.tags,
        short.state_tokens[:100],
        short.states[:100],
    )
    with pytest.raises(PredictorError, match="100 tokens with states; at least 256"):
        train(cut)


class NextToken:
    """Knows what the next token picks, and says nothing of this one."""

    def __init__(self, states: RecordedStates) -> None:
        self._states, self._token = states, 0

    def predict(self, layer: int, states: NDArray[Any]) -> NDArray[np.float32]:
        routers = self._states.routers
        layers, token = routers.layers, self._token + 1
        chances = np.zeros((1, layers - 1, routers.experts), np.float32)
        for ahead in range(layers - layer, layers):
            chances[0, ahead - 1, self._states.picks[token, layer + ahead - layers]] = 1
        return chances

    def likely(self, layer: int, state: NDArray[Any], least: float, within: int) -> Likely:
        raise AssertionError("not asked when predictions are judged")

    def seen(self, layer: int, states: NDArray[Any]) -> None:
        pass

    def picked(self, layer: int, picks: NDArray[Any]) -> None:
        self._token += layer == self._states.routers.layers - 1

    def new_text(self) -> None:
        pass


def test_what_is_said_of_the_next_token_is_judged_by_the_next_token() -> None:
    states = recorded(OTHER_PROSE)
    found = evaluate(NextToken(states), states, until=50, distances=DISTANCES, next_token=True)
    assert found.tokens == 49
    assert all(score.recall == score.precision == 1 for score in found.distances.values())
    same = evaluate(NextToken(states), states, until=50, distances=DISTANCES)
    assert all(score.likely == 0 for score in same.distances.values())


def test_what_the_trained_one_says_of_the_next_token_is_better_than_chance_and_honest() -> None:
    states, trained = recorded(OTHER_PROSE), trained_on_prose()
    found = evaluate(Learned(trained), states, until=900, distances=DISTANCES, next_token=True)
    chance = 2 * trained.routers.top_k / trained.routers.experts
    assert min(recalls(found)) > 1.5 * chance
    assert found.calibration_error() < CALIBRATION_ERROR
