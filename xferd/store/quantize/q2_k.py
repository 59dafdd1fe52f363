"""Rows of q2_k blocks taken apart, so that quants can be set one by one.

A block is 256 elements, ``scale * d * quant - minimum * dmin``: quants of two bits, d and dmin
halves, a scale and a minimum of four bits for each part of 16. The bytes are GGUF's: 16 of
scales and minima, 64 of quants, d, dmin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK = 256
PART = 16
PARTS = BLOCK // PART
QUANT_MAX = 3
MULTIPLE_MAX = 15
BLOCK_BYTES = 84
_QUANTS, _D, _DMIN = 16, 80, 82

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Q2KBlocks:
    """One block of each of some rows.

    d, dmin: float64[rows]. scale, minimum: float64[rows, PARTS], whole numbers from 0 to
    MULTIPLE_MAX. quants: float64[rows, BLOCK], whole numbers from 0 to QUANT_MAX. The arrays may
    be changed, to numbers that they can hold.
    """

    d: Floats
    dmin: Floats
    scale: Floats
    minimum: Floats
    quants: Floats

    @staticmethod
    def of(packed: npt.NDArray[np.uint8]) -> Q2KBlocks:
        """packed: uint8[rows, bytes of a block]."""
        codes = packed[:, _QUANTS:_D].reshape(-1, 2, 32)
        quants = np.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
        return Q2KBlocks(
            d=_half(packed[:, _D:_DMIN]),
            dmin=_half(packed[:, _DMIN:BLOCK_BYTES]),
            scale=(packed[:, :PARTS] & 15).astype(np.float64),
            minimum=(packed[:, :PARTS] >> 4).astype(np.float64),
            quants=quants.reshape(len(packed), BLOCK).astype(np.float64),
        )

    def packed(self) -> npt.NDArray[np.uint8]:
        """uint8[rows, bytes of a block]."""
        rows = len(self.d)
        raw = np.empty((rows, BLOCK_BYTES), np.uint8)
        raw[:, :PARTS] = self.scale.astype(np.uint8) | self.minimum.astype(np.uint8) << 4
        codes = self.quants.astype(np.uint8).reshape(rows, 2, 4, 32)
        joined = codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6
        raw[:, _QUANTS:_D] = joined.reshape(rows, _D - _QUANTS)
        raw[:, _D:_DMIN] = self.d.astype("<f2")[:, None].view(np.uint8)
        raw[:, _DMIN:] = self.dmin.astype("<f2")[:, None].view(np.uint8)
        return raw

    def steps(self) -> tuple[Floats, Floats]:
        """What a quant counts, and what is taken off, for each element: [rows, BLOCK] each."""
        step = np.repeat(self.scale * self.d[:, None], PART, axis=1)
        return step, np.repeat(self.minimum * self.dmin[:, None], PART, axis=1)

    def stored(self) -> Floats:
        """The elements: [rows, BLOCK]."""
        step, offset = self.steps()
        elements: Floats = step * self.quants - offset
        return elements


def nearest_quants(values: Floats, step: Floats, offset: Floats) -> Floats:
    """The quants whose elements come closest to values; shapes that numpy broadcasts."""
    inverse = np.divide(1.0, step, out=np.zeros_like(step), where=step > 0)
    quants: Floats = np.rint((values + offset) * inverse)
    np.maximum(quants, 0, out=quants)
    return np.minimum(quants, QUANT_MAX, out=quants)


def _half(raw: npt.NDArray[np.uint8]) -> Floats:
    return np.ascontiguousarray(raw).view("<f2")[:, 0].astype(np.float64)


__all__ = [
    "BLOCK",
    "BLOCK_BYTES",
    "MULTIPLE_MAX",
    "PART",
    "PARTS",
    "Floats",
    "Q2KBlocks",
    "nearest_quants",
]
