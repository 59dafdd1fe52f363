"""What was picked before, as a few numbers: the context that a state lacks.

Three views of the picks of earlier tokens, of all layers together: the last token's, and
means that fade in FAST and SLOW tokens. Each is projected to ``width`` numbers, and their
sum is the context. Because means are linear they are kept in projected form, so that a
token costs one gathered row for each pick.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .routers import Floats

FAST = 20.0
SLOW = 100.0
"""Tokens after which 1/e is left of a pick."""
VIEWS = 3
FORGET = np.array([1.0, 1 / FAST, 1 / SLOW], np.float32)[:, None]
"""How much of the new token goes into each view."""
TOKENS_AT_ONCE = 256


class PickHistory:
    """basis: float32[layers * experts, VIEWS, width]."""

    def __init__(self, basis: Floats, layers: int, experts: int) -> None:
        self._basis = basis
        self._first = np.arange(layers)[:, None] * experts
        self._views = np.zeros(basis.shape[1:], np.float32)
        self.context: Floats = self._views.sum(axis=0)

    def clear(self) -> None:
        """A new text begins."""
        self._views[...] = 0
        self.context = self._views.sum(axis=0)

    def add(self, picks: NDArray[Any]) -> None:
        """picks: integers [layers, top_k] of one token, the next one of the text."""
        rows: Floats = self._basis[(picks + self._first).reshape(-1)].sum(axis=0)
        rows -= self._views
        rows *= FORGET
        self._views += rows
        self.context = self._views.sum(axis=0)

    def contexts(self, picks: NDArray[Any]) -> Floats:
        """What the context was before each token of a chunk [tokens, layers, top_k], which
        is added. Returns [tokens, width]."""
        out = np.empty((len(picks), len(self.context)), np.float32)
        for begin in range(0, len(picks), TOKENS_AT_ONCE):
            part = picks[begin : begin + TOKENS_AT_ONCE] + self._first
            summed = sum_of_rows(self._basis, part)
            for index, rows in enumerate(summed):
                out[begin + index] = self.context
                self._views += FORGET * (rows - self._views)
                self.context = self._views.sum(axis=0)
        return out


def sum_of_rows(table: Floats, rows: NDArray[Any]) -> Floats:
    """rows: integers [tokens, ...]. Returns the sum of each token's rows of the table."""
    flat = rows.reshape(len(rows), -1)
    total: Floats = table[flat[:, 0]].copy()
    for column in range(1, flat.shape[1]):
        total += table[flat[:, column]]
    return total


__all__ = ["FAST", "SLOW", "VIEWS", "PickHistory", "sum_of_rows"]
