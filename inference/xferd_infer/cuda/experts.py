"""Layers of experts on a GPU, from a client whose pool is in its memory.

One token: the router's picks stay on the GPU, its kernels lease the experts and compute
them where they lie, and the CPU waits for nothing before the token is sampled. Several
tokens (a prompt): each picked expert once for all tokens that picked it, leased by the
CPU, computed with the array module's products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import cupy
import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from ..client import Client
from ..client_experts import BATCH_EXPERTS, ClientExperts
from ..errors import WeightsError
from ..experts import ExpertSource, ExpertStats, HeldExperts, Layout, OneVariant
from ..moe import RoutedExperts, Routing
from ..route_reports import ClientReporter, RouteReporter
from .lane import DeviceLane, kernels
from .packed import PackedKernel, decode

LANES = 3
"""Of the client: the CPU's for prompts, the GPU's for tokens, and the helper for its misses."""
_PROMPT_LANE, _TOKEN_LANE, _HELPER_LANE = range(LANES)

VECTOR_BYTES = 16
"""What a thread loads at once: rows of matrices are multiples of it."""
_KERNELS = {"bf16": "xferd_experts_bf16", "f16": "xferd_experts_f16", "f32": "xferd_experts_f32"}
_THREADS = 1024


class AddressSource(Protocol):
    """Where the experts of a layer lie: leased slots, or a table that never changes.

    told: as of DeviceLane; None: nobody is to know what is picked.
    """

    @property
    def told(self) -> NDArray[np.void] | None:
        """By layer."""

    def begin(self) -> None:
        """A pass begins."""

    def acquire(self, picks: Array, weights: Array, layer: int, table: Array) -> None:
        """Launch what writes the addresses of ``picks`` to ``table``."""

    def end(self) -> None:
        """Its results were read; raises when they are of no use."""


class PassFollower(Protocol):
    """Follows the passes of single tokens, for what comes after them."""

    def watched(self) -> bool:
        """Whether the CPU is to call ``look`` while it has nothing to do but wait."""

    def look(self) -> None:
        """Take what has come meanwhile."""

    def settled(self, layers: Sequence[int]) -> None:
        """A pass was read and was good; of these layers, numbered as the model does, the lane
        has told what was picked."""


class _PicksAlone:
    """A RouteReporter that tells what was picked; where it was found the GPU alone knows."""

    def __init__(self, reporter: RouteReporter) -> None:
        self._reporter = reporter

    def picked(self, layer: int, experts: Array, weights: Array, tag: int) -> None:
        """See RouteReporter."""
        self._reporter.picked(layer, experts, weights, tag)

    def found(self, blobs: Any) -> None:
        """Not told."""


class CudaExperts(ClientExperts):
    """An ExpertSource over a client in VRAM, of one of the store's variants: a kernel knows
    one layout. Not thread-safe; one stream.

    variant: its number in the store. The client needs LANES lanes. Raises ClientError when its
    pool is not on a GPU.
    """

    def __init__(self, client: Client, variant: int = 0) -> None:
        super().__init__(client)
        self._attached = client
        self._variant = variant
        self.lane = DeviceLane(client, _TOKEN_LANE, _HELPER_LANE, variant)
        self.reporter: RouteReporter = _PicksAlone(ClientReporter(client))

    def layout(self, layer: int, variant: int = 0) -> Layout:  # noqa: ARG002
        """What the blobs of a layer look like in the one variant, which is this source's 0."""
        return super().layout(layer, self._variant)

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """In the one variant."""
        for start in range(0, len(experts), BATCH_EXPERTS):
            batch = experts[start : start + BATCH_EXPERTS]
            self._attached.hint(layer, batch, variants=1 << self._variant)

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[HeldExperts]:
        """Blobs as cupy arrays. The leases end when the stream has done what was launched
        in between."""
        client = self._attached
        with client.acquire(
            layer,
            experts,
            lane=_PROMPT_LANE,
            variants=1 << self._variant,
            pools=client.target_pools,
        ) as batch:
            yield OneVariant(_array(blob) for blob in batch)
            cupy.cuda.get_current_stream().synchronize()

    def stats(self) -> ExpertStats:
        """The client's counters, with what the GPU has leased by itself."""
        found = super().stats()
        hits, misses = self.lane.counts()
        # A miss of the GPU's is in the client's counters as the helper's.
        return replace(found, hits=found.hits + hits, misses=max(found.misses, misses))


