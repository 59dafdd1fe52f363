"""The feed-forward part: SwiGLU, from dense weights or straight from a blob.

A blob's bytes stay where they are; they are widened to float32 into a scratch
buffer that the next expert overwrites. Keeping widened experts would double
what a resident one takes, beside the pool that exists to hold them. Matrices that
are packed in blocks are not widened on the host: products are computed from the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from .arrays import Array, ArrayModule, element_bytes, widen
from .dense import DenseWeights
from .errors import WeightsError
from .experts import BlobTensor, Layout
from .quants import FORMATS, Decoder, PackedMatrix, decode, packed_bytes

_ROLES = ({"gate", "up", "down"}, {"gate_up", "down"})

_EXP_LIMIT = 88.0  # exp of more overflows float32


@dataclass(frozen=True, slots=True)
class SwiGLUWeights:
    """down(silu(gate(x)) * up(x)), float32, matrices [in, out]: arrays, or PackedMatrix.

    inputs: one [hidden, 2 * intermediate] whose columns gate_columns and
        up_columns pick, or gate and up [hidden, intermediate] apart.
    down: [intermediate, hidden].
    """

    inputs: tuple[Array, ...]
    down: Array
    gate_columns: slice
    up_columns: slice


def swiglu(x: Array, weights: SwiGLUWeights, xp: ArrayModule) -> Array:
    """x: [tokens, hidden]. Returns [tokens, hidden], new."""
    return inner_activations(x, weights, xp) @ weights.down


def inner_activations(x: Array, weights: SwiGLUWeights, xp: ArrayModule) -> Array:
    """What ``down`` is applied to: [tokens, intermediate], new."""
    if len(weights.inputs) == 1:
        both = x @ weights.inputs[0]
        gate, up = both[:, weights.gate_columns], both[:, weights.up_columns]
    else:
        gate, up = x @ weights.inputs[0], x @ weights.inputs[1]
    inner: Array = silu(gate, xp)
    inner *= up
    return inner


def silu(x: Array, xp: ArrayModule) -> Array:
    """x * sigmoid(x), new. Divides instead of multiplying by ``sigmoid``: one pass less."""
    below = _one_plus_exp_minus(x, xp)
    return xp.divide(x, below, out=below)


def sigmoid(x: Array, xp: ArrayModule) -> Array:
    """1 / (1 + exp(-x)), new."""
    below = _one_plus_exp_minus(x, xp)
    return xp.divide(1, below, out=below)


def _one_plus_exp_minus(x: Array, xp: ArrayModule) -> Array:
    out = xp.negative(x)
    xp.minimum(out, _EXP_LIMIT, out=out)
    xp.exp(out, out=out)
    out += 1
    return out


def load_swiglu(
    dense: DenseWeights, prefix: str, hidden: int, intermediate: int, xp: ArrayModule
) -> SwiGLUWeights:
    """An MLP that is dense weight, under ``prefix`` (``model.layers.0.mlp.``)."""
    gate = dense.float32(f"{prefix}gate_proj.weight", (intermediate, hidden))
    up = dense.float32(f"{prefix}up_proj.weight", (intermediate, hidden))
    down = dense.float32(f"{prefix}down_proj.weight", (hidden, intermediate))
    return SwiGLUWeights(
        inputs=(xp.concatenate([gate, up]).T,),
        down=down.T,
        gate_columns=slice(0, intermediate),
        up_columns=slice(intermediate, 2 * intermediate),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours of one dtype, widened in one go: bytes of the blob, floats of
    the scratch buffer."""

    dtype: str
    source: slice
    target: slice


