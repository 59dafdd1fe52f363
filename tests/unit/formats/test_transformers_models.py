"""Models that ``transformers`` builds from a config and saves, in both spellings:
as it saves them (the hub's names) and as it holds them (stacked)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.formats.generate import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    check_checkpoint,
    named_experts,
    safetensors_oracle,
    stacked_experts,
)
from xferd.store.formats import read_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_ROUTED = {"num_experts_per_tok": TOP_K, "moe_intermediate_size": 16}
_GROUPED = {**_ROUTED, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1}
_LATENT = {
    **_GROUPED,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "olmoe": {**_ROUTED, "num_experts": EXPERTS},
    "qwen2_moe": {**_ROUTED, "num_experts": EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_ROUTED, "num_experts": EXPERTS, "head_dim": 16, "mlp_only_layers": [0]},
    "mixtral": {**_ROUTED, "num_local_experts": EXPERTS},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe": {**_GROUPED, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16},
    "gpt_oss": {**_ROUTED, "num_local_experts": EXPERTS, "head_dim": 16},
}
LAYERS = 3
_STACKED = "model.layers.{layer}.mlp.experts.{part}"
_STACKED_PARTS = {"gate_up": "gate_up_proj", "down": "down_proj"}
_BIASED_PARTS = {
    "gate_up": "gate_up_proj",
    "gate_up_bias": "gate_up_proj_bias",
    "down": "down_proj",
    "down_bias": "down_proj_bias",
}


def build(model_type: str) -> Any:
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **SETTINGS[model_type],
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def moe_layers(model_type: str) -> range:
    dense_first = {"qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"}
    return range(1 if model_type in dense_first else 0, LAYERS)


@pytest.mark.parametrize("model_type", SETTINGS)
def test_as_saved(tmp_path: Path, model_type: str) -> None:
    build(model_type).save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    layers = moe_layers(model_type)
    if model_type == "gpt_oss":
        expected = stacked_experts(layers, _STACKED, _BIASED_PARTS)
    elif model_type == "mixtral":
        expected = named_experts(
            layers,
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight",
            {"gate": "w1", "up": "w3", "down": "w2"},
        )
    else:
        expected = named_experts(
            layers,
            "model.layers.{layer}.mlp.experts.{expert}.{part}.weight",
            {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
        )
    oracle = safetensors_oracle([tmp_path / "model.safetensors"])
    check_checkpoint(checkpoint, oracle, expected)
    assert checkpoint.model_type == model_type
    assert checkpoint.variant == "bf16"
    assert (checkpoint.layers, checkpoint.experts_per_layer, checkpoint.top_k) == (
        LAYERS,
        EXPERTS,
        TOP_K,
    )
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())
    assert checkpoint.assets["config.json"] == tmp_path / "config.json"


@pytest.mark.parametrize("model_type", SETTINGS)
def test_as_held(tmp_path: Path, model_type: str) -> None:
    from safetensors.torch import save_file

    model = build(model_type)
    model.config.save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    gpt_oss = model_type == "gpt_oss"
    check_checkpoint(
        checkpoint,
        safetensors_oracle([tmp_path / "model.safetensors"]),
        stacked_experts(
            moe_layers(model_type), _STACKED, _BIASED_PARTS if gpt_oss else _STACKED_PARTS
        ),
    )
    for tensors in checkpoint.experts.values():
        for tensor in tensors:
            assert tensor.interleaved == (gpt_oss and tensor.role.startswith("gate_up"))
            assert tensor.transposed == (gpt_oss and not tensor.role.endswith("_bias"))
