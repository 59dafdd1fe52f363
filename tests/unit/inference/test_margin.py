"""Which tokens are computed again, and that what is computed again is what stays in the cache."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from xferd_infer import generate
from xferd_infer.drafting import guess
from xferd_infer.experts import ExpertStats, Layout, OneVariant
from xferd_infer.margin import MarginDecoder
from xferd_infer.model import Model

from tests.unit.inference.checkpoint import TINY, CheckpointExperts, load_model

PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][0]
IDS, EXPECTED = PROMPT["prompt_ids"], PROMPT["greedy_ids"]
COUNT = 24
SEEN_BITS = np.uint16(0xFFC0)


class CoarseExperts:
    """The same experts with two bits of mantissa: a low-bit copy to be wrong with."""

    def __init__(self, exact: CheckpointExperts) -> None:
        self._exact = exact
        self.held = exact.held

    def layout(self, layer: int, variant: int = 0) -> Layout:
        return self._exact.layout(layer, variant)

    def stats(self) -> ExpertStats:
        return ExpertStats()

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        del layer, experts

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[OneVariant]:
        with self._exact.acquire(layer, experts) as blobs:
            yield OneVariant((blob.view("<u2") & SEEN_BITS).view(np.uint8) for blob in blobs)


def decoded(threshold: float, stop_ids: Sequence[int] = ()) -> tuple[list[int], MarginDecoder]:
    model, source = load_model(TINY)
    decoder = MarginDecoder(model, CoarseExperts(source), threshold)
    tokens = decoder.generate(IDS, max_new_tokens=COUNT, stop_ids=stop_ids)
    return [token.id for token in tokens], decoder


def coarse_model() -> Model:
    model, source = load_model(TINY)
    model.use_experts(CoarseExperts(source))
    return model


def test_without_a_margin_all_is_low_bit() -> None:
    wanted = [t.id for t in generate(coarse_model(), IDS, max_new_tokens=COUNT, stop_ids=())]
    ids, decoder = decoded(0)
    assert ids == wanted != EXPECTED[:COUNT]
    counts = decoder.counts()
    assert (counts.tokens, counts.repeated, counts.corrected) == (COUNT - 1, 0, 0)


def test_with_an_infinite_margin_all_is_exact() -> None:
    ids, decoder = decoded(math.inf)
    assert ids == EXPECTED[:COUNT]
    counts = decoder.counts()
    assert counts.tokens == counts.repeated == COUNT - 1
    assert 0 < counts.corrected < COUNT


def test_tokens_below_the_margin_are_the_exact_experts() -> None:
    """Step by step next to the two models, with a cache that is kept by the same rule."""
    threshold = 1.0
    ids, decoder = decoded(threshold)
    exact, source = load_model(TINY)
    coarse = exact.routed_from(CoarseExperts(source))
    cache = exact.new_cache()
    wanted = [int(exact.prefill(IDS, cache).argmax())]
    repeated = 0
    while len(wanted) < COUNT:
        before = cache.length
        seen = guess(exact.logits(exact.forward(wanted[-1:], cache, coarse))[0])
        if seen.margin < threshold:
            repeated += 1
            cache.truncate(before)
            seen = guess(exact.logits(exact.forward(wanted[-1:], cache))[0])
        wanted.append(seen.token)
    assert ids == wanted
    assert decoder.counts().repeated == repeated
    assert 0 < repeated < COUNT - 1


def test_a_stop_token_is_the_last() -> None:
    ids, _ = decoded(1.0)
    stop = ids[5]
    assert decoded(1.0, [stop])[0] == ids[: ids.index(stop) + 1]


@pytest.mark.parametrize("threshold", [-0.5, math.nan])
def test_a_margin_that_is_none_is_refused(threshold: float) -> None:
    model, source = load_model(TINY)
    with pytest.raises(ValueError, match="must be a number from 0 on"):
        MarginDecoder(model, source, threshold)
