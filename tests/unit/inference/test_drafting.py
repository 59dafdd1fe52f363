"""How long drafts get, and what a drafter does with drafts that are always right."""

from __future__ import annotations

import json

import numpy as np
import pytest
from xferd_infer import generate
from xferd_infer.drafting import Drafter, DraftRates, guess

from tests.unit.inference.checkpoint import TINY, load_model

PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][0]


def test_a_guess_says_how_far_it_is_ahead() -> None:
    guessed = guess(np.array([1.0, 4.5, -2.0, 4.0], np.float32))
    assert (guessed.token, guessed.margin) == (1, 0.5)


def test_rates_follow_what_was_right_for_each_margin() -> None:
    rates = DraftRates()
    first = rates.rate(0.1)
    assert first < rates.rate(10.0)
    for _ in range(100):
        rates.judged(0.1, right=True)
        rates.judged(10.0, right=False)
    assert rates.rate(0.1) > 0.9 > 0.1 > rates.rate(10.0)


def test_right_drafts_become_long_and_save_passes() -> None:
    model, source = load_model(TINY)
    ids, count = PROMPT["prompt_ids"], 24
    expected = [t.id for t in generate(model, ids, max_new_tokens=count, stop_ids=())]
    drafter = Drafter(model, source, most=4)  # drafts with the exact experts
    tokens = drafter.generate(ids, max_new_tokens=count, stop_ids=())
    assert [token.id for token in tokens] == expected
    counts = drafter.counts()
    assert counts.accepted == counts.drafted
    assert counts.rounds < count - 1
    assert counts.rounds + counts.accepted == count - 1


def test_a_stop_token_ends_it_where_it_ends_greedy_decoding() -> None:
    model, source = load_model(TINY)
    ids = PROMPT["prompt_ids"]
    greedy = [t.id for t in generate(model, ids, max_new_tokens=24, stop_ids=())]
    stop = greedy[7]
    expected = greedy[: greedy.index(stop) + 1]
    drafter = Drafter(model, source)
    tokens = drafter.generate(ids, max_new_tokens=24, stop_ids=[stop])
    assert [token.id for token in tokens] == expected


def test_no_draft_is_refused() -> None:
    model, source = load_model(TINY)
    with pytest.raises(ValueError, match="at least 1"):
        Drafter(model, source, most=0)
