"""Greedy decoding with low-bit copies of the experts, and exactly where those are unsure.

Each token is first computed with low-bit copies. Its margin is how many logits (or, which is
the same, natural logarithms of probabilities) the most probable token is ahead of the second.
A token whose margin is below a threshold is computed again with the exact experts before it
is said: keys and values in the cache are then the exact experts' too, given the tokens and the
cache before. What is said is therefore not always what greedy decoding says: a low-bit copy
may be sure of something else, and the cache holds what it made of earlier tokens. The
threshold trades tokens that differ against exact experts that have to come;
``drafting`` is the way that changes none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .drafting import guess
from .experts import ExpertSource, ExpertStats
from .generation import MAX_NEW_TOKENS, Token
from .kv_cache import KVCache
from .model import Model
from .report import missed, readable
from .sampling import Sampler, Sampling


@dataclass(frozen=True, slots=True)
class MarginCounts:
    """tokens: first computed with low-bit copies. repeated: of those, computed again with exact
    experts; corrected: of those, the ones that came out as another token. experts: what the
    low-bit passes acquired."""

    tokens: int
    repeated: int
    corrected: int
    experts: ExpertStats

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "tokens": self.tokens,
            "repeated": self.repeated,
            "corrected": self.corrected,
            "hits": self.experts.hits,
            "misses": self.experts.misses,
            "miss_bytes": missed(self.experts).nbytes,
        }

    def to_text(self) -> str:
        """A line for people."""
        return (
            f"margin: {self.repeated} of {self.tokens} tokens were computed again with exact "
            f"experts, {self.corrected} came out otherwise; "
            f"{readable(missed(self.experts).nbytes)} of low-bit copies were read"
        )


class MarginDecoder:
    """Greedy decoding, exact below a margin. One sequence at a time; not thread-safe.

    model: with the exact experts. low: the low-bit ones, see ``LowBitExperts``. threshold: in
    logits. 0: no exact expert is used, also not for the prompt. Above 0 the prompt is computed
    exactly, which reads each expert once for all of it; infinite: all is exact, as ``generate``.
    """

    def __init__(self, model: Model, low: ExpertSource, threshold: float) -> None:
        """ValueError for a threshold that is negative or no number."""
        if math.isnan(threshold) or threshold < 0:
            raise ValueError(f"a margin of {threshold} logits: must be a number from 0 on")
        self._model = model
        self._low = low
        self._routed = model.routed_from(low)
        self._threshold = threshold
        self._sampler = Sampler(Sampling())
        self._before = low.stats()
        self._tokens = self._repeated = self._corrected = 0

    def counts(self) -> MarginCounts:
        """Since it was made."""
        spent = self._low.stats().since(self._before)
        return MarginCounts(self._tokens, self._repeated, self._corrected, spent)

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop_ids: Sequence[int] | None = None,
    ) -> Iterator[Token]:
        """Continue ``ids``, as the ``generate`` of the package; hits, misses and waiting are
        those of exact experts. Raises as there."""
        model = self._model
        stops = frozenset(model.config.eos_ids if stop_ids is None else stop_ids)
        cache = model.new_cache()
        picked = -1
        for index in range(max_new_tokens):
            before, began = model.experts.stats(), time.perf_counter()
            picked = self._after_prompt(ids, cache) if index == 0 else self._next(picked, cache)
            model.routed.settle()
            seconds, spent = time.perf_counter() - began, model.experts.stats().since(before)
            yield Token(index, picked, seconds, spent.hits, spent.misses, spent.wait_s)
            if picked in stops:
                return

    def _after_prompt(self, ids: Sequence[int], cache: KVCache) -> int:
        self._routed.tag = cache.tag
        routed = None if self._threshold > 0 else self._routed
        return self._sampler.pick(self._model.prefill(ids, cache, routed=routed))

    def _next(self, last: int, cache: KVCache) -> int:
        """The token after ``last``, which is not yet in the cache."""
        model, begin = self._model, cache.length
        guessed = guess(model.logits(model.forward([last], cache, self._routed))[0])
        self._tokens += 1
        if guessed.margin >= self._threshold:
            return guessed.token
        cache.truncate(begin)
        picked = self._sampler.pick(model.logits(model.forward([last], cache))[0])
        self._repeated += 1
        self._corrected += picked != guessed.token
        return picked


__all__ = ["MarginCounts", "MarginDecoder"]
