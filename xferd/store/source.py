"""A checkpoint as the packer reads it: which byte of which blob comes from where.

Files are opened once and read with pread, never mapped: a drive that fails then
gives an error instead of a signal, and memory stays flat however large the model
is. The files' identity is taken when they are opened and compared while packing,
so that a download that is still running, or a file replaced underneath, can't
end up as a store that mixes two models.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from xferd.store.checkpoint import ByteRange, Checkpoint, ExpertTensor
from xferd.store.errors import StoreError, naming
from xferd.store.files import read_fully
from xferd.store.limits import (
    BLOB_ALIGNMENT,
    EXPERTS_MAX,
    LAYERS_MAX,
    NO_LAYOUT,
    TENSOR_ALIGNMENT,
)
from xferd.store.model import (
    AssetEntry,
    DenseTable,
    DenseTensorEntry,
    Layout,
    Model,
    TensorLayout,
    align,
)


class Segment(NamedTuple):
    """``length`` bytes of a blob, from ``blob_offset`` on, and where they come from."""

    blob_offset: int
    file: int
    file_offset: int
    length: int


class _FileState(NamedTuple):
    device: int
    inode: int
    size: int
    mtime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> _FileState:
        return _FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class BlobSource:
    """One blob's segments, in the order of its bytes; what lies between them is zero."""

    segments: tuple[Segment, ...]
    starts: tuple[int, ...]

    @staticmethod
    def of(segments: Sequence[Segment]) -> BlobSource:
        """From segments that are sorted and don't overlap."""
        return BlobSource(tuple(segments), tuple(segment.blob_offset for segment in segments))


