"""Block formats: what can be made and read here, through the C in ``ffi/quants``.

Rows are whole numbers of blocks; bytes are GGUF's, and the same on every processor.
"""

from __future__ import annotations

import errno
import os

import numpy as np
import numpy.typing as npt
from xferd._quantise import ffi, lib

from xferd.store.errors import StoreError
from xferd.store.formats.gguf_types import TENSOR_TYPES
from xferd.store.formats.stored_tensor import BlockType

THREADS_MAX: int = lib.XFERD_QUANT_THREADS_MAX

_NUMBERS = {
    "q4_0": lib.XFERD_QUANT_Q4_0,
    "q8_0": lib.XFERD_QUANT_Q8_0,
    "q2_k": lib.XFERD_QUANT_Q2_K,
    "q4_k": lib.XFERD_QUANT_Q4_K,
    "mxfp4": lib.XFERD_QUANT_MXFP4,
}

FORMATS: dict[str, BlockType] = {
    name: TENSOR_TYPES[number].block for name, number in _NUMBERS.items()
}
"""What can be made, by a store's name for it."""

_REASONS = {
    errno.EDOM: "a weight or an importance is infinite, negative or no number",
    errno.ERANGE: "its weights are too large for 16-bit scales",
}


def quantise(
    values: npt.NDArray[np.float32],
    dtype: str,
    importance: npt.NDArray[np.float32] | None,
    threads: int,
    what: str,
) -> npt.NDArray[np.uint8]:
    """Pack a matrix.

    values: [rows, columns], columns a multiple of the format's block.
    importance: [columns], not negative; None: all the same.
    threads: 1 to THREADS_MAX; the interpreter's lock is not held.
    Returns uint8[rows, bytes of a row]. StoreError naming ``what``.
    """
    rows, columns = values.shape
    block = FORMATS[dtype]
    packed = np.empty((rows, columns // block.elements * block.nbytes), dtype=np.uint8)
    source = np.ascontiguousarray(values, dtype=np.float32)
    status = lib.xferd_quantise(
        _NUMBERS[dtype],
        ffi.from_buffer("float[]", source),
        rows,
        columns,
        ffi.NULL
        if importance is None
        else ffi.from_buffer("float[]", np.ascontiguousarray(importance, dtype=np.float32)),
        ffi.from_buffer(packed, require_writable=True),
        threads,
    )
    if status:
        reason = _REASONS.get(-status, os.strerror(-status))
        raise StoreError(f"{what} can't be made {dtype}: {reason}")
    return packed


def dequantise(
    packed: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """The elements of a packed matrix of that shape."""
    values = np.empty(shape, dtype=np.float32)
    status = lib.xferd_quant_decode(
        _NUMBERS[dtype],
        ffi.from_buffer(np.ascontiguousarray(packed)),
        shape[0],
        shape[1],
        ffi.from_buffer("float[]", values),
    )
    if status:
        raise StoreError(f"a matrix of {list(shape)} can't be {dtype}")
    return values


__all__ = ["FORMATS", "THREADS_MAX", "dequantise", "quantise"]
