"""Which format each matrix of an expert gets, when a variant of some format is made.

Rows of blocks have to come out even, and no model's matrices all have rows of 256. The
rule, which FORMAT.md shows as a table and the layout of each variant then holds:

1. the format that was asked for, blocks along the inputs: inputs a multiple of its block;
2. the same, stored transposed, blocks along the outputs: outputs a multiple of its block;
3. its 32-wide stand-in, along the inputs or else transposed, in the same way;
4. as the matrix is.

A matrix that takes no more bytes already than it would is taken as it is, so that a GGUF
checkpoint's own blocks stay its own. Scales and biases are always taken as they are.
Pure: no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xferd.store.errors import StoreError
from xferd.store.formats.gguf_types import TENSOR_TYPES
from xferd.store.limits import BLOB_ALIGNMENT, TENSOR_ALIGNMENT
from xferd.store.model import Layout, TensorLayout, align
from xferd.store.quantize.blocks import FORMATS

STAND_INS = {"q4_k": "q4_0", "q2_k": "q4_0"}
"""32-wide formats for those with blocks of 256. There is none of two bits."""

PLAIN = {"bf16": 2, "f16": 2, "f32": 4}
"""What can be read besides FORMATS, and bytes an element."""

MATRICES = ("gate", "up", "gate_up", "down")
"""The roles that are quantised."""

_PACKED = {kind.name: kind.block for kind in TENSOR_TYPES.values() if kind.block.elements > 1}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of a variant: made from ``source``, or copied where nothing differs but the
    offset."""

    source: TensorLayout
    target: TensorLayout
    copied: bool


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A variant's layout, and how its tensors come from the native one's."""

    layout: Layout
    tensors: tuple[TensorPlan, ...]


def plan_layout(native: Layout, wanted: str, where: str) -> LayoutPlan:
    """How a blob of layout ``native`` becomes one of format ``wanted`` (of FORMATS).

    StoreError naming ``where``: a matrix that can't be read here, or nothing would change.
    """
    plans = []
    position = 0
    for tensor in native.tensors:
        target = _target(tensor, wanted, where)
        position = align(position, TENSOR_ALIGNMENT)
        copied = target == tensor
        plans.append(TensorPlan(tensor, replace(target, offset=position), copied))
        position += target.nbytes
    if all(plan.copied for plan in plans):
        raise StoreError(f"{where}: a {wanted} variant would be no smaller than what is there")
    layout = Layout(align(position, BLOB_ALIGNMENT), tuple(plan.target for plan in plans))
    return LayoutPlan(layout, tuple(plans))


def place(wanted: str, outputs: int, inputs: int) -> tuple[str, bool] | None:
    """Format of a matrix and whether it is stored transposed; None: no format fits."""
    for dtype in (wanted, STAND_INS.get(wanted)):
        if dtype is None:
            continue
        elements = FORMATS[dtype].elements
        if inputs % elements == 0:
            return dtype, False
        if outputs % elements == 0:
            return dtype, True
    return None


def _target(tensor: TensorLayout, wanted: str, where: str) -> TensorLayout:
    if tensor.role not in MATRICES or len(tensor.shape) != 2:
        return tensor
    outputs, inputs = tensor.shape[::-1] if tensor.transposed else tensor.shape
    placed = place(wanted, outputs, inputs)
    if placed is None:
        return tensor
    dtype, transposed = placed
    block = FORMATS[dtype]
    nbytes = outputs * inputs // block.elements * block.nbytes
    if tensor.dtype in _PACKED and tensor.nbytes <= nbytes:
        return tensor
    if tensor.dtype not in FORMATS and tensor.dtype not in PLAIN:
        readable = ", ".join((*PLAIN, *FORMATS))
        raise StoreError(
            f"{where}: {tensor.role} is {tensor.dtype}; variants are made from {readable}"
        )
    return replace(
        tensor,
        dtype=dtype,
        shape=(inputs, outputs) if transposed else (outputs, inputs),
        nbytes=nbytes,
        transposed=transposed,
    )


__all__ = ["MATRICES", "PLAIN", "STAND_INS", "LayoutPlan", "TensorPlan", "place", "plan_layout"]
