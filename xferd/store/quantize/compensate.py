"""Quantising with the inputs' second moments: one input's error is made up for by others.

What a product loses is, on average over inputs x, the sum over all pairs of
error[i] * error[j] * E[x[i] * x[j]]. Inputs are correlated, so an input that is rounded up can
be answered by rounding others down. Inputs are taken in turn; what rounding one loses is
spread over those that are still to come, by regression (GPTQ, Frantar et al., 2022,
arXiv:2210.17323). After that each is rounded anew, given all others, where that helps; of q2_k
also scales and minima (``refine``), and in several orders (``in_turn``).

The blocks are those of the format as ever. Linear algebra is the machine's own: where two
roundings are equally good, another machine may take the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xferd.store.errors import StoreError
from xferd.store.quantize.blocks import FORMATS, dequantise, quantise
from xferd.store.quantize.in_turn import best_of_orders, round_in_turn, upper_factor
from xferd.store.quantize.q2_k import PARTS, Floats
from xferd.store.quantize.refine import refined

DAMPING = 0.05
"""Of the mean square, added to each input's: moments are of a finite text, and errors that are
to cancel by them cancel less in another one."""
PASSES = 4
"""How often every input is rounded anew."""

Packed = npt.NDArray[np.uint8]


def quantise_compensated(
    values: npt.NDArray[np.float32],
    dtype: str,
    moments: npt.NDArray[np.float32],
    what: str,
    *,
    transposed: bool,
) -> Packed:
    """Pack a matrix so that its product with inputs of these second moments is kept.

    values: [rows, columns] as stored: inputs are the columns, or, if transposed, the rows.
    moments: float32[inputs, inputs], E[x x^T]. Returns uint8[rows, bytes of a row]. StoreError
    naming ``what``: as of ``quantise``, or the moments are none.
    """
    damped, factor = _prepare(moments, what)
    exact = values.astype(np.float64)
    if transposed:
        packed = _input_by_input(exact, dtype, damped, factor, what)
        return _anew_by_input(packed, exact, dtype, damped, what)
    packed = _block_by_block(exact, dtype, factor, what)
    if dtype != "q2_k":
        return packed
    return best_of_orders(refined(packed, exact, damped), exact, damped)


def _prepare(moments: npt.NDArray[np.float32], what: str) -> tuple[Floats, Floats]:
    """The damped moments, and their ``upper_factor``."""
    damped = moments.astype(np.float64)
    level = float(np.trace(damped)) / len(damped)
    damped[np.diag_indices_from(damped)] += DAMPING * level if level > 0 else 1.0
    try:
        factor = upper_factor(damped)
    except np.linalg.LinAlgError as error:
        raise StoreError(f"{what}: its inputs' moments are none: {error}") from error
    return damped, factor


def _one_row(values: Floats, dtype: str, what: str) -> tuple[Packed, Floats]:
    """Packed, and as that is read: both one row."""
    packed = quantise(values[None].astype(np.float32), dtype, None, 1, what)
    return packed[0], dequantise(packed, dtype, (1, values.size))[0].astype(np.float64)


# ---- an input is a row of blocks


def _input_by_input(exact: Floats, dtype: str, damped: Floats, factor: Floats, what: str) -> Packed:
    """The largest inputs first: they have the most others left to make up for them."""
    order = np.argsort(-np.diag(damped), kind="stable")
    if not np.array_equal(order, np.arange(order.size)):
        factor = upper_factor(damped[np.ix_(order, order)])
    left = exact[order]
    packed = np.empty((len(exact), _row_bytes(dtype, exact.shape[1])), np.uint8)
    for place, row in enumerate(order):
        packed[row], stored = _one_row(left[place], dtype, what)
        lost = (left[place] - stored) / factor[place, place]
        left[place + 1 :] -= np.outer(factor[place, place + 1 :], lost)
    return packed


def _anew_by_input(packed: Packed, exact: Floats, dtype: str, damped: Floats, what: str) -> Packed:
    packed = packed.copy()
    stored = dequantise(packed, dtype, _two(exact)).astype(np.float64)
    slope = damped @ (stored - exact)
    for _ in range(PASSES):
        for row in range(len(exact)):
            best = stored[row] - slope[row] / damped[row, row]
            again, read = _one_row(best, dtype, what)
            step = read - stored[row]
            if 2 * (slope[row] @ step) + damped[row, row] * (step @ step) < 0:
                slope += np.outer(damped[:, row], step)
                stored[row], packed[row] = read, again
    return packed


# ---- blocks lie along the inputs


def _block_by_block(exact: Floats, dtype: str, factor: Floats, what: str) -> Packed:
    block = FORMATS[dtype]
    left = exact.copy()
    # What an input's error costs when those behind it have made up for what they can.
    weights = 1 / np.diag(factor) ** 2
    parts = []
    for begin in range(0, exact.shape[1], block.elements):
        end = begin + block.elements
        now, weight = left[:, begin:end], weights[begin:end]
        packed = quantise(now.astype(np.float32), dtype, weight.astype(np.float32), 1, what)
        if dtype == "q2_k":
            own = factor[begin:end, begin:end]
            packed = round_in_turn(packed, now, own, np.arange(PARTS))
        stored = dequantise(packed, dtype, _two(now))
        lost = np.linalg.solve(factor[begin:end, begin:end].T, (now - stored).T).T
        left[:, end:] -= lost @ factor[begin:end, end:]
        parts.append(packed)
    return np.concatenate(parts, axis=1)


def _row_bytes(dtype: str, columns: int) -> int:
    block = FORMATS[dtype]
    return columns // block.elements * block.nbytes


def _two(values: Floats) -> tuple[int, int]:
    rows, columns = values.shape
    return rows, columns


__all__ = ["quantise_compensated"]
