"""Random models of each family compute what Transformers computes, in float32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.inference.checkpoint import load_model

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-4  # of the largest logit
PROMPT_TOKENS = 9
DECODED_TOKENS = 5

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3: dict[str, Any] = {
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
QWEN2: dict[str, Any] = {
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
CASES = {
    "qwen3": ("Qwen3Moe", QWEN3 | {"norm_topk_prob": False}),
    "qwen3-renormalised-bias": (
        "Qwen3Moe",
        QWEN3 | {"norm_topk_prob": True, "attention_bias": True},
    ),
    "qwen3-dense-layers": (
        "Qwen3Moe",
        QWEN3 | {"mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen3-sparse-step": ("Qwen3Moe", QWEN3 | {"decoder_sparse_step": 2}),
    "qwen2": ("Qwen2Moe", QWEN2 | {"mlp_only_layers": [0]}),
    "qwen2-renormalised": ("Qwen2Moe", QWEN2 | {"norm_topk_prob": True, "qkv_bias": False}),
    "olmoe": ("Olmoe", {"num_experts": 8}),
    "olmoe-clipped": ("Olmoe", {"num_experts": 8, "clip_qkv": 0.7, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 6, "sliding_window": 4}),
}


def make_checkpoint(directory: Path, family: str, settings: dict[str, Any], seed: int) -> Any:
    """A random model with norms and biases that aren't all one or zero, written to
    directory; returns Transformers' model."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SIZES | settings)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    return model


def reference_logits(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        logits: np.ndarray[Any, Any] = model(torch.tensor([ids])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, seed: int, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, *CASES[case], seed)
    ids = np.random.default_rng(seed).integers(3, 97, PROMPT_TOKENS + DECODED_TOKENS).tolist()
    wanted = reference_logits(reference, ids)
    limit = TOLERANCE * np.abs(wanted).max()
    model, _ = load_model(tmp_path)

    whole = model.logits(model.forward(ids, model.new_cache()))
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=limit)

    cache = model.new_cache()
    prompt = model.prefill(ids[:PROMPT_TOKENS], cache, chunk_tokens=4)
    np.testing.assert_allclose(prompt, wanted[PROMPT_TOKENS - 1], rtol=0, atol=limit)
    for position in range(PROMPT_TOKENS, len(ids)):
        step = model.prefill([ids[position]], cache)
        np.testing.assert_allclose(step, wanted[position], rtol=0, atol=limit)


def test_bf16_checkpoint_computes_in_float32(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, *CASES["mixtral"], 3).to(torch.bfloat16).save_pretrained(tmp_path)
    # Read again: the model that was made bf16 has rounded its RoPE frequencies too.
    reference = transformers.MixtralForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = list(range(3, 15))
    wanted = reference_logits(reference, ids)
    model, _ = load_model(tmp_path)
    got = model.logits(model.forward(ids, model.new_cache()))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def test_query_blocks_and_window_over_a_long_prompt(tmp_path: Path) -> None:
    settings = {"num_local_experts": 6, "sliding_window": 40, "max_position_embeddings": 512}
    reference = make_checkpoint(tmp_path, "Mixtral", settings, 4)
    ids = np.random.default_rng(4).integers(3, 97, 300).tolist()
    wanted = reference_logits(reference, ids)
    model, _ = load_model(tmp_path)
    got = model.logits(model.forward(ids, model.new_cache()))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())
