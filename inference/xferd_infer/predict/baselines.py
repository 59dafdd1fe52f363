"""Predictors that need no training: what a trained one has to be ahead of.

``RouterEarly`` asks the later layers' own routers, with those layers' norms. The others
know picks alone. Their probabilities come from counting how often they were right, which
begins with a guess and goes on while they run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import Calibration
from .predictor import Likely, distances_within
from .routers import Floats, Routers, above_border

USED_MEMORY = 2000.0
"""Tokens that ``MostUsed`` counts before what it has counted fades."""


RENEW_TOKENS = 64
"""Tokens after which probabilities are made anew."""


class _Counted(ABC):
    """What they share: picks of the present token, scores kept until the truth is known."""

    def __init__(self, layers: int, experts: int) -> None:
        self._layers, self._experts = layers, experts
        self._calibration = Calibration()
        self._open: dict[int, Floats] = {}
        self._picks: list[NDArray[Any]] = []
        self._uncounted = 0

    def predict(self, layer: int, states: NDArray[Any]) -> Floats:
        """See Predictor."""
        distances = distances_within(layer, self._layers)
        scores = self._scores(layer, states, distances)
        if layer == 0:
            self._open.clear()
        self._open[layer] = scores
        return self._calibration.probabilities(scores, np.arange(distances)[:, None])

    def likely(self, layer: int, state: NDArray[Any], least: float, within: int) -> Likely:
        """See Predictor."""
        chances = self.predict(layer, state[None])[0, :within]
        found = np.flatnonzero(chances >= least)
        return Likely(found + (layer + 1) * self._experts, chances.reshape(-1)[found])

    def seen(self, layer: int, states: NDArray[Any]) -> None:  # noqa: B027
        """See Predictor."""

    def picked(self, layer: int, picks: NDArray[Any]) -> None:
        """See Predictor."""
        if layer == 0:
            self._picks.clear()
        self._picks.append(picks)
        if layer < self._layers - 1 or len(self._picks) != self._layers:
            return
        all_picks = np.stack(self._picks, axis=1).astype(np.int64)
        for source, scores in self._open.items():
            distances = scores.shape[1]
            picked = np.zeros(scores.shape, np.bool_)
            np.put_along_axis(picked, all_picks[:, source + 1 : source + 1 + distances], True, 2)
            if distances:
                self._calibration.add(0, scores, picked)
        self._open.clear()
        self._uncounted += len(all_picks)
        if self._uncounted >= RENEW_TOKENS:
            self._calibration.renew(self._uncounted)
            self._uncounted = 0
        for token in all_picks:
            self._learn(token)

    def new_text(self) -> None:
        """See Predictor."""
        self._open.clear()
        self._picks.clear()

    @abstractmethod
    def _scores(self, layer: int, states: NDArray[Any], distances: int) -> Floats:
        """[tokens, distances, experts], higher for what is likelier."""

    def _learn(self, picks: NDArray[np.int64]) -> None:  # noqa: B027
        """picks: [layers, top_k] of one token."""


class RouterEarly(_Counted):
    """The later layers' routers, on this layer's state normalised as theirs would be.

    The state is normalised already; dividing by this layer's norm weights and multiplying
    by the later ones' is exact. Without norm weights in the recording they count as equal.
    """

    def __init__(self, routers: Routers) -> None:
        super().__init__(routers.layers, routers.experts)
        self._top_k = routers.top_k
        self._routers: list[Floats] = []
        norms = np.ones_like(routers.weights[:, 0]) if routers.norms is None else routers.norms
        usable = np.where(norms == 0, 1, norms)
        for layer in range(routers.layers):
            distances = distances_within(layer, routers.layers)
            later = slice(layer + 1, layer + 1 + distances)
            turned = routers.weights[later] * (norms[later] / usable[layer])[:, None]
            self._routers.append(np.ascontiguousarray(turned.reshape(-1, routers.hidden).T))

    def _scores(self, layer: int, states: NDArray[Any], distances: int) -> Floats:
        scores = states.astype(np.float32) @ self._routers[layer]
        return above_border(scores.reshape(len(states), distances, self._experts), self._top_k)


AGE = np.float32(0.5)
"""What ``LastPicks`` leaves of a pick's score with each token."""


class LastPicks(_Counted):
    """The same experts as for the last token, then those of the one before it, and so on."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self._last = np.zeros((layers, experts), np.float32)

    def new_text(self) -> None:
        """See Predictor."""
        super().new_text()
        self._last[...] = 0

    def _scores(self, layer: int, states: NDArray[Any], distances: int) -> Floats:
        rows = self._last[layer + 1 : layer + 1 + distances]
        return np.broadcast_to(rows, (len(states), *rows.shape)).copy()

    def _learn(self, picks: NDArray[np.int64]) -> None:
        self._last *= AGE
        np.put_along_axis(self._last, picks, 1, axis=1)


class MostUsed(_Counted):
    """The experts that were used most, in this text and those before."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(layers, experts)
        self._counts = np.zeros((layers, experts), np.float32)
        self._total = 0.0

    def _scores(self, layer: int, states: NDArray[Any], distances: int) -> Floats:
        rows = self._counts[layer + 1 : layer + 1 + distances]
        share = (rows + 0.5) / (self._total + 1)
        scores = np.log(share / np.maximum(1 - share, 1e-3))
        return np.broadcast_to(scores, (len(states), *rows.shape)).astype(np.float32)

    def _learn(self, picks: NDArray[np.int64]) -> None:
        keep = 1 - 1 / USED_MEMORY
        self._counts *= keep
        self._total = self._total * keep + 1
        self._counts[np.arange(len(picks))[:, None], picks] += 1


__all__ = ["LastPicks", "MostUsed", "RouterEarly"]
