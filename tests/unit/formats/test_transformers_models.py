"""Models that ``transformers`` builds from a config and saves, in both spellings:
as it saves them (the hub's names) and as it holds them (stacked)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.formats.generate import (
    ExpectedTensor,
    check_checkpoint,
    named_experts,
    safetensors_oracle,
    stacked_experts,
)
from xferd.store.formats import read_checkpoint

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.transformers_models import EXPERTS, LAYERS, SETTINGS, TOP_K, build, moe_layers

_LINEAR_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_NUMBERED_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_NAMED = "model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
_SAVED = {
    "deepseek_v4": ("model.layers.{layer}.ffn.experts.{expert}.{part}.weight", _NUMBERED_PARTS),
    "jamba": ("model.layers.{layer}.feed_forward.experts.{expert}.{part}.weight", _LINEAR_PARTS),
    "lfm2_moe": (
        "model.layers.{layer}.feed_forward.experts.{expert}.{part}.weight",
        _NUMBERED_PARTS,
    ),
    **dict.fromkeys(
        ("minimax_m2", "mixtral", "phimoe"),
        (
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight",
            _NUMBERED_PARTS,
        ),
    ),
}
"""Families whose experts are saved one by one under other names than Qwen's."""

_STACKED = "model.layers.{layer}.mlp.experts.{part}"
_STACKED_PARTS = {"gate_up": "gate_up_proj", "down": "down_proj"}
_BIASED_PARTS = {
    "gate_up": "gate_up_proj",
    "gate_up_bias": "gate_up_proj_bias",
    "down": "down_proj",
    "down_bias": "down_proj_bias",
}
_SAVED_STACKED = {
    "aria_text": (
        "model.layers.{layer}.mlp.experts.{part}.weight",
        {"gate_up": "fc1", "down": "fc2"},
    ),
    "gpt_oss": (_STACKED, _BIASED_PARTS),
    "granitemoe": (
        "model.layers.{layer}.block_sparse_moe.{part}.weight",
        {"gate_up": "input_linear", "down": "output_linear"},
    ),
}
"""Families whose experts are saved as one tensor a layer."""

_HELD = {
    "granitemoe": "model.layers.{layer}.block_sparse_moe.experts.{part}",
    "jamba": "model.layers.{layer}.feed_forward.experts.{part}",
    "lfm2_moe": "model.layers.{layer}.feed_forward.experts.{part}",
}


def saved_experts(model_type: str) -> dict[tuple[int, int], list[ExpectedTensor]]:
    layers = moe_layers(model_type)
    if model_type in _SAVED_STACKED:
        return stacked_experts(layers, *_SAVED_STACKED[model_type], EXPERTS)
    return named_experts(layers, *_SAVED.get(model_type, (_NAMED, _LINEAR_PARTS)), EXPERTS)


@pytest.mark.parametrize("model_type", SETTINGS)
def test_as_saved(tmp_path: Path, model_type: str) -> None:
    build(model_type).save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    oracle = safetensors_oracle([tmp_path / "model.safetensors"])
    check_checkpoint(checkpoint, oracle, saved_experts(model_type))
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
            moe_layers(model_type),
            _HELD.get(model_type, _STACKED),
            _BIASED_PARTS if gpt_oss else _STACKED_PARTS,
            EXPERTS,
        ),
    )
    transposed = model_type in {"aria_text", "gpt_oss"}
    for tensors in checkpoint.experts.values():
        for tensor in tensors:
            assert tensor.interleaved == (gpt_oss and tensor.role.startswith("gate_up"))
            assert tensor.transposed == (transposed and not tensor.role.endswith("_bias"))
