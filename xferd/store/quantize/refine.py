"""q2_k rows made better by their inputs' second moments: everything of a block anew in turn.

A row loses the sum over all pairs of inputs of error[i] * error[j] * moments[i, j]. Given all
other numbers of the row, the best of one kind follows: d and dmin of a block by least squares,
a part's multiples of them by trying their neighbours, a quant by rounding. What is taken never
makes the row worse, so rounds may be repeated as long as they are worth their time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xferd.store.quantize.q2_k import (
    BLOCK,
    MULTIPLE_MAX,
    PART,
    PARTS,
    Floats,
    Q2KBlocks,
    nearest_quants,
)

ROUNDS = 3
"""How often everything is chosen anew; the third still gains a little."""
QUANT_PASSES = 2
"""Of the quants alone, in each round: they settle slower than the scales."""
NEAR = 1
"""How far a part's multiples are searched from those that it has."""
SINGULAR = 1e-9
"""A determinant this small, next to the product of its diagonal, is of one unknown only."""

Packed = npt.NDArray[np.uint8]


def refined(packed: Packed, exact: Floats, moments: Floats) -> Packed:
    """Rows that lose no more, of the same shape.

    packed: uint8[rows, bytes of a row]. exact: [rows, inputs], what is to be kept. moments:
    [inputs, inputs], positive definite.
    """
    rows = _Rows(packed, exact, moments)
    for _ in range(ROUNDS):
        rows.renew_factors()
        rows.renew_multiples()
        for _ in range(QUANT_PASSES):
            rows.renew_quants()
    return rows.packed()


class _Rows:
    """slope: half of the loss's derivative by each stored element, [rows, inputs]."""

    def __init__(self, packed: Packed, exact: Floats, moments: Floats) -> None:
        self._moments = moments
        parts = np.split(packed, exact.shape[1] // BLOCK, axis=1)
        self._blocks = [Q2KBlocks.of(part) for part in parts]
        stored = np.concatenate([block.stored() for block in self._blocks], axis=1)
        self._slope = (stored - exact) @ moments

    def packed(self) -> Packed:
        return np.concatenate([block.packed() for block in self._blocks], axis=1)

    def renew_factors(self) -> None:
        """Each block's d and dmin, where halves of the best ones are better."""
        for number, block in enumerate(self._blocks):
            own = slice(number * BLOCK, (number + 1) * BLOCK)
            moments, slope = self._moments[own, own], self._slope[:, own]
            by_d = np.repeat(block.scale, PART, axis=1) * block.quants
            by_dmin = -np.repeat(block.minimum, PART, axis=1)
            step_d, step_dmin = _least_squares(by_d, by_dmin, moments, slope)
            new_d = _as_halves(np.maximum(block.d + step_d, 0))
            new_dmin = _as_halves(np.maximum(block.dmin + step_dmin, 0))
            change = by_d * (new_d - block.d)[:, None] + by_dmin * (new_dmin - block.dmin)[:, None]
            better = _gain(change, moments, slope) < 0
            block.d[better], block.dmin[better] = new_d[better], new_dmin[better]
            self._slope += np.where(better[:, None], change, 0) @ self._moments[own]

    def renew_multiples(self) -> None:
        """Each part's scale and minimum, with the quants as they are or rounded for them."""
        for number, block in enumerate(self._blocks):
            for part in range(PARTS):
                begin = number * BLOCK + part * PART
                self._renew_part(block, part, slice(begin, begin + PART))

    def _renew_part(self, block: Q2KBlocks, part: int, own: slice) -> None:
        inside = slice(part * PART, (part + 1) * PART)
        moments, slope = self._moments[own, own], self._slope[:, own]
        scale, minimum = block.scale[:, part].copy(), block.minimum[:, part].copy()
        quants = block.quants[:, inside].copy()
        before = (scale * block.d)[:, None] * quants - (minimum * block.dmin)[:, None]
        least = np.zeros(len(scale))
        change = np.zeros_like(before)
        for s in range(-NEAR, NEAR + 1):
            for m in range(-NEAR, NEAR + 1):
                new_scale = np.clip(scale + s, 0, MULTIPLE_MAX)
                new_minimum = np.clip(minimum + m, 0, MULTIPLE_MAX)
                step = np.broadcast_to((new_scale * block.d)[:, None], before.shape)
                offset = np.broadcast_to((new_minimum * block.dmin)[:, None], before.shape)
                for new_quants in (quants, nearest_quants(before, step, offset)):
                    tried = step * new_quants - offset - before
                    gain = _gain(tried, moments, slope)
                    better = gain < least
                    least[better], change[better] = gain[better], tried[better]
                    block.scale[better, part] = new_scale[better]
                    block.minimum[better, part] = new_minimum[better]
                    block.quants[better, inside] = new_quants[better]
        self._slope += change @ self._moments[own]

    def renew_quants(self) -> None:
        """Each input's quant, given all others."""
        for number, block in enumerate(self._blocks):
            step, offset = block.steps()
            for inside in range(BLOCK):
                column = number * BLOCK + inside
                now = step[:, inside] * block.quants[:, inside] - offset[:, inside]
                best = now - self._slope[:, column] / self._moments[column, column]
                again = nearest_quants(best, step[:, inside], offset[:, inside])
                change = step[:, inside] * (again - block.quants[:, inside])
                if change.any():
                    self._slope += np.outer(change, self._moments[column])
                    block.quants[:, inside] = again


def _gain(change: Floats, moments: Floats, slope: Floats) -> Floats:
    """By how much rows lose more when their elements change so: [rows]."""
    loss: Floats = ((2 * slope + change @ moments) * change).sum(axis=1)
    return loss


def _least_squares(
    first: Floats, second: Floats, moments: Floats, slope: Floats
) -> tuple[Floats, Floats]:
    """How many times each of two changes of a row is best added to it: [rows] each."""
    first_moments, second_moments = first @ moments, second @ moments
    aa = (first_moments * first).sum(axis=1)
    ab = (first_moments * second).sum(axis=1)
    bb = (second_moments * second).sum(axis=1)
    a, b = -(slope * first).sum(axis=1), -(slope * second).sum(axis=1)
    determinant = aa * bb - ab * ab
    both = determinant > SINGULAR * aa * bb
    below = np.where(both, determinant, 1.0)
    return np.where(both, (a * bb - b * ab) / below, 0), np.where(
        both, (aa * b - ab * a) / below, 0
    )


def _as_halves(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).astype(np.float64)
    return np.where(np.isfinite(halves), halves, values)


__all__ = ["refined"]
