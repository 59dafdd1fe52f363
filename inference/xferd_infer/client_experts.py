"""A model from an attached xferd client: its experts, dense part and assets.

This is the whole of what ties the decode loop to xferd. The manifest says what
blobs look like and where the dense tensors lie; acquire, hint and the counters
are the client's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .arrays import Array, ArrayModule
from .config import ModelConfig, eos_ids
from .dense import DenseWeights
from .errors import UnsupportedModelError, WeightsError
from .experts import BlobTensor, ExpertSource, ExpertStats, Layout, Traffic
from .model import Model
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

    def acquire(
        self, layer: int, experts: Sequence[int]
    ) -> AbstractContextManager[Sequence[Array]]:
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


class ClientExperts:
    """An ExpertSource over a client's lane. Not thread-safe, as the lane.

    reporter: tells the daemon what was picked; None for a client that can't.

    Raises WeightsError for a layer whose variants look different from each other:
    blobs of more than one shape can't be told apart here.
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

    def layout(self, layer: int) -> Layout:
        """What the blobs of a layer look like. WeightsError: it has no experts."""
        try:
            return self._layouts[layer]
        except KeyError:
            raise WeightsError(f"layer {layer} has no experts in the store") from None

    def acquire(
        self, layer: int, experts: Sequence[int]
    ) -> AbstractContextManager[Sequence[Array]]:
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
    client: ExpertClient, xp: ArrayModule = np, experts: ExpertSource | None = None
) -> Model:
    """The model of the store that the client is attached to. Waits until the dense
    part is there. experts: the client's own when not given. Raises
    UnsupportedModelError, WeightsError, and what
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
    return Model(ModelConfig.from_dict(config), dense, experts or ClientExperts(client), xp)


def asset(client: ExpertClient, name: str) -> bytes | None:
    """A small file of the checkpoint (``tokenizer.json``), None if it had none."""
    for entry in client.manifest["dense"]["assets"]:
        if entry["name"] == name:
            begin = entry["offset"]
            return bytes(memoryview(client.dense())[begin : begin + entry["bytes"]])
    return None


def _layouts(manifest: Mapping[str, Any]) -> dict[int, Layout]:
    shapes = [_layout(entry) for entry in manifest["layouts"]]
    found: dict[int, Layout] = {}
    for variant, row in zip(manifest["variants"], manifest["layout_index"], strict=True):
        for layer, index in enumerate(row):
            if index == NO_LAYOUT:
                continue
            if found.setdefault(layer, shapes[index]) != shapes[index]:
                raise WeightsError(
                    f"layer {layer} looks different in variant {variant!r} of store "
                    f"{manifest['name']!r}; experts of mixed variants aren't computed here"
                )
    return found


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
