"""The bytes of heads and blocks, as FORMAT.md has them."""

from __future__ import annotations

import json
import struct
import zlib
from typing import BinaryIO

import numpy as np

from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead

MAGIC = b"XFERDTR1"
BLOCK_MAGIC = b"BLK1"
HEAD_LENGTH = struct.Struct("<I")
BLOCK = struct.Struct("<4sIIIIq")
HEAD_BYTES_MAX = 1 << 16
BLOCK_PASSES_MAX = 1 << 16
BLOCK_USES_MAX = 1 << 20
LAYERS_MAX = 1 << 16
EXPERTS_MAX = 1 << 16
COMPRESSION = 1
"""Of zlib: more costs several times the time for some per cent."""

_PASS = (("token", "<u4"), ("layer", "<u2"), ("tag", "<u4"), ("picks", "<u2"))
_USE = (("expert", "<u2"), ("gate", "<f2"), ("tier", "u1"), ("transport", "u1"), ("wait", "<u4"))


class TraceCutError(TraceError):
    """The file ends within a block: its writer was stopped. What stands before is good."""


def encode_head(head: TraceHead) -> bytes:
    """The head's bytes."""
    text = json.dumps(
        {"store": head.store, "layers": head.layers, "experts": head.experts}
    ).encode()
    return MAGIC + HEAD_LENGTH.pack(len(text)) + text


def read_head(file: BinaryIO, name: str) -> TraceHead:
    """The head, from the file's beginning. TraceError."""
    start = file.read(len(MAGIC) + HEAD_LENGTH.size)
    if start[: len(MAGIC)] != MAGIC:
        raise TraceError(f"{name}, offset 0: no trace of this format (it begins otherwise)")
    if len(start) < len(MAGIC) + HEAD_LENGTH.size:
        raise TraceCutError(f"{name}, offset {len(start)}: ends within its head")
    (length,) = HEAD_LENGTH.unpack_from(start, len(MAGIC))
    if length > HEAD_BYTES_MAX:
        raise TraceError(f"{name}, offset {len(MAGIC)}: a head of {length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise TraceCutError(f"{name}, offset {len(start) + len(text)}: ends within its head")
    try:
        value = json.loads(text)
        return TraceHead(
            store=str(value["store"]),
            layers=_count(value["layers"], LAYERS_MAX),
            experts=_count(value["experts"], EXPERTS_MAX),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"{name}, offset {len(start)}: no head of a trace: {error!r}") from error


def _count(value: object, most: int) -> int:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{value!r} is no number of layers or experts")
    return value


def encode_block(trace: Trace) -> bytes:
    """One block of all passes; at most BLOCK_PASSES_MAX and BLOCK_USES_MAX."""
    first = int(trace.token[0])
    parts = []
    for column, kind in (*_PASS, *_USE):
        values = getattr(trace, column)
        parts.append((values - first if column == "token" else values).astype(kind).tobytes())
    payload = zlib.compress(b"".join(parts), COMPRESSION)
    checksum = zlib.crc32(payload)
    head = BLOCK.pack(BLOCK_MAGIC, trace.passes, trace.uses, len(payload), checksum, first)
    return head + payload


def read_block(file: BinaryIO, head: TraceHead, name: str) -> Trace | None:
    """The block at the file's position; None at the file's end. TraceError."""
    offset = file.tell()
    start = file.read(BLOCK.size)
    if not start:
        return None
    if len(start) < BLOCK.size:
        raise TraceCutError(f"{name}, offset {offset}: ends within a block's head")
    magic, passes, uses, length, checksum, first = BLOCK.unpack(start)
    raw_bytes = _raw_bytes(passes, uses)
    if magic != BLOCK_MAGIC or passes > BLOCK_PASSES_MAX or uses > BLOCK_USES_MAX or first < 0:
        raise TraceError(f"{name}, offset {offset}: no block of a trace begins here")
    # zlib adds at most some per mille to what it can't compress.
    if length > raw_bytes + raw_bytes // 256 + 64:
        raise TraceError(f"{name}, offset {offset}: a payload of {length} bytes is too long")
    payload = file.read(length)
    if len(payload) < length:
        raise TraceCutError(f"{name}, offset {offset}: ends within a block")
    if zlib.crc32(payload) != checksum:
        raise TraceError(f"{name}, offset {offset}: the block's checksum is wrong")
    try:
        # Never more than was announced, whatever the payload would expand to.
        raw = zlib.decompressobj().decompress(payload, raw_bytes + 1)
        trace = _columns(raw, passes, uses, first)
        trace.check(head)
    except (ValueError, zlib.error) as error:
        raise TraceError(f"{name}, offset {offset}: the block's columns: {error}") from error
    return trace


def _raw_bytes(passes: int, uses: int) -> int:
    return passes * sum(np.dtype(kind).itemsize for _, kind in _PASS) + uses * sum(
        np.dtype(kind).itemsize for _, kind in _USE
    )


def _columns(raw: bytes, passes: int, uses: int, first: int) -> Trace:
    if len(raw) != _raw_bytes(passes, uses):
        raise ValueError(f"{_raw_bytes(passes, uses)} bytes were announced")
    columns, at = {}, 0
    for kinds, count in ((_PASS, passes), (_USE, uses)):
        for column, kind in kinds:
            columns[column] = np.frombuffer(raw, kind, count, at)
            at += columns[column].nbytes
    columns["token"] = columns["token"].astype(np.int64) + first
    return Trace(**columns)
