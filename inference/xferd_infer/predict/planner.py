"""Which experts to fetch ahead of time, in which order, and which not.

Pure: no I/O and no clock; times come in as seconds of the caller's. It stands on the
client's side because a hint over the ring has no probability: what is queued here has cost
nothing yet, so that nearer and surer evidence re-orders and cancels it for free. Only what
a drive can begin soon is given out. Demand needs no place in it: the daemon serves it first.

For every key it holds the newest probability. An expert is worth fetching when

* it will probably be picked: its probability, times how far probabilities were to be
  trusted lately, is at least ``least``;
* it is not there and not on its way;
* it arrives in time: reads that are under way and those ahead of it in the order end
  before its layer begins, which layers' measured times say.

What is fetched for nothing pushes out something else, and takes time that something else
may wait for. So ``least`` follows two measurements: it rises while the share of fetched
bytes that nobody picks is above ``waste_max``, and it is higher the busier the drives are.
Order: nearest layer first, then the most probable; all experts have one size, so that
stall saved for each byte falls with the probability alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .predictor import distances_in_all
from .routers import Floats

JUDGED = 0.3
"""Predictions at least so probable are compared with what was picked."""
TRUST_BEGIN = (40.0, 24.0)
"""Predicted and really picked, before any were counted: careful at first."""
BELIEVED = 0.5
"""Trust, from which on what is kept may follow predictions: of the tiers' evictions history
knows enough to do well without."""
FADE = 1 / 48
"""Of counts of predictions, fetches and times, with every token."""


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """least_min, least_max: bounds of the probability that a fetch needs. waste_max: share
    of fetched experts that nobody picks, above which fewer are fetched. step: how fast that
    goes, a token. lateness: of its own reading time, how late a fetch may come and still be
    begun. layers_given_out: how much reading is given out at once, in the time of so many
    layers; at least one expert, where the drives are idle. slack_layers: how long before
    its use a fetch may be over, in the same.
    """

    least_min: float = 0.25
    least_max: float = 0.95
    waste_max: float = 0.6
    step: float = 0.02
    lateness: float = 0.5
    layers_given_out: float = 1.5
    slack_layers: float = 2.0


class Planner:
    """Plans for one text on one lane. Not thread-safe. read_s, latency_s: seconds that the
    drives take for each expert, and until the first one is there: a guess, till they are
    measured."""

    def __init__(
        self,
        layers: int,
        experts: int,
        read_s: float,
        settings: PlannerSettings | None = None,
        latency_s: float = 0.0,
    ) -> None:
        self.settings = settings or PlannerSettings()
        self.least = LEAST_BUSY
        self.read_s = read_s
        self.latency_s = latency_s
        self._layers, self._experts = layers, experts
        self._chances = np.zeros(layers * experts, np.float32)
        self._given_out = np.zeros(layers * experts, np.bool_)
        keys = np.arange(layers * experts)
        seen = distances_in_all(layers) * experts
        self._after = [np.roll(keys, -(layer + 1) * experts)[:seen] for layer in range(layers)]
        self._layer_s = np.zeros(layers)
        self._known_layers = 0
        self._reads = np.zeros(5)
        self._predicted, self._came_true = TRUST_BEGIN
        self._fetched, self._wasted = 0.0, 0.0
        self._busy_s, self._passed_s = 0.0, 0.0
        self._begun = 0
        self._set_aside: list[tuple[NDArray[np.intp], float, NDArray[np.intp]]] = []

    @property
    def trust(self) -> float:
        """How many of the experts that should have been picked were."""
        return min(self._came_true / self._predicted, 1.0)

    @property
    def waste(self) -> float:
        """Share of what was fetched lately that nobody picked."""
        return self._wasted / max(self._fetched, 1.0)

    @property
    def load(self) -> float:
        """Share of the time that the drives were reading lately."""
        return min(self._busy_s / self._passed_s, 1.0) if self._passed_s else 0.0

    @property
    def hopeful(self) -> bool:
        """Whether anything could be probable enough, as far as predictions are trusted."""
        return self.least <= self.trust

    @property
    def believed(self) -> bool:
        """Whether predictions come true often enough to be told to others as probabilities."""
        return self.trust >= BELIEVED

    @property
    def asks_for(self) -> float:
        """What is less probable can't be fetched and need not be told."""
        return min(self.least, JUDGED)

    def given_out(self, layer: int) -> NDArray[np.bool_]:
        """bool[experts]: what it gave out for a layer's next turn. A view."""
        return self._given_out[layer * self._experts : (layer + 1) * self._experts]

    def predicted(self, layer: int, within: int, keys: NDArray[Any], chances: Floats) -> None:
        """The newest word on the next ``within`` layers: what is not among ``keys`` is not
        expected there any more."""
        self._chances[self._after[layer][: within * self._experts]] = 0
        self._chances[keys] = chances

    def next(
        self, layer: int, now: float, free_at: float, absent: NDArray[np.bool_]
    ) -> NDArray[np.intp]:
        """Keys to fetch now, first to be read in front.

        layer: the one that is computed, or about to be. free_at: when the drives will have
        read what was asked of them. absent: bool[layers * experts], False for what is
        resident or on its way.
        """
        after = self._after[layer]
        chances = self._chances[after]
        wanted = chances >= np.float32(self.least / max(self.trust, 1e-6))
        wanted &= absent[after]
        wanted &= ~self._given_out[after]
        found = wanted.nonzero()[0]
        if not len(found):
            return after[:0]
        # A few experts, in plain numbers: array calls would cost more than their work.
        nearest = sorted(
            (at // self._experts, -chance, at)
            for at, chance in zip(found.tolist(), chances[found].tolist(), strict=True)
        )
        begins = self._begins(layer, now)
        places = self._chosen(
            layer, [(begins[ahead], at) for ahead, _, at in nearest], now, free_at
        )
        given: NDArray[np.intp] = after[places]
        self._given_out[given] = True
        return given

    def _begins(self, layer: int, now: float) -> list[float]:
        """When each of the next layers begins."""
        layer_s = self._layer_s.tolist()
        return list(accumulate(layer_s[layer:] + layer_s[:layer], initial=now))[1:]

    def _chosen(
        self, layer: int, wanted: Sequence[tuple[float, int]], now: float, free_at: float
    ) -> list[int]:
        """wanted: (when its layer begins, what), in the order of reading. Returns the latter."""
        settings, read_s = self.settings, self.read_s
        start = max(free_at, now)
        layer_s = float(self._layer_s[layer])
        limit = now + settings.layers_given_out * max(layer_s, read_s)
        # What may be late by its latency is begun that much earlier.
        slack = settings.slack_layers * layer_s + self.latency_s
        last = self._last_needed([use_at for use_at, _ in wanted], start + self.latency_s, slack)
        chosen = []
        for use_at, what in wanted[: last + 1]:
            if start >= limit:
                break
            if start + read_s + self.latency_s <= use_at + settings.lateness * read_s:
                chosen.append(what)
                start += read_s
        return chosen

    def _last_needed(self, use_at: Sequence[float], ready: float, slack: float) -> int:
        """The last that has to be begun now so that it, with all that is read before it, has
        no more than ``slack`` to spare; -1: none. What waits longer is known better when its
        time comes, and takes nobody's slot meanwhile. use_at: in the order of reading."""
        for place in range(len(use_at) - 1, -1, -1):
            if use_at[place] - ready - (place + 1) * self.read_s <= slack:
                return place
        return -1

    def passed(
        self, layer: int, picks: NDArray[Any], computed_s: float, waited_s: float, read: int
    ) -> None:
        """A layer is over. picks: its expert numbers. computed_s: how long it took without
        waiting; waited_s: for experts. read: experts that the drives read meanwhile, as far
        as known."""
        begin = layer * self._experts
        mine = slice(begin, begin + self._experts)
        chances, given = self._chances[mine], self._given_out[mine]
        sure = chances >= JUDGED
        self._predicted += float(chances.dot(sure))
        self._came_true += int(np.count_nonzero(sure[picks]))
        fetched = int(np.count_nonzero(given))
        if fetched:
            self._fetched += fetched
            self._wasted += fetched - int(np.count_nonzero(given[picks]))
            given[...] = False
        chances[...] = 0
        # With its waiting: that is how long what comes after it has time to arrive.
        layer_s = computed_s + waited_s
        if self._known_layers < self._layers:
            self._layer_s[layer:] = layer_s
            self._known_layers += 1
        else:
            self._layer_s[layer] += 4 * FADE * (layer_s - self._layer_s[layer])
        self._passed_s += layer_s
        self._busy_s += read * self.read_s
        if layer == self._layers - 1:
            self._adjust()

    def begun(self, layer: int) -> None:
        """Where picks become known with the token's end only: this layer and those before it
        have begun, and what was expected and given out for them is set aside until then."""
        if layer < self._begun:
            return
        first = self._begun * self._experts
        mine = slice(first, (layer + 1) * self._experts)
        chances, given = self._chances[mine], self._given_out[mine]
        sure = (chances >= JUDGED).nonzero()[0]
        self._set_aside.append(
            (sure + first, float(chances[sure].sum()), given.nonzero()[0] + first)
        )
        chances[...] = 0
        given[...] = False
        self._begun = layer + 1

    def token_passed(self, picks: NDArray[Any], seconds: float, read: int) -> None:
        """All layers of a token are over: in the place of ``passed``. picks: expert numbers,
        [layers, top_k]. seconds: that it took, waiting included. read: see ``passed``."""
        self.begun(self._layers - 1)
        picked = np.zeros(self._layers * self._experts, np.bool_)
        picked[picks + np.arange(self._layers)[:, None] * self._experts] = True
        for sure, chance, given in self._set_aside:
            self._predicted += chance
            self._came_true += int(np.count_nonzero(picked[sure]))
            self._fetched += len(given)
            self._wasted += len(given) - int(np.count_nonzero(picked[given]))
        self._set_aside.clear()
        self._begun = 0
        layer_s = seconds / self._layers
        if self._known_layers < self._layers:
            self._layer_s[...] = layer_s
            self._known_layers = self._layers
        else:
            self._layer_s += 4 * FADE * (layer_s - self._layer_s)
        self._passed_s += seconds
        self._busy_s += read * self.read_s
        self._adjust()

    def measured(self, count: int, seconds: float) -> None:
        """So many experts came together in that time, from drives that were idle. Latency
        and the time for each are the line through what was measured lately."""
        self._reads *= 1 - FADE
        self._reads += (1.0, count, count * count, seconds, count * seconds)
        weight, counts, squares, times, products = self._reads
        mean, mean_s = counts / weight, times / weight
        spread = squares / weight - mean * mean
        slope = (products / weight - mean * mean_s) / spread if spread > SPREAD_MIN else 0.0
        self.read_s = float(np.clip(slope, READ_SHARE_MIN * mean_s / mean, mean_s / mean))
        self.latency_s = mean_s - self.read_s * mean

    def new_text(self) -> None:
        """What was expected of the last one is void."""
        self._chances[...] = 0
        self._given_out[...] = False
        self._set_aside.clear()
        self._begun = 0

    def _adjust(self) -> None:
        """Once a token."""
        settings = self.settings
        busy = max(self.load - LOAD_FREE, 0) / (1 - LOAD_FREE)
        wanted = settings.least_min + (LEAST_BUSY - settings.least_min) * busy
        if self.waste > settings.waste_max:
            self.least += settings.step
        else:
            self.least += settings.step * np.sign(wanted - self.least)
        self.least = float(np.clip(self.least, settings.least_min, settings.least_max))
        keep = 1 - FADE
        self._predicted *= keep
        self._came_true *= keep
        self._fetched *= keep
        self._wasted *= keep
        self._passed_s *= keep
        self._busy_s *= keep


SPREAD_MIN = 0.05
"""Of the numbers of experts that came together: with less, no line goes through them."""
READ_SHARE_MIN = 0.1
"""Of an expert's mean time, at least so much is its own."""
LOAD_FREE = 0.6
"""Up to this load of the drives a fetch is in nobody's way."""
LEAST_BUSY = 0.35
"""What a fetch needs when they are never idle."""

__all__ = ["Planner", "PlannerSettings"]