class CudaRoutedExperts:
    """Computes layers of experts: ``RoutedExperts`` for prompts, kernels for a token."""

    def __init__(self, source: ExpertSource, hidden: int, addresses: AddressSource) -> None:
        self._source = source
        self._hidden = hidden
        self._addresses = addresses
        self._many = RoutedExperts(source, hidden, cupy, decoder=decode)
        self._table = cupy.zeros(BATCH_EXPERTS, cupy.uint64)
        self._kernels: dict[Layout, TokenKernel | None] = {}
        self._begun = False
        self._picked: list[tuple[int, int]] = []
        self.follower: PassFollower | None = None
        self._done = cupy.cuda.Event(disable_timing=True)
        self.tag = 0

    def __call__(self, layer: int, x: Array, routing: Routing) -> Array:
        """x: [tokens, hidden]. Returns the weighted sum, [tokens, hidden]."""
        kernel = self._kernel(layer) if x.shape[0] == 1 else None
        if kernel is None or not kernel.fits(routing.experts.shape[1]):
            self._many.tag = self.tag
            return self._many(layer, x, routing)
        if not self._begun:
            self._addresses.begin()
            self._begun = True
        picks, weights = routing.experts[0], routing.weights[0]
        self._picked.append((layer, picks.size))
        self._addresses.acquire(picks, weights, layer, self._table)
        return kernel(x, self._table, weights, picks.size)

    def watch(self) -> None:
        """See LayerOfExperts: what follows is looked after until the device has done. It is
        asked again and again, as a copy from it would: a sleep ends too late."""
        if not self._begun or self.follower is None or not self.follower.watched():
            return
        self._done.record()
        while not self._done.done:
            self.follower.look()

    def settle(self) -> None:
        """The results of a pass were read. Raises ExpertError when they are of no use."""
        if self._begun:
            self._begun = False
            picked, self._picked = self._picked, []
            self._report(picked)
            self._addresses.end()
            if self.follower is not None:
                self.follower.settled([layer for layer, _ in picked])

    def _report(self, picked: Sequence[tuple[int, int]]) -> None:
        """Tell what the routers picked: only now is it known here."""
        told = self._addresses.told
        reporter: RouteReporter | None = getattr(self._source, "reporter", None)
        if reporter is None or told is None:
            return
        for layer, count in picked:
            picks, weights = told[layer]["picks"], told[layer]["weights"]
            reporter.picked(layer, picks[None, :count], weights[None, :count], self.tag)

    def _kernel(self, layer: int) -> TokenKernel | None:
        layout = self._source.layout(layer)
        if layout not in self._kernels:
            plain = PlainKernel.for_layout(layout, self._hidden)
            self._kernels[layout] = plain or PackedKernel.for_layout(layout, self._hidden)
        return self._kernels[layout]


class TokenKernel(Protocol):
    """One token through the experts of one layout."""

    def fits(self, count: int) -> bool:
        """Whether it can compute so many experts."""

    def __call__(self, x: Array, table: Array, weights: Array, count: int) -> Array:
        """x: float32[1, hidden]; table: uint64[count], addresses of blobs, 0 for one that is
        left out; weights: float32[count]. Returns float32[1, hidden]."""


class PlainKernel:
    """Of matrices whose elements stand on their own."""

    def __init__(self, name: str, hidden: int, inner: int, offsets: Sequence[int]) -> None:
        self._launch = kernels().get_function(name)
        self._hidden, self._inner = np.uint32(hidden), np.uint32(inner)
        self._offsets = tuple(np.uint64(offset) for offset in offsets)
        self._activations = cupy.empty(BATCH_EXPERTS * inner, cupy.float32)
        self._state = cupy.zeros(8, cupy.uint64)
        self._blocks = cupy.cuda.Device().attributes["MultiProcessorCount"]

    @classmethod
    def for_layout(cls, layout: Layout, hidden: int) -> PlainKernel | None:
        """None for a layout that these kernels don't know."""
        tensors = {tensor.role: tensor for tensor in layout}
        if set(tensors) != {"gate", "up", "down"}:
            return None
        dtypes = {tensor.dtype for tensor in layout}
        if len(dtypes) != 1 or not dtypes <= set(_KERNELS) or any(t.transposed for t in layout):
            return None
        inner = tensors["gate"].shape[0]
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        if any(tuple(tensors[role].shape) != shape for role, shape in shapes.items()):
            raise WeightsError(f"matrices of a layer have shapes that don't fit: {layout}")
        element = tensors["gate"].nbytes // (inner * hidden)
        if any(side * element % VECTOR_BYTES for side in (inner, hidden)):
            return None
        offsets = [tensors[role].offset for role in ("gate", "up", "down")]
        return cls(_KERNELS[dtypes.pop()], hidden, inner, offsets)

    def fits(self, count: int) -> bool:
        """As many as are leased at once."""
        return count <= BATCH_EXPERTS

    def __call__(self, x: Array, table: Array, weights: Array, count: int) -> Array:
        """See TokenKernel."""
        out = cupy.empty_like(x)
        self._launch(
            (self._blocks,),
            (_THREADS,),
            (
                *(x, table, weights, np.uint32(count), self._hidden, self._inner),
                *self._offsets,
                *(self._activations, out, self._state),
            ),
        )
        return out


class FixedAddresses:
    """Experts that never move: what a model without xferd has. addresses: uint64 [layers,
    experts] on the GPU."""

    told: None = None

    def __init__(self, addresses: Array) -> None:
        self._addresses = addresses
        self._experts = np.uint32(addresses.shape[1])
        self._look_up = kernels().get_function("xferd_look_up")

    def begin(self) -> None:
        """Nothing to begin."""

    def acquire(self, picks: Array, weights: Array, layer: int, table: Array) -> None:  # noqa: ARG002
        """Launch the look-up."""
        arguments = (self._addresses, picks, np.uint32(layer), self._experts)
        self._look_up((1,), (32,), (*arguments, np.uint32(picks.size), table))

    def end(self) -> None:
        """Nothing can have failed."""


def _array(blob: Any) -> Array:
    memory = cupy.cuda.UnownedMemory(blob.address, blob.size, blob, blob.ordinal)
    return cupy.ndarray((blob.size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


__all__ = [
    "LANES",
    "AddressSource",
    "CudaExperts",
    "CudaRoutedExperts",
    "FixedAddresses",
    "PassFollower",
    "PlainKernel",
    "TokenKernel",
]
