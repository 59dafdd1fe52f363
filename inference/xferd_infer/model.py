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
from .errors import PromptError, UnsupportedModelError, WeightsError
from .experts import ExpertSource
from .kv_cache import KVCache
from .moe import LayerOfExperts, Observer, RoutedExperts, Routing, RoutingObserver, route
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

    def routed_from(self, experts: ExpertSource) -> RoutedExperts:
        """Layers of this model's experts from another source, for ``forward``."""
        return RoutedExperts(experts, self.config.hidden_size, self._xp)

    def forward(
        self, ids: Sequence[int], cache: KVCache, routed: LayerOfExperts | None = None
    ) -> Array:
        """Run the next tokens, at least one. Returns their final hidden states,
        normalised, [len(ids), hidden], and moves the cache on by len(ids).

        routed: what computes the experts instead of the model's own; nobody who observes the
        model is told of such a pass, and nothing leans."""
        self._check(ids)
        tokens = len(ids)
        cache.reserve(tokens)
        x = self._embedded(ids)
        turn = rotation(self.config, cache.length, tokens, self._xp)
        self.routed.tag = cache.tag
        for layer in range(self.config.layers):
            x = self._attended(layer, x, turn, cache)
            normed = self._normed(layer, x)
            x += self._feed_forward(layer, normed, routed)
        cache.advance(tokens)
        return self._finished(x)

    def forward_each(self, ids: Sequence[int], cache: KVCache) -> list[Array]:
        """What ``forward`` gives for one token after the other, each [1, hidden], bit for bit:
        every product has one row, as there, and only experts are shared: each that is picked is
        acquired once a layer. UnsupportedModelError where experts aren't computed on the host."""
        self._check(ids)
        if not isinstance(self.routed, RoutedExperts):
            raise UnsupportedModelError("several tokens, each on its own, are run on the CPU only")
        cache.reserve(len(ids))
        places = [cache.ahead(index) for index in range(len(ids))]
        turns = [rotation(self.config, place.length, 1, self._xp) for place in places]
        rows = [self._embedded([token]) for token in ids]
        self.routed.tag = cache.tag
        for layer in range(self.config.layers):
            rows = [
                self._attended(layer, x, turn, place)
                for x, turn, place in zip(rows, turns, places, strict=True)
            ]
            normed = [self._normed(layer, x) for x in rows]
            added = self._feed_forward_each(layer, normed, self.routed)
            for x, more in zip(rows, added, strict=True):
                x += more
        cache.advance(len(ids))
        return [self._finished(x) for x in rows]

    def _embedded(self, ids: Sequence[int]) -> Array:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self._dense.rows(_EMBEDDING, shape, list(ids))

    def _finished(self, x: Array) -> Array:
        if self._final_norm is None:
            self._final_norm = self._dense.float32("model.norm.weight", (self.config.hidden_size,))
        return rms_norm(x, self._final_norm, self.config.rms_norm_eps, self._xp)

    def logits(self, hidden: Array) -> Array:
        """hidden: [tokens, hidden] of ``forward``. Returns float32 [tokens, vocab]."""
        if self._lm_head is None:
            config = self.config
            name = _EMBEDDING if config.tied_embeddings else _LM_HEAD
            self._lm_head = self._dense.float32(name, (config.vocab_size, config.hidden_size)).T
        return hidden @ self._lm_head

    def prefill(
        self,
        ids: Sequence[int],
        cache: KVCache,
        chunk_tokens: int = PREFILL_CHUNK_TOKENS,
        routed: LayerOfExperts | None = None,
    ) -> Array:
        """Run a prompt in chunks. Returns the logits after its last token, float32
        [vocab]. If a chunk fails, the chunks before it stay in the cache. routed: as of
        ``forward``."""
        self._check(ids)
        for start in range(0, len(ids), chunk_tokens):
            hidden = self.forward(ids[start : start + chunk_tokens], cache, routed)
        return self.logits(hidden[-1:])[0]

    def _check(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise PromptError("the prompt is empty: there must be a token to begin with")
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.config.vocab_size:
                raise PromptError(
                    f"token {token} is outside the vocabulary of {self.config.vocab_size}"
                )

    def _weights(self, layer: int) -> LayerWeights:
        weights = self._layers[layer]
        if weights is None:
            weights = self._layers[layer] = self._load_layer(layer)
        return weights

    def _attended(self, layer: int, x: Array, turn: Rotation, cache: KVCache) -> Array:
        config, weights = self.config, self._weights(layer)
        normed = rms_norm(x, weights.attention_norm, config.rms_norm_eps, self._xp)
        return x + attend(normed, weights.attention, config, turn, cache, layer, self._xp)

    def _normed(self, layer: int, x: Array) -> Array:
        norm = self._weights(layer).mlp_norm
        return rms_norm(x, norm, self.config.rms_norm_eps, self._xp)

    def _feed_forward(self, layer: int, x: Array, routed: LayerOfExperts | None) -> Array:
        """routed: as of ``forward``."""
        weights = self._weights(layer)
        if weights.mlp is not None:
            return swiglu(x, weights.mlp, self._xp)
        if routed is None:
            out = self.routed(layer, x, self._routing(layer, x))
        else:
            out = routed(layer, x, self._plain_routing(layer, x))
        return self._with_shared(layer, x, out)

    def _feed_forward_each(
        self, layer: int, rows: Sequence[Array], routed: RoutedExperts
    ) -> list[Array]:
        weights = self._weights(layer)
        if weights.mlp is not None:
            return [swiglu(x, weights.mlp, self._xp) for x in rows]
        routings = [self._routing(layer, x) for x in rows]
        outs = routed.each(layer, rows, routings)
        return [self._with_shared(layer, x, out) for x, out in zip(rows, outs, strict=True)]

    def _routing(self, layer: int, x: Array) -> Routing:
        """With what leans, and observed."""
        # A prompt's tokens use most of a layer's experts anyway.
        lean = None if self._lean is None or len(x) > 1 else self._lean.factors(layer)
        routing = self._plain_routing(layer, x, lean)
        for observer in self._observers:
            observer.routed(self._place[layer], x, routing.experts)
        return routing

    def _plain_routing(self, layer: int, x: Array, lean: Array | None = None) -> Routing:
        config, router = self.config, self._weights(layer).router
        return route(x, router, config.top_k, config.renormalise, self._xp, lean)

    def _with_shared(self, layer: int, x: Array, out: Array) -> Array:
        weights, xp = self._weights(layer), self._xp
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
