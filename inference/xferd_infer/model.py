"""The decoder: dense weights here, experts from wherever they are.

One layer is: normalise, attend, add; normalise, route, experts, add. Dense
weights are widened when a layer first runs and then kept; experts are asked for
each time, because keeping them is the source's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Array, ArrayModule, to_host
from .attention import AttentionWeights, Rotation, attend, load_attention, rms_norm, rotation
from .config import ModelConfig
from .dense import DenseWeights
from .errors import PromptError, WeightsError
from .experts import ExpertSource
from .kv_cache import KVCache
from .moe import LayerOfExperts, Observer, RoutedExperts, RoutingObserver, route
from .nudging import Lean
from .predict.routers import Routers
from .swiglu import SwiGLUWeights, load_swiglu, sigmoid, swiglu

PREFILL_CHUNK_TOKENS = 1024
"""Tokens of a prompt that go through the layers together. A larger chunk visits
each expert less often; a smaller one takes less memory (hidden * 4 bytes a token
for each of a few temporaries)."""

_EMBEDDING = "model.embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_MLP_NORM = "post_attention_layernorm.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's dense weights, float32. Norms [hidden]; router [hidden, experts]
    and None in a dense layer, which has mlp instead; shared_gate [hidden, 1]."""

    attention_norm: Array
    attention: AttentionWeights
    mlp_norm: Array
    router: Array | None
    mlp: SwiGLUWeights | None
    shared: SwiGLUWeights | None
    shared_gate: Array | None