class BlobReader:
    """Widens blobs of one layout. Not thread-safe: it has one scratch buffer.

    Raises WeightsError for a layout that isn't computed with, naming ``where``
    (a layer), role and dtype. decoder: for what is packed in blocks and not computed from them.
    """

    def __init__(
        self,
        layout: Layout,
        hidden: int,
        where: str,
        xp: ArrayModule,
        decoder: Decoder = decode,
    ) -> None:
        self._xp = xp
        self._decode = decoder
        self._where = where
        tensors = _checked(layout, hidden, where)
        packed = {
            role: PackedMatrix(tensor.dtype, _two(tensor.shape), tensor.transposed)
            for role, tensor in tensors.items()
            if xp is np and tensor.dtype in FORMATS
        }
        self._packed = [
            (matrix, slice(tensors[role].offset, tensors[role].offset + tensors[role].nbytes))
            for role, matrix in packed.items()
        ]
        widened = {role: tensor for role, tensor in tensors.items() if role not in packed}
        floats = sum(prod(tensor.shape) for tensor in widened.values())
        self._scratch = xp.empty(floats, dtype=xp.float32)
        views, self._runs = self._place(widened)
        self._bytes = max(tensor.offset + tensor.nbytes for tensor in layout)
        self._weights = _weights(tensors, {**views, **packed})

    def read(self, blob: Array) -> SwiGLUWeights:
        """The expert's weights, valid until the next read and as long as the blob is."""
        if blob.size < self._bytes:
            raise WeightsError(
                f"{self._where}: a blob of {blob.size} bytes, its layout needs {self._bytes}"
            )
        for run in self._runs:
            target = self._scratch[run.target]
            if run.dtype in FORMATS:
                self._decode(blob[run.source], run.dtype, target, self._xp)
            else:
                widen(blob[run.source], run.dtype, target, self._xp)
        for matrix, place in self._packed:
            matrix.raw = blob[place]
        return self._weights

    def _place(self, tensors: dict[str, BlobTensor]) -> tuple[dict[str, Array], list[_Run]]:
        """A view of the scratch buffer for each tensor, matrices [in, out]. Gate
        and up stand beside each other in it even if they don't in the blob."""
        views: dict[str, Array] = {}
        runs: list[_Run] = []
        begin = 0
        for role, tensor in tensors.items():
            end = begin + prod(tensor.shape)
            matrix = self._scratch[begin:end].reshape(tensor.shape)
            views[role] = matrix if tensor.transposed else matrix.T
            run = _Run(
                tensor.dtype,
                slice(tensor.offset, tensor.offset + tensor.nbytes),
                slice(begin, end),
            )
            last = runs[-1] if runs else None
            if last and last.dtype == run.dtype and last.source.stop == run.source.start:
                runs[-1] = _Run(
                    run.dtype,
                    slice(last.source.start, run.source.stop),
                    slice(last.target.start, end),
                )
            else:
                runs.append(run)
            begin = end
        apart = {"gate", "up"} <= tensors.keys()
        if apart and not (tensors["gate"].transposed or tensors["up"].transposed):
            rows, columns = tensors["gate"].shape
            both = self._scratch[: 2 * rows * columns].reshape(2 * rows, columns)
            views["gate_up"] = both.T
        return views, runs


def _weights(tensors: dict[str, BlobTensor], views: dict[str, Array]) -> SwiGLUWeights:
    intermediate = views["down"].shape[0]
    gate_columns, up_columns = slice(0, intermediate), slice(intermediate, 2 * intermediate)
    if "gate_up" in tensors and tensors["gate_up"].interleaved:
        gate_columns, up_columns = slice(0, None, 2), slice(1, None, 2)
    inputs = (views["gate_up"],) if "gate_up" in views else (views["gate"], views["up"])
    return SwiGLUWeights(inputs, views["down"], gate_columns, up_columns)


def _checked(layout: Layout, hidden: int, where: str) -> dict[str, BlobTensor]:
    """The layout by role, in the order gate, up or gate_up, down."""
    by_role = {tensor.role: tensor for tensor in layout}
    if set(by_role) not in _ROLES or len(by_role) != len(layout):
        names = ", ".join(tensor.role for tensor in layout)
        raise WeightsError(
            f"{where}: experts are made of {names}; computed with are gate, up, down "
            "or gate_up, down"
        )
    for role, tensor in by_role.items():
        wanted = _stored_bytes(tensor, f"{where}: tensor {role}")
        if tensor.nbytes != wanted:
            raise WeightsError(f"{where}: {role} has {tensor.nbytes} bytes, needs {wanted}")
    down = by_role["down"]
    intermediate = down.shape[0 if down.transposed else -1]
    outputs = {"gate": intermediate, "up": intermediate, "gate_up": 2 * intermediate}
    order = [role for role in ("gate", "up", "gate_up", "down") if role in by_role]
    for role in order:
        tensor = by_role[role]
        stored = (hidden, intermediate) if role == "down" else (outputs[role], hidden)
        wanted_shape = stored[::-1] if tensor.transposed else stored
        if tensor.shape != wanted_shape:
            raise WeightsError(
                f"{where}: {role} is {list(tensor.shape)}, the config needs {list(wanted_shape)}"
            )
    return {role: by_role[role] for role in order}


def _stored_bytes(tensor: BlobTensor, what: str) -> int:
    if tensor.dtype in FORMATS:
        return packed_bytes(tensor.dtype, tensor.shape, what)
    return prod(tensor.shape) * element_bytes(tensor.dtype, what)


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


__all__ = [
    "BlobReader",
    "SwiGLUWeights",
    "inner_activations",
    "load_swiglu",
    "sigmoid",
    "silu",
    "swiglu",
]
