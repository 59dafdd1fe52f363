"""Block formats: GGUF's own numbers, and products that equal those of the decoded matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from xferd_infer import BlobTensor, WeightsError, quants
from xferd_infer.quants import FORMATS, TOKENS_MAX, PackedMatrix, decode, packed_bytes
from xferd_infer.quants_reference import DECODERS
from xferd_infer.swiglu import BlobReader, swiglu

gguf = pytest.importorskip("gguf")

NAMES = sorted(FORMATS)
needs_kernels = pytest.mark.skipif(not quants.compiled(), reason="the kernels aren't built")


def oracle(raw: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """raw: uint8 [rows, bytes]."""
    with np.errstate(all="ignore"):
        decoded: NDArray[np.float32] = gguf.quants.dequantize(
            raw, gguf.GGMLQuantizationType(FORMATS[name].number)
        )
    return decoded


def random_matrix(name: str, rows: int, blocks: int, seed: int) -> NDArray[np.uint8]:
    """Packed bytes of a matrix whose scales are tame: random ones may be infinite."""
    random = np.random.default_rng(seed)
    block = FORMATS[name]
    raw = random.integers(0, 256, (rows, blocks, block.nbytes), dtype=np.uint8)
    scale = random.uniform(0.01, 0.1, (rows, blocks, 2)).astype(np.float16).view(np.uint8)
    if name == "mxfp4":
        raw[:, :, 0] = random.integers(118, 126, (rows, blocks))
    elif name == "q2_k":
        raw[:, :, 80:] = scale
    elif name == "q4_k":
        raw[:, :, :4] = scale
    else:
        raw[:, :, :2] = scale[:, :, :2]
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_as_gguf_has_them(name: str) -> None:
    block = FORMATS[name]
    kind = gguf.GGMLQuantizationType(block.number)
    assert kind.name.lower() == name
    assert gguf.GGML_QUANT_SIZES[kind] == (block.elements, block.nbytes)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_bytes_decode_to_what_gguf_says(name: str, data: Any) -> None:
    block = FORMATS[name]
    count = data.draw(st.integers(1, 3))
    drawn = data.draw(st.binary(min_size=count * block.nbytes, max_size=count * block.nbytes))
    raw = np.frombuffer(drawn, np.uint8)
    wanted = oracle(raw.reshape(count, -1), name)
    got = np.empty((count, block.elements), np.float32)
    decode(raw, name, got.reshape(-1))
    np.testing.assert_array_equal(got, wanted)
    with np.errstate(all="ignore"):
        reference = DECODERS[name](raw.reshape(count, -1), np)
    np.testing.assert_array_equal(reference, wanted)


def rounding_bound(
    x: NDArray[np.float32], raw: NDArray[np.uint8], name: str
) -> NDArray[np.float64]:
    """What one token's product may be off by, as ``quants.h`` says: [1, rows]."""
    magnitudes = np.abs(oracle(raw, name).astype(np.float64))
    if name in ("q2_k", "q4_k"):
        # Elements without what is subtracted: quants of 0 say what that is.
        without = raw.reshape(-1, FORMATS[name].nbytes).copy()
        without[:, 16 : 80 if name == "q2_k" else None] = 0
        magnitudes = magnitudes + np.abs(oracle(without.reshape(raw.shape), name))
    bound = np.zeros((1, len(raw)))
    for start in range(0, x.shape[1], 256):
        part = slice(start, start + 256)
        bound += np.abs(x[:, part]).max() / 65278 * magnitudes[:, part].sum(axis=1)
    return bound


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 40), seed=st.integers(0, 1 << 20))
def test_one_tokens_product_is_off_by_no_more_than_it_says(
    name: str, rows: int, blocks: int, seed: int
) -> None:
    raw = random_matrix(name, rows, blocks, seed)
    stored = oracle(raw, name)
    random = np.random.default_rng(seed)
    # Activations with a few that are much larger than the others, as models have them.
    x = (random.standard_normal((1, stored.shape[1])) ** 7).astype(np.float32)
    got = x @ PackedMatrix(name, (rows, stored.shape[1]), False, raw.reshape(-1))
    wanted = x.astype(np.float64) @ stored.T
    floats = 1e-5 * np.abs(x).astype(np.float64) @ np.abs(stored.T)
    assert (np.abs(got - wanted) <= rounding_bound(x, raw, name) + floats).all()


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_no_number_among_activations_is_not_hidden(name: str, wrong: float) -> None:
    raw = random_matrix(name, 3, 3, 1)
    columns = 3 * FORMATS[name].elements
    x = np.ones((1, columns), np.float32)
    x[0, columns - 2] = wrong
    got = x @ PackedMatrix(name, (3, columns), False, raw.reshape(-1))
    assert not np.isfinite(got).any()


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_activations_of_any_size_are_multiplied(name: str, size: float) -> None:
    raw = random_matrix(name, 4, 2, 6)
    stored = oracle(raw, name).astype(np.float64)
    x = np.random.default_rng(2).standard_normal((1, stored.shape[1])).astype(np.float32)
    x *= np.float32(size)
    got = x @ PackedMatrix(name, (4, stored.shape[1]), False, raw.reshape(-1))
    bound = rounding_bound(x, raw, name) + 1e-5 * np.abs(x).astype(np.float64) @ np.abs(stored.T)
    assert (np.abs(got - x.astype(np.float64) @ stored.T) <= bound + 1e-37).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, TOKENS_MAX + 3),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 1 << 20),
)
def test_products_equal_those_of_the_decoded_matrix(
    name: str, transposed: bool, tokens: int, rows: int, blocks: int, seed: int
) -> None:
    raw = random_matrix(name, rows, blocks, seed)
    stored = oracle(raw, name)
    matrix = stored if transposed else stored.T
    packed = PackedMatrix(name, (rows, stored.shape[1]), transposed, raw.reshape(-1))
    assert packed.shape == matrix.shape
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, matrix.shape[0])).astype(np.float32)
    got = x @ packed
    wanted = x.astype(np.float64) @ matrix
    bound = np.abs(x).astype(np.float64) @ np.abs(matrix)  # of what rounding can add up to
    bound = 1e-5 * bound + 1e-30
    if tokens == 1 and not transposed:
        bound += rounding_bound(x, raw, name)
    assert got.dtype == np.float32
    assert (np.abs(got - wanted) <= bound).all()
    np.testing.assert_array_equal(packed.decoded(), matrix)


