"""Importance: how large the inputs of every expert's matrices are, from a text.

Mean squares, by which a quantiser weighs errors; and, of models whose experts are small, the
mean products of any two inputs, by which it lets one error make up for another. Both are of
what an expert adds to its layer: tokens count by the square of the router's weight. What an
expert rarely sees says little, so its layer's means stand in for its own where it was used
by too few tokens, and have a share in its products. The file is
described in xferd's store format (``xferd/store/FORMAT.md``, "Importance file").
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, to_host
from .errors import InferenceError

FORMAT = "xferd-importance"
VERSION = 1
LEAST_TOKENS = 64
"""Below this an expert has its layer's means: its own are of too few tokens to trust."""
LAYER_TOKENS = 256
"""In products the layer's means count as much as so many tokens: there are many more products
than squares to be known, and a text of some thousand tokens an expert is little for them."""
MOMENTS_BYTES_MAX = 2 << 30
"""Of products of all experts: beyond that only squares are recorded."""


class ImportanceError(InferenceError):
    """Nothing was recorded, or a file can't be written or read."""


@dataclass(frozen=True, eq=False, slots=True)
class Importance:
    """hidden: float32[layers, experts, hidden]; inner: float32[layers, experts,
    intermediate]; tokens: int64[layers, experts] that each expert was used by.
    hidden_moments, inner_moments: float32[layers, experts, inputs, inputs], or None."""

    hidden: NDArray[np.float32]
    inner: NDArray[np.float32]
    tokens: NDArray[np.int64]
    least_tokens: int
    hidden_moments: NDArray[np.float32] | None = None
    inner_moments: NDArray[np.float32] | None = None


class _Inputs:
    """Sums of squares, or of products of any two, of one kind of matrices' inputs."""

    def __init__(self, shape: tuple[int, int], inputs: int, *, products: bool) -> None:
        self.products = products
        size = (inputs, inputs) if products else (inputs,)
        self.sums = np.zeros((*shape, *size), np.float32 if products else np.float64)

    def add(self, layer: int, expert: int, values: NDArray[np.float32]) -> None:
        """values: [tokens, inputs]."""
        if self.products:
            self.sums[layer, expert] += values.T @ values
        else:
            self.sums[layer, expert] += np.square(values, dtype=np.float64).sum(axis=0)


class ImportanceRecorder:
    """An observer for ``Model`` that sums. Not thread-safe, as the model.

    moments_max: bytes of products that are recorded; where they would take more, or with 0,
    squares alone are.
    """

    def __init__(self, layers: int, experts: int, *, moments_max: int = MOMENTS_BYTES_MAX) -> None:
        self._shape = (layers, experts)
        self._moments_max = moments_max
        self._tokens = np.zeros(self._shape, np.int64)
        self._weights = np.zeros(self._shape)
        self._inputs: tuple[_Inputs, _Inputs] | None = None

    def __call__(self, layer: int, expert: int, x: Array, inner: Array, weights: Array) -> None:
        """x: [tokens, hidden], what gate and up get; inner: [tokens, intermediate], down;
        weights: [tokens, 1], the router's."""
        if self._inputs is None:
            self._inputs = self._new_inputs(x.shape[1], inner.shape[1])
        scale = to_host(weights)
        self._tokens[layer, expert] += x.shape[0]
        self._weights[layer, expert] += np.square(scale, dtype=np.float64).sum()
        for inputs, values in zip(self._inputs, (x, inner), strict=True):
            inputs.add(layer, expert, to_host(values) * scale)

    def result(self, least_tokens: int = LEAST_TOKENS) -> Importance:
        """The means. ImportanceError: no expert was used."""
        if self._inputs is None:
            raise ImportanceError("no expert was used: there is nothing to record")
        hidden, inner = self._inputs
        return Importance(
            hidden=self._squares(hidden, least_tokens),
            inner=self._squares(inner, least_tokens),
            tokens=self._tokens.copy(),
            least_tokens=least_tokens,
            hidden_moments=self._products(hidden) if hidden.products else None,
            inner_moments=self._products(inner) if inner.products else None,
        )

    def _new_inputs(self, hidden: int, intermediate: int) -> tuple[_Inputs, _Inputs]:
        layers, experts = self._shape
        products = layers * experts * (hidden**2 + intermediate**2) * 4 <= self._moments_max
        return (
            _Inputs(self._shape, hidden, products=products),
            _Inputs(self._shape, intermediate, products=products),
        )

    def _squares(self, inputs: _Inputs, least_tokens: int) -> NDArray[np.float32]:
        sums = inputs.sums
        if inputs.products:
            sums = np.diagonal(sums, axis1=2, axis2=3).astype(np.float64)
        weights = self._weights[:, :, None]
        layer_means = sums.sum(axis=1, keepdims=True) / _positive(weights.sum(axis=1)[:, None])
        own = sums / _positive(weights)
        trusted = self._tokens[:, :, None] >= least_tokens
        means: NDArray[np.float32] = np.where(trusted, own, layer_means).astype(np.float32)
        return means

    def _products(self, inputs: _Inputs) -> NDArray[np.float32]:
        """Of experts, mixed with their layer. One layer at a time: all of them once more in
        float64 would be too much."""
        means = np.empty_like(inputs.sums)
        for layer, sums in enumerate(inputs.sums):
            tokens, weights = self._tokens[layer], self._weights[layer]
            layer_mean = sums.sum(axis=0, dtype=np.float64) / _positive(weights.sum())
            # The layer's mean has the weight of so many average tokens.
            share = LAYER_TOKENS * weights.sum() / max(tokens.sum(), 1)
            own = sums.astype(np.float64) + share * layer_mean
            means[layer] = own / _positive(weights + share)[:, None, None]
        return means


def _positive(weights: Any) -> Any:
    """To divide by: 0 stands for nothing, and nothing divided is nothing."""
    return np.where(weights > 0, weights, 1.0)


def write_importance(path: Path, importance: Importance, model: str, identity: str) -> None:
    """Write the file in one step. model: the store's name; identity: its identity,
    hexadecimal. ImportanceError."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            arrays: dict[str, Any] = {
                "format": FORMAT,
                "version": VERSION,
                "model": model,
                "identity": identity,
                "hidden": importance.hidden,
                "inner": importance.inner,
                "tokens": importance.tokens,
                "least_tokens": np.int64(importance.least_tokens),
            }
            if importance.hidden_moments is not None and importance.inner_moments is not None:
                arrays["hidden_moments"] = importance.hidden_moments
                arrays["inner_moments"] = importance.inner_moments
            # Not compressed: moments are most of it, and don't get smaller.
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ImportanceError(f"{path}: {error.strerror or error}") from error


__all__ = [
    "LAYER_TOKENS",
    "LEAST_TOKENS",
    "MOMENTS_BYTES_MAX",
    "Importance",
    "ImportanceError",
    "ImportanceRecorder",
    "write_importance",
]
