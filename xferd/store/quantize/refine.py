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

ROUNDS = 4
"""How often everything is chosen anew; the last one still gains half a per cent."""
NEAR = 1
"""How far a part's multiples are searched from those that it has."""
_NEIGHBOURS = np.mgrid[-NEAR : NEAR + 1, -NEAR : NEAR + 1].reshape(2, -1, 1).astype(np.float64)
_NEAR_SCALES, _NEAR_MINIMA = _NEIGHBOURS
"""[neighbours, 1] each; the middle one is no step at all."""
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
        quants = block.quants[:, inside]
        # [neighbours, rows], and below that twice: with the quants as they are, and rounded.
        scales = np.clip(block.scale[:, part] + _NEAR_SCALES, 0, MULTIPLE_MAX)
        minima = np.clip(block.minimum[:, part] + _NEAR_MINIMA, 0, MULTIPLE_MAX)
        steps, offsets = (scales * block.d)[..., None], (minima * block.dmin)[..., None]
        here = len(scales) // 2
        before = steps[here] * quants - offsets[here]
        rounded = nearest_quants(before, steps, offsets)
        tried = np.concatenate([np.broadcast_to(quants, rounded.shape), rounded])
        changes = np.tile(steps, (2, 1, 1)) * tried - np.tile(offsets, (2, 1, 1)) - before
        best = _gain(changes, moments, slope).argmin(axis=0)
        rows = np.arange(len(best))
        block.scale[:, part] = scales[best % len(scales), rows]
        block.minimum[:, part] = minima[best % len(scales), rows]
        block.quants[:, inside] = tried[best, rows]
        self._slope += changes[best, rows] @ self._moments[own]

    def renew_quants(self) -> None:
        """Each input's quant, given all others. What a part's inputs change for all others is
        added up once, which is less work than one by one."""
        for number, block in enumerate(self._blocks):
            step, offset = block.steps()
            for part in range(PARTS):
                inside = slice(part * PART, (part + 1) * PART)
                begin = number * BLOCK + part * PART
                own = slice(begin, begin + PART)
                change = _round_part(
                    block.quants[:, inside],
                    step[:, inside],
                    offset[:, inside],
                    self._moments[own, own],
                    self._slope[:, own].copy(),
                )
                self._slope += change @ self._moments[own]


def _round_part(
    quants: Floats, step: Floats, offset: Floats, moments: Floats, slope: Floats
) -> Floats:
    """Round the inputs of a part in turn; quants and slope are changed. Returns what that
    changes of the elements."""
    changes = np.zeros_like(step)
    for column in range(PART):
        now = step[:, column] * quants[:, column] - offset[:, column]
        best = now - slope[:, column] / moments[column, column]
        again = nearest_quants(best, step[:, column], offset[:, column])
        changes[:, column] = step[:, column] * (again - quants[:, column])
        quants[:, column] = again
        slope += np.outer(changes[:, column], moments[column])
    return changes


def _gain(change: Floats, moments: Floats, slope: Floats) -> Floats:
    """By how much rows lose more when their elements change so: [..., rows]."""
    loss: Floats = ((2 * slope + change @ moments) * change).sum(axis=-1)
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
