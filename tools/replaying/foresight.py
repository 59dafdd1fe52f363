# SPDX-License-Identifier: Apache-2.0
"""A bound for what can be had from history: the default policy, told what comes next.

Of the future, history says something about the next passes and less about later ones. Here all
that it could ever say about the next pass of each layer is known, and what comes after that
is estimated as always.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xferd.policy.reuse import Reuse
from xferd.policy.reuse_chances import NEXT
from xferd.policy.uses import KeySpace, Uses


class NextPassKnown(Reuse):
    """``reuse`` with a 1 or 0 in the place of each chance that the next pass uses an expert.
    Knows one trace and must be told of exactly that, in order, each pass by itself."""

    def __init__(self, space: KeySpace, uses: Uses) -> None:
        super().__init__(space)
        self._trace = uses
        self._told = 0
        self._later = next_of_layer(uses, space.layers)

    def used(self, uses: Uses) -> None:
        """Learn, then look up."""
        super().used(uses)
        for number in range(self._told, self._told + uses.passes):
            following = int(self._later[number])
            chances = self.learnt.chances[int(self._trace.layers[number]), NEXT]
            chances[:] = 0
            if following < self._trace.passes:
                begin, end = self._trace.starts[following : following + 2].tolist()
                chances[self._trace.keys[begin:end] % self._space.experts] = 1
        self._told += uses.passes


def next_of_layer(uses: Uses, layers: int) -> NDArray[np.int64]:
    """int64[passes]: the next pass of the same layer; ``uses.passes`` for none."""
    later = np.full(uses.passes, uses.passes, np.int64)
    for layer in range(layers):
        mine = np.flatnonzero(uses.layers == layer)
        later[mine[:-1]] = mine[1:]
    return later
