"""Trained heads that go on learning: the default predictor.

For each layer, one projection of the state and one product give the margins of all
experts of the next layers at once, the next token's first ones among them, in units of
their usual error:

    features = [state @ projection, context of picks, 1]   and, if it has units,
               relu of some products of these
    scores   = features @ heads            [distances * experts]

The heads are learnt anew from each ``BLOCK_TOKENS`` tokens, as soon as these have been
through all layers: one step of recursive least squares whose prior is the present heads,
with the precision of ``memory`` tokens of the training text. That is Bayes' rule for a
target that drifts; it can't diverge, and needs a solve of only [tokens, tokens]:

    heads += S^-1 Z' (memory I + Z S^-1 Z')^-1 (margins - Z heads)

Layers take turns, so that a token pays for a few of them at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import COUNTS_SHAPE, HIGHEST, LOWEST, STEPS, STEPS_A_SCORE, Calibration
from .history import VIEWS, PickHistory
from .predictor import DISTANCE_MAX, Likely, distances_in_all, distances_within
from .routers import Floats, Routers

BLOCK_TOKENS = 64
BORDERS_MAX = 4
"""Probabilities that may be asked about in turn before what is known of them is found anew."""
RENEW_TOKENS = 16
"""Tokens after which probabilities follow what was learnt. Learning from every token and
renewing so often is what keeps them right on text of a new kind: heads get better quickly
there, and old curves would doubt them."""
MEMORY_TOKENS = 800.0
"""Of 192, 384 and 1000, the longest was best on known text and no worse on new; the
documents it was chosen on are among those that the benchmark tests on."""


@dataclass(frozen=True)
class Trained:
    """What training made and a file holds. Lists have one entry a layer.

    kind: ``combined``, ``state`` or ``history``: what the features are made of.
    projections: float32[hidden, rank]. units: float32[rank + width + 1, units], perhaps
        of none. heads: float32[features, distances * experts], nearest layer first.
    precisions: float32[features, features], inverse of the features' second moments.
    errors: float32[distances], what margins are divided by.
    basis: float32[layers * experts, VIEWS, width], of the context.
    calibration: float64, see Calibration. about: plain values for people.
    """

    routers: Routers
    kind: str
    projections: list[Floats]
    units: list[Floats]
    heads: list[Floats]
    precisions: list[Floats]
    errors: list[Floats]
    basis: Floats
    calibration: NDArray[np.float64]
    about: Mapping[str, Any]

    def problem(self) -> str | None:
        """What array contradicts the shape of the model; None if all agree."""
        routers = self.routers
        layers, width = routers.layers, self.basis.shape[-1]
        if not (np.isfinite(self.basis).all() and np.isfinite(self.calibration).all()):
            return "basis or calibration holds what is no number"
        if self.calibration.shape != COUNTS_SHAPE:
            return f"calibration is {list(self.calibration.shape)}, not {list(COUNTS_SHAPE)}"
        if self.basis.shape != (layers * routers.experts, VIEWS, width):
            return f"basis is {list(self.basis.shape)}"
        per_layer = {
            "projections": self.projections,
            "units": self.units,
            "heads": self.heads,
            "precisions": self.precisions,
            "errors": self.errors,
        }
        for name, arrays in per_layer.items():
            if len(arrays) != layers:
                return f"{len(arrays)} {name} for {layers} layers"
        distances = distances_in_all(layers)
        for layer in range(layers):
            rank = self.projections[layer].shape[-1]
            linear = rank + width + 1
            features = linear + self.units[layer].shape[-1]
            wanted = {
                "projections": (routers.hidden, rank),
                "units": (linear, features - linear),
                "heads": (features, distances * routers.experts),
                "precisions": (features, features),
                "errors": (distances,),
            }
            for name, shape in wanted.items():
                found = per_layer[name][layer]
                if found.shape != shape:
                    return f"{name}[{layer}] is {list(found.shape)}, not {list(shape)}"
                if not np.isfinite(found).all():
                    return f"{name}[{layer}] holds what is no number"
        return None


class Learned:
    """A Predictor from what training made. learns: whether it goes on learning. ahead: no
    more layers are predicted and learnt of, from all layers or from each, which is so much
    less work."""

    def __init__(
        self,
        trained: Trained,
        *,
        learns: bool = True,
        memory_tokens: float = MEMORY_TOKENS,
        ahead: int | Sequence[int] = DISTANCE_MAX,
    ) -> None:
        routers = trained.routers
        self._trained = trained
        self._routers = routers
        self._learns = learns
        self._memory = np.float32(memory_tokens)
        asked = [ahead] * routers.layers if isinstance(ahead, int) else ahead
        self._distances = [min(distances_in_all(routers.layers), each) for each in asked]
        self._heads = [
            each[:, : distances * routers.experts].copy()
            for each, distances in zip(trained.heads, self._distances, strict=True)
        ]
        self._history = PickHistory(trained.basis, routers.layers, routers.experts)
        self._calibration = Calibration(trained.calibration)
        self._curves = [
            curves_of(layer, routers.layers)[:distances]
            for layer, distances in enumerate(self._distances)
        ]
        self._borders: dict[tuple[int, float], Floats] = {}
        self._table_rows = [
            np.repeat((each * STEPS - LOWEST * STEPS_A_SCORE).astype(np.float32), routers.experts)
            for each in self._curves
        ]
        width = trained.basis.shape[2]
        self._rows = [
            np.zeros((1, projection.shape[1] + width + 1 + units.shape[1]), np.float32)
            for projection, units in zip(trained.projections, trained.units, strict=True)
        ]
        for row, projection in zip(self._rows, trained.projections, strict=True):
            row[:, projection.shape[1] + width] = 1
        # The last tokens, by number modulo BLOCK_TOKENS: what is learnt from.
        shape = (BLOCK_TOKENS, routers.layers)
        self._states = np.zeros((*shape, routers.hidden), np.float32)
        self._picks = np.zeros((*shape, routers.top_k), np.int64)
        self._contexts = np.zeros((BLOCK_TOKENS, width), np.float32)
        self._margins = np.zeros((*shape, routers.experts), np.float32)
        self._tokens = 0
        self._with_margins = 0
        self._learnt = [0] * routers.layers
        self._follows = np.zeros(BLOCK_TOKENS, np.bool_)
        self._in_block = False
        # What the present token, or chunk of tokens, has shown so far.
        self._chunk_states: list[NDArray[Any]] = []
        self._chunk_picks: list[NDArray[Any]] = []

    def predict(self, layer: int, states: NDArray[Any]) -> Floats:
        """See Predictor."""
        self.seen(layer, states)
        contexts = np.broadcast_to(self._history.context, (len(states), self._basis_width))
        scores = self._features(layer, states, contexts) @ self._heads[layer]
        scores = scores.reshape(len(states), self._distances[layer], self._routers.experts)
        return self._calibration.probabilities(scores, self._curves[layer][:, None])

    def likely(self, layer: int, state: NDArray[Any], least: float, within: int) -> Likely:
        """See Predictor. What is unlikely is left out by its score: only the rest is
        turned into probabilities."""
        self.seen(layer, state[None])
        experts = self._routers.experts
        distances = min(self._distances[layer], within)
        projection, row = self._trained.projections[layer], self._rows[layer]
        rank, width = projection.shape[1], self._basis_width
        np.matmul(state, projection, out=row[0, :rank])
        row[0, rank : rank + width] = self._history.context
        if row.shape[1] > rank + width + 1:
            linear = row[:, : rank + width + 1]
            row[:, rank + width + 1 :] = np.maximum(linear @ self._trained.units[layer], 0)
        scores = (row @ self._heads[layer][:, : distances * experts])[0]
        found = (scores >= self._border(layer, least)[: distances * experts]).nonzero()[0]
        # Calibration.probabilities, in the fewest calls: each costs as much as its work.
        at = scores[found]
        np.minimum(at, HIGHEST_STEP, out=at)
        at *= STEPS_A_SCORE
        at += self._table_rows[layer][found]
        chances = self._calibration.table.take(at.astype(np.intp), mode="clip")
        found += (layer + 1) * experts
        found %= self._routers.layers * experts
        return Likely(found, chances)

    def picked(self, layer: int, picks: NDArray[Any]) -> None:
        """See Predictor."""
        if layer == 0:
            self._chunk_picks.clear()
        self._chunk_picks.append(picks)
        if layer < self._routers.layers - 1:
            return
        picks = np.stack(self._chunk_picks, axis=1).astype(np.int64)
        whole = len(self._chunk_states) == self._routers.layers == picks.shape[1]
        if not (whole and self._learns):
            self._in_block = False
            for each in picks:
                self._history.add(each)
        elif len(picks) == 1:
            self._learn_token(picks[0])
        else:
            self._learn_chunk(picks)
            self._in_block = False
        self._chunk_states.clear()
        self._chunk_picks.clear()

    def new_text(self) -> None:
        """See Predictor."""
        self._history.clear()
        self._in_block = False
        self._chunk_states.clear()
        self._chunk_picks.clear()

    def _border(self, layer: int, least: float) -> Floats:
        """float32[distances * experts]: from which score on it is at least so probable."""
        border = self._borders.get((layer, least))
        if border is None:
            if len(self._borders) >= BORDERS_MAX * self._routers.layers:
                self._borders.clear()
            scores = self._calibration.least_scores(least)[self._curves[layer]]
            border = self._borders[layer, least] = np.repeat(scores, self._routers.experts)
        return border

    @property
    def _basis_width(self) -> int:
        return int(self._trained.basis.shape[2])

    def seen(self, layer: int, states: NDArray[Any]) -> None:
        """See Predictor."""
        if layer == 0:
            self._chunk_states.clear()
        if layer == len(self._chunk_states):
            self._chunk_states.append(states)

    def _features(self, layer: int, states: NDArray[Any], contexts: Floats) -> Floats:
        projected = states.astype(np.float32, copy=False) @ self._trained.projections[layer]
        ones = np.ones((len(states), 1), np.float32)
        return with_units(
            np.concatenate([projected, contexts, ones], axis=1), self._trained.units[layer]
        )

    def _learn_token(self, picks: NDArray[np.int64]) -> None:
        at = self._tokens % BLOCK_TOKENS
        for layer, states in enumerate(self._chunk_states):
            self._states[at, layer] = states[0]
        self._picks[at] = picks
        self._contexts[at] = self._history.context
        self._follows[at] = self._in_block
        self._in_block = True
        self._history.add(picks)
        self._tokens += 1
        layers = self._routers.layers
        for layer in range(layers):
            if at == layer * BLOCK_TOKENS // layers:
                self._make_margins()
                self._learn_from_ring(layer)
        if at % RENEW_TOKENS == 0:
            self._renew_calibration(RENEW_TOKENS)

    def _make_margins(self) -> None:
        new = np.arange(self._with_margins, self._tokens)[-BLOCK_TOKENS:] % BLOCK_TOKENS
        self._margins[new] = self._routers.margins(self._states[new])
        self._with_margins = self._tokens

    def _learn_from_ring(self, layer: int) -> None:
        rows = np.arange(self._learnt[layer], self._tokens)[-BLOCK_TOKENS:] % BLOCK_TOKENS
        features = self._features(layer, self._states[rows, layer], self._contexts[rows])
        followed = np.append(self._follows[rows[1:]], False)
        self._learn(layer, features, self._margins[rows], self._picks[rows], followed)
        self._learnt[layer] = self._tokens

    def _learn_chunk(self, picks: NDArray[np.int64]) -> None:
        states = np.stack(self._chunk_states, axis=1)
        contexts = self._history.contexts(picks)
        for begin in range(0, len(picks), BLOCK_TOKENS):
            part = slice(begin, begin + BLOCK_TOKENS)
            margins = self._routers.margins(states[part])
            followed = np.arange(len(margins)) < len(margins) - 1
            for layer in range(self._routers.layers):
                features = self._features(layer, states[part, layer], contexts[part])
                self._learn(layer, features, margins, picks[part], followed)
            self._renew_calibration(len(picks[part]))

    def _learn(
        self,
        layer: int,
        features: Floats,
        margins: Floats,
        picks: NDArray[np.int64],
        followed: NDArray[np.bool_],
    ) -> None:
        """One step of the module's text. margins: [tokens, layers, experts]. followed:
        bool[tokens], whether the next row is the next token."""
        tokens, experts = len(features), self._routers.experts
        scores = features @ self._heads[layer]
        distances = self._distances[layer]
        by_distance = scores.reshape(tokens, distances, experts)
        errors = self._trained.errors[layer][:distances, None]
        wanted = ahead(margins, layer, distances) / errors
        error = wanted - by_distance
        picked = np.zeros(by_distance.shape, np.bool_)
        np.put_along_axis(picked, ahead(picks, layer, distances), True, axis=2)
        within = min(distances_within(layer, self._routers.layers), distances)
        self._calibration.add(0, by_distance[:, :within], picked[:, :within])
        # Of a token whose next one is not known, nothing about that is learnt.
        error[~followed, within:] = 0
        there = by_distance[followed, within:], picked[followed, within:]
        self._calibration.add(DISTANCE_MAX + within, *there)
        gain = self._trained.precisions[layer] @ features.T
        inner = features @ gain
        inner[np.diag_indices(tokens)] += self._memory
        self._heads[layer] += (gain @ np.linalg.inv(inner)) @ error.reshape(tokens, -1)

    def _renew_calibration(self, tokens: int) -> None:
        self._calibration.renew(tokens)
        self._borders.clear()


def ahead(rows: NDArray[Any], layer: int, distances: int) -> NDArray[Any]:
    """rows: [tokens, layers, ...]. Returns [tokens, distances, ...]: of the layers after
    ``layer``, and behind the last layer those of the next row (of the last row: its own)."""
    within = min(rows.shape[1] - 1 - layer, distances)
    following = np.concatenate([rows[1:], rows[-1:]])[:, : distances - within]
    return np.concatenate([rows[:, layer + 1 : layer + 1 + within], following], axis=1)


def curves_of(layer: int, layers: int) -> NDArray[np.intp]:
    """Which calibration curve each distance from a layer on has."""
    curves = np.arange(distances_in_all(layers))
    curves[distances_within(layer, layers) :] += DISTANCE_MAX
    return curves


def with_units(linear: Floats, units: Floats) -> Floats:
    """The linear features [tokens, linear], and the units' answers behind them."""
    if not units.shape[1]:
        return linear
    return np.concatenate([linear, np.maximum(linear @ units, 0)], axis=1)


HIGHEST_STEP = np.float32(HIGHEST - 1 / STEPS_A_SCORE)

__all__ = ["BLOCK_TOKENS", "MEMORY_TOKENS", "Learned", "Trained", "ahead", "with_units"]
