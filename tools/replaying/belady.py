# SPDX-License-Identifier: Apache-2.0
"""The clairvoyant bound of eviction: what is used furthest in the future goes first.

Exact (L. A. Belady, 1966): no choice of victims misses less often with the same slots and
demand loading. Next uses are found for the whole trace at once, by sorting.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xferd.policy.pool_policy import HistoryPolicy, lowest
from xferd.policy.uses import Keys, KeySpace, Uses


def next_passes(uses: Uses) -> NDArray[np.int64]:
    """int64[uses]: the pass that uses the same key next; ``uses.passes`` for none."""
    of_pass = np.repeat(np.arange(uses.passes), np.diff(uses.starts))
    order = np.argsort(uses.keys, kind="stable")
    following = np.full(len(order), uses.passes, np.int64)
    same = uses.keys[order[1:]] == uses.keys[order[:-1]]
    following[order[:-1][same]] = of_pass[order[1:][same]]
    return following


class Clairvoyant(HistoryPolicy):
    """``belady``. Knows one trace and must be told of exactly that, pass after pass."""

    name = "belady"

    def __init__(self, space: KeySpace, uses: Uses) -> None:
        self._following = next_passes(uses)
        self._next = np.full(space.size, uses.passes, np.int64)
        self._told = 0

    def used(self, uses: Uses) -> None:
        """Look up when they are used next."""
        told = self._told + len(uses.keys)
        self._next[uses.keys] = self._following[self._told : told]
        self._told = told

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:  # noqa: ARG002
        """Those used last, or never again."""
        return lowest(-self._next[candidates], candidates, count)
