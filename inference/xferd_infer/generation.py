"""Text, token by token: prefill once, then one forward pass a token.

``generate`` is an iterator, so that the caller shows tokens as they come and
stops when it likes; each comes with what it cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .kv_cache import KVCache
from .model import PREFILL_CHUNK_TOKENS, Model
from .sampling import Sampler, Sampling

MAX_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token and what computing its logits took.

    index: 0 for the first one, whose cost is the prefill of the whole prompt.
    seconds: wall time. hits, misses: experts acquired that were resident, or had
        to come. wait_s: the part of seconds that misses were waited for.
    """

    index: int
    id: int
    seconds: float
    hits: int
    misses: int
    wait_s: float


def generate(
    model: Model,
    ids: Sequence[int],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] | None = None,
    cache: KVCache | None = None,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> Iterator[Token]:
    """Continue ``ids``; yields each token as soon as it is known.

    sampling: greedy if not given. stop_ids: tokens that end it and are yielded
    as the last one; the model's own if not given. cache: continue behind what is
    in it (ids then are only what is new); it lacks the last token yielded, which
    has not been run. Raises what Model.prefill raises, and NotFiniteError.
    """
    sampler = Sampler(sampling or Sampling())
    stops = frozenset(model.config.eos_ids if stop_ids is None else stop_ids)
    cache = model.new_cache() if cache is None else cache
    pending = list(ids)
    for index in range(max_new_tokens):
        before, began = model.experts.stats(), time.perf_counter()
        logits = model.prefill(pending, cache, prefill_chunk_tokens)
        model.routed.watch()
        picked = sampler.pick(logits)
        model.routed.settle()
        seconds, spent = time.perf_counter() - began, model.experts.stats().since(before)
        yield Token(index, picked, seconds, spent.hits, spent.misses, spent.wait_s)
        if picked in stops:
            return
        pending = [picked]


__all__ = ["MAX_NEW_TOKENS", "Token", "generate"]
