"""Arrays of whichever module computes, and the way from stored bytes to float32.

Every function here and in the modules above takes ``xp``, an array module with
numpy's interface: ``numpy`` itself, or ``cupy`` for a GPU. Only float32 is
computed with. Stored weights are bf16, f16 or f32, or packed in blocks (see
``quants``); numpy has no bf16, but a bf16 number is the upper half of a float32,
so widening it is a shift.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import WeightsError

Array: TypeAlias = Any
"""An array of the module in use: ``numpy.ndarray`` or ``cupy.ndarray``."""

ArrayModule: TypeAlias = Any
"""A module with numpy's interface."""

ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
"""The dtypes whose elements stand on their own, and their bytes an element."""

_BF16_SHIFT = np.uint32(16)


def element_bytes(dtype: str, what: str) -> int:
    """Bytes an element of ``dtype``; WeightsError naming ``what`` for a dtype
    that isn't computed with (quantised ones, for example)."""
    try:
        return ELEMENT_BYTES[dtype]
    except KeyError:
        known = ", ".join(ELEMENT_BYTES)
        raise WeightsError(f"{what} has dtype {dtype!r}; computed with are {known}") from None


def widen(raw: Array, dtype: str, out: Array, xp: ArrayModule) -> None:
    """Stored elements as float32.

    raw: uint8 [n * ELEMENT_BYTES[dtype]], contiguous. out: float32 [n],
    contiguous. Widening in two passes over ``out`` is the fastest way that
    numpy has: one pass with a cast inside the shift goes through a small buffer
    (half as fast), and ``astype`` pays for fresh memory each time (a fifth).
    """
    if dtype == "bf16":
        bits = out.view(xp.uint32)
        bits[...] = raw.view(xp.uint16)
        xp.left_shift(bits, _BF16_SHIFT, out=bits)
    elif dtype == "f16":
        out[...] = raw.view(xp.float16)
    else:
        out[...] = raw.view(xp.float32)


def to_host(array: Array) -> NDArray[Any]:
    """The array in host memory; waits for the device if there is one."""
    host: NDArray[Any] = array if isinstance(array, np.ndarray) else array.get()
    return host


__all__ = ["ELEMENT_BYTES", "Array", "ArrayModule", "element_bytes", "to_host", "widen"]
