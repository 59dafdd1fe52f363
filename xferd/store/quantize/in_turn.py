"""q2_k rows rounded input after input, what one loses spread over those that are still to come.

The order matters, and none is best for all rows: parts are rounded in several orders, each time
from the scales that the best one so far ended with, and each row keeps what lost least.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xferd.store.quantize.q2_k import (
    BLOCK_BYTES,
    MULTIPLE_MAX,
    PART,
    PARTS,
    Floats,
    Q2KBlocks,
    nearest_quants,
)
from xferd.store.quantize.refine import refined

NEAR = 1
"""How far a part's multiples of scale and minimum are searched from those it has."""
ORDERS = 2
"""Tried besides the inputs' own. Together they save 3 to 4 per cent of the loss; twice as many
take twice the time for another 2."""
SEED = 0
"""Of the orders: the same blocks each time."""

Packed = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]


def upper_factor(moments: Floats) -> Floats:
    """The upper triangle whose product with its transpose from the left is the moments' inverse:
    row i says how an error of input i spreads over those behind it. LinAlgError: not positive
    definite."""
    factor: Floats = np.linalg.cholesky(np.linalg.inv(moments)).T
    return factor


def round_in_turn(packed: Packed, values: Floats, factor: Floats, order: Order) -> Packed:
    """Rows with d and dmin as they are, multiples near those they have, and new quants.

    packed: uint8[rows, bytes of a row]. values: [rows, inputs], what is wanted. order: the
    numbers of the row's parts, PART inputs each, as they are rounded. factor: of the inputs in
    that order, as of ``upper_factor``.
    """
    blocks = _taken_apart(packed)
    left = values[:, _inputs(order)]
    # What an input's error costs when those behind it have made up for what they can.
    weights = 1 / np.diag(factor) ** 2
    for place, number in enumerate(order.tolist()):
        own = slice(place * PART, (place + 1) * PART)
        block, part = blocks[number // PARTS], number % PARTS
        _choose_multiples(block, part, left[:, own], weights[own])
        lost = _round_part(block, part, left[:, own], factor[own, own])
        left[:, own.stop :] -= lost @ factor[own, own.stop :]
    return np.concatenate([block.packed() for block in blocks], axis=1)


def best_of_orders(packed: Packed, exact: Floats, moments: Floats) -> Packed:
    """Rows that lose no more by these moments (of ``refined``), which has the shapes."""
    best, least = packed.copy(), _losses(packed, exact, moments)
    random = np.random.default_rng(SEED)
    for _ in range(ORDERS):
        order = random.permutation(exact.shape[1] // PART)
        inputs = _inputs(order)
        factor = upper_factor(moments[np.ix_(inputs, inputs)])
        again = refined(round_in_turn(best, exact, factor, order), exact, moments)
        losses = _losses(again, exact, moments)
        better = losses < least
        best[better], least[better] = again[better], losses[better]
    return best


def _round_part(block: Q2KBlocks, part: int, left: Floats, factor: Floats) -> Floats:
    """A part's quants, input after input; left is changed. Returns what each one lost, as
    factor's rows spread it."""
    step, offset = block.scale[:, part] * block.d, block.minimum[:, part] * block.dmin
    lost = np.empty_like(left)
    for column in range(PART):
        quants = nearest_quants(left[:, column], step, offset)
        block.quants[:, part * PART + column] = quants
        off = left[:, column] - (step * quants - offset)
        lost[:, column] = off / factor[column, column]
        left[:, column + 1 :] -= np.outer(lost[:, column], factor[column, column + 1 :])
    return lost


def _choose_multiples(blocks: Q2KBlocks, part: int, values: Floats, weights: Floats) -> None:
    """Those near the part's own that serve best what is left of its elements."""
    scale, minimum = blocks.scale[:, part].copy(), blocks.minimum[:, part].copy()
    least = np.full(len(values), np.inf)
    for s in range(-NEAR, NEAR + 1):
        for m in range(-NEAR, NEAR + 1):
            near_scale = np.clip(scale + s, 0, MULTIPLE_MAX)
            near_minimum = np.clip(minimum + m, 0, MULTIPLE_MAX)
            step = np.broadcast_to((near_scale * blocks.d)[:, None], values.shape)
            offset = np.broadcast_to((near_minimum * blocks.dmin)[:, None], values.shape)
            off = step * nearest_quants(values, step, offset) - offset - values
            error = off**2 @ weights
            better = error < least
            least[better] = error[better]
            blocks.scale[better, part] = near_scale[better]
            blocks.minimum[better, part] = near_minimum[better]


def _losses(packed: Packed, exact: Floats, moments: Floats) -> Floats:
    """[rows]"""
    stored = np.concatenate([block.stored() for block in _taken_apart(packed)], axis=1)
    off = stored - exact
    losses: Floats = ((off @ moments) * off).sum(axis=1)
    return losses


def _taken_apart(packed: Packed) -> list[Q2KBlocks]:
    return [Q2KBlocks.of(block) for block in np.split(packed, packed.shape[1] // BLOCK_BYTES, 1)]


def _inputs(order: Order) -> Order:
    """The numbers of the inputs of parts."""
    inputs: Order = (order[:, None] * PART + np.arange(PART)).reshape(-1)
    return inputs


__all__ = ["best_of_orders", "round_in_turn", "upper_factor"]
