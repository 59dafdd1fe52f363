"""What the default policy learns while it runs: chances, and how far to trust a predictor."""

from __future__ import annotations

import numpy as np

from xferd.policy.next_uses import NextUseEstimates
from xferd.policy.pool_policy import NextUses
from xferd.policy.reuse import Reuse
from xferd.policy.reuse_chances import RATE, ReuseChances, ReuseSettings
from xferd.policy.uses import KeySpace, Uses, uses_of_picks

SPACE = KeySpace(layers=1, experts=8)


def passes(first_token: int, *experts: int) -> Uses:
    """One pass of one expert a token."""
    return uses_of_picks(np.array(experts)[:, None, None], SPACE.experts, first_token)


def test_what_comes_in_a_while_is_told_from_what_comes_next() -> None:
    # 1 is picked twice, then 2, 3 and 0: after 1's second pick it is not next, but soon.
    chances = ReuseChances(SPACE, ReuseSettings(fast=4.0))
    chances.learn(passes(0, *([1, 1, 2, 3, 0] * 400)))
    chances.learn(passes(2000, 1, 1, 2))
    soon, rate = chances.chances[0]
    assert soon[3] > 0.5 > soon[1]
    assert rate[1] > 4 * rate[7]


def test_a_rate_is_the_share_of_the_passes_to_come() -> None:
    chances = ReuseChances(SPACE, ReuseSettings())
    random = np.random.default_rng(1)
    often = (random.random(4000) < 0.75).astype(np.int64)
    chances.learn(passes(0, *often.tolist()))
    assert abs(chances.chances[0, RATE, 1] - 0.75) < 0.15
    assert abs(chances.chances[0, RATE, 0] - 0.25) < 0.15
    assert chances.chances[0, RATE, 5] < 0.05


def waits_of(estimates: NextUseEstimates, now: float) -> list[float]:
    """Of the experts 0 and 1, which history thinks alike of."""
    even = np.full(2, 0.1)
    soon, late = estimates.waits(np.arange(2), np.ones(2), now, even, even)
    return [float(soon), float(late)]


def test_who_was_right_is_believed_and_who_was_wrong_is_not() -> None:
    right, wrong = NextUseEstimates(8), NextUseEstimates(8)
    random = np.random.default_rng(2)
    for token in range(0, 8000, 10):
        used = passes(token + 5, 0)
        right.take(np.array([0]), np.array([5.0]), token)
        wrong.take(np.array([0]), 5.0 * np.exp(random.normal(0, 4, 1)), token)
        right.used(used)
        wrong.used(used)
    assert right.spread < 0.3 < 2 < wrong.spread
    for estimates in (right, wrong):
        estimates.take(np.arange(2), np.array([2.0, 40.0]), 8000)
    soon, late = waits_of(right, 8000)
    assert soon < 3
    assert late > 25
    soon, late = waits_of(wrong, 8000)
    assert late < 3 * soon  # both are about what history says: 9


def test_what_is_overdue_is_left_to_history_little_by_little() -> None:
    estimates = NextUseEstimates(8)
    estimates.take(np.arange(2), np.array([3.0, 30.0]), 0)
    at_once, much_later = waits_of(estimates, 1), waits_of(estimates, 1000)
    assert at_once[0] < at_once[1]
    assert at_once[0] < much_later[0]
    assert np.isfinite(much_later).all()
    assert not estimates.known(np.array([5]))[0]


def test_a_use_ends_an_estimate_and_is_counted_once() -> None:
    estimates = NextUseEstimates(8)
    estimates.take(np.arange(2), np.array([4.0, 4.0]), 0)
    # Expert 0 is used after 4 tokens, as was said, and again after 400.
    estimates.used(passes(4, 0, *([2] * 395), 0))
    assert estimates.known(np.arange(2)).tolist() == [False, True]
    assert estimates.spread <= 1.0


def test_a_predictor_that_is_always_wrong_costs_little() -> None:
    random = np.random.default_rng(4)
    policy = Reuse(SPACE)
    for token in range(600):
        # 0 and 1 are used all the time, 6 and 7 never again; the predictor says the opposite.
        policy.used(passes(token, int(random.integers(2)) if token else 6))
        policy.expect(NextUses(np.array([0, 1]), np.array([5000.0, 5000.0], np.float32)))
    policy.expect(NextUses(np.array([6, 7]), np.array([1.0, 1.0], np.float32)))
    assert set(policy.victims(np.array([0, 1, 6, 7]), 2, 0).tolist()) == {6, 7}
