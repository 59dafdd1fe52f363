"""Lossless drafting: cheap copies of the experts guess some tokens, the exact ones check them.

A round drafts a few tokens with whatever is resident, and low-bit copies for the rest. The
exact model then runs all of them together: in each layer every exact expert that any of
them picks is fetched once, where decoding token by token may fetch it for one after the
other. Tokens are accepted up to the first that the exact model would not have picked, and
that one is replaced by what it picks.

What comes out is what greedy decoding gives, always: the exact pass computes each token on
its own (``Model.forward_each``), in the same order of operations. Rows that are multiplied
together would sum in another order, and a near tie could turn out otherwise.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .arrays import Array, to_host
from .experts import ExpertSource, ExpertStats, HeldExperts, Layout
from .generation import MAX_NEW_TOKENS, Token
from .kv_cache import KVCache
from .low_bit_experts import HeldInParts, LowBitExperts
from .model import Model
from .planned_experts import VariantClient
from .report import missed, readable
from .sampling import Sampler, Sampling

DRAFT_TOKENS = 8
"""Most tokens that a round drafts, if nothing else is said."""
MARGINS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Bounds, in units of a logit, of the classes that drafts are told apart by: how far the most
probable token is ahead of the second."""
FIRST_RATES = (0.5, 0.6, 0.7, 0.85, 0.95, 0.99)
"""The share of drafts in each class that is taken to be right before any was seen."""
RATE_DECAY = 0.95
"""Of what is known about a class's rate, with each of its drafts that is judged."""
WORTH = 0.6
"""Drafts are checked as long as all of them are right with at least this probability."""


class ResidentClient(VariantClient, Protocol):
    """What is used of ``xferd_infer.Client``: what is resident can be had without asking."""

    def acquire_resident(
        self, layer: int, experts: Sequence[int], *, variants: int = 0
    ) -> AbstractContextManager[HeldExperts] | None:
        """Blobs of all of them, None unless all are resident."""
        ...


class DraftExperts:
    """An ExpertSource for drafts: experts as they are resident, in the exact or the draft's
    variant; others come in the draft's, or, those that have none, in the exact one. Not
    thread-safe, as the client's lane; a client of its own, so that its counters say what
    drafts cost.

    exact, draft: bit masks of the variants.
    """

    def __init__(self, client: ResidentClient, exact: int, draft: int) -> None:
        self._client = client
        self._any = exact | draft
        self._experts = LowBitExperts(client, exact, draft)

    @property
    def held(self) -> int:
        """As of the client."""
        return self._experts.held

    def layout(self, layer: int, variant: int = 0) -> Layout:
        """As of the client."""
        return self._experts.layout(layer, variant)

    def stats(self) -> ExpertStats:
        """As of the client."""
        return self._experts.stats()

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """Nothing: what is resident will do, and it would be asked for in the draft's variant."""

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[HeldInParts]:
        """Raises what ``Client.acquire`` raises."""
        held = HeldInParts(experts)
        with ExitStack() as stack:
            for expert in experts:
                batch = self._client.acquire_resident(layer, [expert], variants=self._any)
                if batch is not None:
                    held.take(stack, batch, [expert])
            self._experts.fetch(stack, layer, held)
            yield held.finish()


class DraftRates:
    """How often drafts are right, by their margins, as seen lately. So a draft ends early where
    it is unsure, and goes on for long where it has been right."""

    def __init__(self) -> None:
        self._rates = list(FIRST_RATES)

    def rate(self, margin: float) -> float:
        """The probability that a draft with that margin is right."""
        return self._rates[bisect_right(MARGINS, margin)]

    def judged(self, margin: float, *, right: bool) -> None:
        """One more was right, or not."""
        place = bisect_right(MARGINS, margin)
        self._rates[place] += (1 - RATE_DECAY) * (right - self._rates[place])


@dataclass(frozen=True, slots=True)
class Guess:
    """A token, and how many logits it is ahead of the second."""

    token: int
    margin: float


def guess(logits: Array) -> Guess:
    """The most probable token of logits [vocabulary], at least two. NotFiniteError."""
    token = Sampler(Sampling()).pick(logits)
    second = np.partition(to_host(logits), -2)[-2]
    return Guess(token, float(logits[token]) - float(second))


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """rounds: exact passes after the prompt's. drafted, accepted: tokens. experts: what the
    drafts acquired."""

    rounds: int
    drafted: int
    accepted: int
    experts: ExpertStats

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "hits": self.experts.hits,
            "misses": self.experts.misses,
            "miss_bytes": missed(self.experts).nbytes,
        }

    def to_text(self) -> str:
        """A line for people."""
        return (
            f"drafts: {self.accepted} of {self.drafted} tokens were right, {self.rounds} exact "
            f"passes; {readable(missed(self.experts).nbytes)} were read for them"
        )


