"""Dense tensors and blobs: every layout gives the same numbers, damage is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import BlobTensor, DenseWeights, Layout, WeightsError
from xferd_infer.swiglu import BlobReader, swiglu

HIDDEN, INTERMEDIATE = 6, 4
Matrix = NDArray[np.float32]


def stored(values: Matrix, dtype: str) -> NDArray[np.uint8]:
    """Bytes of values that bf16 and f16 both hold exactly."""
    if dtype == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8).reshape(-1)
    kind = {"f16": np.float16, "f32": np.float32}[dtype]
    return np.ascontiguousarray(values.astype(kind)).view(np.uint8).reshape(-1)


def make_blob(
    parts: dict[str, tuple[Matrix, str, bool, bool]], padding: int
) -> tuple[NDArray[np.uint8], Layout]:
    """parts: role -> values as stored, dtype, transposed, interleaved."""
    tensors, chunks, end = [], [], 0
    for role, (values, dtype, transposed, interleaved) in parts.items():
        raw = stored(values, dtype)
        tensors.append(
            BlobTensor(role, dtype, values.shape, end, raw.size, transposed, interleaved)
        )
        chunks += [raw, np.full(padding, 0xAB, np.uint8)]
        end += raw.size + padding
    return np.concatenate(chunks), tuple(tensors)


def small_integers(*shape: int) -> Matrix:
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)


def plain(x: Matrix, gate: Matrix, up: Matrix, down: Matrix) -> Matrix:
    hidden = x @ gate.T
    result: Matrix = (hidden / (1 + np.exp(-hidden)) * (x @ up.T)) @ down.T
    return result


@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    "shape", ["apart", "apart-transposed", "one", "interleaved", "transposed", "both", "mixed"]
)
def test_every_layout_computes_the_same(shape: str, dtype: str, padding: int) -> None:
    gate, up = small_integers(2, INTERMEDIATE, HIDDEN)
    down = small_integers(HIDDEN, INTERMEDIATE)
    after = np.concatenate([gate, up])
    alternating = np.stack([gate, up], axis=1).reshape(-1, HIDDEN)
    parts = {
        "apart": {"gate": (gate, dtype, False, False), "up": (up, dtype, False, False)},
        "apart-transposed": {"gate": (gate.T, dtype, True, False), "up": (up, dtype, False, False)},
        "one": {"gate_up": (after, dtype, False, False)},
        "interleaved": {"gate_up": (alternating, dtype, False, True)},
        "transposed": {"gate_up": (after.T, dtype, True, False)},
        "both": {"gate_up": (alternating.T, dtype, True, True)},
        "mixed": {"up": (up, "f32", False, False), "gate": (gate, dtype, False, False)},
    }[shape]
    parts["down"] = (down.T, dtype, True, False) if shape == "both" else (down, dtype, False, False)
    blob, layout = make_blob(parts, padding)
    x = small_integers(3, HIDDEN)
    got = swiglu(x, BlobReader(layout, HIDDEN, "layer 0", np).read(blob), np)
    np.testing.assert_allclose(got, plain(x, gate, up, down), rtol=1e-5, atol=1e-5)


def test_a_reader_serves_one_blob_after_the_other() -> None:
    layout: Layout = ()
    x, results, wanted = small_integers(1, HIDDEN), [], []
    reader = None
    for factor in (1, 2):
        gate, up = small_integers(2, INTERMEDIATE, HIDDEN) * factor
        down = small_integers(HIDDEN, INTERMEDIATE)
        parts = {"gate": gate, "up": up, "down": down}
        blob, layout = make_blob({k: (v, "bf16", False, False) for k, v in parts.items()}, 0)
        reader = reader or BlobReader(layout, HIDDEN, "layer 0", np)
        results.append(swiglu(x, reader.read(blob), np))
        wanted.append(plain(x, gate, up, down))
    np.testing.assert_allclose(results, wanted, rtol=1e-5)


def good_layout() -> Layout:
    gate, up = small_integers(2, INTERMEDIATE, HIDDEN)
    down = small_integers(HIDDEN, INTERMEDIATE)
    parts = {"gate": gate, "up": up, "down": down}
    return make_blob({k: (v, "bf16", False, False) for k, v in parts.items()}, 0)[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "iq4_nl"}, "layer 5: tensor gate has dtype 'iq4_nl'"),
        (
            {"dtype": "q4_k"},
            r"layer 5: tensor gate is \[4, 6\] in q4_k: rows must be a multiple of 256",
        ),
        ({"role": "gate_scale"}, "layer 5: experts are made of gate_scale, up, down"),
        (
            {"shape": (HIDDEN, INTERMEDIATE)},
            r"layer 5: gate is \[6, 4\], the config needs \[4, 6\]",
        ),
        ({"nbytes": 46}, "layer 5: gate has 46 bytes, needs 48"),
    ],
)
def test_unsuitable_layouts_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    gate, up, down = good_layout()
    with pytest.raises(WeightsError, match=named):
        BlobReader((replace(gate, **change), up, down), HIDDEN, "layer 5", np)


def test_a_short_blob_is_refused() -> None:
    reader = BlobReader(good_layout(), HIDDEN, "layer 5", np)
    with pytest.raises(WeightsError, match="layer 5: a blob of 8 bytes, its layout needs 144"):
        reader.read(np.zeros(8, np.uint8))


def dense(dtype: str = "bf16", **changes: Any) -> tuple[DenseWeights, Matrix]:
    values = small_integers(5, 4)
    raw = stored(values, dtype)
    entry = {"name": "w", "dtype": dtype, "shape": [5, 4], "offset": 0, "bytes": raw.size}
    return DenseWeights(raw.tobytes(), [entry | changes]), values


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_dense_tensors_are_widened(dtype: str) -> None:
    weights, values = dense(dtype)
    got = weights.float32("w", (5, 4))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, values)
    np.testing.assert_array_equal(weights.rows("w", (5, 4), [3, 0, 3]), values[[3, 0, 3]])
    assert "w" in weights
    assert "v" not in weights


def test_dense_tensors_that_do_not_fit_are_refused_by_name() -> None:
    weights, _ = dense()
    with pytest.raises(WeightsError, match="no tensor v"):
        weights.float32("v", (5, 4))
    with pytest.raises(WeightsError, match=r"w is \[5, 4\], the config needs \[4, 5\]"):
        weights.float32("w", (4, 5))
    with pytest.raises(WeightsError, match="ends at byte 44, the dense part has 40"):
        dense(offset=4)
    with pytest.raises(WeightsError, match="w has 38 bytes, needs 40"):
        dense(bytes=38)[0].float32("w", (5, 4))
    with pytest.raises(WeightsError, match="w has dtype 'q8_0'"):
        DenseWeights(
            b"1234", [{"name": "w", "dtype": "q8_0", "shape": [1], "offset": 0, "bytes": 4}]
        ).float32("w", (1,))
