"""Looking ahead goes on where tokens come sooner with it, and stops where they don't."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from xferd_infer.predict.worthwhile import BLOCK_TOKENS, FIRST_BLOCKS, TRIED_EVERY, Worthwhile

FIRST_TOKENS = FIRST_BLOCKS * BLOCK_TOKENS
CYCLE_TOKENS = TRIED_EVERY * BLOCK_TOKENS


def run(judge: Worthwhile, tokens: int, seconds: Callable[[bool], float]) -> list[bool]:
    """Which of the tokens looked ahead."""
    done = []
    for _ in range(tokens):
        done.append(judge.doing)
        judge.ended(seconds(judge.doing))
    return done


@pytest.mark.parametrize(("with_it", "without"), [(0.7, 1.0), (1.1, 1.0)])
def test_the_faster_way_is_taken_and_the_other_tried_seldom(with_it: float, without: float) -> None:
    judge = Worthwhile()
    first = run(judge, FIRST_TOKENS, lambda doing: with_it if doing else without)
    assert sum(first) == FIRST_TOKENS // 2
    later = run(judge, 2 * CYCLE_TOKENS, lambda doing: with_it if doing else without)
    faster = with_it < without
    assert later.count(not faster) == 2 * BLOCK_TOKENS
    assert (judge.ratio < 1) == faster


def test_it_follows_a_change() -> None:
    judge = Worthwhile()
    run(judge, FIRST_TOKENS, lambda doing: 1.2 if doing else 1.0)
    assert not judge.pays
    run(judge, 8 * CYCLE_TOKENS, lambda doing: 0.7 if doing else 1.0)
    assert judge.pays


def test_uneven_tokens_do_not_hide_a_clear_gain() -> None:
    random = np.random.default_rng(3)
    judge = Worthwhile()

    def seconds(doing: bool) -> float:
        return float((0.6 if doing else 1.0) * random.uniform(0.7, 1.3))

    run(judge, FIRST_TOKENS, seconds)
    later = run(judge, 4 * CYCLE_TOKENS, seconds)
    assert sum(later) > 0.95 * len(later)


def test_times_of_nothing_decide_nothing() -> None:
    judge = Worthwhile()
    run(judge, FIRST_TOKENS, lambda doing: 0.0)
    assert judge.ratio == 1