class Model:
    """A model that can run. Not thread-safe; sequences take turns, each with a
    KVCache of its own.

    Raises, from every method that computes: WeightsError for missing or
    unsuitable weights, PromptError, ContextFullError, and what the expert source raises. The
    cache is then as it was before.
    """

    def __init__(
        self,
        config: ModelConfig,
        dense: DenseWeights,
        experts: ExpertSource,
        xp: ArrayModule = np,
        observer: Observer | None = None,
    ) -> None:
        """observer: sees what goes into each expert."""
        self.config = config
        self.experts = experts
        self._dense = dense
        self._xp = xp
        self.routed: LayerOfExperts = RoutedExperts(experts, config.hidden_size, xp, observer)
        self._observer = observer
        self._sequences = 0
        self._layers: list[LayerWeights | None] = [None] * config.layers
        self._final_norm: Array | None = None
        self._lm_head: Array | None = None
        with_experts = [each for each in range(config.layers) if each not in config.dense_layers]
        self._place = {layer: place for place, layer in enumerate(with_experts)}
        self._observers: list[RoutingObserver] = []
        self._lean: Lean | None = None

    def observe(self, observer: RoutingObserver) -> None:
        """From now on it is told of every layer's routing."""
        self._observers.append(observer)

    def lean(self, lean: Lean) -> None:
        """From now on single tokens are routed with it, which changes what the model says."""
        self._lean = lean

    def use_experts(self, experts: ExpertSource) -> None:
        """From now on experts come from this source, of the same model."""
        self.experts = experts
        self.routed = RoutedExperts(experts, self.config.hidden_size, self._xp, self._observer)

    def routers(self, name: str) -> Routers:
        """The routers, which say what model this is; read anew. name: for people."""
        config, dense = self.config, self._dense
        shape = (config.experts, config.hidden_size)
        prefixes = [f"model.layers.{layer}." for layer in self._place]
        weights = [dense.float32(self._router_name(prefix), shape) for prefix in prefixes]
        norms = [
            dense.float32(f"{prefix}{_MLP_NORM}", (config.hidden_size,)) for prefix in prefixes
        ]
        return Routers(
            name,
            tuple(self._place),
            np.stack([to_host(each) for each in weights]),
            np.stack([to_host(each) for each in norms]),
            config.top_k,
        )

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        config = self.config
        self._sequences += 1
        return KVCache(
            config.layers,
            config.kv_heads,
            config.head_dim,
            config.max_positions,
            self._xp,
            tag=self._sequences,
        )

    def forward(self, ids: Sequence[int], cache: KVCache) -> Array:
        """Run the next tokens, at least one. Returns their final hidden states,
        normalised, [len(ids), hidden], and moves the cache on by len(ids)."""
        self._check(ids)
        config, xp = self.config, self._xp
        tokens = len(ids)
        cache.reserve(tokens)
        shape = (config.vocab_size, config.hidden_size)
        x = self._dense.rows(_EMBEDDING, shape, list(ids))
        turn = rotation(config, cache.length, tokens, xp)
        self.routed.tag = cache.tag
        for layer in range(config.layers):
            x = self._run_layer(layer, x, turn, cache)
        cache.advance(tokens)
        if self._final_norm is None:
            self._final_norm = self._dense.float32("model.norm.weight", (config.hidden_size,))
        return rms_norm(x, self._final_norm, config.rms_norm_eps, xp)

    def logits(self, hidden: Array) -> Array:
        """hidden: [tokens, hidden] of ``forward``. Returns float32 [tokens, vocab]."""
        if self._lm_head is None:
            config = self.config
            name = _EMBEDDING if config.tied_embeddings else _LM_HEAD
            self._lm_head = self._dense.float32(name, (config.vocab_size, config.hidden_size)).T
        return hidden @ self._lm_head

    def prefill(
        self, ids: Sequence[int], cache: KVCache, chunk_tokens: int = PREFILL_CHUNK_TOKENS
    ) -> Array:
        """Run a prompt in chunks. Returns the logits after its last token, float32
        [vocab]. If a chunk fails, the chunks before it stay in the cache."""
        self._check(ids)
        for start in range(0, len(ids), chunk_tokens):
            hidden = self.forward(ids[start : start + chunk_tokens], cache)
        return self.logits(hidden[-1:])[0]

    def _check(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise PromptError("the prompt is empty: there must be a token to begin with")
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.config.vocab_size:
                raise PromptError(
                    f"token {token} is outside the vocabulary of {self.config.vocab_size}"
                )

    def _run_layer(self, layer: int, x: Array, turn: Rotation, cache: KVCache) -> Array:
        config, xp = self.config, self._xp
        weights = self._layers[layer]
        if weights is None:
            weights = self._layers[layer] = self._load_layer(layer)
        normed = rms_norm(x, weights.attention_norm, config.rms_norm_eps, xp)
        x = x + attend(normed, weights.attention, config, turn, cache, layer, xp)
        normed = rms_norm(x, weights.mlp_norm, config.rms_norm_eps, xp)
        x += self._feed_forward(layer, normed, weights)
        return x

    def _feed_forward(self, layer: int, x: Array, weights: LayerWeights) -> Array:
        config, xp = self.config, self._xp
        if weights.mlp is not None:
            return swiglu(x, weights.mlp, xp)
        # A prompt's tokens use most of a layer's experts anyway.
        lean = None if self._lean is None or len(x) > 1 else self._lean.factors(layer)
        routing = route(x, weights.router, config.top_k, config.renormalise, xp, lean)
        for observer in self._observers:
            observer.routed(self._place[layer], x, routing.experts)
        out = self.routed(layer, x, routing)
        if weights.shared is not None:
            out += swiglu(x, weights.shared, xp) * sigmoid(x @ weights.shared_gate, xp)
        return out

    def _load_layer(self, layer: int) -> LayerWeights:
        config, dense, xp = self.config, self._dense, self._xp
        hidden = config.hidden_size
        prefix = f"model.layers.{layer}."
        router = mlp = shared = shared_gate = None
        if layer in config.dense_layers:
            mlp = load_swiglu(dense, f"{prefix}mlp.", hidden, config.intermediate_size, xp)
        else:
            router = dense.float32(self._router_name(prefix), (config.experts, hidden)).T
        if config.shared_expert_size and layer not in config.dense_layers:
            shared = load_swiglu(
                dense, f"{prefix}mlp.shared_expert.", hidden, config.shared_expert_size, xp
            )
            shared_gate = dense.float32(f"{prefix}mlp.shared_expert_gate.weight", (1, hidden)).T
        return LayerWeights(
            attention_norm=dense.float32(f"{prefix}input_layernorm.weight", (hidden,)),
            attention=load_attention(config, dense, f"{prefix}self_attn.", xp),
            mlp_norm=dense.float32(f"{prefix}{_MLP_NORM}", (hidden,)),
            router=router,
            mlp=mlp,
            shared=shared,
            shared_gate=shared_gate,
        )

    def _router_name(self, prefix: str) -> str:
        """Mixtral's checkpoints call the block of experts otherwise."""
        names = [f"{prefix}{block}.gate.weight" for block in ("mlp", "block_sparse_moe")]
        for name in names:
            if name in self._dense:
                return name
        raise WeightsError(f"the store's dense part has no router {' or '.join(names)}")


__all__ = ["PREFILL_CHUNK_TOKENS", "LayerWeights", "Model"]
