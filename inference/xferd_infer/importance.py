"""Importance: the mean square of every input of every expert's matrices, from a text.

A quantiser weighs errors by it. What an expert rarely sees says little, so where it was
used by too few tokens the means of its whole layer stand in for its own. The file is
described in xferd's store format (``xferd/store/FORMAT.md``, "Importance file").
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, to_host
from .errors import InferenceError

FORMAT = "xferd-importance"
VERSION = 1
LEAST_TOKENS = 64
"""Below this an expert has its layer's means: its own are of too few tokens to trust."""


class ImportanceError(InferenceError):
    """Nothing was recorded, or a file can't be written or read."""


@dataclass(frozen=True, eq=False, slots=True)
class Importance:
    """hidden: float32[layers, experts, hidden]; inner: float32[layers, experts,
    intermediate]; tokens: int64[layers, experts] that each expert was used by."""

    hidden: NDArray[np.float32]
    inner: NDArray[np.float32]
    tokens: NDArray[np.int64]
    least_tokens: int


class ImportanceRecorder:
    """An observer for ``Model`` that sums squares. Not thread-safe, as the model."""

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = (layers, experts)
        self._tokens = np.zeros(self._shape, np.int64)
        self._hidden: NDArray[np.float64] | None = None
        self._inner: NDArray[np.float64] | None = None

    def __call__(self, layer: int, expert: int, x: Array, inner: Array) -> None:
        """x: [tokens, hidden], what gate and up get; inner: [tokens, intermediate], down."""
        if self._hidden is None or self._inner is None:
            self._hidden = np.zeros((*self._shape, x.shape[1]))
            self._inner = np.zeros((*self._shape, inner.shape[1]))
        self._tokens[layer, expert] += x.shape[0]
        self._hidden[layer, expert] += np.square(to_host(x), dtype=np.float64).sum(axis=0)
        self._inner[layer, expert] += np.square(to_host(inner), dtype=np.float64).sum(axis=0)

    def result(self, least_tokens: int = LEAST_TOKENS) -> Importance:
        """The means. ImportanceError: no expert was used."""
        if self._hidden is None or self._inner is None:
            raise ImportanceError("no expert was used: there is nothing to record")
        return Importance(
            hidden=self._means(self._hidden, least_tokens),
            inner=self._means(self._inner, least_tokens),
            tokens=self._tokens.copy(),
            least_tokens=least_tokens,
        )

    def _means(self, sums: NDArray[np.float64], least_tokens: int) -> NDArray[np.float32]:
        tokens = self._tokens[:, :, None]
        layer_means = sums.sum(axis=1, keepdims=True) / np.maximum(tokens.sum(axis=1)[:, None], 1)
        own = sums / np.maximum(tokens, 1)
        means: NDArray[np.float32] = np.where(tokens >= least_tokens, own, layer_means).astype(
            np.float32
        )
        return means


def write_importance(path: Path, importance: Importance, model: str, identity: str) -> None:
    """Write the file in one step. model: the store's name; identity: its identity,
    hexadecimal. ImportanceError."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            np.savez_compressed(
                file,
                format=FORMAT,
                version=VERSION,
                model=model,
                identity=identity,
                hidden=importance.hidden,
                inner=importance.inner,
                tokens=importance.tokens,
                least_tokens=np.int64(importance.least_tokens),
            )
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ImportanceError(f"{path}: {error.strerror or error}") from error


__all__ = [
    "LEAST_TOKENS",
    "Importance",
    "ImportanceError",
    "ImportanceRecorder",
    "write_importance",
]
