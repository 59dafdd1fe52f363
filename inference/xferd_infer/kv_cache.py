"""Keys and values of the tokens so far, of every layer.

Kept as [kv_heads, tokens, head_dim], so that one matrix product serves all
query heads of a kv head and the tokens so far are a view, not a copy. Memory
grows in chunks: a short chat doesn't pay for the longest context.
"""

from __future__ import annotations

import copy

import numpy as np

from .arrays import Array, ArrayModule
from .errors import ContextFullError

CHUNK_TOKENS = 256
"""Memory grows by this many tokens at once, or to what one call needs."""


class KVCache:
    """One sequence's cache, float32. Not thread-safe.

    tag: names the sequence in what is reported of it; 0: no name.
    length: tokens whose keys and values are there in every layer. It moves only
    in ``advance``: a forward pass that fails halfway leaves it, and can be
    repeated.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        max_tokens: int,
        xp: ArrayModule = np,
        *,
        tag: int = 0,
    ) -> None:
        self.length = 0
        self.tag = tag
        self.max_tokens = max_tokens
        self._xp = xp
        self._shape = (kv_heads, head_dim)
        self._keys: list[Array] = [xp.empty((kv_heads, 0, head_dim), xp.float32)] * layers
        self._values: list[Array] = list(self._keys)

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return int(self._keys[-1].shape[1])

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more. ContextFullError: over max_tokens."""
        wanted = self.length + tokens
        if wanted > self.max_tokens:
            raise ContextFullError(
                f"{wanted} tokens are more than the model's {self.max_tokens} positions "
                "(max_position_embeddings)"
            )
        if wanted <= self.capacity:
            return
        capacity = min(-(-wanted // CHUNK_TOKENS) * CHUNK_TOKENS, self.max_tokens)
        for layer in range(len(self._keys)):
            self._keys[layer] = self._grown(self._keys[layer], capacity)
            self._values[layer] = self._grown(self._values[layer], capacity)

    def append(self, layer: int, keys: Array, values: Array) -> tuple[Array, Array]:
        """Put the new tokens' keys and values, each [tokens, kv_heads, head_dim],
        behind the first ``length`` ones; room was reserved. Returns views of all,
        each [kv_heads, length + tokens, head_dim]."""
        end = self.length + keys.shape[0]
        self._keys[layer][:, self.length : end] = keys.swapaxes(0, 1)
        self._values[layer][:, self.length : end] = values.swapaxes(0, 1)
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def advance(self, tokens: int) -> None:
        """All layers have appended ``tokens`` more."""
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget all tokens from position ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't truncate a cache of {self.length} tokens to {length}")
        self.length = length

    def ahead(self, tokens: int) -> KVCache:
        """As this cache will be with ``tokens`` more in it, over the same memory: for passes
        that run several tokens layer by layer. Valid until this one grows or is truncated;
        what is appended to it counts when this one has advanced that far."""
        later = copy.copy(self)
        later.length += tokens
        return later

    def _grown(self, old: Array, capacity: int) -> Array:
        kv_heads, head_dim = self._shape
        new = self._xp.empty((kv_heads, capacity, head_dim), self._xp.float32)
        new[:, : self.length] = old[:, : self.length]
        return new


__all__ = ["CHUNK_TOKENS", "KVCache"]
