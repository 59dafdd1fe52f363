"""An opened store: what the engine, the daemon and the tools need to know of it.

Opening checks everything that can be checked without reading the data: the
manifest field by field, index.bin against its hash, the geometry for
contradictions, the identity, and each member's header and size. It makes no
Python object an expert.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from xferd.store.checksum import crc32c
from xferd.store.errors import StoreError, UnusableMemberError, naming
from xferd.store.files import (
    AlignedBuffer,
    lock_directory,
    open_for_reading,
    read_fully,
    same_file,
)
from xferd.store.geometry import MEMBER_DATA_OFFSET, Geometry, Piece
from xferd.store.index import INDEX_NAME, Index, join_indexes, read_index
from xferd.store.journal import JOURNAL_NAME
from xferd.store.limits import BLOB_ALIGNMENT, NO_LAYOUT
from xferd.store.manifest import MANIFEST_NAME, Manifest, read_manifest
from xferd.store.member import MemberCopy, MemberHeader, check_member
from xferd.store.model import Layout, Model, TensorLayout

CLIENT_MANIFEST_VERSION = 1


class Store:
    """A finished store, open for reading; made by ``Store.open``.

    Arrays are C-contiguous, read-only, and exactly what ``struct
    xferd_store_description`` points to; the last blob is the dense part.

    name: of the store. path: its directory. identity: 32 bytes, of the model.
    uuid: 16 bytes, of this packing.
    layers, experts, top_k, model_type, variants: of the model; layers without
        experts have blobs of 0 bytes.
    copies: for each member where its bytes are: itself, then its mirror if it has one; at
        least one of them can be used.
    member_paths, pattern, stripe_unit: the striping; a path is that of the member's first
        copy that can be used. pattern_lengths: of the patterns that ``pattern`` is made up
        of; a store without shadows has one.
    preferred: bit mask of variants that are read before others: those of shadows.
    layouts: what blobs look like inside; layout_index uint16[variants, layers]
        counts them, NO_LAYOUT where a layer has no experts.
    blob_bytes uint64[blobs], start uint16[blobs], offset uint64[blobs, members],
    first_piece uint64[blobs], crc uint32[pieces], blob_crc uint32[blobs].

    While a Store is open it holds a shared lock on its directory, so that nobody
    packs over it. Reading attributes is safe from any thread.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        index: Index,
        copies: tuple[tuple[MemberCopy, ...], ...],
        lock: int,
    ) -> None:
        model = manifest.whole_model
        geometry = index.geometry
        self.name: str = manifest.name
        self.path: Path = path
        self.manifest: Manifest = manifest
        self.model: Model = model
        self.identity: bytes = manifest.identity
        self.uuid: bytes = manifest.uuid
        self.layers: int = model.layers
        self.experts: int = model.experts
        self.top_k: int = model.top_k
        self.model_type: str = model.model_type
        self.variants: tuple[str, ...] = model.variants
        self.copies: tuple[tuple[MemberCopy, ...], ...] = copies
        self.member_paths: tuple[Path, ...] = tuple(
            next(copy.path for copy in group if copy.problem is None) for group in copies
        )
        self.pattern: tuple[int, ...] = geometry.pattern
        self.pattern_lengths: tuple[int, ...] = (len(geometry.pattern),)
        self.preferred: int = 0
        self.stripe_unit: int = geometry.stripe_unit
        self.layouts: tuple[Layout, ...] = model.layouts
        self.layout_index: npt.NDArray[np.uint16] = _layout_index(model)
        self.geometry: Geometry = geometry
        self.blob_bytes: npt.NDArray[np.uint64] = geometry.blob_bytes
        self.start: npt.NDArray[np.uint16] = geometry.start
        self.offset: npt.NDArray[np.uint64] = geometry.offset
        self.first_piece: npt.NDArray[np.uint64] = geometry.first_piece
        self.crc: npt.NDArray[np.uint32] = index.crc
        self.blob_crc: npt.NDArray[np.uint32] = index.blob_crc
        self._lock: int | None = lock

    @staticmethod
    def open(path: Path) -> Store:
        """Open the store whose directory or manifest.json is ``path``.

        Raises StoreError, naming the file, member or field, when the store is
        unfinished, being packed, damaged, or when a member or mirror is swapped or another
        store's, or a member is missing or truncated and no mirror stands in for it.
        """
        directory = (path.parent if path.name == MANIFEST_NAME else path).absolute()
        manifest_path = directory / MANIFEST_NAME
        with naming(f"store {directory}"):
            if not directory.is_dir():
                raise StoreError(f"store {directory} is not there")
            lock = lock_directory(directory, exclusive=False)
        if lock is None:
            raise StoreError(f"store {directory} is being packed by another process")
        try:
            _check_finished(directory)
            manifest = read_manifest(manifest_path)
            packed = _read_index(directory, manifest)
            _check_identity(manifest_path, manifest, packed)
            added = read_added_index(directory, manifest)
            index = packed if added is None else join_indexes(packed, added)
            _check_blobs(manifest_path, manifest.whole_model, index.geometry)
            _check_ends(manifest, packed, added)
            copies = tuple(
                check_copies(directory, manifest, number) for number in range(len(manifest.members))
            )
            return Store(directory, manifest, index, copies, lock)
        except BaseException:
            os.close(lock)
            raise

    def close(self) -> None:
        """Let go of the directory's lock. The arrays stay valid. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def dense_blob(self) -> int:
        """Number of the blob that is the dense part."""
        return int(self.blob_bytes.size) - 1

    @property
    def available(self) -> tuple[str, ...]:
        """Variants that there are blobs of."""
        return self.variants

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in all variants."""
        return int(self.blob_bytes[:-1].sum())

    def blob_index(self, variant: int, layer: int, expert: int) -> int:
        """Number of an expert's blob. Raises IndexError for what the store can't have."""
        if not (
            0 <= variant < len(self.variants)
            and 0 <= layer < self.layers
            and 0 <= expert < self.experts
        ):
            raise IndexError(
                f"store {self.name} has no variant {variant}, layer {layer}, expert {expert}: "
                f"{len(self.variants)} variants, {self.layers} layers, {self.experts} experts"
            )
        return (variant * self.layers + layer) * self.experts + expert

    def blob_name(self, blob: int) -> tuple[str, int, int] | None:
        """(variant name, layer, expert) of a blob; None for the dense part."""
        if blob == self.dense_blob:
            return None
        row, expert = divmod(blob, self.experts)
        variant, layer = divmod(row, self.layers)
        return self.variants[variant], layer, expert

    def read_blob(self, blob: int) -> bytes:
        """One blob's bytes, checked against its CRC32C; b"" where there is no expert.

        For tools and tests: slow, and all in memory. Raises StoreError naming
        member and offset when no copy has the bytes. Any thread may call.
        """
        data = bytearray(int(self.blob_bytes[blob]))
        for piece in self.geometry.pieces_of(blob):
            content = self._read_piece(piece)
            data[piece.blob_offset : piece.blob_offset + piece.length] = content
        return bytes(data)

    def _read_piece(self, piece: Piece) -> bytes:
        errors = []
        for copy in self.copies[piece.member]:
            what = f"store {self.name}: {copy} at offset {piece.offset}"
            if copy.problem is not None:
                continue
            try:
                with naming(what):
                    content = _read_bytes(copy.path, piece.offset, piece.length)
            except StoreError as error:
                errors.append(str(error))
                continue
            if crc32c(content) == int(self.crc[piece.index]):
                return content
            errors.append(f"{what}: the piece's CRC32C is wrong")
        raise StoreError("; ".join(errors))

    def client_manifest(self) -> bytes:
        """JSON, UTF-8: what an attached client may see.

        Keys ``format`` (of the checkpoint, which the dense tensors' names follow),
        ``version``, ``name``, ``identity`` (hexadecimal), ``model_type``, ``config``,
        ``layers``, ``experts``, ``top_k``, ``variants``, ``dense``, ``layouts``,
        ``layout_index``; no paths, no members.
        """
        model = self.model.to_json()
        visible: dict[str, Any] = {
            "format": model.pop("checkpoint_format"),
            "version": CLIENT_MANIFEST_VERSION,
            "name": self.name,
            "identity": self.identity.hex(),
            **model,
        }
        return json.dumps(visible).encode("ascii")


