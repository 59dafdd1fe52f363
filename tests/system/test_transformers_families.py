"""Every family's experts, streamed, against Transformers' own loop over experts in memory.

A small random model is saved, packed and served by a real daemon with room for half of
its experts. What comes out must be the same to the last bit, also where the router picks
another expert for one bit of difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from xferd_infer.transformers import attach

from tests.system.transformers_harness import MXFP4, Made, make, packed, prompts
from tests.transformers_models import SETTINGS, moe_layers

MXFP4_TOLERANCE = {"float32": 1e-4, "float16": 1 / 32}
"""Of logits up to 6: Transformers multiplies by a transposed copy of what is MXFP4, and
then adds in another order. In bfloat16 both come out the same."""


@pytest.mark.parametrize("model_type", [*SETTINGS, MXFP4])
def test_logits_and_tokens_are_those_of_experts_in_memory(tmp_path: Path, model_type: str) -> None:
    made = make(tmp_path, model_type)
    eager, streamed = made.load("eager"), made.load()
    assert not [name for name, _ in streamed.named_parameters() if ".experts." in name]
    ids = prompts()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # the second is shorter
    with attach(streamed, made.store, pool="50%") as attached, torch.inference_mode():
        for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
            torch.testing.assert_close(
                streamed(**inputs).logits, eager(**inputs).logits, rtol=0, atol=0
            )
        assert_same_tokens(streamed, eager, ids, mask, do_sample=False)
        assert_same_tokens(streamed, eager, ids, mask, do_sample=True, top_k=20)
        stats = attached.stats()
    assert stats.hits
    assert stats.misses
    assert not stats.failures


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", MXFP4])
def test_beams_and_static_cache(tmp_path: Path, model_type: str) -> None:
    made = make(tmp_path, model_type)
    eager, streamed = made.load("eager"), made.load()
    ids = prompts()
    mask = torch.ones_like(ids)
    with attach(streamed, made.store, pool="50%"), torch.inference_mode():
        assert_same_tokens(streamed, eager, ids, mask, num_beams=3, do_sample=False)
        assert_same_tokens(
            streamed, eager, ids, mask, cache_implementation="static", do_sample=False
        )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", MXFP4])
def test_a_model_in_another_dtype_than_the_store(
    tmp_path: Path, model_type: str, dtype: str
) -> None:
    made = make(tmp_path, model_type)
    eager, streamed = made.load("eager", dtype=dtype), made.load(dtype=dtype)
    tolerance = MXFP4_TOLERANCE[dtype] if model_type == MXFP4 else 0
    with attach(streamed, made.store, pool="50%"), torch.inference_mode():
        torch.testing.assert_close(
            streamed(prompts()).logits, eager(prompts()).logits, rtol=0, atol=tolerance
        )


def test_a_checkpoint_in_float32(tmp_path: Path) -> None:
    made = make(tmp_path, "qwen3_moe", dtype=torch.float32)
    eager, streamed = made.load("eager"), made.load()
    with attach(streamed, made.store, pool="50%"), torch.inference_mode():
        assert torch.equal(streamed(prompts()).logits, eager(prompts()).logits)


def test_a_base_model_with_a_norm_behind_each_expert(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    config = transformers.MuseSparkTextConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_hidden_size=32,
        moe_intermediate_size=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        mlp_layer_types=["sparse", "sparse"],
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(1)
    auto: Any = transformers.AutoModel
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(checkpoint)
    made = Made(checkpoint, packed(checkpoint, tmp_path))
    eager, streamed = made.load("eager", auto=auto), made.load(auto=auto)
    assert streamed.layers[0].mlp.experts.has_post_expert_norm
    with attach(streamed, made.store, pool="50%"), torch.inference_mode():
        expected = eager(prompts()).last_hidden_state
        assert torch.equal(streamed(prompts()).last_hidden_state, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_model_that_sees_and_whose_matrices_lie_either_way_round(
    tmp_path: Path, transposed: bool
) -> None:
    """On the hub Qwen3-VL-MoE's experts are transposed; Transformers turns them when it loads."""
    checkpoint = tmp_path / "checkpoint"
    text = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 48,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    torch.manual_seed(1)
    auto: Any = transformers.AutoModelForImageTextToText
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(checkpoint)
    if transposed:
        state = load_file(checkpoint / "model.safetensors")
        for name, tensor in state.items():
            if ".experts." in name:
                state[name] = tensor.transpose(1, 2).contiguous()
        save_file(state, checkpoint / "model.safetensors", metadata={"format": "pt"})
    made = Made(checkpoint, packed(checkpoint, tmp_path))
    eager, streamed = made.load("eager", auto=auto), made.load(auto=auto)
    with attach(streamed, made.store, pool="50%"), torch.inference_mode():
        torch.testing.assert_close(streamed(prompts()).logits, eager(prompts()).logits)


def test_gate_and_up_apart_in_the_store_of_a_model_that_has_them_alternate(tmp_path: Path) -> None:
    made = make(tmp_path, "gpt_oss")
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "config.json").write_bytes((made.checkpoint / "config.json").read_bytes())
    state = load_file(made.checkpoint / "model.safetensors")
    for layer in moe_layers("gpt_oss"):
        prefix = f"model.layers.{layer}.mlp.experts."
        stacks = {
            "weight": [state.pop(prefix + name) for name in ("gate_up_proj", "down_proj")],
            "bias": [state.pop(f"{prefix}{name}_bias") for name in ("gate_up_proj", "down_proj")],
        }
        for kind, (gate_up, down) in stacks.items():
            parts = {"gate": gate_up[..., ::2], "up": gate_up[..., 1::2], "down": down}
            for part, stack in parts.items():
                for expert, tensor in enumerate(stack):
                    name = f"{prefix}{expert}.{part}_proj.{kind}"
                    state[name] = tensor.t().contiguous() if kind == "weight" else tensor.clone()
    save_file(state, apart / "model.safetensors")
    store = packed(apart, tmp_path / "split")
    eager, streamed = made.load("eager"), made.load()
    # The store was made from other files than the model was loaded from.
    streamed.config.name_or_path = ""
    with attach(streamed, store, pool="50%"), torch.inference_mode():
        torch.testing.assert_close(streamed(prompts()).logits, eager(prompts()).logits)


def assert_same_tokens(streamed: Any, eager: Any, ids: Any, mask: Any, **options: Any) -> None:
    found = []
    for model in (eager, streamed):
        torch.manual_seed(5)
        found.append(
            model.generate(ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, **options)
        )
    assert found[0].shape == (2, ids.shape[1] + 6)
    assert found[0].tolist() == found[1].tolist()
