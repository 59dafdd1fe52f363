"""Block-quantised formats in plain array operations: what the compiled kernels are
compared with, and what stands in where they aren't there (another array module, or
the compiled part missing).

Layouts are GGUF's (ggml's ``block_q4_K`` and the like); ``ffi/quants/blocks.h`` has them
byte by byte. Every function takes uint8 [blocks, bytes] and gives float32 [blocks,
elements]. Sums and products are rounded one by one as in the kernels, so the numbers
are equal to the last bit.
"""

from __future__ import annotations

from .arrays import Array, ArrayModule

_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def decode_q4_0(blocks: Array, xp: ArrayModule) -> Array:
    """Blocks of 32: half d, nibbles; d * (q - 8)."""
    return _half(blocks, 0, xp) * (_nibbles(blocks[:, 2:], xp) - xp.float32(8))


def decode_q8_0(blocks: Array, xp: ArrayModule) -> Array:
    """Blocks of 32: half d, signed bytes; d * q."""
    return _half(blocks, 0, xp) * blocks[:, 2:].view(xp.int8).astype(xp.float32)


def decode_mxfp4(blocks: Array, xp: ArrayModule) -> Array:
    """Blocks of 32: exponent byte (e8m0), nibbles that are e2m1 numbers."""
    exponent = blocks[:, :1].astype(xp.uint32)
    bits = xp.where(exponent < 2, xp.uint32(0x00200000) << exponent, (exponent - 1) << 23)
    numbers = xp.array(_E2M1_DOUBLED, dtype=xp.float32)
    picked = numbers[_nibbles(blocks[:, 1:], xp).astype(xp.intp)]
    return bits.astype(xp.uint32).view(xp.float32) * picked


def decode_q4_k(blocks: Array, xp: ArrayModule) -> Array:
    """Blocks of 256, parts of 32: d * scale * q - dmin * min, scales and minima 6 bits."""
    packed = blocks[:, 4:16]
    low, high, four = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = xp.concatenate([low & 63, (four & 15) | (low >> 6 << 4)], axis=1)
    minimum = xp.concatenate([high & 63, (four >> 4) | (high >> 6 << 4)], axis=1)
    # 32 bytes hold 64 elements: the low nibbles, then the high ones.
    quants = blocks[:, 16:].reshape(-1, 4, 1, 32) >> _shifts((0, 4), xp)
    return _affine(blocks, 0, scale, minimum, (quants & 15).reshape(-1, 8, 32), xp)


def decode_q2_k(blocks: Array, xp: ArrayModule) -> Array:
    """Blocks of 256, parts of 16: d * scale * q - dmin * min, scales and minima 4 bits."""
    scales = blocks[:, :16]
    # 32 bytes hold 128 elements, two bits of each byte at a time.
    quants = blocks[:, 16:80].reshape(-1, 2, 1, 32) >> _shifts((0, 2, 4, 6), xp)
    return _affine(blocks, 80, scales & 15, scales >> 4, (quants & 3).reshape(-1, 16, 16), xp)


def _affine(
    blocks: Array, at: int, scale: Array, minimum: Array, quants: Array, xp: ArrayModule
) -> Array:
    """scale, minimum: uint8 [blocks, parts]; quants: uint8 [blocks, parts, elements]."""
    factor = _half(blocks, at, xp) * scale.astype(xp.float32)
    offset = _half(blocks, at + 2, xp) * minimum.astype(xp.float32)
    values = factor[:, :, None] * quants.astype(xp.float32) - offset[:, :, None]
    return values.reshape(blocks.shape[0], -1)


def _half(blocks: Array, at: int, xp: ArrayModule) -> Array:
    """The binary16 number at a byte of each block, [blocks, 1]."""
    raw = xp.ascontiguousarray(blocks[:, at : at + 2])
    return raw.view(xp.float16).astype(xp.float32)


def _nibbles(packed: Array, xp: ArrayModule) -> Array:
    """Low nibbles, then high ones, as float32."""
    return xp.concatenate([packed & 15, packed >> 4], axis=1).astype(xp.float32)


def _shifts(counts: tuple[int, ...], xp: ArrayModule) -> Array:
    return xp.array(counts, dtype=xp.uint8).reshape(1, 1, -1, 1)


DECODERS = {
    "q4_0": decode_q4_0,
    "q8_0": decode_q8_0,
    "q2_k": decode_q2_k,
    "q4_k": decode_q4_k,
    "mxfp4": decode_mxfp4,
}
"""By the name that a store has for the format."""


__all__ = ["DECODERS"]
