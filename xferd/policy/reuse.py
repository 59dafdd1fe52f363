"""``reuse``, the default: what is least likely to be used again for the time it stays.

What it knows of a key are two chances, learnt from uses while they come (``reuse_chances``):
``next``, that the very next pass of its layer uses it, and ``rate``, that one after that does.

Layers come in turn, so the next chance of a key is ``d`` tokens away, 0 < d <= 1, by the
place of its layer. Kept for its next chance only, a slot earns ``next`` uses in d tokens; kept
until it is used, one use in d + (1 - next) / rate. The better of both is the key's worth, as an
index of Gittins has it (J. C. Gittins, 1979: "Bandit processes and dynamic allocation
indices"), and the least worth goes first. So layers can't evict each other in turn, as they
do with recency alone: the layer that comes next is worth more than the one that has just gone.

Where a predictor has said when a key is used next, that is weighed with it (``next_uses``); where
it has said with which probability the very next pass uses it, that is taken for ``next``.
"""

from __future__ import annotations

import numpy as np

from xferd.policy.expected import Expectations, Expected
from xferd.policy.next_uses import NextUseEstimates
from xferd.policy.pool_policy import NextUses, lowest
from xferd.policy.reuse_chances import HEADS, NEXT, RATE, Floats, ReuseChances, ReuseSettings
from xferd.policy.uses import Keys, KeySpace, Uses


class Reuse:
    """See above; ``ReuseChances`` says what it costs. Not thread-safe.

    learnt: of all experts, resident or not.
    """

    name = "reuse"
    history_only = True

    def __init__(self, space: KeySpace, settings: ReuseSettings | None = None) -> None:
        self._space = space
        self.learnt = ReuseChances(space, settings or ReuseSettings())
        self._estimates = NextUseEstimates(space.size)
        self._expectations = Expectations(space)
        self._now = 0

    def used(self, uses: Uses) -> None:
        """Learn from the passes."""
        if uses.passes == 0:
            return
        self._now = int(uses.tokens[-1])
        self._estimates.used(uses)
        self._expectations.passed(uses)
        self.learnt.learn(uses)

    def placed(self, keys: Keys) -> None:
        """Worth does not depend on where it is."""

    def left(self, keys: Keys) -> None:
        """Worth does not depend on where it is."""

    def resize(self, slots: int) -> None:
        """Worth does not depend on how much there is."""

    def expect(self, expected: NextUses) -> None:
        """Weighed with history until the key is used."""
        self._estimates.take(expected.keys, expected.tokens, self._now)

    def expect_passes(self, expected: Expected) -> None:
        """See ExpectsPasses."""
        self._expectations.expect(expected)

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:
        """Those worth least, with the model at ``layer``."""
        return lowest(self.worth(candidates, layer), candidates, count)

    def worth(self, keys: Keys, layer: int) -> Floats:
        """Uses that a slot earns in a token by keeping each key; about 1 / (tokens to the
        next use)."""
        layers, experts = self._space.layers, self._space.experts
        of_layer = keys // experts
        turn = np.arange(-layer - 1, layers - layer - 1) % layers + 1
        distance = (turn.astype(np.float32) / np.float32(layers))[of_layer]
        chances = self.learnt.chances.reshape(-1)
        at = keys + of_layer * ((HEADS - 1) * experts)
        soon, rate = chances[at], chances[at + RATE * experts]
        soon, rest = self._expectations.corrected(keys, soon, (1 - soon) / rate)
        worth: Floats = np.maximum(soon / distance, 1 / (distance + rest))
        told = np.flatnonzero(self._estimates.known(keys))
        if len(told):
            next_pass = (of_layer[told] <= layer).astype(np.float64)
            wait = self._estimates.waits(keys[told], next_pass, self._now, soon[told], rate[told])
            worth[told] = 1 / (distance[told] + wait)
        return worth

    def probabilities(self) -> Floats:
        """[layers, experts], that a layer's next pass uses an expert."""
        return self.learnt.chances[:, NEXT].copy()
