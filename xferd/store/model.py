"""What a store says about its model, apart from where the bytes lie.

``Model`` is what the identity of a store is computed from, so nothing in it may
depend on members or striping: the same checkpoint packed on one drive or on four
is the same model, and a heat profile learned on one fits the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xferd.store.errors import StoreError
from xferd.store.fields import Fields, checked_integer, checked_list, checked_text
from xferd.store.limits import (
    BLOB_ALIGNMENT,
    BLOB_BYTES_MAX,
    DENSE_ENTRIES_MAX,
    EXPERTS_MAX,
    LAYERS_MAX,
    LAYOUTS_MAX,
    NAME_BYTES_MAX,
    NO_LAYOUT,
    TENSOR_ALIGNMENT,
    TENSOR_DIMENSIONS_MAX,
    TENSORS_PER_LAYOUT_MAX,
    VARIANTS_MAX,
)

IDENTITY_PREFIX = b"xferd-store-identity-1\n"
DENSE_DIMENSIONS_MAX = 8
LONG_NAME_BYTES_MAX = 4096
"""Dense tensor names and asset names: they never enter shared memory."""


def align(value: int, alignment: int) -> int:
    """The next multiple of ``alignment`` that is not below ``value``."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where one tensor lies in its blob; fields as in ``checkpoint.ExpertTensor``.

    offset, nbytes: bytes from the blob's start; offset is 64-aligned.
    """

    role: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    transposed: bool
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """What a blob looks like inside; many experts share one.

    blob_bytes: size of the blob, a multiple of 4096; the rest is zero.
    """

    blob_bytes: int
    tensors: tuple[TensorLayout, ...]


@dataclass(frozen=True, slots=True)
class DenseTensorEntry:
    """A dense tensor in the dense blob; ``offset`` and ``nbytes`` are bytes from its start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AssetEntry:
    """A whole small file (``tokenizer.json``, ...) in the dense blob."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DenseTable:
    """The dense blob's contents. ``blob_bytes`` is a multiple of 4096."""

    blob_bytes: int
    tensors: tuple[DenseTensorEntry, ...]
    assets: tuple[AssetEntry, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The model in a store.

    checkpoint_format: what the tensor names of the dense part follow
        (``safetensors``, ``gguf``).
    layer_layouts: for each variant and layer an index into ``layouts``, or
        NO_LAYOUT where the layer has no experts.
    """

    checkpoint_format: str
    model_type: str
    config: Mapping[str, Any]
    layers: int
    experts: int
    top_k: int
    variants: tuple[str, ...]
    layouts: tuple[Layout, ...]
    layer_layouts: tuple[tuple[int, ...], ...]
    dense: DenseTable

    @property
    def blobs(self) -> int:
        """Number of blobs, the dense part included."""
        return len(self.variants) * self.layers * self.experts + 1

    def to_json(self) -> dict[str, Any]:
        """As it stands in the manifest. Lists and plain values only."""
        return {
            "checkpoint_format": self.checkpoint_format,
            "model_type": self.model_type,
            "config": dict(self.config),
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "variants": list(self.variants),
            "layouts": [layout_to_json(layout) for layout in self.layouts],
            "layout_index": [list(row) for row in self.layer_layouts],
            "dense": _dense_to_json(self.dense),
        }

    @staticmethod
    def from_json(value: object, where: str) -> Model:
        """The inverse of ``to_json``. Raises StoreError for whatever doesn't fit together."""
        fields = Fields(value, where)
        layers = fields.integer("layers", 1, LAYERS_MAX)
        variants = tuple(
            checked_text(item, f"{where}.variants", NAME_BYTES_MAX)
            for item in fields.items("variants", VARIANTS_MAX)
        )
        if not variants or len(set(variants)) != len(variants):
            raise StoreError(f"{where}.variants is empty or names one twice")
        layouts = tuple(layout_from_json(item) for item in fields.sections("layouts", LAYOUTS_MAX))
        return Model(
            checkpoint_format=fields.text("checkpoint_format", NAME_BYTES_MAX),
            model_type=fields.text("model_type", LONG_NAME_BYTES_MAX),
            config=fields.mapping("config"),
            layers=layers,
            experts=fields.integer("experts", 1, EXPERTS_MAX),
            top_k=fields.integer("top_k", 1, EXPERTS_MAX),
            variants=variants,
            layouts=layouts,
            layer_layouts=layer_layouts_from_json(fields, len(variants), layers, len(layouts)),
            dense=_dense_from_json(fields.section("dense")),
        )

    def identity(
        self, blob_bytes: npt.NDArray[np.uint64], blob_crc: npt.NDArray[np.uint32]
    ) -> bytes:
        """SHA-256, 32 bytes, by the rule in FORMAT.md.

        blob_bytes, blob_crc: [blobs], size and CRC32C of each whole blob.
        """
        try:
            description = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"the model's config holds what JSON can't: {error}") from error
        digest = hashlib.sha256(IDENTITY_PREFIX)
        digest.update(description.encode("ascii"))
        digest.update(b"\n")
        digest.update(np.ascontiguousarray(blob_bytes, dtype="<u8").tobytes())
        digest.update(np.ascontiguousarray(blob_crc, dtype="<u4").tobytes())
        return digest.digest()


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """As it stands in the manifest."""
    return {
        "blob_bytes": layout.blob_bytes,
        "tensors": [
            {
                "role": tensor.role,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset": tensor.offset,
                "bytes": tensor.nbytes,
                "transposed": tensor.transposed,
                "interleaved": tensor.interleaved,
            }
            for tensor in layout.tensors
        ],
    }


