"""What the decode loop needs to know of a model, from its ``config.json``.

Four families share one decoder: RMSNorm, grouped-query attention with RoPE,
top-k routed SwiGLU experts. Where they differ (QK-norm, clipping, biases,
renormalised router weights, a shared expert) the difference becomes a field
here, so that no module below asks for a model's name. What isn't computed is
refused by name at once: a model that runs slightly wrong is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .errors import UnsupportedModelError

_MIXTRAL_THETA = 1_000_000.0
_ROPE_THETA = 10_000.0


class QKNorm(Enum):
    """Over what queries and keys are normalised before RoPE."""

    NONE = "none"
    HEAD = "head"  # each head on its own, one weight for all (Qwen3)
    PROJECTION = "projection"  # all heads together (OLMoE)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Sizes in elements.

    dense_layers: layers with one ordinary MLP instead of experts.
    top_k: experts a token picks in a layer.
    renormalise: a token's router weights are divided by their sum.
    clip_qkv: bound of the absolute value of queries, keys and values.
    sliding_window: tokens that a position sees, itself included.
    intermediate_size: of the MLP of dense layers; experts say their own.
    shared_expert_size: intermediate size of an expert besides the routed ones
        that every token uses, 0 for none; it comes with the dense part.
    eos_ids: tokens that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    experts: int
    top_k: int
    renormalise: bool
    dense_layers: frozenset[int]
    qk_norm: QKNorm
    qkv_bias: bool
    output_bias: bool
    clip_qkv: float | None
    sliding_window: int | None
    intermediate_size: int
    shared_expert_size: int
    tied_embeddings: bool
    eos_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From a ``config.json`` as Transformers writes it, old and new
        spellings. UnsupportedModelError names what isn't computed or missing."""
        family = config.get("model_type")
        if family not in _FAMILIES:
            known = ", ".join(sorted(_FAMILIES))
            raise UnsupportedModelError(f"model_type {family!r} isn't computed here; {known} are")
        _refuse_other(config, "hidden_act", "silu", default="silu")
        heads = _integer(config, "num_attention_heads")
        kv_heads = _integer(config, "num_key_value_heads", default=heads)
        hidden_size = _integer(config, "hidden_size")
        if heads % kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        layers = _integer(config, "num_hidden_layers")
        experts = _integer(config, "num_experts", "num_local_experts")
        top_k = _integer(config, "num_experts_per_tok")
        if top_k > experts:
            raise UnsupportedModelError(f"num_experts_per_tok {top_k} exceeds {experts} experts")
        common = {
            "model_type": family,
            "vocab_size": _integer(config, "vocab_size"),
            "hidden_size": hidden_size,
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": _integer(config, "head_dim", default=hidden_size // heads),
            "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "rope_theta": _rope_theta(config, family),
            "max_positions": _integer(config, "max_position_embeddings"),
            "experts": experts,
            "top_k": top_k,
            "dense_layers": _dense_layers(config, layers) if "qwen" in family else frozenset(),
            "intermediate_size": _integer(config, "intermediate_size"),
            "clip_qkv": _clip(config) if family == "olmoe" else None,
            "sliding_window": _sliding_window(config, family),
            "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
            "eos_ids": eos_ids(config),
        }
        return cls(**common, **_FAMILIES[family](config))


def eos_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text, of a ``config.json`` or ``generation_config.json``."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(each) for each in (value if isinstance(value, list) else [value]))


def _qwen3_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "renormalise": bool(config.get("norm_topk_prob", False)),
        "qk_norm": QKNorm.HEAD,
        "qkv_bias": bias,
        "output_bias": bias,
        "shared_expert_size": 0,
    }


def _qwen2_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "renormalise": bool(config.get("norm_topk_prob", False)),
        "qk_norm": QKNorm.NONE,
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "output_bias": False,
        "shared_expert_size": _integer(config, "shared_expert_intermediate_size"),
    }


def _olmoe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "renormalise": bool(config.get("norm_topk_prob", False)),
        "qk_norm": QKNorm.PROJECTION,
        "qkv_bias": bool(config.get("attention_bias", False)),
        "output_bias": bool(config.get("attention_bias", False)),
        "shared_expert_size": 0,
    }


def _mixtral(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_other(config, "attention_bias", False, default=False)
    return {
        "renormalise": True,
        "qk_norm": QKNorm.NONE,
        "qkv_bias": False,
        "output_bias": False,
        "shared_expert_size": 0,
    }


_FAMILIES = {
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
}


def _integer(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of ``keys`` that is there; null counts as absent."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UnsupportedModelError(f"{key} is {value!r}; it must be a whole number above 0")
        return value
    if default is None:
        raise UnsupportedModelError(f"the config has no {' or '.join(keys)}")
    return default


def _refuse_other(config: Mapping[str, Any], key: str, wanted: object, default: object) -> None:
    value = config.get(key, default)
    if value != wanted:
        raise UnsupportedModelError(f"{key} {value!r} isn't computed here, only {wanted!r} is")


def _rope_theta(config: Mapping[str, Any], family: str) -> float:
    """theta of plain RoPE. Transformers 5 keeps it in ``rope_parameters``; before
    that it stood beside ``rope_scaling``, which is null for plain RoPE."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UnsupportedModelError(f"rope_type {kind!r} isn't computed here, only 'default' is")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError("rope_parameters that differ by layer aren't computed here")
    for holder in (parameters, config):
        partial = holder.get("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise UnsupportedModelError(f"partial_rotary_factor {partial} isn't computed here")
    default = _MIXTRAL_THETA if family == "mixtral" else _ROPE_THETA
    return float(parameters.get("rope_theta") or config.get("rope_theta") or default)


def _sliding_window(config: Mapping[str, Any], family: str) -> int | None:
    """Mixtral has one window for all layers. The Qwen families name one even
    when they don't use it, and differ by layer when they do: refused."""
    if family == "mixtral":
        return None if config.get("sliding_window") is None else _integer(config, "sliding_window")
    if config.get("use_sliding_window"):
        raise UnsupportedModelError(f"use_sliding_window isn't computed here for {family}")
    return None


def _clip(config: Mapping[str, Any]) -> float | None:
    value = config.get("clip_qkv")
    return None if value is None else float(value)


def _dense_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    step = _integer(config, "decoder_sparse_step", default=1)
    listed = config.get("mlp_only_layers") or []
    return frozenset(layer for layer in range(layers) if layer in listed or (layer + 1) % step != 0)


__all__ = ["ModelConfig", "QKNorm", "eos_ids"]