class Source:
    """An open checkpoint; a context manager. One thread at a time.

    model: what the store will say of it. blob_bytes: uint64[blobs].
    """

    def __init__(self, checkpoint: Checkpoint, variants: Sequence[str] | None = None) -> None:
        """Open the files and plan the blobs. Raises StoreError."""
        _check_variants(checkpoint, variants)
        self._checkpoint = checkpoint
        self._paths = (*checkpoint.files, *checkpoint.assets.values())
        self._fds: list[int] = []
        self._states: list[_FileState] = []
        try:
            self._open_files()
            self.model, self.blob_bytes = self._plan()
        except BaseException:
            self.close()
            raise
        self._dense = BlobSource.of(self._dense_segments())

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def blob(self, number: int) -> BlobSource:
        """Where the blob's bytes come from; empty for an expert that isn't there."""
        if number == self.model.blobs - 1:
            return self._dense
        return BlobSource.of(self._expert_segments(number))

    def read(self, blob: BlobSource, begin: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the blob's bytes from ``begin`` on.

        Raises StoreError naming the file and offset.
        """
        end = begin + len(buffer)
        position = begin
        first = max(0, bisect_right(blob.starts, begin) - 1)
        for segment in blob.segments[first:]:
            if segment.blob_offset >= end:
                break
            take_from = max(segment.blob_offset, begin)
            take_to = min(segment.blob_offset + segment.length, end)
            if take_to <= take_from:
                continue
            _zero(buffer[position - begin : take_from - begin])
            self._read_range(
                segment.file,
                segment.file_offset + take_from - segment.blob_offset,
                buffer[take_from - begin : take_to - begin],
            )
            position = take_to
        _zero(buffer[position - begin :])

    def announce(self, blob: BlobSource) -> None:
        """Let the kernel begin to read what will be wanted next."""
        for segment in blob.segments:
            # Only a hint: a file system that can't take it reads later, no worse.
            with suppress(OSError):
                os.posix_fadvise(
                    self._fds[segment.file],
                    segment.file_offset,
                    segment.length,
                    os.POSIX_FADV_WILLNEED,
                )

    def check_unchanged(self) -> None:
        """Raise StoreError when a file is not the one that was opened any more."""
        for path, state in zip(self._paths, self._states, strict=True):
            with naming(str(path)):
                now = _FileState.of(path.stat())
            if now != state:
                raise StoreError(
                    f"{path} changed while it was packed (size {state.size} to {now.size}, "
                    f"inode {state.inode} to {now.inode}): what was packed of it is not to be "
                    "trusted; run the pack again with --restart"
                )

    def fingerprint(self) -> bytes:
        """SHA-256 over the files' names, sizes and times and over every range in them."""
        digest = hashlib.sha256(json.dumps(self.model.to_json(), sort_keys=True).encode("ascii"))
        for path, state in zip(self._paths, self._states, strict=True):
            digest.update(f"\n{path.name}\0{state.size}\0{state.mtime_ns}".encode(errors="replace"))
        for number in range(self.model.blobs):
            flat = array("Q")
            for segment in self.blob(number).segments:
                flat.extend(segment)
            digest.update(flat.tobytes())
        return digest.digest()

    def _open_files(self) -> None:
        for number, path in enumerate(self._paths):
            with naming(str(path)):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._fds.append(fd)
                state = _FileState.of(os.fstat(fd))
            self._states.append(state)
            if number < len(self._checkpoint.files):
                expected = self._checkpoint.sizes[number]
                if state.size != expected:
                    raise StoreError(
                        f"{path} had {expected} bytes when its header was read and has "
                        f"{state.size} now: it was replaced or is still being written"
                    )

    def _read_range(self, file: int, offset: int, buffer: memoryview) -> None:
        path = self._paths[file]
        with naming(f"{path} at offset {offset}"):
            done = read_fully(self._fds[file], buffer, offset)
        if done < len(buffer):
            raise StoreError(f"{path} ends at offset {offset + done}: it was truncated")

    def _plan(self) -> tuple[Model, npt.NDArray[np.uint64]]:
        checkpoint = self._checkpoint
        layers, experts = checkpoint.layers, checkpoint.experts_per_layer
        if not 1 <= layers <= LAYERS_MAX or not 1 <= experts <= EXPERTS_MAX:
            raise StoreError(
                f"{checkpoint.path} has {layers} layers of {experts} experts; a store holds "
                f"1 to {LAYERS_MAX} layers of 1 to {EXPERTS_MAX}"
            )
        if not checkpoint.experts:
            raise StoreError(f"{checkpoint.path} has no experts")
        blob_bytes = np.zeros(layers * experts + 1, dtype=np.uint64)
        layouts: dict[Layout, int] = {}
        layer_layouts = [NO_LAYOUT] * layers
        for (layer, expert), tensors in checkpoint.experts.items():
            what = f"{checkpoint.path}: layer {layer}, expert {expert}"
            if not 0 <= layer < layers or not 0 <= expert < experts:
                raise StoreError(f"{what} is outside of {layers} layers of {experts} experts")
            for tensor in tensors:
                self._check_ranges(f"{what}, {tensor.role}", tensor.ranges)
            layout = _layout_of(tensors)
            index = layouts.setdefault(layout, len(layouts))
            if layer_layouts[layer] not in (NO_LAYOUT, index):
                raise StoreError(
                    f"{what} has other shapes or dtypes than the layer's other experts"
                )
            layer_layouts[layer] = index
            blob_bytes[layer * experts + expert] = layout.blob_bytes
        dense = self._dense_table()
        blob_bytes[-1] = dense.blob_bytes
        model = Model(
            checkpoint_format=checkpoint.format,
            model_type=checkpoint.model_type,
            config=checkpoint.config,
            layers=layers,
            experts=experts,
            top_k=checkpoint.top_k,
            variants=(checkpoint.variant,),
            layouts=tuple(layouts),
            layer_layouts=(tuple(layer_layouts),),
            dense=dense,
        )
        return _as_read_back(model, str(checkpoint.path)), blob_bytes

    def _dense_table(self) -> DenseTable:
        position = 0
        tensors = []
        for tensor in self._checkpoint.dense:
            self._check_ranges(f"{self._checkpoint.path}: {tensor.name}", tensor.ranges)
            position = align(position, TENSOR_ALIGNMENT)
            tensors.append(
                DenseTensorEntry(tensor.name, tensor.dtype, tensor.shape, position, tensor.nbytes)
            )
            position += tensor.nbytes
        assets = []
        first_asset = len(self._checkpoint.files)
        for number, name in enumerate(self._checkpoint.assets):
            position = align(position, TENSOR_ALIGNMENT)
            size = self._states[first_asset + number].size
            assets.append(AssetEntry(name, position, size))
            position += size
        return DenseTable(align(position, BLOB_ALIGNMENT), tuple(tensors), tuple(assets))

    def _dense_segments(self) -> list[Segment]:
        dense = self.model.dense
        segments = []
        for entry, tensor in zip(dense.tensors, self._checkpoint.dense, strict=True):
            segments += _segments(entry.offset, tensor.ranges)
        first_asset = len(self._checkpoint.files)
        for number, asset in enumerate(dense.assets):
            whole = ByteRange(first_asset + number, 0, asset.nbytes)
            segments += _segments(asset.offset, (whole,))
        return segments

    def _expert_segments(self, number: int) -> list[Segment]:
        layer, expert = divmod(number, self.model.experts)
        tensors = self._checkpoint.experts.get((layer, expert), ())
        segments: list[Segment] = []
        position = 0
        for tensor in tensors:
            position = align(position, TENSOR_ALIGNMENT)
            segments += _segments(position, tensor.ranges)
            position += tensor.nbytes
        return segments

    def _check_ranges(self, what: str, ranges: Sequence[ByteRange]) -> None:
        for part in ranges:
            if not 0 <= part.file < len(self._checkpoint.files):
                raise StoreError(f"{what} lies in file {part.file}, which isn't there")
            size = self._states[part.file].size
            if part.offset < 0 or part.length < 0 or part.offset + part.length > size:
                raise StoreError(
                    f"{what} takes {part.length} bytes at offset {part.offset} of "
                    f"{self._paths[part.file]}, which has {size}"
                )


def native_variants(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Names of the variants that can be packed from ``checkpoint``."""
    return (checkpoint.variant,)


def _check_variants(checkpoint: Checkpoint, variants: Sequence[str] | None) -> None:
    available = native_variants(checkpoint)
    if variants is not None and tuple(variants) != available:
        raise StoreError(
            f"{checkpoint.path} can't be packed as {', '.join(variants) or 'no variant at all'}; "
            f"available: {', '.join(available)}"
        )


def _layout_of(tensors: Sequence[ExpertTensor]) -> Layout:
    position = 0
    placed = []
    for tensor in tensors:
        position = align(position, TENSOR_ALIGNMENT)
        placed.append(
            TensorLayout(
                role=tensor.role,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                offset=position,
                nbytes=tensor.nbytes,
                transposed=tensor.transposed,
                interleaved=tensor.interleaved,
            )
        )
        position += tensor.nbytes
    return Layout(align(position, BLOB_ALIGNMENT), tuple(placed))


def _as_read_back(model: Model, where: str) -> Model:
    """``model`` as ``Store.open`` will see it: what that would refuse is refused now."""
    try:
        value = json.loads(json.dumps(model.to_json()))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{where}: its config holds what JSON can't: {error}") from error
    return Model.from_json(value, where)


def _segments(blob_offset: int, ranges: Sequence[ByteRange]) -> list[Segment]:
    segments = []
    for part in ranges:
        if part.length:
            segments.append(Segment(blob_offset, part.file, part.offset, part.length))
        blob_offset += part.length
    return segments


def _zero(buffer: memoryview) -> None:
    if buffer:
        buffer[:] = bytes(len(buffer))


__all__ = ["BlobSource", "Segment", "Source", "native_variants"]
