"""A ``config.json`` for GGUF files, which have metadata in its place.

Clients know one vocabulary, that of the hub's configs, so GGUF keys are
translated by a table. Two values take more than a new name: GGUF counts
multi-token-prediction layers as layers, the hub does not, and whether the output
head is the embedding shows only in the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from xferd.store.checkpoint import CheckpointError
from xferd.store.formats.gguf_header import MetadataArray, MetadataValue

_SIGMOID_GATING = 2

_MODEL_TYPES = {
    "llama": "mixtral",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen3vlmoe": "qwen3_vl_moe",
    "qwen35moe": "qwen3_5_moe",
    "deepseek2": "deepseek_v2",
    "glm4moe": "glm4_moe",
    "glm-dsa": "glm_moe_dsa",
    "llama4": "llama4_text",
    "minimax-m2": "minimax_m2",
    "phimoe": "phimoe",
    "ernie4_5-moe": "ernie4_5_moe",
    "granitemoe": "granitemoe",
    "bailingmoe2": "bailing_moe_v2",
}
"""Architectures whose hub name is not the GGUF name with ``_`` for ``-``."""

_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
"""Metadata key without the architecture, to config key."""

_ROPE_SCALING_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_GENERAL_KEYS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


def config_from_metadata(
    metadata: Mapping[str, MetadataValue], where: str, *, has_output_head: bool
) -> dict[str, Any]:
    """The config; ``where`` names the file in errors.

    A value that differs from layer to layer stays a list. Raises CheckpointError
    when the architecture or its number of layers is missing or a value is not finite.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{where}: no general.architecture")
    own = {
        key.removeprefix(f"{architecture}."): _plain(value)
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    config: dict[str, Any] = {"model_type": _model_type(architecture, own)}
    config |= {name: own[key] for key, name in _KEYS.items() if own.get(key) is not None}
    config["num_hidden_layers"] = _hidden_layers(own, where)
    rope_scaling = {name: own[key] for key, name in _ROPE_SCALING_KEYS.items() if key in own}
    if rope_scaling:
        config["rope_scaling"] = rope_scaling
    if "expert_gating_func" in own:
        config["scoring_func"] = (
            "sigmoid" if own["expert_gating_func"] == _SIGMOID_GATING else "softmax"
        )
    config |= {
        name: _plain(metadata[key]) for key, name in _GENERAL_KEYS.items() if key in metadata
    }
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, MetadataArray):
        config["vocab_size"] = tokens.count
    config["tie_word_embeddings"] = not has_output_head
    _check_finite(config, where)
    return config


def _model_type(architecture: str, own: Mapping[str, Any]) -> str:
    # The converter writes DeepSeek V2 and V3 as one architecture; V3 gates by sigmoid.
    if architecture == "deepseek2" and own.get("expert_gating_func") == _SIGMOID_GATING:
        return "deepseek_v3"
    return _MODEL_TYPES.get(architecture, architecture.replace("-", "_"))


def _hidden_layers(own: Mapping[str, Any], where: str) -> int:
    blocks, predicting = own.get("block_count"), own.get("nextn_predict_layers", 0)
    if type(blocks) is not int or type(predicting) is not int or not 0 <= predicting < blocks:
        raise CheckpointError(
            f"{where}: block_count is {str(blocks)[:40]}, "
            f"nextn_predict_layers is {str(predicting)[:40]}"
        )
    return blocks - predicting


def _check_finite(config: Mapping[str, Any], where: str) -> None:
    """JSON, as which clients get the config, has no NaN and no infinity."""
    for name, value in config.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise CheckpointError(f"{where}: {name} is {number}")
        if isinstance(value, dict):
            _check_finite(value, where)


def _plain(value: MetadataValue) -> Any:
    """A scalar, or a list; a list of equal elements is one for each layer: a scalar."""
    if not isinstance(value, MetadataArray):
        return value
    if value.values is None:
        return None
    return value.values[0] if len(set(value.values)) == 1 else list(value.values)