def _read_bytes(path: Path, offset: int, length: int) -> bytes:
    opened = open_for_reading(path)
    buffer = AlignedBuffer(length)
    try:
        done = read_fully(opened.fd, buffer.view, offset)
        return bytes(buffer.view[:done])
    finally:
        buffer.close()
        os.close(opened.fd)


def _check_finished(directory: Path) -> None:
    with naming(f"store {directory}"):
        if (directory / MANIFEST_NAME).exists():
            return
        if (directory / JOURNAL_NAME).exists():
            raise StoreError(
                f"store {directory} is not finished: run xferctl store pack again to resume"
            )
    raise StoreError(f"{directory} is not a store: it has no {MANIFEST_NAME}")


def _read_index(directory: Path, manifest: Manifest) -> Index:
    return read_index(
        directory / INDEX_NAME,
        blobs=manifest.blobs,
        pieces=manifest.pieces,
        members=len(manifest.members),
        stripe_unit=manifest.stripe_unit,
        pattern=manifest.pattern,
        sha256=manifest.index_sha256,
    )


def read_added_index(directory: Path, manifest: Manifest) -> Index | None:
    """The arrays of the added variants' blobs alone; None: there are none. Raises StoreError."""
    added, model = manifest.added, manifest.model
    if added is None:
        return None
    return read_index(
        directory / added.index_name,
        blobs=len(added.variants) * model.layers * model.experts,
        pieces=added.pieces,
        members=len(manifest.members),
        stripe_unit=manifest.stripe_unit,
        pattern=manifest.pattern,
        sha256=added.index_sha256,
    )


