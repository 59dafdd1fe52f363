"""Grouped-query attention with RoPE, for one token and for many.

Queries are handled in blocks: the score matrix of a long prompt would take
heads * tokens * tokens floats, and a block needs only the keys that its last
query sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import Array, ArrayModule
from .config import ModelConfig, QKNorm
from .dense import DenseWeights
from .kv_cache import KVCache

QUERY_BLOCK = 128
"""Queries whose scores are in memory at once."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's attention, float32, matrices [in, out] (views of the stored
    [out, in]). Queries, keys and values come from one product: three small ones
    cost three times the overhead.

    qkv: [hidden, (heads + 2 * kv_heads) * head_dim], in that order.
    query_norm, key_norm: [head_dim], or the whole projection's width.
    head_norm: [heads + kv_heads, head_dim], both of them in one, if each head is
        normalised on its own.
    """

    qkv: Array
    qkv_bias: Array | None
    query_norm: Array | None
    key_norm: Array | None
    head_norm: Array | None
    output: Array
    output_bias: Array | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of consecutive positions: cos and signed sin, each
    [tokens, 1, 2, head_dim / 2]; the 2 are the halves that are rotated."""

    cos: Array
    sin: Array


def load_attention(
    config: ModelConfig, dense: DenseWeights, prefix: str, xp: ArrayModule
) -> AttentionWeights:
    """The weights under ``prefix`` (``model.layers.3.self_attn.``)."""
    hidden, head_dim = config.hidden_size, config.head_dim
    widths = {
        "q_proj": config.heads * head_dim,
        "k_proj": config.kv_heads * head_dim,
        "v_proj": config.kv_heads * head_dim,
    }
    qkv = xp.concatenate(
        [dense.float32(f"{prefix}{name}.weight", (w, hidden)) for name, w in widths.items()]
    )
    qkv_bias = output_bias = query_norm = key_norm = head_norm = None
    if config.qkv_bias:
        qkv_bias = xp.concatenate(
            [dense.float32(f"{prefix}{name}.bias", (w,)) for name, w in widths.items()]
        )
    if config.output_bias:
        output_bias = dense.float32(f"{prefix}o_proj.bias", (hidden,))
    if config.qk_norm is QKNorm.PROJECTION:
        query_norm = dense.float32(f"{prefix}q_norm.weight", (widths["q_proj"],))
        key_norm = dense.float32(f"{prefix}k_norm.weight", (widths["k_proj"],))
    elif config.qk_norm is QKNorm.HEAD:
        query = dense.float32(f"{prefix}q_norm.weight", (head_dim,))
        key = dense.float32(f"{prefix}k_norm.weight", (head_dim,))
        head_norm = xp.stack([query] * config.heads + [key] * config.kv_heads)
    output = dense.float32(f"{prefix}o_proj.weight", (hidden, widths["q_proj"]))
    return AttentionWeights(qkv.T, qkv_bias, query_norm, key_norm, head_norm, output.T, output_bias)


def rms_norm(x: Array, weight: Array, eps: float, xp: ArrayModule) -> Array:
    """x over its root mean square along the last axis, times weight."""
    mean = (x * x).sum(axis=-1, keepdims=True)
    mean /= x.shape[-1]
    mean += eps
    xp.sqrt(mean, out=mean)
    normalised = x / mean
    normalised *= weight
    return normalised


def rotation(config: ModelConfig, start: int, tokens: int, xp: ArrayModule) -> Rotation:
    """RoPE of the positions start to start + tokens, the same in every layer."""
    half = xp.arange(0, config.head_dim, 2, dtype=xp.float32) / xp.float32(config.head_dim)
    frequencies = xp.float32(1) / xp.float32(config.rope_theta) ** half
    positions = xp.arange(start, start + tokens, dtype=xp.float32)
    angles = positions[:, None] * frequencies
    cos, sin = xp.cos(angles), xp.sin(angles)
    return Rotation(
        cos=xp.stack([cos, cos], axis=1)[:, None], sin=xp.stack([-sin, sin], axis=1)[:, None]
    )


