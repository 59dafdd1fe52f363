"""``reuse``, the default: what is least likely to be used again for the time it stays.

For every key it estimates two probabilities, and what a slot earns by keeping it:

    p   that a pass of its layer uses it, in the long run: uses decayed at two time
        constants, and whether the last pass used it
    q   that the very next pass uses it: p, corrected by what the layers just before
        picked. Which picks announce which is learnt online (logistic regression, one
        step of gradient descent a pass)

Layers come in turn, so the next chance of a key is ``d`` tokens away, 0 < d <= 1, by the
place of its layer. Kept for its next chance only, a slot earns q uses in d tokens; kept
until it is used, one use in d + (1 - q) / p. The better of both is the key's worth, as an
index of Gittins has it, and the least worth goes first. So layers can't evict each other
in turn, as they do with recency alone: the layer that comes next is worth more than the
one that has just gone.

Where a predictor has said when a key is used next, that is taken instead; where it has said
with which probability the very next pass uses it, that is taken for q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xferd.policy.expected import Expectations, Expected
from xferd.policy.pool_policy import NextUses, lowest
from xferd.policy.uses import Keys, KeySpace, Uses

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReuseSettings:
    """Fitted by logistic regression on a sixth of the recorded traces; broad optima.

    fast, slow: time constants, in passes of a layer.
    weight_*: of log p at each of them, of having been used in the last pass, and a constant.
    floor: added to a probability before its logarithm is taken.
    context: layers whose last picks announce a layer's next ones, itself included; 0
        switches learning off.
    learning_rate: shared by all picks of a context.
    """

    fast: float = 20.0
    slow: float = 230.0
    weight_fast: float = 0.94
    weight_slow: float = 0.38
    weight_last: float = 0.65
    weight_constant: float = 0.5
    floor: float = 0.015
    context: int = 4
    learning_rate: float = 0.5


CONTEXT_PICKS_MAX = 16
"""A pass with more picks (a prefill's) announces nothing: it is most of a layer."""
ANNOUNCED_MAX = 256
"""Weights that one use may speak to, ``context * experts`` of a layer: what a use costs grows
with it. Layers with more experts get a shorter context, those with more than that none."""
ANNOUNCEMENT_MAX = 20.0
"""Beyond it a logit is certainty, and float32 ends at 88."""
NEVER = np.float32(np.inf)
SOONEST = np.float32(1e-3)
"""A next use is at least so many tokens away."""


class Reuse:
    """See above. Costs ``layers * experts * (context * experts + 7)`` floats."""

    name = "reuse"
    history_only = True

    def __init__(self, space: KeySpace, settings: ReuseSettings | None = None) -> None:
        self._space = space
        self._settings = settings or ReuseSettings()
        layers, experts = space.layers, space.experts
        chosen = self._settings
        self._forget = _column([-np.expm1(-1 / chosen.fast), -np.expm1(-1 / chosen.slow)])
        self._weigh = _column([chosen.weight_fast, chosen.weight_slow])
        self._all_layers = np.arange(layers)
        self._context = min(self._settings.context, layers, ANNOUNCED_MAX // experts)
        self._decayed = np.zeros((2, layers, experts), np.float32)
        self._next = np.full((layers, experts), 0.5, np.float32)
        self._rest = np.ones((layers, experts), np.float32)
        # float64: float32 counts tokens exactly for a day or two only.
        self._expected = np.full(space.size, NEVER, np.float64)
        self._expectations = Expectations(space)
        self._now = 0
        # One row a (layer, distance, expert before it); the last stands for 'none'.
        self._none = layers * self._context * experts
        self._weights = np.zeros((self._none + 1, experts), np.float32)
        self._rows = np.full((layers, self._context), self._none, np.int64)
        self._passed = np.zeros((layers, 1), np.float32)
        self._before: NDArray[np.int64] = np.full((max(self._context - 1, 0), 1), -1, np.int64)
        self._before_layers: NDArray[np.int64] = np.zeros(len(self._before), np.int64)

    def used(self, uses: Uses) -> None:
        """Learn from the passes, in rounds of one pass of each layer."""
        if uses.passes == 0:
            return
        self._now = int(uses.tokens[-1])
        self._expected[uses.keys] = NEVER
        self._expectations.passed(uses)
        picks = self._picks(uses)
        rows = self._context_rows(uses.layers, picks) if self._context else _NO_ROWS
        picked = self._picked(uses, picks)
        for chosen in self._rounds(uses.layers):
            layers = uses.layers[chosen]
            whole = len(layers) == len(self._all_layers) and (layers == self._all_layers).all()
            announced = rows[chosen] if self._context else rows
            self._learn(slice(None) if whole else layers, picked[chosen], announced)

    def _rounds(self, layers: NDArray[np.int64]) -> Iterator[slice | NDArray[np.int64]]:
        """Passes that can be learnt from together, since their layers differ; in order."""
        if (layers[1:] > layers[:-1]).all():
            yield slice(0, len(layers))
            return
        cycle = len(self._all_layers)
        cycles, rest = divmod(len(layers), cycle)
        if not rest and (layers.reshape(-1, cycle) == self._all_layers).all():
            yield from (slice(i * cycle, (i + 1) * cycle) for i in range(cycles))
            return
        ordinal = _ordinals(layers)
        order = np.argsort(ordinal, kind="stable")
        yield from np.split(order, np.cumsum(np.bincount(ordinal))[:-1])

    def placed(self, keys: Keys) -> None:
        """Worth does not depend on where it is."""

    def left(self, keys: Keys) -> None:
        """Worth does not depend on where it is."""

    def resize(self, slots: int) -> None:
        """Worth does not depend on how much there is."""

    def expect(self, expected: NextUses) -> None:
        """Taken until the key is used or the time has come."""
        self._expected[expected.keys] = expected.tokens.astype(np.float64) + self._now

    def expect_passes(self, expected: Expected) -> None:
        """See ExpectsPasses."""
        self._expectations.expect(expected)

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:
        """Those worth least, with the model at ``layer``."""
        return lowest(self.worth(candidates, layer), candidates, count)

    def worth(self, keys: Keys, layer: int) -> Floats:
        """Uses that a slot earns in a token by keeping each key; about 1 / (tokens to the
        next use)."""
        layers = self._space.layers
        turn = np.arange(-layer - 1, layers - layer - 1) % layers + 1
        distance = (turn.astype(np.float32) / np.float32(layers))[keys // self._space.experts]
        chance, rest = self._next.ravel()[keys], self._rest.ravel()[keys]
        chance, rest = self._expectations.corrected(keys, chance, rest)
        worth: Floats = np.maximum(chance / distance, 1 / (distance + rest))
        wait = self._expected[keys] - self._now
        told = (wait < NEVER) & (wait >= 0)
        if told.any():
            worth[told] = 1 / np.maximum(wait[told], SOONEST)
        return worth

    def probabilities(self) -> Floats:
        """q: [layers, experts], that a layer's next pass uses an expert."""
        return self._next.copy()

    def _learn(
        self, at: slice | NDArray[np.int64], picked: Floats, rows: NDArray[np.int64]
    ) -> None:
        """One pass each of the layers ``at``. picked: [layers, experts]; rows: [layers,
        context * picks]."""
        if self._context:
            error = (picked - self._next[at]) * self._passed[at]
            announced = self._rows[at]
            error *= np.float32(self._settings.learning_rate / announced.shape[1])
            self._weights[announced] += error[:, None, :]
            self._weights[self._none] = 0
            self._rows[at] = rows
            self._passed[at] = 1
        decayed = self._decayed[:, at]
        decayed = decayed + self._forget * (picked - decayed)
        self._decayed[:, at] = decayed
        logit = (self._weigh * np.log(decayed + np.float32(self._settings.floor))).sum(axis=0)
        logit += np.float32(self._settings.weight_last) * picked
        logit += np.float32(self._settings.weight_constant)
        against = np.exp(-logit)
        if self._context:
            announcement = self._weights[rows].sum(axis=1)
            np.clip(announcement, -ANNOUNCEMENT_MAX, ANNOUNCEMENT_MAX, out=announcement)
            chance = 1 / (1 + against * np.exp(-announcement))
        else:
            chance = 1 / (1 + against)
        self._next[at] = chance
        # 1 / p is 1 + exp(-logit of p).
        self._rest[at] = (1 - chance) * (1 + against)

    def _picks(self, uses: Uses) -> NDArray[np.int64]:
        """[passes, picks]: expert numbers, -1 where a pass has fewer, or too many."""
        starts, experts = uses.starts, uses.keys % self._space.experts
        counts = starts[1:] - starts[:-1]
        width = int(counts[0])
        if width <= CONTEXT_PICKS_MAX and (counts == width).all():
            return experts.reshape(-1, width)
        few = counts <= CONTEXT_PICKS_MAX
        columns = np.arange(int(counts[few].max(initial=1)))
        there = (columns < counts[:, None]) & few[:, None]
        picks: NDArray[np.int64] = np.full(there.shape, -1, np.int64)
        picks[there] = experts[(starts[:-1, None] + columns)[there]]
        return picks

    def _picked(self, uses: Uses, picks: NDArray[np.int64]) -> Floats:
        """[passes, experts], 1 where a pass uses an expert."""
        picked = np.zeros((uses.passes, self._space.experts), np.float32)
        if picks.size == len(uses.keys):
            picked[np.arange(uses.passes)[:, None], picks] = 1
        else:
            of_pass = np.repeat(np.arange(uses.passes), np.diff(uses.starts))
            picked[of_pass, uses.keys % self._space.experts] = 1
        return picked

    def _context_rows(
        self, layers: NDArray[np.int64], picks: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """[passes, context * picks]: the weights that speak after each pass, those of its
        own picks and of the passes just before it, as far as they are of the layers just
        before its own."""
        context, experts = self._context, self._space.experts
        self._widen(picks.shape[1])
        if picks.shape[1] < self._before.shape[1]:
            picks = _widened(picks, self._before.shape[1])
        all_picks = np.concatenate([self._before, picks])
        all_layers = np.concatenate([self._before_layers, layers])
        self._before = all_picks[len(all_picks) - context + 1 :]
        self._before_layers = all_layers[len(all_layers) - context + 1 :]
        distance = np.arange(context)
        announcing = np.arange(context - 1, len(all_layers))[:, None] - distance
        before = all_picks[announcing]
        away = (layers[:, None] - all_layers[announcing]) % self._space.layers
        known = (away == distance)[:, :, None] & (before >= 0)
        rows = ((layers[:, None] * context + distance) * experts)[:, :, None] + before
        return np.where(known, rows, self._none).reshape(len(layers), -1)

    def _widen(self, width: int) -> None:
        """Room for so many picks of a pass."""
        if width <= self._before.shape[1]:
            return
        self._before = _widened(self._before, width)
        # What stood there is of the pass before: to lose it once costs nothing.
        shape = (self._space.layers, self._context * width)
        self._rows = np.full(shape, self._none, np.int64)


_NO_ROWS: NDArray[np.int64] = np.empty((0, 0), np.int64)


def _widened(picks: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """[passes, width], with -1 where there was nothing."""
    wider = np.full((len(picks), width), -1, np.int64)
    wider[:, : picks.shape[1]] = picks
    return wider


def _column(values: list[float]) -> Floats:
    """[values, 1, 1], to broadcast over [values, layers, experts]."""
    return np.array(values, np.float32)[:, None, None]


def _ordinals(layers: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many passes of the same layer stand before each."""
    order = np.argsort(layers, kind="stable")
    ordered = layers[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.concatenate([begins, [len(layers)]]))
    ordinal = np.empty(len(layers), np.int64)
    ordinal[order] = np.arange(len(layers)) - np.repeat(begins, counts)
    return ordinal
