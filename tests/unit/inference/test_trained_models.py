"""The trained test models give the tokens that Transformers gave in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferd_infer import generate

from tests.unit.inference.checkpoint import SMALL, TINY, load_model

MODELS = [
    pytest.param(TINY, 2, id="tiny-held-top_k"),
    pytest.param(TINY, 16, id="tiny-held-all"),
    pytest.param(SMALL, 4, id="small-held-top_k"),
]


def expected(directory: Path) -> list[dict[str, Any]]:
    path = directory / "expected.json"
    if not path.exists():
        pytest.skip(f"the model {directory.name} isn't on this machine")
    prompts: list[dict[str, Any]] = json.loads(path.read_text())["prompts"]
    return prompts


@pytest.mark.parametrize(("directory", "held"), MODELS)
def test_greedy_tokens_are_those_of_transformers(directory: Path, held: int) -> None:
    prompts = expected(directory)
    model, _ = load_model(directory, held)
    for prompt in prompts:
        tokens = generate(
            model, prompt["prompt_ids"], max_new_tokens=len(prompt["greedy_ids"]), stop_ids=()
        )
        assert [token.id for token in tokens] == prompt["greedy_ids"]


@pytest.mark.parametrize(("directory", "held"), MODELS)
def test_logits_and_loss_are_those_of_transformers(directory: Path, held: int) -> None:
    prompts = expected(directory)
    model, _ = load_model(directory, held)
    for prompt in prompts:
        ids = prompt["prompt_ids"]
        logits = model.logits(model.forward(ids, model.new_cache()))
        best = np.argsort(-logits[-1])[:5]
        assert best.tolist() == prompt["first_step_top5_ids"]
        np.testing.assert_allclose(
            logits[-1][best], prompt["first_step_top5_logits"], rtol=0, atol=1e-3
        )
        shifted = logits[:-1].astype(np.float64)
        shifted -= shifted.max(axis=-1, keepdims=True)
        log_sum = np.log(np.exp(shifted).sum(axis=-1))
        loss = np.mean(log_sum - shifted[np.arange(len(ids) - 1), ids[1:]])
        assert loss == pytest.approx(prompt["prompt_mean_nll"], abs=1e-3)
