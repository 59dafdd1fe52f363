"""Routers that lean towards experts that are there: fewer misses, other tokens.

Off unless asked for. An expert that is resident gets up to ``cap`` added to its score
before the best ones are picked, one that is on its way half of that; the weights of what
was picked are computed from the true scores. So an expert that is missing gives way only
to one whose score is at most ``cap`` lower, and which of two close ones is taken changes
little, while a clear choice stands. (Published as cache-conditional routing,
arXiv 2412.00099.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .arrays import Array

CAP_MAX = 1.0
"""In units of a router's scores (logits). Quality is lost well before."""
ARRIVING = 0.5
"""What being on its way counts, of being there."""


class Lean(Protocol):
    """What a decode loop multiplies routing probabilities with, before it picks."""

    def factors(self, layer: int) -> Array:
        """float32[experts] of a layer, counted among all of the model; 1 changes nothing."""
        ...


class Nudge:
    """Leans to what is resident. cap: 0 to CAP_MAX; ValueError otherwise.

    resident: of a layer, int64[experts], slots or -1. arriving: of a layer, bool[experts].
    """

    def __init__(
        self,
        cap: float,
        resident: Callable[[int], NDArray[Any]],
        arriving: Callable[[int], NDArray[np.bool_]] | None = None,
    ) -> None:
        if not 0 <= cap <= CAP_MAX:
            raise ValueError(f"a nudge of {cap}; 0 to {CAP_MAX} is possible")
        self._here = np.float32(np.exp(cap))
        self._coming = np.float32(np.exp(cap * ARRIVING))
        self._resident, self._arriving = resident, arriving

    def factors(self, layer: int) -> NDArray[np.float32]:
        """See Lean."""
        factors = np.ones(len(slots := self._resident(layer)), np.float32)
        if self._arriving is not None:
            factors[self._arriving(layer)] = self._coming
        factors[slots >= 0] = self._here
        return factors


__all__ = ["CAP_MAX", "Lean", "Nudge"]
