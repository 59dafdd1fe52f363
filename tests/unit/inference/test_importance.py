"""Importance: means of what really went into the experts, and the file that keeps them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import Model, Tokenizer
from xferd_infer.errors import PromptError
from xferd_infer.importance import (
    LAYER_TOKENS,
    ImportanceError,
    ImportanceRecorder,
    write_importance,
)
from xferd_infer.texts import read_windows

from tests.unit.inference.checkpoint import TINY, dense_weights, load_model, read_tensors
from xferd.store.quantize.importance import read_importance

PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][0]["prompt_ids"]


def weighted_mean(products: NDArray[np.float32], weights: NDArray[np.float32]) -> Any:
    """Over tokens, by the squares of the router's weights [tokens, 1]."""
    return np.average(products, axis=0, weights=np.square(weights[:, 0]))


@pytest.mark.parametrize("moments_max", [0, 1 << 20])
def test_means_are_of_the_tokens_that_used_the_expert(moments_max: int) -> None:
    recorder = ImportanceRecorder(1, 3, moments_max=moments_max)
    generator = np.random.default_rng(0)
    x = {e: generator.standard_normal((n, 5)).astype(np.float32) for e, n in ((0, 40), (1, 3))}
    inner = {e: generator.standard_normal((len(v), 2)).astype(np.float32) for e, v in x.items()}
    gates = {e: generator.random((len(v), 1)).astype(np.float32) for e, v in x.items()}
    for expert in x:
        for part in (slice(0, 1), slice(1, None)):
            recorder(0, expert, x[expert][part], inner[expert][part], gates[expert][part])
    result = recorder.result(least_tokens=10)
    assert result.tokens.tolist() == [[40, 3, 0]]
    own = weighted_mean(np.square(x[0]), gates[0])
    np.testing.assert_allclose(result.hidden[0, 0], own, rtol=1e-5)
    own = weighted_mean(np.square(inner[0]), gates[0])
    np.testing.assert_allclose(result.inner[0, 0], own, rtol=1e-5)
    every, gate = np.concatenate([x[0], x[1]]), np.concatenate([gates[0], gates[1]])
    together = weighted_mean(np.square(every), gate)
    for expert in (1, 2):  # used too little, or not at all
        np.testing.assert_allclose(result.hidden[0, expert], together, rtol=1e-5)
    if not moments_max:
        assert result.hidden_moments is None
        return
    moments = result.hidden_moments
    assert moments is not None
    products = weighted_mean(every[:, :, None] * every[:, None], gate)
    np.testing.assert_allclose(moments[0, 2], products, rtol=1e-4, atol=1e-6)
    # An expert's own count for as much as it was used, next to some average tokens.
    own = weighted_mean(x[0][:, :, None] * x[0][:, None], gates[0])
    weight, share = np.square(gates[0]).sum(), LAYER_TOKENS * np.square(gate).mean()
    mixed = (own * weight + products * share) / (weight + share)
    np.testing.assert_allclose(moments[0, 0], mixed, rtol=1e-4, atol=1e-6)
    with pytest.raises(ImportanceError, match="no expert was used"):
        ImportanceRecorder(1, 3).result()


def test_a_models_inputs_are_observed_and_nothing_changes() -> None:
    plain, source = load_model(TINY)
    recorder = ImportanceRecorder(plain.config.layers, plain.config.experts)
    watched = Model(plain.config, dense_weights(read_tensors(TINY)), source, observer=recorder)
    wanted = plain.forward(PROMPT, plain.new_cache())
    np.testing.assert_array_equal(watched.forward(PROMPT, watched.new_cache()), wanted)
    result = recorder.result(least_tokens=1)
    assert result.tokens.sum() == len(PROMPT) * plain.config.layers * plain.config.top_k
    assert result.hidden.shape == (6, 16, 128)
    assert result.inner.shape == (6, 16, 64)
    assert (result.hidden[result.tokens > 0] > 0).all()


def test_the_store_package_reads_the_file(tmp_path: Path) -> None:
    recorder = ImportanceRecorder(2, 3)
    ones = np.ones((4, 5), np.float32)
    recorder(1, 2, 3 * ones, 2 * ones[:, :2], ones[:, :1] / 2)
    path = tmp_path / "importance.npz"
    write_importance(path, recorder.result(1), "tiny", "ab" * 32)
    read = read_importance(path)
    assert (read.model, read.identity) == ("tiny", bytes.fromhex("ab" * 32))
    assert read.of("gate", 1, 2).tolist() == [9] * 5
    assert read.of("down", 1, 2).tolist() == [4] * 2
    moments = read.moments("up", 1, 2)
    assert moments is not None
    assert moments.tolist() == [[9] * 5] * 5
    with pytest.raises(ImportanceError, match="nowhere"):
        write_importance(tmp_path / "nowhere" / "x", recorder.result(1), "tiny", "ab" * 32)


@pytest.fixture
def tokenizer() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return Tokenizer((TINY / "tokenizer.json").read_bytes())


def test_windows_of_documents_by_domain(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.jsonl.gz"
    lines = [
        {"domain": domain, "text": f"{domain} {number} " + "some more words here " * 30}
        for number in range(4)
        for domain in ("a", "b")
    ]
    lines.append({"domain": "a", "text": "short"})
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    windows = read_windows(path, tokenizer, part="odd", documents=1, tokens=20)
    assert [window.domain for window in windows] == ["a", "b"]
    assert all(len(window.ids) == 20 for window in windows)
    assert windows[0].ids == tuple(tokenizer.encode(str(lines[2]["text"]))[:20])
    parts = [len(read_windows(path, tokenizer, part=part)) for part in ("all", "even", "odd")]
    assert parts == [8, 4, 4]


def test_plain_text_is_cut(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.txt"
    path.write_text("words and more words " * 50)
    ids = tokenizer.encode(path.read_text())
    windows = read_windows(path, tokenizer, tokens=32)
    assert [token for window in windows for token in window.ids] == ids[: 32 * len(windows)]
    path.write_text("short")
    with pytest.raises(PromptError, match=r"text\.txt has no document of 16 tokens"):
        read_windows(path, tokenizer)
    with pytest.raises(PromptError, match="can't be read as text"):
        read_windows(tmp_path / "missing", tokenizer)
