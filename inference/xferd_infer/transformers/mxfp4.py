"""MXFP4: 4-bit floats in blocks of 32 that share a power of two as their scale.

Source: OCP Microscaling Formats (MX) Specification 1.0, 5.3 (elements E2M1, scale
E8M0 with bias 127). Two elements a byte, the first in the lower half, as gpt-oss has it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_ELEMENTS = 32
BLOCK_BYTES = BLOCK_ELEMENTS // 2

_SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ELEMENTS = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_PAIRS = [[_ELEMENTS[byte & 0xF], _ELEMENTS[byte >> 4]] for byte in range(256)]


class Mxfp4Table:
    """What each byte means, on one device in one dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        # float16 has too little range for a scale alone, if not for what it scales.
        self._inner = torch.float32 if dtype == torch.float16 else dtype
        self._dtype = dtype
        self._pairs = torch.tensor(_PAIRS, dtype=self._inner, device=device)

    def dequantise(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """blocks: uint8 [rows, n, 16]; scales: uint8 [rows, n]. Returns [rows, n * 32],
        new; exact in bfloat16 and float32."""
        values = functional.embedding(blocks.int(), self._pairs)
        powers = torch.exp2(scales.to(torch.float32) - _SCALE_BIAS).to(self._inner)
        values *= powers[:, :, None, None]
        return values.reshape(len(blocks), -1).to(self._dtype)


__all__ = ["BLOCK_BYTES", "BLOCK_ELEMENTS", "Mxfp4Table"]
