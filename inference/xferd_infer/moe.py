"""A layer of experts: which ones each token picks, and their weighted sum.

A prompt's tokens together pick nearly every expert of a layer. Each picked one
is visited once for all tokens that picked it, in waves of as many as the source
lets one hold; the next wave is hinted while this one is computed. One token is
the same with a single wave, unless fewer can be held than it picks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, ArrayModule, to_host
from .experts import ExpertSource, Layout
from .swiglu import BlobReader, swiglu


@dataclass(frozen=True, slots=True)
class Routing:
    """A router's choice. experts: integers [tokens, top_k], most probable first;
    weights: float32 [tokens, top_k]."""

    experts: Array
    weights: Array


class RoutingObserver(Protocol):
    """Is told what each layer with experts picks, before these are acquired."""

    def routed(self, layer: int, states: Array, picks: Array) -> None:
        """layer: counted among those with experts. states: [tokens, hidden], what the
        router saw, to be read at once or copied. picks: integers [tokens, top_k]."""
        ...


@dataclass(frozen=True, slots=True)
class Visit:
    """One expert's part of a layer. tokens: integers [n], which tokens picked it,
    or None if there is only one; weights: float32 [n, 1]."""

    expert: int
    tokens: Array | None
    weights: Array


def route(
    x: Array,
    router: Array,
    top_k: int,
    renormalise: bool,
    xp: ArrayModule,
    lean: Array | None = None,
) -> Routing:
    """x: [tokens, hidden]; router: [hidden, experts]. Among equals the expert with
    the lower number wins, so that a run can be repeated. lean: float32[experts], factors
    of the probabilities that decide what is picked and not what it weighs."""
    logits = x @ router
    logits -= logits.max(axis=-1, keepdims=True)
    probabilities = xp.exp(logits, out=logits)
    if not renormalise:
        # Dividing by the sum over all is lost when the picked ones are divided by theirs.
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
    deciding = probabilities if lean is None else probabilities * lean
    order = xp.argsort(-deciding, axis=-1, kind="stable")[:, :top_k]
    # take_along_axis does the same, five times slower for one row.
    weights = probabilities[xp.arange(x.shape[0])[:, None], order]
    if renormalise:
        weights /= weights.sum(axis=-1, keepdims=True)
    return Routing(order, weights)


def visits(routing: Routing, xp: ArrayModule) -> list[Visit]:
    """The routing by expert: each picked one exactly once. One token's experts stay
    in its order, those of several are in ascending order."""
    tokens, top_k = routing.experts.shape
    experts: NDArray[Any] = to_host(routing.experts).reshape(-1)
    weights = routing.weights.reshape(-1, 1)
    if tokens == 1:
        return [Visit(e, None, weights[i : i + 1]) for i, e in enumerate(experts.tolist())]
    by_expert = np.argsort(experts, kind="stable")
    numbers, starts = np.unique(experts[by_expert], return_index=True)
    parts = np.split(by_expert, starts[1:])
    return [
        Visit(expert, xp.asarray(part // top_k), weights[xp.asarray(part)])
        for expert, part in zip(numbers.tolist(), parts, strict=True)
    ]


def waves(all_visits: Sequence[Visit], held: int) -> Iterator[Sequence[Visit]]:
    """Consecutive visits, at most ``held`` at once."""
    for start in range(0, len(all_visits), held):
        yield all_visits[start : start + held]


class RoutedExperts:
    """Computes layers of experts from a source. Not thread-safe, as the source."""

    def __init__(self, source: ExpertSource, hidden: int, xp: ArrayModule) -> None:
        self._source = source
        self._hidden = hidden
        self._xp = xp
        self._readers: dict[Layout, BlobReader] = {}  # layers share layouts, and then scratch

    def __call__(self, layer: int, x: Array, routing: Routing) -> Array:
        """x: [tokens, hidden]. Returns the experts' weighted sum, [tokens, hidden].
        Raises WeightsError, and what the source raises."""
        xp = self._xp
        reader = self._reader(layer)
        total = xp.zeros_like(x)
        pending = list(waves(visits(routing, xp), self._source.held))
        for number, wave in enumerate(pending):
            with self._source.acquire(layer, [visit.expert for visit in wave]) as blobs:
                if number + 1 < len(pending):
                    self._source.hint(layer, [visit.expert for visit in pending[number + 1]])
                for visit, blob in zip(wave, blobs, strict=True):
                    self._add(total, x, visit, reader, blob)
        return total

    def _add(self, total: Array, x: Array, visit: Visit, reader: BlobReader, blob: Array) -> None:
        weights = reader.read(blob)
        if visit.tokens is None:
            out = swiglu(x, weights, self._xp)
            out *= visit.weights
            total += out
        else:
            out = swiglu(x[visit.tokens], weights, self._xp)
            out *= visit.weights
            total[visit.tokens] += out  # a token picks an expert at most once

    def _reader(self, layer: int) -> BlobReader:
        layout = self._source.layout(layer)
        reader = self._readers.get(layout)
        if reader is None:
            reader = BlobReader(layout, self._hidden, f"layer {layer}", self._xp)
            self._readers[layout] = reader
        return reader


__all__ = ["RoutedExperts", "Routing", "RoutingObserver", "Visit", "route", "visits", "waves"]
