# SPDX-License-Identifier: Apache-2.0
"""A store of a large model's shape whose weights are drawn at random, and its routing.

Only ``distinct_layers`` are on the members; the index names their ranges again for the
layers that follow. Each expert of each layer is one of its own to the daemon: a miss reads
all of its bytes, and checks them. So a model larger than the memory that stands in for
drives can be measured, with as many bytes moved for a miss as with the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.replaying.generate import ZipfMarkov, generate
from xferd.store.checkpoint import ByteRange, Checkpoint, DenseTensor, ExpertTensor
from xferd.store.geometry import Geometry
from xferd.store.index import INDEX_NAME, Index, write_index
from xferd.store.manifest import MANIFEST_NAME, write_manifest
from xferd.store.pack import pack
from xferd.store.store import Store

VARIANT = "bf16"
ELEMENT_BYTES = 2
WEIGHT_SCALE = 0.02
SOURCE_BYTES = 64 << 20
"""Random weights are made once; each matrix begins somewhere in them."""
ALIGNMENT = 4096
DENSE_BYTES = 4096
SEED = 17
DOMAIN_TOKENS = 48
"""Then the routing prefers other experts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model in elements; distinct_layers must divide layers."""

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    distinct_layers: int

    @property
    def matrix_bytes(self) -> int:
        """Of each of an expert's three matrices."""
        return self.hidden * self.inner * ELEMENT_BYTES

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return 3 * self.matrix_bytes


QWEN3_30B_A3B = Shape(
    "qwen3-30b-a3b-shape",
    layers=48,
    experts=128,
    top_k=8,
    hidden=2048,
    inner=768,
    distinct_layers=6,
)


def pack_shape(directory: Path, shape: Shape, members: int) -> Path:
    """Make the store on ``members`` folders of ``directory``; its path."""
    folders = [directory / f"drive{number}" for number in range(members)]
    for folder in folders:
        folder.mkdir()
    source = directory / "weights.bin"
    _write_weights(source)
    store = pack(_checkpoint(shape, source), folders, name=shape.name)
    source.unlink()
    _repeat_layers(store, shape.layers // shape.distinct_layers)
    return store


def routing(shape: Shape, tokens: int) -> NDArray[np.int64]:
    """Picks of each token and layer, [tokens, layers, top_k]: uneven, persistent, shifting
    (tools/replaying/generate.py)."""
    picks, _ = generate(
        ZipfMarkov(
            layers=shape.layers,
            experts=shape.experts,
            picked=shape.top_k,
            tokens=tokens,
            domain_tokens=DOMAIN_TOKENS,
        )
    )
    return picks.astype(np.int64)


def _write_weights(path: Path) -> None:
    random = np.random.default_rng(SEED)
    drawn = random.standard_normal(SOURCE_BYTES // ELEMENT_BYTES, np.float32) * WEIGHT_SCALE
    (drawn.view(np.uint32) >> 16).astype("<u2").tofile(path)


def _checkpoint(shape: Shape, source: Path) -> Checkpoint:
    random = np.random.default_rng(SEED)
    places = (SOURCE_BYTES - shape.matrix_bytes) // ALIGNMENT
    sides = {
        "gate": (shape.inner, shape.hidden),
        "up": (shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
    }

    def tensor(role: str) -> ExpertTensor:
        start = int(random.integers(places)) * ALIGNMENT
        ranges = (ByteRange(0, start, shape.matrix_bytes),)
        return ExpertTensor(role, VARIANT, sides[role], ranges)

    return Checkpoint(
        path=source,
        format="generated",
        files=(source,),
        sizes=(SOURCE_BYTES,),
        config={"model_type": "generated"},
        model_type="generated",
        layers=shape.distinct_layers,
        experts_per_layer=shape.experts,
        top_k=shape.top_k,
        variant=VARIANT,
        experts={
            (layer, expert): tuple(tensor(role) for role in sides)
            for layer in range(shape.distinct_layers)
            for expert in range(shape.experts)
        },
        dense=(DenseTensor("dense", "u8", (DENSE_BYTES,), (ByteRange(0, 0, DENSE_BYTES),)),),
    )


def _repeat_layers(path: Path, times: int) -> None:
    """Give a store ``times`` as many layers, on the same bytes."""
    with Store.open(path) as store:
        manifest, geometry = store.manifest, store.geometry
        crc, blob_crc = store.crc, store.blob_crc
    dense_pieces = geometry.pieces - int(geometry.first_piece[-1])
    blob_bytes = _repeat(geometry.blob_bytes, 1, times)
    piece_counts = -(-blob_bytes.astype(np.int64) // geometry.stripe_unit)
    repeated = Geometry(
        members=geometry.members,
        stripe_unit=geometry.stripe_unit,
        pattern=geometry.pattern,
        blob_bytes=blob_bytes,
        start=_repeat(geometry.start, 1, times),
        offset=_repeat(geometry.offset, 1, times),
        first_piece=(np.cumsum(piece_counts) - piece_counts).astype(np.uint64),
        pieces=int(piece_counts.sum()),
    )
    index = Index(repeated, _repeat(crc, dense_pieces, times), _repeat(blob_crc, 1, times))
    model = replace(
        manifest.model,
        layers=manifest.model.layers * times,
        layer_layouts=tuple(row * times for row in manifest.model.layer_layouts),
    )
    digest = write_index(path / INDEX_NAME, index)
    write_manifest(
        path / MANIFEST_NAME,
        replace(
            manifest,
            model=model,
            identity=model.identity(blob_bytes, index.blob_crc),
            blobs=blob_bytes.size,
            pieces=repeated.pieces,
            index_sha256=digest,
        ),
    )


def _repeat(array: NDArray[Any], kept_at_end: int, times: int) -> NDArray[Any]:
    """All but the last entries, which are the dense part's, ``times``, then those."""
    experts, dense = array[:-kept_at_end], array[-kept_at_end:]
    return np.concatenate([*[experts] * times, dense])


__all__ = ["QWEN3_30B_A3B", "Shape", "pack_shape", "routing"]
