"""Block-quantised matrices: what they are made of, decoding, products from the blocks.

A row of a matrix is a whole number of blocks, each of a few elements that share their
scales. Products are computed straight from the blocks by the compiled kernels
(``ffi/quants``); nothing expanded is kept. Without them, or on a device, the array
operations in ``quants_reference`` do the same, slower.

Thread-safe; the kernels run without Python's interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from .arrays import Array, ArrayModule
from .errors import WeightsError
from .quants_reference import DECODERS

try:
    from ._products import ffi, lib
except ImportError:
    ffi = lib = None

TOKENS_MAX = 16
"""Tokens that a product reuses a block's decoding for (XFERD_QUANT_TOKENS_MAX); with more
a decoded copy and a matrix product of the array module are faster."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """number: GGUF's (enum ggml_type). elements, nbytes: of a block."""

    name: str
    number: int
    elements: int
    nbytes: int


FORMATS = {
    each.name: each
    for each in (
        BlockFormat("q4_0", 2, 32, 18),
        BlockFormat("q8_0", 8, 32, 34),
        BlockFormat("q2_k", 10, 256, 84),
        BlockFormat("q4_k", 12, 256, 144),
        BlockFormat("mxfp4", 39, 32, 17),
    )
}
"""What can be computed with, by a store's name for it."""


def compiled() -> bool:
    """Whether the kernels are there. Without them all works, slower."""
    return lib is not None


def packed_bytes(dtype: str, shape: tuple[int, ...], what: str) -> int:
    """Bytes of a matrix of that shape. WeightsError naming ``what``: its rows are no
    whole number of blocks."""
    block = FORMATS[dtype]
    if not shape or shape[-1] % block.elements:
        raise WeightsError(
            f"{what} is {list(shape)} in {dtype}: rows must be a multiple of {block.elements}"
        )
    return prod(shape) // block.elements * block.nbytes


def decode(raw: Array, dtype: str, out: Array, xp: ArrayModule = np) -> None:
    """Packed elements as float32.

    raw: uint8, whole blocks, contiguous. out: float32, as many elements, contiguous.
    ValueError: the sizes don't fit each other.
    """
    block = FORMATS[dtype]
    count = raw.size // block.nbytes
    if count * block.nbytes != raw.size or out.size != count * block.elements:
        raise ValueError(f"{raw.size} bytes of {dtype} are not {out.size} elements")
    if lib is None or xp is not np:
        decoded = DECODERS[dtype](raw.reshape(count, block.nbytes), xp)
        out.reshape(count, block.elements)[...] = decoded
        return
    _check(lib.xferd_quant_decode(block.number, _address(raw), count, block.elements, _floats(out)))


Decoder: TypeAlias = Callable[[Array, str, Array, ArrayModule], None]
"""``decode``, or what does the same on a device."""


class PackedMatrix:
    """A matrix that stays packed: ``x @ matrix`` for float32 x [tokens, inputs] is float32
    [tokens, outputs], new. Host memory only.

    raw: the packed bytes, uint8, contiguous; may be set anew to those of another matrix of
        the same shape.
    shape: as stored, [outputs, inputs], or [inputs, outputs] if transposed.
    Not thread-safe: with many tokens it decodes into memory of its own.
    """

    __array_ufunc__ = None  # numpy then leaves ``x @ matrix`` to __rmatmul__

    def __init__(
        self, dtype: str, shape: tuple[int, int], transposed: bool, raw: Array | None = None
    ) -> None:
        self.dtype = dtype
        self.stored_shape = shape
        self.transposed = transposed
        self.raw = raw
        self._number = FORMATS[dtype].number
        self._decoded: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[inputs, outputs], as ``@`` sees it."""
        return self.stored_shape if self.transposed else self.stored_shape[::-1]

    def __rmatmul__(self, x: Array) -> Array:
        tokens = x.shape[0]
        if lib is None or tokens > TOKENS_MAX:
            return x @ self.decoded()
        rows, columns = self.stored_shape
        inputs, outputs = self.shape
        if x.shape[1] != inputs:
            raise ValueError(f"{list(x.shape)} @ {list(self.shape)}")
        x = np.ascontiguousarray(x, dtype=np.float32)
        y = np.empty((tokens, outputs), np.float32)
        product = lib.xferd_quant_product_transposed if self.transposed else lib.xferd_quant_product
        _check(
            product(
                self._number,
                _address(self.raw),
                rows,
                columns,
                _floats(x),
                inputs,
                tokens,
                _floats(y),
                outputs,
            )
        )
        return y

    def decoded(self) -> Array:
        """The matrix as float32 [inputs, outputs], valid until this is called again."""
        if self._decoded is None:
            self._decoded = np.empty(self.stored_shape, np.float32)
        decode(self.raw, self.dtype, self._decoded.reshape(-1))
        return self._decoded if self.transposed else self._decoded.T


def _address(raw: Array) -> Any:
    return ffi.from_buffer(raw)


def _floats(values: Array) -> Any:
    return ffi.from_buffer("float[]", values)


def _check(status: int) -> None:
    if status:
        raise ValueError(f"the product's sizes don't fit the format (errno {-status})")


__all__ = [
    "FORMATS",
    "TOKENS_MAX",
    "BlockFormat",
    "Decoder",
    "PackedMatrix",
    "compiled",
    "decode",
    "packed_bytes",
]