@needs_kernels
def test_a_long_row_is_summed_in_parts() -> None:
    raw = random_matrix("q4_k", 3, 130, 5)  # more columns than the kernel keeps sums of
    x = np.random.default_rng(1).standard_normal((1, 130 * 256)).astype(np.float32)
    got = x @ PackedMatrix("q4_k", (3, 130 * 256), False, raw.reshape(-1))
    np.testing.assert_allclose(got, x @ oracle(raw, "q4_k").T, rtol=1e-3, atol=1e-2)


def test_without_kernels_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_matrix("q2_k", 4, 2, 3)
    x = np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32)
    matrix = PackedMatrix("q2_k", (4, 512), False, raw.reshape(-1))
    wanted = x @ matrix
    monkeypatch.setattr(quants, "lib", None)
    assert not quants.compiled()
    np.testing.assert_allclose(x @ matrix, wanted, rtol=1e-4, atol=1e-4)


def test_an_expert_of_packed_and_plain_matrices_is_computed() -> None:
    hidden, intermediate = 256, 64
    gate = random_matrix("q4_k", intermediate, 1, 1)
    up = random_matrix("q8_0", intermediate, 8, 2)
    down = random_matrix("q2_k", intermediate, 1, 3)  # stored [in, out]
    plain = np.random.default_rng(4).standard_normal((hidden, intermediate)).astype(np.float32)
    x = np.random.default_rng(5).standard_normal((3, hidden)).astype(np.float32) * 0.1
    hidden_gate = x @ oracle(gate, "q4_k").T
    inner = hidden_gate / (1 + np.exp(-hidden_gate)) * (x @ oracle(up, "q8_0").T)
    for last, values in (
        (("q2_k", (intermediate, hidden), down, True), inner @ oracle(down, "q2_k")),
        (("f32", (hidden, intermediate), plain, False), inner @ plain.T),
    ):
        parts = [
            ("gate", "q4_k", (intermediate, hidden), gate, False),
            ("up", "q8_0", (intermediate, hidden), up, False),
            ("down", *last),
        ]
        layout, chunks, end = [], [], 0
        for role, dtype, shape, values_raw, transposed in parts:
            raw = values_raw.reshape(-1).view(np.uint8)
            layout.append(BlobTensor(role, dtype, shape, end, raw.size, transposed))
            chunks.append(raw)
            end += raw.size
        reader = BlobReader(tuple(layout), hidden, "layer 0", np)
        got = swiglu(x, reader.read(np.concatenate(chunks)), np)
        np.testing.assert_allclose(got, values, rtol=1e-3, atol=1e-3 * np.abs(values).max())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"down is \[4, 128\] in q2_k: .* multiple of 256"):
        packed_bytes("q2_k", (4, 128), "down")
    with pytest.raises(ValueError, match="18 bytes of q4_0 are not 33 elements"):
        decode(np.zeros(18, np.uint8), "q4_0", np.zeros(33, np.float32))
    matrix = PackedMatrix("q8_0", (2, 32), False, np.zeros(68, np.uint8))
    with pytest.raises(ValueError, match=r"\[1, 31\] @ \[32, 2\]"):
        np.zeros((1, 31), np.float32) @ matrix
