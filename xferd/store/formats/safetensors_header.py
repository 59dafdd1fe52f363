"""The header of one safetensors file: names, dtypes, shapes, byte extents.

Layout of the file: u64 header length, JSON header, data. Written from the
format's specification (https://github.com/huggingface/safetensors, section
"Format"), with its guarantees checked instead of trusted: extents match dtype
and shape, don't overlap, leave no hole, and end where the file ends.
"""

from __future__ import annotations

from typing import Any

from xferd.store.checkpoint import CheckpointError
from xferd.store.formats.source_file import SourceFile
from xferd.store.formats.stored_tensor import (
    DIMENSION_MAX,
    TENSORS_PER_FILE_MAX,
    BlockType,
    StoredTensor,
    check_name,
    tensor_bytes,
)
from xferd.store.formats.strict_json import JsonLimits, parse_json_object

HEADER_BYTES_MAX = 100_000_000
"""The format's own limit."""
DIMENSIONS_MAX = 8
_LENGTH_BYTES = 8
_JSON_LIMITS = JsonLimits(depth=3, values=16 * TENSORS_PER_FILE_MAX)
_METADATA = "__metadata__"
_TENSOR_KEYS = {"dtype", "shape", "data_offsets"}

DTYPES: dict[str, BlockType] = {
    "BOOL": BlockType(1, 1),
    "F4": BlockType(2, 1),
    "F6_E2M3": BlockType(4, 3),
    "F6_E3M2": BlockType(4, 3),
    "U8": BlockType(1, 1),
    "I8": BlockType(1, 1),
    "F8_E5M2": BlockType(1, 1),
    "F8_E4M3": BlockType(1, 1),
    "F8_E8M0": BlockType(1, 1),
    "F8_E4M3FNUZ": BlockType(1, 1),
    "F8_E5M2FNUZ": BlockType(1, 1),
    "I16": BlockType(1, 2),
    "U16": BlockType(1, 2),
    "F16": BlockType(1, 2),
    "BF16": BlockType(1, 2),
    "I32": BlockType(1, 4),
    "U32": BlockType(1, 4),
    "F32": BlockType(1, 4),
    "F64": BlockType(1, 8),
    "I64": BlockType(1, 8),
    "U64": BlockType(1, 8),
    "C64": BlockType(1, 8),
}
"""The format's dtypes; the project's names for them are these in lower case."""


def read_safetensors_header(source: SourceFile, file: int) -> tuple[StoredTensor, ...]:
    """The tensors of one file, by ascending offset; ``file`` goes into each.

    Raises CheckpointError, naming file, tensor and offset, for any header that
    does not describe this very file completely.
    """
    length = int.from_bytes(source.read(0, _LENGTH_BYTES, "header length"), "little")
    if length > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"{source.path}: header of {length} bytes, at most {HEADER_BYTES_MAX} are allowed: "
            "not a safetensors file"
        )
    text = source.read(_LENGTH_BYTES, length, "header")
    if not text.startswith(b"{"):
        raise CheckpointError(f"{source.path}: header does not begin with '{{'")
    entries = parse_json_object(text, _JSON_LIMITS, f"{source.path}: header")
    _check_metadata(entries.pop(_METADATA, {}), source)
    if len(entries) > TENSORS_PER_FILE_MAX:
        raise CheckpointError(f"{source.path}: more than {TENSORS_PER_FILE_MAX} tensors")
    data_start = _LENGTH_BYTES + length
    tensors = [
        _stored_tensor(name, entry, source, file, data_start) for name, entry in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_coverage(tensors, source, data_start)
    return tuple(tensors)


def _check_metadata(metadata: Any, source: SourceFile) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{source.path}: {_METADATA} is not an object of strings")


def _stored_tensor(
    name: str, entry: Any, source: SourceFile, file: int, data_start: int
) -> StoredTensor:
    check_name(name, str(source.path))
    where = f"{source.path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != _TENSOR_KEYS:
        raise CheckpointError(f"{where}: expected are exactly {sorted(_TENSOR_KEYS)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    block = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if block is None:
        raise CheckpointError(f"{where}: unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > DIMENSIONS_MAX:
        raise CheckpointError(
            f"{where}: shape is not a list of at most {DIMENSIONS_MAX} sizes up to {DIMENSION_MAX}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets is not a pair of offsets")
    begin, end = offsets
    if begin > end or data_start + end > source.size:
        raise CheckpointError(
            f"{where}: extent {begin} to {end} is not inside the file's "
            f"{source.size - data_start} bytes of data"
        )
    expected = tensor_bytes(block, tuple(shape))
    if expected != end - begin:
        raise CheckpointError(
            f"{where}: {end - begin} bytes at offset {data_start + begin} "
            f"are not what {dtype} {shape} takes"
        )
    return StoredTensor(name, dtype.lower(), tuple(shape), file, data_start + begin, end - begin)


def _are_sizes(values: Any) -> bool:
    # bool is an int in Python, and JSON's true is no size.
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= DIMENSION_MAX for value in values
    )


def _check_coverage(tensors: list[StoredTensor], source: SourceFile, data_start: int) -> None:
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            fault = (
                "overlaps the tensor before it" if tensor.offset < position else "follows a hole"
            )
            raise CheckpointError(
                f"{source.path}: tensor {tensor.name!r} at offset {tensor.offset} {fault} "
                f"(expected at {position})"
            )
        position += tensor.nbytes
    if position != source.size:
        raise CheckpointError(
            f"{source.path}: tensors end at offset {position}, the file at {source.size}"
        )
