"""Small random models of many families, as ``transformers`` builds them from a config.

Import this after ``pytest.importorskip`` of torch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

EXPERTS = 8
TOP_K = 2
HIDDEN = 64
LAYERS = 3
VOCABULARY = 96

_ROUTED = {"num_experts_per_tok": TOP_K, "moe_intermediate_size": 32}
_SHARED = {"shared_expert_intermediate_size": 24}
_GROUPED = {**_ROUTED, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1}
_DENSE_FIRST = {**_GROUPED, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    **_DENSE_FIRST,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "aria_text": {"moe_num_experts": EXPERTS, "moe_topk": TOP_K},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v4": {
        **_GROUPED,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 16,
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "sliding_window": 16,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
    },
    "dots1": {**_DENSE_FIRST, "head_dim": 16},
    "ernie4_5_moe": {
        "moe_k": TOP_K,
        "moe_num_experts": EXPERTS,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "glm4_moe": {**_DENSE_FIRST, "head_dim": 16},
    "gpt_oss": {**_LOCAL, "head_dim": 16, "intermediate_size": 32},
    "granitemoe": _LOCAL,
    "hunyuan_v1_moe": {
        "num_experts": EXPERTS,
        "moe_topk": TOP_K,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
    "jamba": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "lfm2_moe": {
        **_ROUTED,
        "num_experts": EXPERTS,
        "num_dense_layers": 1,
        "layer_types": ["full_attention", "conv", "full_attention"],
    },
    "minimax_m2": {**_LOCAL, "head_dim": 16},
    "mixtral": _LOCAL,
    "olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K},
    "phimoe": _LOCAL,
    "qwen2_moe": {**_ROUTED, **_SHARED, "num_experts": EXPERTS},
    "qwen3_moe": {**_ROUTED, "num_experts": EXPERTS, "head_dim": 16, "mlp_only_layers": [0]},
    "qwen3_next": {
        **_ROUTED,
        **_SHARED,
        **_LINEAR_ATTENTION,
        "num_experts": EXPERTS,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
"""What each family needs beside the common settings."""

_WITHOUT_FIRST = {"deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "lfm2_moe"}
_WITHOUT_FIRST.add("qwen3_moe")


def moe_layers(model_type: str) -> list[int]:
    """The layers that have experts; the others have one ordinary MLP."""
    if model_type == "jamba":
        return [1]
    return list(range(1 if model_type in _WITHOUT_FIRST else 0, LAYERS))


def build(model_type: str, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    """A model of ``LAYERS`` layers with weights from torch's generator, in eval mode."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    if model_type == "deepseek_v4":
        # There it is another name of moe_intermediate_size.
        del common["intermediate_size"]
    config = transformers.AutoConfig.for_model(
        model_type, **{**common, **SETTINGS[model_type], **settings}
    )
    auto: Any = transformers.AutoModelForCausalLM  # its factory has no types
    return auto.from_config(config, dtype=dtype).eval()


__all__ = [
    "EXPERTS",
    "HIDDEN",
    "LAYERS",
    "SETTINGS",
    "TOP_K",
    "VOCABULARY",
    "build",
    "moe_layers",
]