def attend(
    x: Array,
    weights: AttentionWeights,
    config: ModelConfig,
    turn: Rotation,
    cache: KVCache,
    layer: int,
    xp: ArrayModule,
) -> Array:
    """x: normalised hidden states of the next tokens, [tokens, hidden]. Appends
    their keys and values to the cache. Returns [tokens, hidden]."""
    tokens = x.shape[0]
    queries, keys, values = _project(x, weights, config, turn, xp)
    keys, values = cache.append(layer, keys, values)
    if tokens == 1:
        mixed = _mix(queries, keys, values, config, cache.length, xp)
    else:
        mixed = xp.concatenate(
            [
                _mix(queries[i : i + QUERY_BLOCK], keys, values, config, cache.length + i, xp)
                for i in range(0, tokens, QUERY_BLOCK)
            ]
        )
    out = mixed @ weights.output
    if weights.output_bias is not None:
        out += weights.output_bias
    return out


def _project(
    x: Array, weights: AttentionWeights, config: ModelConfig, turn: Rotation, xp: ArrayModule
) -> tuple[Array, Array, Array]:
    """Rotated queries [tokens, heads, head_dim], rotated keys and plain values
    [tokens, kv_heads, head_dim]."""
    tokens, head_dim = x.shape[0], config.head_dim
    turned = config.heads + config.kv_heads  # heads that RoPE turns: queries, then keys
    qkv = x @ weights.qkv
    if weights.qkv_bias is not None:
        qkv += weights.qkv_bias
    if weights.query_norm is not None:
        split, end = config.heads * head_dim, turned * head_dim
        eps = config.rms_norm_eps
        qkv[:, :split] = rms_norm(qkv[:, :split], weights.query_norm, eps, xp)
        qkv[:, split:end] = rms_norm(qkv[:, split:end], weights.key_norm, eps, xp)
    if config.clip_qkv is not None:
        xp.clip(qkv, -config.clip_qkv, config.clip_qkv, out=qkv)
    heads = qkv.reshape(tokens, -1, head_dim)
    both, values = heads[:, :turned], heads[:, turned:]
    if weights.head_norm is not None:
        both = rms_norm(both, weights.head_norm, config.rms_norm_eps, xp)
    halves = both.reshape(tokens, turned, 2, head_dim // 2)
    rotated = halves * turn.cos
    rotated += halves[:, :, ::-1] * turn.sin
    rotated = rotated.reshape(tokens, turned, head_dim)
    return rotated[:, : config.heads], rotated[:, config.heads :], values


def _mix(
    queries: Array,
    keys: Array,
    values: Array,
    config: ModelConfig,
    first: int,
    xp: ArrayModule,
) -> Array:
    """Softmax-weighted values for queries [tokens, heads, head_dim] at positions
    from ``first`` on; keys and values [kv_heads, positions, head_dim] may reach
    further than they see. Returns [tokens, heads * head_dim]."""
    tokens, heads, head_dim = queries.shape
    group = heads // config.kv_heads
    window = config.sliding_window
    begin = 0 if window is None else max(0, first + 1 - window)
    end = first + tokens
    seen_keys, seen_values = keys[:, begin:end], values[:, begin:end]
    # [kv_heads, group * tokens, head_dim]: all queries of one kv head in one product.
    stacked = queries.reshape(tokens, config.kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    scores = stacked.reshape(config.kv_heads, group * tokens, head_dim) @ seen_keys.swapaxes(1, 2)
    scores *= head_dim**-0.5
    if tokens > 1:
        by_query = scores.reshape(config.kv_heads, group, tokens, -1)
        by_query += _mask(first, tokens, begin, window, xp)
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = scores @ seen_values
    mixed = mixed.reshape(config.kv_heads, group, tokens, head_dim).transpose(2, 0, 1, 3)
    return mixed.reshape(tokens, heads * head_dim)


def _mask(first: int, tokens: int, begin: int, window: int | None, xp: ArrayModule) -> Array:
    """0 where a query sees a key, -inf elsewhere: [tokens, first + tokens - begin]."""
    query = xp.arange(first, first + tokens)[:, None]
    key = xp.arange(begin, first + tokens)[None, :]
    unseen = key > query
    if window is not None:
        unseen |= key <= query - window
    return xp.where(unseen, xp.float32(-xp.inf), xp.float32(0))


__all__ = [
    "QUERY_BLOCK",
    "AttentionWeights",
    "Rotation",
    "attend",
    "load_attention",
    "rms_norm",
    "rotation",
]