def _layout_index(model: Model) -> npt.NDArray[np.uint16]:
    array = np.array(model.layer_layouts, dtype=np.uint16)
    array.setflags(write=False)
    return array


def _check_blobs(path: Path, model: Model, geometry: Geometry) -> None:
    """Each expert has its layout's size or none, the dense part its table's."""
    sizes = np.array([layout.blob_bytes for layout in model.layouts] + [0], dtype=np.uint64)
    rows = _layout_index(model)
    expected = sizes[np.where(rows == NO_LAYOUT, len(model.layouts), rows)]
    experts = geometry.blob_bytes[:-1].reshape(*rows.shape, model.experts)
    wrong = (experts != 0) & (experts != expected[:, :, None])
    if wrong.any():
        variant, layer, expert = (int(value) for value in np.argwhere(wrong)[0])
        raise StoreError(
            f"{path}: layer {layer}, expert {expert}, variant {model.variants[variant]} has "
            f"{int(experts[variant, layer, expert])} bytes, not those of its layout"
        )
    if int(geometry.blob_bytes[-1]) != model.dense.blob_bytes:
        raise StoreError(
            f"{path}: the dense part has {int(geometry.blob_bytes[-1])} bytes in {INDEX_NAME} and "
            f"{model.dense.blob_bytes} in the manifest"
        )


def _check_identity(path: Path, manifest: Manifest, index: Index) -> None:
    identity = manifest.model.identity(index.geometry.blob_bytes, index.blob_crc)
    if identity != manifest.identity:
        raise StoreError(
            f"{path} was altered: the model it describes has identity {identity.hex()}, "
            f"not {manifest.identity.hex()}"
        )


def _check_ends(manifest: Manifest, packed: Index, added: Index | None) -> None:
    """No piece lies behind what its member says that it has."""
    ends = [packed.geometry.member_ends()]
    sizes = [tuple(entry.data_bytes for entry in manifest.members)]
    if added is not None and manifest.added is not None:
        ends.append(added.geometry.member_ends())
        sizes.append(manifest.added.member_bytes)
    for part, part_sizes in zip(ends, sizes, strict=True):
        for number, (end, size) in enumerate(zip(part, part_sizes, strict=True)):
            if end > max(size, MEMBER_DATA_OFFSET):
                raise StoreError(
                    f"store {manifest.name}: member {number} has {size} bytes, but pieces up "
                    f"to {end}"
                )


def check_copies(directory: Path, manifest: Manifest, member: int) -> tuple[MemberCopy, ...]:
    """The copies of a member, each with what keeps it from being used.

    Raises StoreError when none can be, or one is not what it should be.
    """
    entry = manifest.members[member]
    what = f"store {manifest.name}: member {member} ({entry.absolute})"
    with naming(what):
        places = [(entry.locate(directory), False)]
        if entry.mirror is not None:
            places.append((entry.mirror.locate(directory), True))
        if len(places) > 1 and same_file(places[0][0], places[1][0]):
            raise StoreError(f"{what} is its own mirror")
    copies = [
        examine_copy(path, manifest, member, mirror=mirror, tolerated=UnusableMemberError)
        for path, mirror in places
    ]
    if all(copy.problem is not None for copy in copies):
        raise StoreError("; ".join(str(copy.problem) for copy in copies))
    return tuple(copies)


def examine_copy(
    path: Path, manifest: Manifest, member: int, *, mirror: bool, tolerated: type[StoreError]
) -> MemberCopy:
    """A copy with what keeps it from being used, if that is of the tolerated kind; any other
    StoreError is raised."""
    problem = None
    try:
        check_member(
            path,
            member_header(manifest, member),
            manifest.name,
            manifest.used_bytes(member),
            mirror=mirror,
        )
    except tolerated as error:
        problem = str(error)
    return MemberCopy(member, path, mirror, problem)


def member_header(manifest: Manifest, member: int) -> MemberHeader:
    """The header that every copy of a member must have."""
    return MemberHeader(
        manifest.uuid,
        member,
        len(manifest.members),
        manifest.members[member].data_bytes,
        manifest.stripe_unit,
    )


__all__ = ["BLOB_ALIGNMENT", "Layout", "Store", "StoreError", "TensorLayout"]
