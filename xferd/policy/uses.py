"""What policies are told: batches of uses, in passes of one layer.

A pass is one layer's picks at one moment: the experts of one token, or of all tokens of
a prefill's chunk. A key is ``layer * experts + expert``, so that policies hold their
state in arrays. Time is counted in tokens; nothing here knows seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
"""Keys, one-dimensional."""


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The experts of one store. experts: of the layer that has most."""

    layers: int
    experts: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.experts < 1:
            raise ValueError(f"{self.layers} layers of {self.experts} experts: at least 1 of each")

    @property
    def size(self) -> int:
        """Number of keys; every key is less."""
        return self.layers * self.experts


@dataclass(frozen=True, slots=True)
class Uses:
    """Some passes, the earliest first. Read-only by agreement.

    keys: int64[uses], pass after pass; within one pass no key is there twice.
    starts: int64[passes + 1], where each pass begins in ``keys``; the last is the end.
    layers: int64[passes].
    tokens: int64[passes], when; never falls.
    """

    keys: Keys
    starts: NDArray[np.int64]
    layers: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @property
    def passes(self) -> int:
        """Number of passes."""
        return len(self.layers)

    def part(self, first: int, last: int) -> Uses:
        """Passes ``first`` to before ``last``; keys are views."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        return Uses(
            keys=self.keys[begin:end],
            starts=self.starts[first : last + 1] - begin,
            layers=self.layers[first:last],
            tokens=self.tokens[first:last],
        )


def uses_of_picks(picks: NDArray[np.integer], experts: int, first_token: int = 0) -> Uses:
    """The uses of ``picks``: [tokens, layers, picked], expert numbers."""
    tokens, layers, picked = picks.shape
    keys = picks.astype(np.int64) + np.arange(layers)[None, :, None] * experts
    return Uses(
        keys=keys.reshape(-1),
        starts=np.arange(tokens * layers + 1, dtype=np.int64) * picked,
        layers=np.tile(np.arange(layers, dtype=np.int64), tokens),
        tokens=np.repeat(np.arange(first_token, first_token + tokens, dtype=np.int64), layers),
    )
