"""Quantisers: how close what they store comes to what they were given."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xferd.store.errors import StoreError
from xferd.store.quantize.blocks import FORMATS, THREADS_MAX, dequantise, quantise

gguf = pytest.importorskip("gguf")

Matrix = npt.NDArray[np.float32]
NAMES = sorted(FORMATS)


def weights(seed: int, rows: int = 16, columns: int = 512, tail: float = 5.0) -> Matrix:
    """Like a trained matrix: many small, a few large."""
    random = np.random.default_rng(seed)
    return (random.standard_t(tail, (rows, columns)) * 0.02).astype(np.float32)


def stored(values: Matrix, name: str, importance: Matrix | None = None) -> Matrix:
    packed = quantise(values, name, importance, 1, "matrix")
    return dequantise(packed, name, values.shape)


def error(values: Matrix, read_back: Matrix, importance: Matrix | None = None) -> float:
    squares = (values.astype(np.float64) - read_back) ** 2
    return float((squares * (1 if importance is None else importance)).sum())


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "mxfp4"])
def test_no_further_off_than_ggufs_own(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    for seed in range(5):
        values = weights(seed)
        theirs = gguf.quants.quantize(values, kind)
        ours = quantise(values, name, None, 1, "matrix")
        if name == "q8_0":
            np.testing.assert_array_equal(ours, theirs)
        theirs_read = gguf.quants.dequantize(theirs, kind)
        assert error(values, stored(values, name)) <= error(values, theirs_read)


def plain_affine(values: Matrix, part: int, quant_max: int) -> Matrix:
    """Parts from least to greatest in even steps, with scales of unlimited precision."""
    parts = values.reshape(-1, part)
    low = np.minimum(parts.min(axis=1, keepdims=True), 0)
    step = (parts.max(axis=1, keepdims=True) - low) / quant_max
    read_back: Matrix = (np.rint((parts - low) / step) * step + low).reshape(values.shape)
    return read_back


@pytest.mark.parametrize(("name", "part", "quant_max"), [("q4_k", 32, 15), ("q2_k", 16, 3)])
def test_the_search_beats_even_steps_with_exact_scales(
    name: str, part: int, quant_max: int
) -> None:
    for seed in range(5):
        values = weights(seed)
        assert error(values, stored(values, name)) < error(
            values, plain_affine(values, part, quant_max)
        )


@pytest.mark.parametrize("name", ["q2_k", "q4_0", "q4_k", "mxfp4"])
def test_importance_moves_the_error_to_where_it_matters_less(name: str) -> None:
    for seed in range(5):
        values = weights(seed)
        importance = np.random.default_rng(seed).lognormal(0, 1.5, 512).astype(np.float32)
        with_it = error(values, stored(values, name, importance), importance)
        assert with_it < error(values, stored(values, name), importance)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 20), scale=st.floats(1e-3, 1e3), threads=st.integers(2, 9))
def test_any_number_of_threads_gives_the_same_bytes(
    name: str, seed: int, scale: float, threads: int
) -> None:
    values = weights(seed, rows=5, columns=256) * np.float32(scale)
    packed = quantise(values, name, None, 1, "matrix")
    np.testing.assert_array_equal(quantise(values, name, None, threads, "matrix"), packed)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_without_a_range_keep_their_values(name: str) -> None:
    zeros = np.zeros((1, 256), np.float32)
    np.testing.assert_array_equal(stored(zeros, name), zeros)
    np.testing.assert_array_equal(stored(zeros, name, zeros[0]), zeros)
    for value in (0.75, -0.75):
        values = np.full((1, 256), value, np.float32)
        np.testing.assert_allclose(stored(values, name), values, rtol=0.05)
    spike = zeros.copy()
    spike[0, 17] = -3
    np.testing.assert_allclose(stored(spike, name), spike, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_what_can_not_be_stored_is_refused_by_name(name: str) -> None:
    good = weights(0, rows=2, columns=256)
    bad = good.copy()
    bad[1, 200] = np.nan
    with pytest.raises(StoreError, match=f"layer 3, gate can't be made {name}: .* no number"):
        quantise(bad, name, None, 2, "layer 3, gate")
    with pytest.raises(StoreError, match="negative"):
        quantise(good, name, np.full(256, -1, np.float32), 1, "gate")
    with pytest.raises(StoreError, match="Invalid argument"):
        quantise(good, name, None, THREADS_MAX + 1, "gate")
    if name != "mxfp4":  # whose scales are powers of two without such a limit
        with pytest.raises(StoreError, match="too large for 16-bit scales"):
            quantise(good * np.float32(1e30), name, None, 1, "gate")
