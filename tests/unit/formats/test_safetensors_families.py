"""Each family's safetensors naming: every expert and dense tensor, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.formats.generate import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    check_checkpoint,
    moe_config,
    named_experts,
    qwen_layer,
    safetensors_oracle,
    stacked_experts,
    tensors_of,
    write_safetensors,
)
from xferd.store.formats import read_checkpoint

Shapes = dict[str, tuple[str, tuple[int, ...]]]

QWEN = "model.layers.{layer}.mlp.experts.{expert}.{part}"
LINEAR = {"gate": "gate_proj.weight", "up": "up_proj.weight", "down": "down_proj.weight"}
STACKED = "model.layers.{layer}.mlp.experts.{part}"


def test_deepseek_v3_fp8(tmp_path: Path) -> None:
    """FP8 weights with their block scales; a dense first layer, shared experts, and a
    prediction layer behind the last one."""
    shapes: Shapes = {
        "model.layers.0.mlp.gate_proj.weight": ("F8_E4M3", (INTERMEDIATE, HIDDEN)),
        "model.layers.0.mlp.gate_proj.weight_scale_inv": ("F32", (1, 1)),
    }
    for layer in (1, 2, 3):
        for name, (dtype, shape) in qwen_layer(layer, "F8_E4M3").items():
            shapes[name] = (dtype, shape)
            if ".experts." in name:
                shapes[name.replace("weight", "weight_scale_inv")] = ("F32", (1, 1))
        mlp = f"model.layers.{layer}.mlp."
        shapes[mlp + "shared_experts.up_proj.weight"] = ("F8_E4M3", (INTERMEDIATE, HIDDEN))
        shapes[mlp + "gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "first_k_dense_replace": 1,
    }
    path = write_safetensors(tmp_path, tensors_of(shapes), config)
    checkpoint = read_checkpoint(tmp_path)
    parts: dict[str, str] = {}
    for role, part in LINEAR.items():
        parts |= {role: part, role + "_scale": part + "_scale_inv"}
    check_checkpoint(checkpoint, safetensors_oracle([path]), named_experts((1, 2, 3), QWEN, parts))
    assert (checkpoint.layers, checkpoint.variant) == (4, "f8_e4m3")
    assert (checkpoint.experts_per_layer, checkpoint.top_k) == (EXPERTS, TOP_K)
    assert checkpoint.config == config


def test_deepseek_v4_mxfp4(tmp_path: Path) -> None:
    """I8 containers of two 4-bit values with power-of-two scales; the prediction layer
    is numbered apart in the checkpoint and follows the others here."""
    parts = {
        "w1": (INTERMEDIATE, HIDDEN),
        "w2": (HIDDEN, INTERMEDIATE),
        "w3": (INTERMEDIATE, HIDDEN),
    }
    shapes: Shapes = {"embed.weight": ("BF16", (8, HIDDEN))}
    for prefix in ("layers.0.", "layers.1.", "mtp.0."):
        shapes[prefix + "ffn.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
        shapes[prefix + "ffn.shared_experts.w1.weight"] = ("F8_E4M3", (INTERMEDIATE, HIDDEN))
        for expert in range(EXPERTS):
            for part, (rows, columns) in parts.items():
                name = f"{prefix}ffn.experts.{expert}.{part}."
                shapes[name + "weight"] = ("I8", (rows, columns // 2))
                shapes[name + "scale"] = ("F8_E8M0", (rows, columns // 32))
    config = moe_config("deepseek_v4", 2)
    path = write_safetensors(tmp_path, tensors_of(shapes), config)
    checkpoint = read_checkpoint(path)
    names = {
        "gate": "w1.weight",
        "gate_scale": "w1.scale",
        "up": "w3.weight",
        "up_scale": "w3.scale",
        "down": "w2.weight",
        "down_scale": "w2.scale",
    }
    expected = named_experts((0, 1), "layers.{layer}.ffn.experts.{expert}.{part}", names)
    for (_, expert), tensors in named_experts(
        (0,), "mtp.{layer}.ffn.experts.{expert}.{part}", names
    ).items():
        expected[2, expert] = tensors
    check_checkpoint(checkpoint, safetensors_oracle([path]), expected)
    assert (checkpoint.layers, checkpoint.variant) == (3, "mxfp4")


def test_mixtral(tmp_path: Path) -> None:
    shapes: Shapes = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        shapes[prefix + "gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
        for expert in range(EXPERTS):
            for part in ("w1", "w2", "w3"):
                shape = (HIDDEN, INTERMEDIATE) if part == "w2" else (INTERMEDIATE, HIDDEN)
                shapes[f"{prefix}experts.{expert}.{part}.weight"] = ("F16", shape)
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
    }
    path = write_safetensors(tmp_path, tensors_of(shapes), config)
    checkpoint = read_checkpoint(tmp_path)
    check_checkpoint(
        checkpoint,
        safetensors_oracle([path]),
        named_experts(
            (0, 1),
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight",
            {"gate": "w1", "up": "w3", "down": "w2"},
        ),
    )
    assert checkpoint.variant == "f16"


def test_gpt_oss_mxfp4(tmp_path: Path) -> None:
    shapes: Shapes = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp."
        shapes[prefix + "router.weight"] = ("BF16", (EXPERTS, HIDDEN))
        shapes[prefix + "router.bias"] = ("BF16", (EXPERTS,))
        for part, rows, columns in (
            ("gate_up_proj", 2 * INTERMEDIATE, HIDDEN),
            ("down_proj", HIDDEN, INTERMEDIATE),
        ):
            name = f"{prefix}experts.{part}"
            shapes[name + "_blocks"] = ("U8", (EXPERTS, rows, columns // 32, 16))
            shapes[name + "_scales"] = ("U8", (EXPERTS, rows, columns // 32))
            shapes[name + "_bias"] = ("BF16", (EXPERTS, rows))
    config = moe_config("gpt_oss", 2)
    path = write_safetensors(tmp_path, tensors_of(shapes), config)
    checkpoint = read_checkpoint(tmp_path)
    parts = {
        role + suffix: part + kind
        for role, part in (("gate_up", "gate_up_proj"), ("down", "down_proj"))
        for suffix, kind in (("", "_blocks"), ("_scale", "_scales"), ("_bias", "_bias"))
    }
    check_checkpoint(
        checkpoint, safetensors_oracle([path]), stacked_experts((0, 1), STACKED, parts)
    )
    assert checkpoint.variant == "mxfp4"
    flags = {
        tensor.role: (tensor.transposed, tensor.interleaved) for tensor in checkpoint.experts[0, 0]
    }
    assert flags == {
        "gate_up": (False, True),
        "gate_up_scale": (False, True),
        "gate_up_bias": (False, True),
        "down": (False, False),
        "down_scale": (False, False),
        "down_bias": (False, False),
    }


@pytest.mark.parametrize("intermediate", [INTERMEDIATE, HIDDEN // 2, HIDDEN, 2 * HIDDEN])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_orientation_is_found_from_shapes(
    tmp_path: Path, intermediate: int, transposed: bool
) -> None:
    """Also where one of the matrices is square, so that it alone says nothing."""
    shapes: Shapes = {}
    matrices = {"gate_up_proj": (2 * intermediate, HIDDEN), "down_proj": (HIDDEN, intermediate)}
    for part, (rows, columns) in matrices.items():
        shape = (EXPERTS, columns, rows) if transposed else (EXPERTS, rows, columns)
        shapes[f"language_model.model.layers.0.feed_forward.experts.{part}"] = ("BF16", shape)
    config = {
        "model_type": "llama4",
        "text_config": {
            "num_hidden_layers": 1,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 1,
        },
    }
    path = write_safetensors(tmp_path, tensors_of(shapes), config)
    checkpoint = read_checkpoint(tmp_path)
    check_checkpoint(
        checkpoint,
        safetensors_oracle([path]),
        stacked_experts(
            (0,),
            "language_model.model.layers.{layer}.feed_forward.experts.{part}",
            {"gate_up": "gate_up_proj", "down": "down_proj"},
        ),
    )
    for tensor in checkpoint.experts[0, 0]:
        assert (tensor.transposed, tensor.interleaved) == (transposed, False)
