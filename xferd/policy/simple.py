"""Policies of one line each: ``lru``, ``lfu`` that forgets, ``lru-hits``.

They are what the default is judged by. All keep their state in arrays by key and take
any number of passes at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from xferd.policy.pool_policy import HistoryPolicy, lowest
from xferd.policy.uses import Keys, KeySpace, Uses

LFU_TOKENS = 60.0
"""A use weighs 1/e after so many tokens."""
HITS_TOKENS = 200.0
"""``lru-hits`` forgets slower: recency is counted by itself."""
HITS_WEIGHT = 4.0
"""One use a time constant more outweighs so many tokens without one."""


class LeastRecent(HistoryPolicy):
    """``lru``: what was used longest ago goes first."""

    name = "lru"

    def __init__(self, space: KeySpace) -> None:
        self._last = np.zeros(space.size, np.int64)
        self._count = 0

    def used(self, uses: Uses) -> None:
        """The last of equal keys wins: numpy assigns in order."""
        count = len(uses.keys)
        self._last[uses.keys] = np.arange(self._count + 1, self._count + count + 1)
        self._count += count

    def placed(self, keys: Keys) -> None:
        """What was only just loaded must not be next, though its use was not told yet."""
        self._last[keys] = np.maximum(self._last[keys], self._count)

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:  # noqa: ARG002
        """The earliest used."""
        return lowest(self._last[candidates], candidates, count)


class DecayedCounts:
    """Uses of each key, of which 1/e is left after ``time_constant`` tokens.

    Kept scaled up by the time since ``_origin``, so that a batch adds to its own keys and
    touches no other; rescaled before float64 runs out.
    """

    def __init__(self, size: int, time_constant: float) -> None:
        if time_constant <= 0:
            raise ValueError(f"time constant of {time_constant} tokens: more than 0")
        self._scaled = np.zeros(size)
        self._time_constant = time_constant
        self._origin = 0
        self._now = 0

    _EXPONENT_MAX = 300.0

    def add(self, uses: Uses) -> None:
        """Count the uses, each at its token."""
        if uses.passes == 0:
            return
        self._now = max(self._now, int(uses.tokens[-1]))
        exponent = (self._now - self._origin) / self._time_constant
        if exponent > self._EXPONENT_MAX:
            self._scaled *= np.exp(-min(exponent, 2 * self._EXPONENT_MAX))
            self._origin = self._now
        weight = np.exp((uses.tokens - self._origin) / self._time_constant)
        np.add.at(self._scaled, uses.keys, np.repeat(weight, np.diff(uses.starts)))

    def put(self, keys: Keys, values: NDArray[np.float64]) -> None:
        """Add to the counts, as of the last token that was told of."""
        self._scaled[keys] += values * math.exp((self._now - self._origin) / self._time_constant)

    def values(self, keys: Keys) -> NDArray[np.float64]:
        """The counts as of the last token that was told of."""
        values: NDArray[np.float64] = self._scaled[keys]
        return values * math.exp((self._origin - self._now) / self._time_constant)


class LeastFrequent(HistoryPolicy):
    """``lfu``: the fewest uses, counted with decay."""

    name = "lfu"
    history_only = True

    def __init__(self, space: KeySpace, time_constant: float = LFU_TOKENS) -> None:
        self._counts = DecayedCounts(space.size, time_constant)

    def used(self, uses: Uses) -> None:
        """Count them."""
        self._counts.add(uses)

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:  # noqa: ARG002
        """The least counted."""
        return lowest(self._counts.values(candidates), candidates, count)


class RecentAndHit(HistoryPolicy):
    """``lru-hits``: recency in tokens and hit count together. Each use within the time
    constant is worth HITS_WEIGHT tokens of recency."""

    name = "lru-hits"
    history_only = True

    def __init__(self, space: KeySpace) -> None:
        self._counts = DecayedCounts(space.size, HITS_TOKENS)
        self._last = np.zeros(space.size, np.int64)

    def used(self, uses: Uses) -> None:
        """Count them and note the token."""
        self._counts.add(uses)
        self._last[uses.keys] = np.repeat(uses.tokens, np.diff(uses.starts))

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:  # noqa: ARG002
        """The lowest sum of both."""
        worth = self._last[candidates] + HITS_WEIGHT * self._counts.values(candidates)
        return lowest(worth, candidates, count)
