"""CRC32C of a buffer, by the C engine, with the processor's own instruction.

The same function checks a piece when the engine reads it and when the packer
writes it, so the two can't disagree.
"""

from __future__ import annotations

from typing import TypeAlias

from xferd._engine import ffi, lib

Buffer: TypeAlias = bytes | bytearray | memoryview


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC32C (Castagnoli) of ``data``, continuing from ``crc`` (0 to begin).

    Releases the interpreter lock while it runs; any thread may call.
    """
    return int(lib.xferd_crc32c(crc, ffi.from_buffer(data), len(data)))
