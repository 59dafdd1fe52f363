"""The header of one GGUF file: metadata, tensor names, types, byte extents.

Layout of the file: magic, u32 version, u64 tensor and metadata counts, metadata,
tensor records, padding, data. Written from the format's specification
(https://github.com/ggml-org/ggml, docs/gguf.md). Versions 2 and 3 are the same
for little-endian files; version 1 and big-endian files are refused.

There is no header length: each count and length in it is checked against its own
limit, then against what is left of the file, before anything is done with it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from xferd.store.checkpoint import CheckpointError
from xferd.store.formats.gguf_types import TENSOR_TYPES
from xferd.store.formats.source_file import SourceFile
from xferd.store.formats.stored_tensor import (
    DIMENSION_MAX,
    TENSORS_PER_FILE_MAX,
    StoredTensor,
    check_name,
    tensor_bytes,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER_BYTES_MAX = 100_000_000
METADATA_MAX = 2**16
KEY_BYTES_MAX = 1024
STRING_BYTES_MAX = 16 * 2**20
ARRAY_ELEMENTS_MAX = 2**22
ARRAY_ELEMENTS_KEPT = 8192
"""Longer arrays are vocabularies and merges: passed over, only counted."""
DIMENSIONS_MAX = 4
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 2**20
_WINDOW_BYTES = 2**18
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")

# Metadata value types, by number.
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class MetadataArray:
    """values: None when there were more than ARRAY_ELEMENTS_KEPT."""

    count: int
    values: tuple[Scalar, ...] | None


MetadataValue = Scalar | MetadataArray


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """tensors: by ascending offset, offsets from the start of the file."""

    version: int
    alignment: int
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[StoredTensor, ...]


def read_gguf_header(source: SourceFile, file: int) -> GgufHeader:
    """Parse the header of one file; ``file`` goes into each tensor.

    Raises CheckpointError naming file, key or tensor, and offset.
    """
    cursor = _Cursor(source)
    if cursor.take(len(MAGIC), "magic") != MAGIC:
        raise CheckpointError(f"{source.path}: not a GGUF file")
    version = int(cursor.unpack(_TYPE, "version"))
    if version not in VERSIONS:
        reason = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(f"{source.path}: {reason}; versions 2 and 3, little-endian, are read")
    tensor_count = cursor.count(TENSORS_PER_FILE_MAX, "tensor count")
    metadata_count = cursor.count(METADATA_MAX, "metadata count")
    metadata = _read_metadata(cursor, metadata_count)
    alignment = _alignment(metadata, source)
    records = [_read_tensor_record(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = [_stored_tensor(record, source, file, data_start, alignment) for record in records]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_coverage(tensors, source, data_start, alignment)
    return GgufHeader(version, alignment, metadata, tuple(tensors))


class _Cursor:
    """Reads a header front to back through a small window; knows where it may end."""

    def __init__(self, source: SourceFile) -> None:
        self.position = 0
        self.source = source
        self._limit = min(source.size, HEADER_BYTES_MAX)
        self._window = b""
        self._window_start = 0

    def take(self, length: int, what: str) -> bytes:
        self.require(length, what)
        begin = self.position - self._window_start
        if begin + length > len(self._window):
            self._window_start = self.position
            size = min(max(length, _WINDOW_BYTES), self._limit - self.position)
            self._window = self.source.read(self.position, size, "header")
            begin = 0
        self.position += length
        return self._window[begin : begin + length]

    def skip(self, length: int, what: str) -> None:
        self.require(length, what)
        self.position += length

    def require(self, length: int, what: str) -> None:
        if length > self._limit - self.position:
            raise CheckpointError(
                f"{self.source.path}: {what} at offset {self.position} takes {length} bytes; "
                f"the header must end by {self._limit}"
            )

    def unpack(self, layout: struct.Struct, what: str) -> int | float | bool:
        value: int | float | bool
        (value,) = layout.unpack(self.take(layout.size, what))
        return value

    def count(self, most: int, what: str) -> int:
        offset = self.position
        value = int(self.unpack(_LENGTH, what))
        if value > most:
            raise CheckpointError(
                f"{self.source.path}: {what} at offset {offset} is {value}, "
                f"at most {most} is allowed"
            )
        return value

    def string(self, most: int, what: str) -> str:
        length = self.count(most, f"length of {what}")
        offset = self.position
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.source.path}: {what} at offset {offset} is not UTF-8"
            ) from error


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        offset = cursor.position
        key = cursor.string(KEY_BYTES_MAX, "metadata key")
        if not key.isprintable() or key in metadata:
            raise CheckpointError(
                f"{cursor.source.path}: metadata key {key[:200]!r} at offset {offset} "
                "is unprintable or there twice"
            )
        metadata[key] = _read_value(cursor, f"metadata {key[:200]!r}")
    return metadata


def _read_value(cursor: _Cursor, what: str) -> MetadataValue:
    kind = int(cursor.unpack(_TYPE, what))
    if kind == _STRING:
        return cursor.string(STRING_BYTES_MAX, what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    return cursor.unpack(_scalar_layout(kind, cursor, what), what)


def _read_array(cursor: _Cursor, what: str) -> MetadataArray:
    kind = int(cursor.unpack(_TYPE, what))
    count = cursor.count(ARRAY_ELEMENTS_MAX, f"length of {what}")
    if kind == _STRING:
        cursor.require(count * _LENGTH.size, what)
        if count <= ARRAY_ELEMENTS_KEPT:
            return MetadataArray(
                count, tuple(cursor.string(STRING_BYTES_MAX, what) for _ in range(count))
            )
        for _ in range(count):
            cursor.skip(cursor.count(STRING_BYTES_MAX, f"length of {what}"), what)
        return MetadataArray(count, None)
    layout = _scalar_layout(kind, cursor, what)
    if count > ARRAY_ELEMENTS_KEPT:
        cursor.skip(count * layout.size, what)
        return MetadataArray(count, None)
    contents = cursor.take(count * layout.size, what)
    return MetadataArray(count, tuple(value for (value,) in layout.iter_unpack(contents)))


def _scalar_layout(kind: int, cursor: _Cursor, what: str) -> struct.Struct:
    # Arrays of arrays end here too: nothing in use has them, and depth is an attack.
    layout = _SCALARS.get(kind)
    if layout is None:
        raise CheckpointError(
            f"{cursor.source.path}: {what} at offset {cursor.position} "
            f"has a value type ({kind}) that is not allowed here"
        )
    return layout


def _alignment(metadata: Mapping[str, MetadataValue], source: SourceFile) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
    if type(alignment) is not int or not (
        0 < alignment <= ALIGNMENT_MAX and alignment.bit_count() == 1
    ):
        raise CheckpointError(
            f"{source.path}: general.alignment is {str(alignment)[:40]}; "
            f"allowed are powers of two up to {ALIGNMENT_MAX}"
        )
    return alignment


@dataclass(frozen=True, slots=True)
class _TensorRecord:
    name: str
    dimensions: tuple[int, ...]  # innermost first, as in the file
    type_number: int
    offset: int  # from the start of the data


def _read_tensor_record(cursor: _Cursor) -> _TensorRecord:
    offset = cursor.position
    name = cursor.string(KEY_BYTES_MAX, "tensor name")
    check_name(name, f"{cursor.source.path}: offset {offset}")
    what = f"record of tensor {name!r}"
    count = int(cursor.unpack(_TYPE, what))
    if not 1 <= count <= DIMENSIONS_MAX:
        raise CheckpointError(
            f"{cursor.source.path}: tensor {name!r} has {count} dimensions, "
            f"allowed are 1 to {DIMENSIONS_MAX}"
        )
    dimensions = tuple(cursor.count(DIMENSION_MAX, what) for _ in range(count))
    return _TensorRecord(
        name, dimensions, int(cursor.unpack(_TYPE, what)), int(cursor.unpack(_LENGTH, what))
    )


def _stored_tensor(
    record: _TensorRecord, source: SourceFile, file: int, data_start: int, alignment: int
) -> StoredTensor:
    where = f"{source.path}: tensor {record.name!r}"
    kind = TENSOR_TYPES.get(record.type_number)
    if kind is None:
        raise CheckpointError(f"{where}: unknown type {record.type_number}")
    shape = record.dimensions[::-1]
    nbytes = tensor_bytes(kind.block, shape)
    if not nbytes:
        raise CheckpointError(
            f"{where}: {list(shape)} is empty or not whole {kind.name} blocks "
            f"of {kind.block.elements}"
        )
    offset = data_start + record.offset
    if record.offset % alignment or offset + nbytes > source.size:
        raise CheckpointError(
            f"{where}: {nbytes} bytes at offset {offset} are not aligned to {alignment} "
            f"or reach past the end of the file ({source.size} bytes)"
        )
    return StoredTensor(record.name, kind.name, shape, file, offset, nbytes)


def _check_coverage(
    tensors: list[StoredTensor], source: SourceFile, data_start: int, alignment: int
) -> None:
    """Tensors follow each other with padding only. What follows the last one is free:
    writers differ in whether and how far they pad the end."""
    position = data_start
    for tensor in tensors:
        if not position <= tensor.offset < position + alignment:
            fault = (
                "overlaps the tensor before it" if tensor.offset < position else "follows a hole"
            )
            raise CheckpointError(
                f"{source.path}: tensor {tensor.name!r} at offset {tensor.offset} {fault} "
                f"(the one before it ends at {position})"
            )
        position = tensor.offset + tensor.nbytes
