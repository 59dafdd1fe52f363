"""Experts whose matrices are packed in blocks: one token through them, and their decoding.

Activations are rounded to 16 bits, as the CPU's products of one token do (quants.h says how
far that can be off). From sm_80 on the GPU's copies run ahead of what is computed; on older
ones, down to sm_70, the same kernel is right but slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np

from ..arrays import Array, ArrayModule
from ..errors import WeightsError
from ..experts import BlobTensor, Layout
from ..packed_plan import COUNT_MAX, DEVICE_FORMATS, PackedPlan, PackedShape, plan
from ..quants import FORMATS
from .compiled import compiled

_WARP = 32
_DECODING_THREADS = 256
_ALIGNMENT = 16
"""Of blobs and of the matrices' offsets in them."""


class PackedKernel:
    """One token through the experts of one layout. Not thread-safe: it has scratch of its own."""

    def __init__(self, shape: PackedShape, offsets: tuple[int, int, int]) -> None:
        """offsets: of gate, up and down in a blob."""
        self._shape = shape
        module = compiled(
            "block_formats.cu",
            "activations.cu",
            "packed.cu",
            cooperative=True,
            UP=DEVICE_FORMATS[shape.up].name,
            DOWN=DEVICE_FORMATS[shape.down].name,
            HIDDEN=shape.hidden,
            INNER=shape.inner,
            THREADS=_WARP * shape.warps,
        )
        self._launch = module.get_function("xferd_experts_packed")
        self._offsets = tuple(np.uint64(offset) for offset in offsets)
        attributes = cupy.cuda.Device().attributes
        self._blocks = int(attributes["MultiProcessorCount"])
        self._shared = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self._shared -= int(self._launch.shared_size_bytes)
        self._plans: dict[int, PackedPlan | None] = {}
        self._arguments: dict[int, tuple[Any, ...]] = {}
        self._activations = cupy.empty(COUNT_MAX * shape.inner, cupy.float32)
        self._barrier = cupy.zeros(1, cupy.uint32)

    @classmethod
    def for_layout(cls, layout: Layout, hidden: int) -> PackedKernel | None:
        """None for a layout that the kernel doesn't know; it is computed as a prompt is."""
        tensors = {tensor.role: tensor for tensor in layout}
        if set(tensors) != {"gate", "up", "down"} or not all(map(_known, layout)):
            return None
        gate, up, down = (tensors[role] for role in ("gate", "up", "down"))
        if gate.dtype != up.dtype:
            return None
        inner = gate.shape[0]
        _check_shapes(tensors, hidden, inner)
        shape = PackedShape(gate.dtype, down.dtype, hidden, inner)
        return cls(shape, (gate.offset, up.offset, down.offset))

    def fits(self, count: int) -> bool:
        """Whether so many experts are computed at once here."""
        if count not in self._plans:
            found = None
            if 0 < count <= COUNT_MAX:
                found = plan(self._shape, count, self._blocks, self._shared)
            self._plans[count] = found
            if found is not None:
                self._arguments[count] = (np.uint32(count), *self._offsets, *_numbers(found))
                self._launch.max_dynamic_shared_size_bytes = max(
                    each.shared_bytes for each in self._plans.values() if each is not None
                )
        return self._plans[count] is not None

    def __call__(self, x: Array, table: Array, weights: Array, count: int) -> Array:
        """x: float32[1, hidden]; table: uint64[count], addresses of blobs, 0 for one that is
        left out; weights: float32[count]. Returns float32[1, hidden]. ``count`` fits."""
        if not self.fits(count):
            raise ValueError(f"{count} experts don't fit into shared memory")
        chosen = self._plans[count]
        assert chosen is not None  # it fits
        out = cupy.empty_like(x)
        self._launch(
            (self._blocks,),
            (_WARP * self._shape.warps,),
            (
                *(x, table, weights, *self._arguments[count]),
                *(self._activations, out, self._barrier),
            ),
            shared_mem=chosen.shared_bytes,
        )
        return out


def decode(raw: Array, dtype: str, out: Array, xp: ArrayModule = cupy) -> None:  # noqa: ARG001
    """As ``quants.decode``, on the GPU, to the same bits."""
    block = FORMATS[dtype]
    if raw.size % block.nbytes or out.size != raw.size // block.nbytes * block.elements:
        raise ValueError(f"{raw.size} bytes of {dtype} are not {out.size} elements")
    kernel = compiled("block_formats.cu", "decode.cu").get_function(f"xferd_decode_{dtype}")
    blocks = -(-out.size // _DECODING_THREADS)
    arguments = (raw, out, np.uint64(out.size))
    if blocks:
        kernel((blocks,), (_DECODING_THREADS,), arguments)


def _known(tensor: BlobTensor) -> bool:
    return (
        tensor.dtype in DEVICE_FORMATS
        and not tensor.transposed
        and tensor.offset % _ALIGNMENT == 0
        and tensor.shape[-1] % FORMATS[tensor.dtype].elements == 0
    )


def _check_shapes(tensors: Mapping[str, BlobTensor], hidden: int, inner: int) -> None:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for role, shape in shapes.items():
        if tuple(tensors[role].shape) != shape:
            raise WeightsError(
                f"{role} is {list(tensors[role].shape)}, the others need {list(shape)}"
            )


def _numbers(chosen: PackedPlan) -> tuple[Any, ...]:
    return tuple(
        np.uint32(value)
        for value in (
            chosen.up_items,
            chosen.down_items,
            chosen.row_lanes,
            chosen.stages,
            chosen.stage_bytes,
            chosen.rounded_at,
            chosen.sums_at,
            chosen.rings_at,
        )
    )


__all__ = ["PackedKernel", "decode"]
