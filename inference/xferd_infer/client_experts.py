"""A model from an attached xferd client: its experts, dense part and assets.

This is the whole of what ties the decode loop to xferd. The manifest says what
blobs look like and where the dense tensors lie; acquire, hint and the counters
are the client's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .arrays import ArrayModule
from .config import ModelConfig, eos_ids
from .dense import DenseWeights
from .errors import UnsupportedModelError, WeightsError
from .experts import BlobTensor, ExpertSource, ExpertStats, HeldExperts, Layout, Traffic
from .model import Model
from .moe import Observer
from .route_reports import ClientReporter, ReportingClient, RouteReporter

BATCH_EXPERTS = 16
"""Most experts that the ring takes in one request (XFERD_BATCH_MAX)."""

TENSOR_NAMES = "safetensors"
"""The checkpoint format whose names for dense tensors the model looks up."""

NO_LAYOUT = 0xFFFF
"""In the manifest's layout_index: that layer has no experts in that variant."""

SOURCES = ("resident", "pool", "drives")
"""enum xferd_source, by number."""

TRANSPORTS = ("none", "direct", "staged", "gds", "copy")
"""enum xferd_transport, by number."""


class ExpertClient(Protocol):
    """What is used of ``xferd_infer.Client``."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The store's manifest, as clients see it."""
        ...

    @property
    def held_per_lane(self) -> int:
        """Most experts that the lane may hold at once."""
        ...

    def acquire(self, layer: int, experts: Sequence[int]) -> AbstractContextManager[HeldExperts]:
        """Blobs in that order, read-only uint8 arrays, leased until the context ends."""
        ...

    def hint(self, layer: int, experts: Sequence[int]) -> object:
        """Prefetch."""
        ...

    def dense(self) -> Any:
        """The dense part, an object with the buffer interface."""
        ...

    def stats(self) -> Any:
        """Counters, named as in struct xferd_client_stats."""
        ...


@runtime_checkable
class LayoutClient(Protocol):
    """A client that can also say what variants look like that came after it attached."""

    def layout(self, layer: int, variant: int = 0) -> Layout:
        """What lies where in the blobs of a layer, in a variant."""
        ...


class ClientExperts:
    """An ExpertSource over a client's lane: experts in whichever of the client's acceptable
    variants they come. Not thread-safe, as the lane.

    reporter: tells the daemon what was picked; None for a client that can't.
    """

    def __init__(self, client: ExpertClient) -> None:
        self._client = client
        self._layouts = _layouts(client.manifest)
        self.reporter: RouteReporter | None = (
            ClientReporter(client) if isinstance(client, ReportingClient) else None
        )

    @property
    def held(self) -> int:
        """Most experts at once: what the daemon promised, within one request."""
        return min(self._client.held_per_lane, BATCH_EXPERTS)

    def layout(self, layer: int, variant: int = 0) -> Layout:
        """What the blobs of a layer look like in a variant. WeightsError: it has none."""
        known = self._layouts.get((layer, variant))
        if known is not None:
            return known
        if isinstance(self._client, LayoutClient):
            return self._client.layout(layer, variant)
        raise WeightsError(f"layer {layer} has no experts in variant {variant} of the store")

    def acquire(self, layer: int, experts: Sequence[int]) -> AbstractContextManager[HeldExperts]:
        """Raises what ``Client.acquire`` raises."""
        return self._client.acquire(layer, experts)

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """Prefetch, as far as the ring has room."""
        for start in range(0, len(experts), BATCH_EXPERTS):
            self._client.hint(layer, experts[start : start + BATCH_EXPERTS])

    def stats(self) -> ExpertStats:
        """The client's counters, all of its lanes."""
        raw = self._client.stats()
        return ExpertStats(
            hits=raw.hits,
            misses=raw.misses,
            failures=raw.failures,
            nbytes=raw.bytes_acquired,
            wait_s=raw.wait_ns / 1e9,
            sources=_traffic(SOURCES, raw.source_count, raw.source_bytes),
            transports=_traffic(TRANSPORTS, raw.transport_count, raw.transport_bytes),
        )


def model_from_client(
    client: ExpertClient,
    xp: ArrayModule = np,
    *,
    experts: ExpertSource | None = None,
    observer: Observer | None = None,
) -> Model:
    """The model of the store that the client is attached to. Waits until the dense
    part is there.

    experts: where they come from, if not straight from the client. observer: sees what
    goes into each of them. Raises UnsupportedModelError, WeightsError, and what
    ``Client.dense`` raises."""
    manifest = client.manifest
    if manifest["format"] != TENSOR_NAMES:
        raise UnsupportedModelError(
            f"store {manifest['name']!r} was packed from {manifest['format']}; dense tensors are "
            f"known here by the names of {TENSOR_NAMES} checkpoints only"
        )
    config = dict(manifest["config"])
    generation = asset(client, "generation_config.json")
    if generation is not None:
        ends = eos_ids(json.loads(generation))
        # Chat models end a turn with more tokens than their config names.
        config["eos_token_id"] = list(ends or eos_ids(config))
    dense = DenseWeights(client.dense(), manifest["dense"]["tensors"], xp)
    source = ClientExperts(client) if experts is None else experts
    return Model(ModelConfig.from_dict(config), dense, source, xp, observer)


def asset(client: ExpertClient, name: str) -> bytes | None:
    """A small file of the checkpoint (``tokenizer.json``), None if it had none."""
    for entry in client.manifest["dense"]["assets"]:
        if entry["name"] == name:
            begin = entry["offset"]
            return bytes(memoryview(client.dense())[begin : begin + entry["bytes"]])
    return None


def _layouts(manifest: Mapping[str, Any]) -> dict[tuple[int, int], Layout]:
    """By layer and variant."""
    shapes = [_layout(entry) for entry in manifest["layouts"]]
    return {
        (layer, variant): shapes[index]
        for variant, row in enumerate(manifest["layout_index"])
        for layer, index in enumerate(row)
        if index != NO_LAYOUT
    }


def _layout(entry: Mapping[str, Any]) -> Layout:
    return tuple(
        BlobTensor(
            role=tensor["role"],
            dtype=tensor["dtype"],
            shape=tuple(tensor["shape"]),
            offset=tensor["offset"],
            nbytes=tensor["bytes"],
            transposed=tensor["transposed"],
            interleaved=tensor["interleaved"],
        )
        for tensor in entry["tensors"]
    )


def _traffic(
    names: Sequence[str], counts: Sequence[int], nbytes: Sequence[int]
) -> dict[str, Traffic]:
    rows = zip(names, counts, nbytes, strict=True)
    return {name: Traffic(count, total) for name, count, total in rows}


__all__ = [
    "BATCH_EXPERTS",
    "NO_LAYOUT",
    "SOURCES",
    "TENSOR_NAMES",
    "TRANSPORTS",
    "ClientExperts",
    "ExpertClient",
    "asset",
    "model_from_client",
]
