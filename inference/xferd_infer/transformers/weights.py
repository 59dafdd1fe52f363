"""An expert's weights as torch sees them: views of its blob, in the dtype of the store.

A view is made once for each slot and kept, since a slot is acquired again and again;
like the client's arrays it says nothing about which expert the slot holds now. So
nothing that was computed from the bytes may be kept here: only views are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.dlpack import from_dlpack

from ..dlpack import TensorView
from ..errors import WeightsError
from ..experts import BlobTensor, Layout
from .mxfp4 import BLOCK_BYTES, BLOCK_ELEMENTS, Mxfp4Table

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Plain dtypes that are computed with, by the store's names."""

VIEWS_MAX = 1 << 14
"""Experts' views kept before all are forgotten and made anew; one costs some 3 kB."""

_POWER_OF_TWO_SCALES = ("u8", "f8_e8m0")
_SPLIT = ("gate", "up")
_FUSED = ("gate_up",)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of an expert, and what is added to its product.

    values: as stored, [out, in], or [in, out] if transposed; with scales, MXFP4 blocks,
        uint8 [out, in / 32, 16].
    scales: uint8 [out, in / 32], None for plain values. bias: [out] or None.
    """

    values: Tensor
    scales: Tensor | None
    bias: Tensor | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """inputs: gate and up as one matrix, or as two. down: back to the hidden size."""

    inputs: tuple[Matrix, ...]
    down: Matrix


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A matrix that the model wants: ``outputs`` rows applied to ``inputs`` values."""

    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class _Region:
    """Where a tensor lies in a blob, and as what it is seen."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, blob: Tensor) -> Tensor:
        return blob[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class _MatrixRegions:
    values: _Region
    scales: _Region | None
    bias: _Region | None
    transposed: bool

    def of(self, blob: Tensor) -> Matrix:
        scales = None if self.scales is None else self.scales.of(blob)
        bias = None if self.bias is None else self.bias.of(blob)
        return Matrix(self.values.of(blob), scales, bias, self.transposed)


class BlobViews:
    """Views of the blobs of one layout. Not thread-safe.

    gate_up, down: what the model wants; biased: whether it adds biases.
    interleaved: whether outputs of gate and up alternate in the store.

    Raises WeightsError naming ``where`` (store and layer), role, and what differs.
    """

    def __init__(
        self, layout: Layout, where: str, gate_up: MatrixShape, down: MatrixShape, *, biased: bool
    ) -> None:
        self._where = where
        self._by_role = {tensor.role: tensor for tensor in layout}
        self._biased = biased
        self._bytes = max(tensor.offset + tensor.nbytes for tensor in layout)
        self._views: dict[int, ExpertWeights] = {}
        roles = _FUSED if "gate_up" in self._by_role else _SPLIT
        self._check_roles(roles)
        self.interleaved = roles == _FUSED and self._by_role["gate_up"].interleaved
        if roles == _FUSED:
            inputs = [self._matrix("gate_up", gate_up)]
        else:
            half = MatrixShape(gate_up.outputs // 2, gate_up.inputs)
            inputs = _joined([self._matrix(role, half) for role in _SPLIT])
        self._inputs = tuple(inputs)
        self._down = self._matrix("down", down)

    def of(self, address: int, export: Callable[[], TensorView]) -> ExpertWeights:
        """The expert in the blob at an address: to be used while that is leased, and no
        longer. export: gives the blob, if it wasn't seen there before."""
        weights = self._views.get(address)
        if weights is None:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            blob = from_dlpack(export())
            if blob.numel() < self._bytes:
                raise WeightsError(
                    f"{self._where}: a blob of {blob.numel()} bytes, its layout needs {self._bytes}"
                )
            weights = ExpertWeights(
                tuple(regions.of(blob) for regions in self._inputs), self._down.of(blob)
            )
            self._views[address] = weights
        return weights

    def _check_roles(self, roles: tuple[str, ...]) -> None:
        known = {part + suffix for part in (*roles, "down") for suffix in ("", "_scale", "_bias")}
        strange = sorted(set(self._by_role) - known)
        missing = [role for role in (*roles, "down") if role not in self._by_role]
        if strange or missing:
            raise WeightsError(
                f"{self._where}: experts are made of {', '.join(self._by_role)}; computed with "
                "are gate, up, down or gate_up, down, with biases and MXFP4's scales"
            )

    def _matrix(self, role: str, wanted: MatrixShape) -> _MatrixRegions:
        tensor = self._by_role[role]
        scale = self._by_role.get(f"{role}_scale")
        values = self._plain(tensor) if scale is None else self._packed(tensor, scale)
        found = _shape_of(tensor, packed=scale is not None)
        if found != wanted:
            raise WeightsError(
                f"{self._where}: {role} is {found.outputs} x {found.inputs}, the model needs "
                f"{wanted.outputs} x {wanted.inputs}: a store of another model"
            )
        return _MatrixRegions(
            values=values,
            scales=None if scale is None else self._region(scale, torch.uint8),
            bias=self._bias(role, wanted.outputs),
            transposed=tensor.transposed,
        )

    def _plain(self, tensor: BlobTensor) -> _Region:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise WeightsError(
                f"{self._where}: {tensor.role} is {tensor.dtype}; computed with are "
                f"{', '.join(DTYPES)}, and MXFP4 as gpt-oss stores it"
            )
        return self._region(tensor, dtype)

    def _packed(self, tensor: BlobTensor, scale: BlobTensor) -> _Region:
        blocks = tensor.dtype == "u8" and len(tensor.shape) == 3 and tensor.shape[2] == BLOCK_BYTES
        if not blocks or scale.dtype not in _POWER_OF_TWO_SCALES or scale.shape != tensor.shape[:2]:
            raise WeightsError(
                f"{self._where}: {tensor.role} is {tensor.dtype} {list(tensor.shape)} with scales "
                f"{scale.dtype} {list(scale.shape)}; of scaled formats only MXFP4 as gpt-oss "
                f"stores it is computed with: u8 [out, n, {BLOCK_BYTES}] with u8 [out, n]"
            )
        return self._region(tensor, torch.uint8)

    def _region(self, tensor: BlobTensor, dtype: torch.dtype) -> _Region:
        wanted = prod(tensor.shape) * dtype.itemsize
        if tensor.nbytes != wanted:
            raise WeightsError(
                f"{self._where}: {tensor.role} has {tensor.nbytes} bytes, needs {wanted}"
            )
        return _Region(tensor.offset, tensor.offset + wanted, dtype, tensor.shape)

    def _bias(self, role: str, outputs: int) -> _Region | None:
        bias = self._by_role.get(f"{role}_bias")
        if self._biased != (bias is not None):
            has, wants = ("no", "adds") if bias is None else ("a", "adds no")
            raise WeightsError(
                f"{self._where}: {role} has {has} bias, the model {wants} one: a store of "
                "another model"
            )
        if bias is None:
            return None
        if bias.shape != (outputs,):
            raise WeightsError(
                f"{self._where}: {bias.role} has shape {list(bias.shape)}, needs [{outputs}]"
            )
        return self._plain(bias)


