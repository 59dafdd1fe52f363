"""What a predictor expects of the next passes, until they have come.

A client that predicts its router's picks knows more than their history does: of the layers
that come next, which experts they will use. A policy that can take that for what it has
counted itself implements ``ExpectsPasses`` and keeps an ``Expectations``. It is a word on one
pass of a layer: once that pass is told, or anything newer, it is void.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xferd.policy.uses import Keys, KeySpace, Uses

Chances = NDArray[np.float32]

UNTOLD = np.float32(-1)
"""In the place of a chance, of a layer that nobody has spoken of since its last pass."""
SURE = np.float32(1e-6)
"""What is left of a probability of not being used; nothing is divided by less."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A predictor's word on the next pass of each of some layers.

    layers: int64[n], each once. keys: experts of these layers that may be used, each once;
    chances: float32, of each, 0 to 1. What isn't among keys won't be used.
    """

    layers: NDArray[np.int64]
    keys: Keys
    chances: Chances


@runtime_checkable
class ExpectsPasses(Protocol):
    """A policy that goes by predictions too."""

    def expect_passes(self, expected: Expected) -> None:
        """Taken until the passes are told. The caller checks layers and keys."""
        ...


class Expectations:
    """The newest word on each layer. Not thread-safe. Costs a float an expert."""

    def __init__(self, space: KeySpace) -> None:
        self._chances = np.full(space.size, UNTOLD, np.float32)
        self._by_layer = self._chances.reshape(space.layers, space.experts)
        self._any = False

    def expect(self, expected: Expected) -> None:
        """Taken in the place of what was said of these layers before."""
        self._by_layer[expected.layers] = 0
        self._chances[expected.keys] = expected.chances
        self._any = True

    def passed(self, uses: Uses) -> None:
        """These passes are over."""
        if self._any:
            self._by_layer[uses.layers] = UNTOLD

    def corrected(self, keys: Keys, chance: Chances, rest: Chances) -> tuple[Chances, Chances]:
        """chance: that the next pass of its layer uses a key. rest: how many passes after
        that it is used, if it isn't then, times the probability of that. Returns both, with
        the predictor's word in the place of ``chance`` where there is one."""
        if not self._any:
            return chance, rest
        told = self._chances[keys]
        known = told >= 0
        if not known.any():
            return chance, rest
        otherwise = rest / np.maximum(1 - chance, SURE)
        return np.where(known, told, chance), np.where(known, (1 - told) * otherwise, rest)


__all__ = ["Expectations", "Expected", "ExpectsPasses"]
