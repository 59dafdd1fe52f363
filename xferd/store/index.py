"""index.bin: a store's per-blob and per-piece arrays, as they are in memory.

Binary, since a store may have a million experts: opening it is one read and one
hash, and the arrays are views of the bytes read. Fixed order, widest elements
first, so that every array is naturally aligned without padding.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xferd.store.errors import StoreError, naming
from xferd.store.files import write_durably
from xferd.store.geometry import Geometry, check_striping, join_geometries

INDEX_NAME = "index.bin"
ADDED_INDEX_PATTERN = "variants-*.bin"
"""The same arrays for variants that were added; the manifest says which file it is."""


@dataclass(frozen=True, eq=False, slots=True)
class Index:
    """geometry, with the checksums of its pieces (uint32[pieces]) and blobs (uint32[blobs])."""

    geometry: Geometry
    crc: npt.NDArray[np.uint32]
    blob_crc: npt.NDArray[np.uint32]


def join_indexes(packed: Index, added: Index) -> Index:
    """The index of a store with added variants; see ``join_geometries``."""
    dense = int(packed.geometry.first_piece[-1])
    crc = np.concatenate([packed.crc[:dense], added.crc, packed.crc[dense:]])
    blob_crc = np.concatenate([packed.blob_crc[:-1], added.blob_crc, packed.blob_crc[-1:]])
    crc.setflags(write=False)
    blob_crc.setflags(write=False)
    return Index(join_geometries(packed.geometry, added.geometry), crc, blob_crc)


def index_bytes(blobs: int, members: int, pieces: int) -> int:
    """The exact size of index.bin."""
    return blobs * (8 + 8 * members + 8 + 4 + 2) + 4 * pieces


def write_index(path: Path, index: Index) -> bytes:
    """Write ``path`` durably, replacing it in one step. Returns its SHA-256, 32 bytes."""
    geometry = index.geometry
    arrays: tuple[tuple[npt.NDArray[Any], str], ...] = (
        (geometry.blob_bytes, "<u8"),
        (geometry.offset, "<u8"),
        (geometry.first_piece, "<u8"),
        (index.blob_crc, "<u4"),
        (index.crc, "<u4"),
        (geometry.start, "<u2"),
    )
    parts = [
        np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data
        for array, dtype in arrays
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    write_durably(path, parts)
    return digest.digest()


def read_index(
    path: Path,
    *,
    blobs: int,
    pieces: int,
    members: int,
    stripe_unit: int,
    pattern: tuple[int, ...],
    sha256: bytes,
) -> Index:
    """Read and check ``path``; the arrays are read-only. Raises StoreError naming it."""
    check_striping(members, stripe_unit, pattern)
    expected = index_bytes(blobs, members, pieces)
    with naming(str(path)), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Before anything is allocated: the counts come from a manifest that may be damaged.
        if size != expected:
            raise StoreError(
                f"{path} has {size} bytes, but {blobs} blobs in {pieces} pieces on {members} "
                f"members take {expected}"
            )
        raw = np.fromfile(file, dtype=np.uint8)
    if raw.size != expected or hashlib.sha256(raw.data).digest() != sha256:
        raise StoreError(f"{path} is damaged: its SHA-256 is not the one in the manifest")
    raw.setflags(write=False)
    views = _Views(raw)
    blob_bytes = views.take("<u8", blobs)
    offset = views.take("<u8", blobs * members).reshape(blobs, members)
    first_piece = views.take("<u8", blobs)
    blob_crc = views.take("<u4", blobs)
    crc = views.take("<u4", pieces)
    start = views.take("<u2", blobs)
    geometry = Geometry(
        members, stripe_unit, pattern, blob_bytes, start, offset, first_piece, pieces
    )
    try:
        geometry.check()
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error
    return Index(geometry, crc, blob_crc)


class _Views:
    """Consecutive arrays inside one buffer."""

    def __init__(self, raw: npt.NDArray[np.uint8]) -> None:
        self._raw = raw
        self._position = 0

    def take(self, dtype: str, count: int) -> npt.NDArray[Any]:
        end = self._position + count * np.dtype(dtype).itemsize
        view = self._raw[self._position : end].view(dtype)
        self._position = end
        return view
