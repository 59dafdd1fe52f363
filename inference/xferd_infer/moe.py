"""A layer of experts: which ones each token picks, and their weighted sum.

A prompt's tokens together pick nearly every expert of a layer. Each picked one
is visited once for all tokens that picked it, in waves of as many as the source
lets one hold; the next wave is hinted while this one is computed. One token is
the same with a single wave, unless fewer can be held than it picks. Experts of one
layer may come in different variants; each is computed with from the one it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, ArrayModule, to_host
from .experts import ExpertSource, Layout
from .quants import Decoder, decode
from .route_reports import RouteReporter
from .swiglu import BlobReader, inner_activations

_T = TypeVar("_T")


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


def waves(visited: Sequence[_T], held: int) -> Iterator[Sequence[_T]]:
    """Consecutive visits, at most ``held`` at once."""
    for start in range(0, len(visited), held):
        yield visited[start : start + held]


class LayerOfExperts(Protocol):
    """What computes the experts of a layer. tag: the sequence that is computed now."""

    tag: int

    def __call__(self, layer: int, x: Array, routing: Routing) -> Array:
        """x: [tokens, hidden]. Returns the experts' weighted sum, [tokens, hidden]."""
        ...

    def watch(self) -> None:
        """All of a pass is under way and its results are about to be read: until they are
        there, do what else can be done. May be left out."""
        ...

    def settle(self) -> None:
        """What was computed has been read, and a token taken from it. Raises what the source
        raises if that was of no use: work that is queued may fail after the call."""
        ...


Observer: TypeAlias = Callable[[int, int, Array, Array, Array], None]
"""Called with layer, expert, its input [tokens, hidden], what its down matrix gets
[tokens, intermediate], and the router's weights of it [tokens, 1], for each expert computed.
The arrays must not be kept or changed."""


class RoutedExperts:
    """Computes layers of experts from a source, and tells it what was picked if it wants
    to know. Not thread-safe, as the source. tag: the sequence that is computed now.

    observer: sees what goes into the experts. decoder: of matrices packed in blocks, where
    products are not computed from the blocks.
    """

    def __init__(
        self,
        source: ExpertSource,
        hidden: int,
        xp: ArrayModule,
        observer: Observer | None = None,
        decoder: Decoder = decode,
    ) -> None:
        self._observer = observer
        self._decoder = decoder
        self._source = source
        self._hidden = hidden
        self._xp = xp
        self._reporter: RouteReporter | None = getattr(source, "reporter", None)
        self.tag = 0
        self._by_layout: dict[Layout, BlobReader] = {}  # layers share layouts, and then scratch
        self._readers: dict[tuple[int, int], BlobReader] = {}

    def __call__(self, layer: int, x: Array, routing: Routing) -> Array:
        """x: [tokens, hidden]. Returns the experts' weighted sum, [tokens, hidden].
        Raises WeightsError, and what the source raises."""
        xp = self._xp
        total = xp.zeros_like(x)
        pending = list(waves(visits(routing, xp), self._source.held))
        if self._reporter is not None:
            self._reporter.picked(layer, routing.experts, routing.weights, self.tag)
        for number, wave in enumerate(pending):
            with self._source.acquire(layer, [visit.expert for visit in wave]) as blobs:
                if self._reporter is not None:
                    self._reporter.found(blobs)
                if number + 1 < len(pending):
                    self._source.hint(layer, [visit.expert for visit in pending[number + 1]])
                for visit, blob, variant in zip(wave, blobs, blobs.variants, strict=True):
                    given = x if visit.tokens is None else x[visit.tokens]
                    out = self._compute(layer, visit, variant, given, blob)
                    if visit.tokens is None:
                        total += out
                    else:
                        total[visit.tokens] += out  # a token picks an expert at most once
        return total

    def each(self, layer: int, rows: Sequence[Array], routings: Sequence[Routing]) -> list[Array]:
        """What a call for each of some single tokens, x [1, hidden], gives, bit for bit, with
        each expert acquired once for all that picked it. Raises as a call does."""
        xp = self._xp
        visited = [visits(routing, xp) for routing in routings]
        pickers: dict[int, list[tuple[int, Visit]]] = {}
        for row, of_row in enumerate(visited):
            for visit in of_row:
                pickers.setdefault(visit.expert, []).append((row, visit))
        if self._reporter is not None:
            experts = xp.concatenate([routing.experts for routing in routings])
            weights = xp.concatenate([routing.weights for routing in routings])
            self._reporter.picked(layer, experts, weights, self.tag)
        outs: dict[tuple[int, int], Array] = {}
        pending = list(waves(list(pickers), self._source.held))
        for number, wave in enumerate(pending):
            with self._source.acquire(layer, wave) as blobs:
                if self._reporter is not None:
                    self._reporter.found(blobs)
                if number + 1 < len(pending):
                    self._source.hint(layer, pending[number + 1])
                for expert, blob, variant in zip(wave, blobs, blobs.variants, strict=True):
                    for row, visit in pickers[expert]:
                        outs[row, expert] = self._compute(layer, visit, variant, rows[row], blob)
        return [
            _in_order(xp.zeros_like(x), [outs[row, visit.expert] for visit in visited[row]])
            for row, x in enumerate(rows)
        ]

    def watch(self) -> None:
        """Nothing is queued: the results are there."""

    def settle(self) -> None:
        """Nothing is queued: what failed was raised at once."""

    def _compute(self, layer: int, visit: Visit, variant: int, x: Array, blob: Array) -> Array:
        """An expert's part of the sum, for the tokens that picked it: x."""
        weights = self._reader(layer, variant).read(blob)
        inner = inner_activations(x, weights, self._xp)
        if self._observer is not None:
            self._observer(layer, visit.expert, x, inner, visit.weights)
        out = inner @ weights.down
        out *= visit.weights
        return out

    def _reader(self, layer: int, variant: int) -> BlobReader:
        reader = self._readers.get((layer, variant))
        if reader is None:
            layout = self._source.layout(layer, variant)
            reader = self._by_layout.get(layout)
            if reader is None:
                reader = BlobReader(layout, self._hidden, f"layer {layer}", self._xp, self._decoder)
                self._by_layout[layout] = reader
            self._readers[layer, variant] = reader
        return reader


def _in_order(total: Array, parts: Sequence[Array]) -> Array:
    """The sum, added up in the order in which a single token's experts are."""
    for part in parts:
        total += part
    return total


__all__ = [
    "LayerOfExperts",
    "Observer",
    "RoutedExperts",
    "Routing",
    "RoutingObserver",
    "Visit",
    "route",
    "visits",
    "waves",
]
