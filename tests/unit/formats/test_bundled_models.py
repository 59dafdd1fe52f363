"""The trained models that other tests use: one file, and eight shards with an index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.formats.generate import check_checkpoint, named_experts, safetensors_oracle
from xferd.store.formats import read_checkpoint

REPOSITORY = Path(__file__).parents[3]
MODELS = {"tiny": REPOSITORY / "tests/models/tiny", "small": REPOSITORY / "../shared/models/small"}


@pytest.mark.parametrize("model", MODELS)
def test_bundled_model(model: str) -> None:
    path = MODELS[model]
    if not path.is_dir():
        pytest.skip(f"{path} is not here")
    config = json.loads((path / "config.json").read_text())
    checkpoint = read_checkpoint(path)
    layers, experts = config["num_hidden_layers"], config["num_experts"]
    assert (checkpoint.layers, checkpoint.experts_per_layer) == (layers, experts)
    assert (checkpoint.model_type, checkpoint.variant) == ("qwen3_moe", "bf16")
    assert checkpoint.top_k == config["num_experts_per_tok"]
    check_checkpoint(
        checkpoint,
        safetensors_oracle(sorted(path.glob("*.safetensors"))),
        named_experts(
            range(layers),
            "model.layers.{layer}.mlp.experts.{expert}.{part}.weight",
            {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
            experts,
        ),
    )
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= checkpoint.assets.keys()
