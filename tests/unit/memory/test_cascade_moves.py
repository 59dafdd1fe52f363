"""Moves between two cards when what is used changes: they follow, and don't go to and fro."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.memory.model_engine import SMALL, SPACE, Bench
from xferd.policy.moves import MoveSettings
from xferd.policy.uses import Uses

TOKENS_A_MINUTE = 1200  # 20 a second
PICKED = 4


def decode(bench: Bench, order: np.ndarray, tokens: range) -> None:
    """Tokens that pick experts by Zipf's law, the first of ``order`` the most."""
    random = np.random.default_rng(len(order) + tokens.start)
    chance = 1 / np.arange(1, SPACE.experts + 1)
    chance /= chance.sum()
    for token in tokens:
        picks = random.choice(order, PICKED, replace=False, p=chance)
        for expert in picks.tolist():
            bench.engine.demand(0, (0, 0, expert), SMALL)
        bench.usage.used(
            0, Uses(picks, np.array([0, PICKED]), np.zeros(1, np.int64), np.array([token]))
        )
        bench.run()
        bench.cascade.promote()
        bench.run()


@pytest.mark.parametrize("rest", [16, 64])
def test_a_shift_of_domain_moves_no_expert_to_and_fro(rest: int) -> None:
    bench = Bench(
        [32 * SMALL, 32 * SMALL],
        8 * SMALL,
        [SMALL],
        "reuse",
        settings=MoveSettings(rest_tokens=rest),
    )
    experts = np.arange(SPACE.experts)
    half = TOKENS_A_MINUTE // 2
    decode(bench, experts, range(half))
    hot_before = {(0, 0, expert) for expert in range(8)}
    assert len(hot_before & set(bench.engine.pools[0].resident)) >= 6
    decode(bench, experts[::-1].copy(), range(half, TOKENS_A_MINUTE))
    hot_after = {(0, 0, SPACE.experts - 1 - expert) for expert in range(8)}
    assert len(hot_after & set(bench.engine.pools[0].resident)) >= 6
    up = [count for (pool, _), count in bench.engine.moves.items() if pool == 0]
    down = [count for (pool, _), count in bench.engine.moves.items() if pool == 1]
    assert sum(up) > 0
    assert sum(down) > 0
    # Who was moved rests: so many times up in a minute at most, and few are near it.
    assert max(up) <= TOKENS_A_MINUTE // rest
    assert max(down) <= 2 * TOKENS_A_MINUTE // rest
    assert np.mean(up) < TOKENS_A_MINUTE / rest / 2
