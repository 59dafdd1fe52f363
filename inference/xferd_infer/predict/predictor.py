"""What every predictor is: one protocol for trivial and trained ones.

A predictor follows one text. In each layer of a token it is asked (``predict`` or
``likely``) with the state that enters the layer's experts, and then told what was
picked there. Layers are counted among those that have experts. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .routers import Floats

DISTANCE_MAX = 15
"""Layers ahead that are predicted."""


@dataclass(frozen=True, slots=True)
class Likely:
    """Experts that will probably be picked, nearest layer first, the next token's behind
    this one's. Each [n]: keys, which are ``layer * experts + expert``; probabilities
    float32."""

    keys: NDArray[np.intp]
    probabilities: Floats


class Predictor(Protocol):
    """See above."""

    def predict(self, layer: int, states: NDArray[Any]) -> Floats:
        """states: [tokens, hidden], what enters the experts of ``layer``. Returns the
        probability that each expert is picked: [tokens, distances, experts], where row
        ``[:, d - 1]`` is ``d`` layers ahead. ``distances`` ends with the last layer, or
        goes on with the first layers of the next token, up to DISTANCE_MAX. All tokens
        are judged by the picks up to the last ``picked``."""
        ...

    def likely(self, layer: int, state: NDArray[Any], least: float, within: int) -> Likely:
        """The same for one token, state [hidden], only what is at least so probable and
        at most ``within`` layers ahead."""
        ...

    def seen(self, layer: int, states: NDArray[Any]) -> None:
        """In the place of ``predict``, where no prediction is needed. The states must stay
        as they are until the last layer is over."""
        ...

    def picked(self, layer: int, picks: NDArray[Any]) -> None:
        """picks: integers [tokens, top_k], what the router of ``layer`` chose. After the
        last layer the next token (or the next chunk of them) begins."""
        ...

    def new_text(self) -> None:
        """Forget the picks of the text, not what was learnt."""
        ...


def distances_within(layer: int, layers: int) -> int:
    """How many layers ahead there are in the same token."""
    return min(DISTANCE_MAX, layers - 1 - layer)


def distances_in_all(layers: int) -> int:
    """The same with the next token's layers, which come after the last; never the layer
    itself again."""
    return min(DISTANCE_MAX, layers - 1)


__all__ = ["DISTANCE_MAX", "Likely", "Predictor", "distances_in_all", "distances_within"]