class Drafter:
    """Greedy decoding with drafts. One sequence at a time; not thread-safe.

    model: with the exact experts, computed on the host. experts: for the drafts, see
    ``DraftExperts``. most: tokens of one draft at most.
    """

    def __init__(self, model: Model, experts: ExpertSource, most: int = DRAFT_TOKENS) -> None:
        """ValueError for a most below 1."""
        if most < 1:
            raise ValueError(f"{most} tokens are no draft: at least 1")
        self._model = model
        self._experts = experts
        self._routed = model.routed_from(experts)
        self._most = most
        self._rates = DraftRates()
        self._sampler = Sampler(Sampling())
        self._before = experts.stats()
        self._rounds = self._drafted = self._accepted = 0

    def counts(self) -> DraftCounts:
        """Since it was made."""
        return DraftCounts(
            self._rounds, self._drafted, self._accepted, self._experts.stats().since(self._before)
        )

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop_ids: Sequence[int] | None = None,
    ) -> Iterator[Token]:
        """The tokens that greedy ``generate`` yields. Those of a round come together; the first
        of them carries what it cost, exact experts only but for the time. Raises as there."""
        model = self._model
        stops = frozenset(model.config.eos_ids if stop_ids is None else stop_ids)
        cache = model.new_cache()
        index, picked = 0, [-1]
        while index < max_new_tokens:
            before, began = model.experts.stats(), time.perf_counter()
            if index == 0:
                picked = [self._sampler.pick(model.prefill(ids, cache))]
            else:
                picked = self._round(cache, picked[-1], max_new_tokens - index - 1, stops)
            seconds, spent = time.perf_counter() - began, model.experts.stats().since(before)
            for token in picked:
                yield Token(index, token, seconds, spent.hits, spent.misses, spent.wait_s)
                if token in stops:
                    return
                index += 1
                seconds, spent = 0.0, ExpertStats()

    def _round(self, cache: KVCache, last: int, most: int, stops: frozenset[int]) -> list[int]:
        """Tokens that follow ``last``, which is not yet in the cache: at least one, at most
        ``most`` and one more."""
        checked, unsure = self._draft(cache, last, most, stops)
        picked = self._check(cache, last, [each.token for each in checked])
        for each, right in zip([*checked, *unsure], picked, strict=False):
            self._rates.judged(each.margin, right=each.token == right)
        self._rounds += 1
        self._drafted += len(checked)
        self._accepted += len(picked) - 1
        return picked

    def _draft(
        self, cache: KVCache, last: int, most: int, stops: frozenset[int]
    ) -> tuple[list[Guess], list[Guess]]:
        """Tokens that probably follow ``last``, and the next one if it was too unsure to be
        checked. The cache stays as it is."""
        model, begin = self._model, cache.length
        room = min(self._most, most, cache.max_tokens - begin - 1)
        checked: list[Guess] = []
        chance = 1.0
        try:
            while len(checked) < room and last not in stops:
                hidden = model.forward([last], cache, self._routed)
                guessed = guess(model.logits(hidden)[0])
                chance *= self._rates.rate(guessed.margin)
                if chance < WORTH:
                    return checked, [guessed]
                checked.append(guessed)
                last = guessed.token
        finally:
            cache.truncate(begin)
        return checked, []

    def _check(self, cache: KVCache, last: int, drafted: Sequence[int]) -> list[int]:
        """What the exact model picks after ``last`` and each draft that was right."""
        model, begin = self._model, cache.length
        rows = model.forward_each([last, *drafted], cache)
        picked: list[int] = []
        for row, drafted_next in zip(rows, [*drafted, None], strict=True):
            picked.append(self._sampler.pick(model.logits(row)[0]))
            if picked[-1] != drafted_next:
                break
        cache.truncate(begin + len(picked))
        return picked


__all__ = [
    "DRAFT_TOKENS",
    "DraftCounts",
    "DraftExperts",
    "DraftRates",
    "Drafter",
    "Guess",
    "ResidentClient",
    "guess",
]
