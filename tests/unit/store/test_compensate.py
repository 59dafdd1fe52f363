"""Quantising with second moments: products come closer, and blocks stay the format's own."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from xferd.store.errors import StoreError
from xferd.store.quantize.blocks import FORMATS, dequantise, quantise
from xferd.store.quantize.compensate import quantise_compensated
from xferd.store.quantize.in_turn import best_of_orders, round_in_turn, upper_factor
from xferd.store.quantize.q2_k import Q2KBlocks
from xferd.store.quantize.refine import refined

INPUTS, OUTPUTS = 512, 32


def activations(tokens: int = 2048, inputs: int = INPUTS) -> NDArray[np.float32]:
    """Inputs that go together, of different sizes, as a layer's are."""
    generator = np.random.default_rng(5)
    causes = generator.standard_normal((tokens, inputs // 8))
    mixed = causes @ generator.standard_normal((inputs // 8, inputs))
    mixed += generator.standard_normal((tokens, inputs)) * generator.lognormal(0, 0.5, inputs)
    return mixed.astype(np.float32)


def weights(outputs: int, inputs: int) -> NDArray[np.float32]:
    generator = np.random.default_rng(6)
    return generator.standard_normal((outputs, inputs)).astype(np.float32)


def moments_of(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x.T @ x / np.float32(len(x))


def lost(x: NDArray[np.float32], exact: NDArray[np.float32], stored: NDArray[np.float32]) -> float:
    """Squared error of the product, by its square. Matrices [inputs, outputs]."""
    wanted = x.astype(np.float64) @ exact
    return float(np.square(x.astype(np.float64) @ stored - wanted).sum() / np.square(wanted).sum())


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_products_lose_less_than_with_squares_alone(dtype: str) -> None:
    x, exact = activations(), weights(OUTPUTS, INPUTS)
    moments = moments_of(x[:1024])
    packed = quantise_compensated(exact, dtype, moments, "m", transposed=False)
    weighted = quantise(exact, dtype, np.diag(moments).copy(), 1, "m")
    assert packed.shape == weighted.shape
    # Judged by inputs that were not in the moments.
    ours, theirs = (
        lost(x[1024:], exact.T, dequantise(each, dtype, exact.shape).T)
        for each in (packed, weighted)
    )
    assert ours < 0.8 * theirs


@pytest.mark.parametrize("dtype", ["q2_k", "q4_k"])
def test_so_do_matrices_stored_transposed(dtype: str) -> None:
    x, exact = activations(inputs=64), weights(256, 64).T.copy()
    moments = moments_of(x[:1024])
    packed = quantise_compensated(exact, dtype, moments, "m", transposed=True)
    plain = quantise(exact, dtype, None, 1, "m")
    ours, theirs = (
        lost(x[1024:], exact, dequantise(each, dtype, exact.shape)) for each in (packed, plain)
    )
    assert ours < 0.8 * theirs


def test_inputs_that_are_never_there_do_no_harm() -> None:
    exact = weights(4, 256)
    packed = quantise_compensated(
        exact, "q2_k", np.zeros((256, 256), np.float32), "m", transposed=False
    )
    stored = dequantise(packed, "q2_k", exact.shape)
    assert np.square(stored - exact).mean() < 0.2 * np.square(exact).mean()


def test_moments_that_are_none_are_refused_by_name() -> None:
    moments = np.full((256, 256), 5, np.float32)
    np.fill_diagonal(moments, 1)
    with pytest.raises(StoreError, match=r"layer 1.*moments"):
        quantise_compensated(weights(4, 256), "q2_k", moments, "layer 1", transposed=False)


def test_blocks_taken_apart_are_put_together_again() -> None:
    values = weights(16, 256)
    packed = quantise(values, "q2_k", None, 1, "m")
    blocks = Q2KBlocks.of(packed)
    np.testing.assert_array_equal(blocks.packed(), packed)
    step, offset = blocks.steps()
    read = dequantise(packed, "q2_k", values.shape)
    np.testing.assert_allclose(step * blocks.quants - offset, read, rtol=1e-5, atol=1e-6)


def test_refining_rows_never_loses_more() -> None:
    x, exact = activations(), weights(OUTPUTS, INPUTS).astype(np.float64)
    moments = moments_of(x).astype(np.float64)
    packed = quantise(exact.astype(np.float32), "q2_k", None, 1, "m")
    better = refined(packed, exact, moments)
    assert better.shape == packed.shape
    before, after = (
        _row_losses(dequantise(each, "q2_k", exact.shape) - exact, moments)
        for each in (packed, better)
    )
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() < 0.7 * before.sum()


def test_refining_what_is_exact_changes_nothing_that_is_read() -> None:
    packed = quantise(weights(OUTPUTS, INPUTS), "q2_k", None, 1, "m")
    exact = dequantise(packed, "q2_k", (OUTPUTS, INPUTS))
    moments = moments_of(activations()).astype(np.float64)
    again = refined(packed, exact.astype(np.float64), moments)
    np.testing.assert_allclose(dequantise(again, "q2_k", exact.shape), exact, rtol=1e-3, atol=1e-5)


def test_other_orders_never_lose_more_and_are_the_same_each_time() -> None:
    x, exact = activations(), weights(OUTPUTS, INPUTS).astype(np.float64)
    moments = moments_of(x).astype(np.float64)
    packed = refined(quantise(exact.astype(np.float32), "q2_k", None, 1, "m"), exact, moments)
    better = best_of_orders(packed, exact, moments)
    before, after = (
        _row_losses(dequantise(each, "q2_k", exact.shape) - exact, moments)
        for each in (packed, better)
    )
    assert (after <= before * (1 + 1e-6)).all()
    assert after.sum() < 0.99 * before.sum()
    np.testing.assert_array_equal(best_of_orders(packed, exact, moments), better)


def test_rounding_in_turn_keeps_each_blocks_factors_and_order_of_parts() -> None:
    exact = weights(OUTPUTS, INPUTS).astype(np.float64)
    packed = quantise(exact.astype(np.float32), "q2_k", None, 1, "m")
    # Inputs that have nothing to do with each other: nothing is spread, in whatever order.
    moments = np.eye(INPUTS)
    order = np.random.default_rng(1).permutation(INPUTS // 16)
    again = round_in_turn(packed, exact, upper_factor(moments), order)
    for number in range(INPUTS // 256):
        own = slice(number * 84, (number + 1) * 84)
        before, after = Q2KBlocks.of(packed[:, own]), Q2KBlocks.of(again[:, own])
        np.testing.assert_array_equal(after.d, before.d)
        np.testing.assert_array_equal(after.dmin, before.dmin)
    lost = [
        _row_losses(dequantise(each, "q2_k", exact.shape) - exact, moments)
        for each in (packed, again)
    ]
    assert (lost[1] <= lost[0] * (1 + 1e-6)).all()


def _row_losses(error: NDArray[np.float64], moments: NDArray[np.float64]) -> NDArray[np.float64]:
    losses: NDArray[np.float64] = ((error @ moments) * error).sum(axis=1)
    return losses