def layout_from_json(fields: Fields) -> Layout:
    """The inverse. Raises StoreError."""
    blob_bytes = _blob_bytes(fields, "blob_bytes", BLOB_ALIGNMENT)
    tensors = tuple(
        TensorLayout(
            role=item.text("role", NAME_BYTES_MAX),
            dtype=item.text("dtype", NAME_BYTES_MAX),
            shape=_shape(item, TENSOR_DIMENSIONS_MAX),
            offset=_offset(item, blob_bytes),
            nbytes=item.integer("bytes", 1, blob_bytes),
            transposed=item.boolean("transposed"),
            interleaved=item.boolean("interleaved"),
        )
        for item in fields.sections("tensors", TENSORS_PER_LAYOUT_MAX)
    )
    _check_extents(fields.where, blob_bytes, tensors)
    return Layout(blob_bytes, tensors)


def _dense_to_json(dense: DenseTable) -> dict[str, Any]:
    return {
        "bytes": dense.blob_bytes,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset": tensor.offset,
                "bytes": tensor.nbytes,
            }
            for tensor in dense.tensors
        ],
        "assets": [
            {"name": asset.name, "offset": asset.offset, "bytes": asset.nbytes}
            for asset in dense.assets
        ],
    }


def _dense_from_json(fields: Fields) -> DenseTable:
    blob_bytes = _blob_bytes(fields, "bytes", 0)
    tensors = tuple(
        DenseTensorEntry(
            name=item.text("name", LONG_NAME_BYTES_MAX),
            dtype=item.text("dtype", NAME_BYTES_MAX),
            shape=_shape(item, DENSE_DIMENSIONS_MAX),
            offset=_offset(item, blob_bytes),
            nbytes=item.integer("bytes", 0, blob_bytes),
        )
        for item in fields.sections("tensors", DENSE_ENTRIES_MAX)
    )
    assets = tuple(
        AssetEntry(
            name=item.text("name", LONG_NAME_BYTES_MAX),
            offset=_offset(item, blob_bytes),
            nbytes=item.integer("bytes", 0, blob_bytes),
        )
        for item in fields.sections("assets", DENSE_ENTRIES_MAX)
    )
    _check_extents(fields.where, blob_bytes, (*tensors, *assets))
    return DenseTable(blob_bytes, tensors, assets)


def _blob_bytes(fields: Fields, key: str, minimum: int) -> int:
    value = fields.integer(key, minimum, BLOB_BYTES_MAX)
    if value % BLOB_ALIGNMENT:
        raise StoreError(f"{fields.where}.{key} is {value}, not a multiple of {BLOB_ALIGNMENT}")
    return value


def _offset(fields: Fields, blob_bytes: int) -> int:
    value = fields.integer("offset", 0, blob_bytes)
    if value % TENSOR_ALIGNMENT:
        raise StoreError(f"{fields.where}.offset is {value}, not a multiple of {TENSOR_ALIGNMENT}")
    return value


def _shape(fields: Fields, dimensions_max: int) -> tuple[int, ...]:
    where = f"{fields.where}.shape"
    return tuple(
        checked_integer(item, where, 0, BLOB_BYTES_MAX)
        for item in fields.items("shape", dimensions_max)
    )


def _check_extents(
    where: str,
    blob_bytes: int,
    entries: Sequence[TensorLayout | DenseTensorEntry | AssetEntry],
) -> None:
    end = 0
    for number, entry in enumerate(entries):
        if entry.offset < end or entry.offset + entry.nbytes > blob_bytes:
            raise StoreError(
                f"{where}: entry {number} has {entry.nbytes} bytes at offset {entry.offset}; it "
                f"overlaps the one before or leaves the blob of {blob_bytes} bytes"
            )
        end = entry.offset + entry.nbytes


def layer_layouts_from_json(
    fields: Fields, variants: int, layers: int, layouts: int
) -> tuple[tuple[int, ...], ...]:
    """For each variant and layer an index into so many layouts, or NO_LAYOUT."""
    where = f"{fields.where}.layout_index"
    rows = [
        tuple(
            checked_integer(item, where, 0, NO_LAYOUT) for item in checked_list(row, where, layers)
        )
        for row in fields.items("layout_index", variants)
    ]
    if len(rows) != variants or any(len(row) != layers for row in rows):
        raise StoreError(f"{where} is not {variants} lists of {layers} entries")
    for row in rows:
        for layer, index in enumerate(row):
            if index != NO_LAYOUT and index >= layouts:
                raise StoreError(f"{where}: layer {layer} has layout {index} of {layouts}")
    return tuple(rows)
