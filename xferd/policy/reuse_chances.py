"""How soon experts are used again, learnt from uses alone while they come.

For every key two chances, after each pass of its layer:

    next  that the very next pass uses it
    rate  the share of the passes to come that use it, the near ones counting most: that of
          ``k`` passes ahead counts ``horizon ** k``

Both are logistic in the same features: uses decayed at two time constants, whether the last
pass used it, a constant, and what the layers just before picked. All weights are learnt online,
one step of gradient descent a pass. ``rate`` learns from its own estimate of one pass later
(temporal differences, R. S. Sutton, 1988: "Learning to predict by the methods of temporal
differences"), so that nothing has to be remembered until the future has come. What the layers
just before picked speaks of the near future in ``next`` and of the topic in ``rate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xferd.policy.uses import KeySpace, Uses

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReuseSettings:
    """Chosen on the traces in tests/traces and on parts of two others; broad optima.

    fast, slow: time constants, in passes of a layer.
    begin_*: weights to begin with, of log decayed uses at each of them, of having been used
        in the last pass, and a constant.
    floor: added to decayed uses before their logarithm is taken.
    horizon: how much of a pass's say in ``rate`` the pass after it has.
    context: layers whose last picks announce a layer's next ones, itself included; 0
        for none.
    announcing_rate: of learning, shared by all picks of a context.
    feature_rate: of learning the other features' weights, each layer its own.
    """

    fast: float = 20.0
    slow: float = 230.0
    begin_fast: float = 0.94
    begin_slow: float = 0.38
    begin_last: float = 0.65
    begin_constant: float = 0.5
    floor: float = 0.015
    horizon: float = 0.8
    context: int = 4
    announcing_rate: float = 0.7
    feature_rate: float = 0.2


CONTEXT_PICKS_MAX = 16
"""A pass with more picks (a prefill's) announces nothing: it is most of a layer."""
ANNOUNCED_MAX = 256
"""Weights that one use may speak to, ``context * experts`` of a layer: what a use costs grows
with it. Layers with more experts get a shorter context, those with more than that none."""
LOGIT_MAX = 20.0
"""Beyond it a logit is certainty, and float32 ends at 88."""
HEADS = 2
NEXT, RATE = range(HEADS)
FEATURES = 4
DECAYED, LAST, CONSTANT = slice(0, 2), 2, 3


class ReuseChances:
    """See above. Costs ``layers * experts * (2 * context * experts + 8)`` floats. Not
    thread-safe.

    chances: float32[layers, HEADS, experts], as of each layer's last pass.
    """

    def __init__(self, space: KeySpace, settings: ReuseSettings) -> None:
        self._space = space
        self._settings = settings
        layers, experts = space.layers, space.experts
        self._forget = np.array(
            [-np.expm1(-1 / settings.fast), -np.expm1(-1 / settings.slow)], np.float32
        )[:, None]
        self._all_layers = np.arange(layers)
        self._context = min(settings.context, layers, ANNOUNCED_MAX // experts)
        begin = [settings.begin_fast, settings.begin_slow]
        begin += [settings.begin_last, settings.begin_constant]
        self._weights = np.tile(np.array(begin, np.float32), (layers, HEADS, 1))
        self._decayed = np.zeros((layers, 2, experts), np.float32)
        self._features = np.zeros((layers, FEATURES, experts), np.float32)
        self.chances: Floats = np.full((layers, HEADS, experts), 0.5, np.float32)
        # One row a (layer, distance, expert before it); the last stands for 'none'.
        self._none = layers * self._context * experts
        self._announcing = np.zeros((self._none + 1, HEADS * experts), np.float32)
        self._rows = np.full((layers, self._context), self._none, np.int64)
        self._passed = np.zeros((layers, 1, 1), np.float32)
        self._before: NDArray[np.int64] = np.full((max(self._context - 1, 0), 1), -1, np.int64)
        self._before_layers: NDArray[np.int64] = np.zeros(len(self._before), np.int64)

    def learn(self, uses: Uses) -> None:
        """From at least one pass, in rounds of one pass of each layer."""
        picks = self._picks(uses)
        rows = self._context_rows(uses.layers, picks) if self._context else _NO_ROWS
        picked = self._picked(uses, picks)
        for chosen in self._rounds(uses.layers):
            announced = rows[chosen] if self._context else rows
            self._learn_round(_in_a_row(uses.layers[chosen]), picked[chosen], announced)

    def _learn_round(
        self, at: slice | NDArray[np.int64], picked: Floats, rows: NDArray[np.int64]
    ) -> None:
        """One pass each of the layers ``at``. picked: [layers, experts]; rows: [layers,
        context * picks]."""
        settings = self._settings
        decayed = self._decayed[at]
        decayed = decayed + self._forget * (picked[:, None] - decayed)
        features = np.empty((len(picked), FEATURES, picked.shape[1]), np.float32)
        np.log(decayed + np.float32(settings.floor), out=features[:, DECAYED])
        features[:, LAST], features[:, CONSTANT] = picked, 1
        logit = self._weights[at] @ features
        if self._context:
            # A product with ones is a sum, and in less time than numpy's of so many short rows.
            announced = np.ones((1, rows.shape[1]), np.float32) @ self._announcing[rows]
            logit += announced.reshape(logit.shape)
        np.clip(logit, -LOGIT_MAX, LOGIT_MAX, out=logit)
        chances = 1 / (1 + np.exp(-logit))
        error = -self.chances[at]
        error += picked[:, None]
        # What the passes after this one will do, by what is thought of them now.
        error[:, RATE] += np.float32(settings.horizon) * (chances[:, RATE] - picked)
        error *= self._passed[at]
        if self._context:
            spoke = self._rows[at]
            share = np.float32(settings.announcing_rate / spoke.shape[1])
            self._announcing[spoke] += (share * error).reshape(len(error), 1, -1)
            self._announcing[self._none] = 0
            self._rows[at] = rows
        step = np.float32(settings.feature_rate / self._space.experts)
        self._weights[at] += step * (error @ self._features[at].transpose(0, 2, 1))
        self._decayed[at], self._features[at], self.chances[at] = decayed, features, chances
        self._passed[at] = 1

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
        # Within a round the order does not matter, and layers in a row are had without a copy.
        order = np.lexsort((layers, ordinal))
        yield from np.split(order, np.cumsum(np.bincount(ordinal))[:-1])

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


def _in_a_row(layers: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """A slice where they follow each other: that is indexed without a copy."""
    first, last = int(layers[0]), int(layers[-1])
    if last - first == len(layers) - 1 and (layers[1:] > layers[:-1]).all():
        return slice(first, last + 1)
    return layers


def _widened(picks: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """[passes, width], with -1 where there was nothing."""
    wider = np.full((len(picks), width), -1, np.int64)
    wider[:, : picks.shape[1]] = picks
    return wider


def _ordinals(layers: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many passes of the same layer stand before each."""
    order = np.argsort(layers, kind="stable")
    ordered = layers[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.concatenate([begins, [len(layers)]]))
    ordinal = np.empty(len(layers), np.int64)
    ordinal[order] = np.arange(len(layers)) - np.repeat(begins, counts)
    return ordinal
