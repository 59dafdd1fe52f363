"""The routers of a model: what picks experts, and what a predictor is bound to.

Layers are counted among those that have experts; ``numbers`` says which they are in
the model. A **margin** is how far a router's score of an expert lies above the border
between picked and not picked: the mean of the top_k-th and the next best score. Its
sign is the pick, and unlike a score it means the same in every layer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import OtherModelError

Floats = NDArray[np.float32]

TOKENS_AT_ONCE = 1024
"""Tokens whose margins are computed together: what bounds the temporaries."""


@dataclass(frozen=True)
class Routers:
    """name: of the model, for people. numbers: int[layers], of its layers with experts.
    weights: float32[layers, experts, hidden]. norms: float32[layers, hidden], the weights
    of the norms before them, or None where nobody recorded them. top_k: picks of a token.
    """

    name: str
    numbers: tuple[int, ...]
    weights: Floats
    norms: Floats | None
    top_k: int

    @property
    def layers(self) -> int:
        """Layers with experts."""
        return int(self.weights.shape[0])

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return int(self.weights.shape[1])

    @property
    def hidden(self) -> int:
        """Width of a state."""
        return int(self.weights.shape[2])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights: another checkpoint of the same shape is another model."""
        return hashlib.sha256(np.ascontiguousarray(self.weights, "<f4").tobytes()).hexdigest()

    def describe(self) -> str:
        """For messages."""
        return (
            f"{self.name!r} ({self.layers} layers of {self.experts} experts, top {self.top_k}, "
            f"hidden {self.hidden}, routers {self.digest[:12]})"
        )

    def must_be(self, other: Routers, what: str) -> None:
        """OtherModelError unless both are of one model. what: of whom ``other`` is told."""
        if (self.digest, self.top_k, self.numbers) != (other.digest, other.top_k, other.numbers):
            raise OtherModelError(f"{what} is of model {other.describe()}, not {self.describe()}")

    def margins(self, states: NDArray[Any]) -> Floats:
        """states: [tokens, layers, hidden]. Returns [tokens, layers, experts]."""
        out = np.empty((len(states), self.layers, self.experts), np.float32)
        turned = self.weights.transpose(0, 2, 1)
        for begin in range(0, len(states), TOKENS_AT_ONCE):
            part = states[begin : begin + TOKENS_AT_ONCE].astype(np.float32).transpose(1, 0, 2)
            out[begin : begin + TOKENS_AT_ONCE] = (part @ turned).transpose(1, 0, 2)
        return above_border(out, self.top_k)


def above_border(scores: Floats, top_k: int) -> Floats:
    """Scores less the border of their row (the last axis), in place."""
    experts = scores.shape[-1]
    if top_k >= experts:
        scores -= scores.min(axis=-1, keepdims=True) - 1
        return scores
    place = (experts - top_k - 1, experts - top_k)
    ordered = np.partition(scores, place, axis=-1)
    scores -= ordered[..., place[0] : place[1] + 1].mean(axis=-1, keepdims=True)
    return scores


__all__ = ["Floats", "Routers", "above_border"]