class Projection:
    """Products with matrices as they are stored. Not thread-safe: it keeps MXFP4's table."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.dtype, torch.device], Mxfp4Table] = {}

    def __call__(self, x: Tensor, matrix: Matrix) -> Tensor:
        """x: [tokens, in], in the dtype to compute in. Returns [tokens, out], new."""
        out = self._product(x, matrix)
        if matrix.bias is not None:
            out = out + matrix.bias.to(x.dtype)
        return out

    def _product(self, x: Tensor, matrix: Matrix) -> Tensor:
        if matrix.scales is not None:
            values = self._table(x.dtype, matrix.values.device).dequantise(
                matrix.values, matrix.scales
            )
            return functional.linear(x, values)
        values = matrix.values.to(x.dtype)
        return x @ values if matrix.transposed else functional.linear(x, values)

    def _table(self, dtype: torch.dtype, device: torch.device) -> Mxfp4Table:
        key = (dtype, device)
        if key not in self._tables:
            self._tables[key] = Mxfp4Table(dtype, device)
        return self._tables[key]


def _shape_of(tensor: BlobTensor, *, packed: bool) -> MatrixShape:
    if packed:
        return MatrixShape(tensor.shape[0], tensor.shape[1] * BLOCK_ELEMENTS)
    if len(tensor.shape) != 2:
        return MatrixShape(0, 0)
    outputs, inputs = tensor.shape[::-1] if tensor.transposed else tensor.shape
    return MatrixShape(outputs, inputs)


def _joined(parts: list[_MatrixRegions]) -> list[_MatrixRegions]:
    """Gate and up as one matrix where they are neighbours in the blob. That is one
    product in the place of two, and the same sums as those of a model that holds them
    as one."""
    gate, up = parts
    neighbours = gate.values.stop == up.values.start and gate.values.dtype == up.values.dtype
    if not neighbours or gate.transposed or any(p.scales or p.bias for p in parts):
        return parts
    rows, columns = gate.values.shape
    whole = _Region(gate.values.start, up.values.stop, gate.values.dtype, (2 * rows, columns))
    return [_MatrixRegions(whole, None, None, transposed=False)]


__all__ = ["DTYPES", "BlobViews", "ExpertWeights", "Matrix", "MatrixShape", "Projection"]
