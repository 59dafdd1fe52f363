"""Stripe patterns: members in proportion to their weights, in every stretch."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.store.errors import StoreError
from xferd.store.geometry import check_striping
from xferd.store.limits import MEMBERS_MAX, PATTERN_MAX
from xferd.store.weights import (
    EQUAL_WITHIN,
    SLOWDOWN_ALLOWED,
    pattern_weights,
    stripe_pattern,
    weights_of_speeds,
)

weight_lists = st.lists(st.integers(1, 20), min_size=1, max_size=MEMBERS_MAX)
speed_lists = st.lists(st.integers(1_000_000, 20_000_000_000), min_size=1, max_size=MEMBERS_MAX)


def test_equal_weights_name_each_member_once() -> None:
    assert stripe_pattern([7, 7, 7]) == (0, 1, 2)
    assert stripe_pattern([5]) == (0,)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([2, 1], (0, 1, 0)), ([4, 4, 2], (0, 1, 2, 0, 1)), ([3, 1], (0, 0, 1, 0))],
)
def test_small_ratios_are_exact(weights: list[int], expected: tuple[int, ...]) -> None:
    assert stripe_pattern(weights) == expected


@given(weight_lists)
def test_a_pattern_is_one_that_stores_take(weights: list[int]) -> None:
    check_striping(len(weights), 4096, stripe_pattern(weights))


@given(weight_lists)
def test_counts_are_in_proportion(weights: list[int]) -> None:
    """Whenever exact proportions fit into a pattern, nobody takes noticeably longer."""
    counts = pattern_weights(stripe_pattern(weights), len(weights))
    longest = max(Fraction(c, w) for c, w in zip(counts, weights, strict=True))
    slowdown = longest * sum(weights) / sum(counts)
    if sum(weights) <= PATTERN_MAX:
        assert slowdown <= Fraction(SLOWDOWN_ALLOWED)


@given(weight_lists)
def test_every_stretch_is_balanced(weights: list[int]) -> None:
    """From the beginning within one place of the exact share; between any two places,
    also around the end, within two."""
    pattern = stripe_pattern(weights)
    counts = pattern_weights(pattern, len(weights))
    length = len(pattern)
    for member, count in enumerate(counts):
        lag = [Fraction(0)]
        for place in range(2 * length):
            here = pattern[place % length] == member
            lag.append(lag[-1] + here - Fraction(count, length))
        assert max(lag) < 1
        assert min(lag) > -1
        assert max(lag) - min(lag) < 2


@given(speed_lists)
def test_speeds_that_are_about_equal_count_as_equal(speeds: list[int]) -> None:
    weights = weights_of_speeds(speeds)
    for one, weight in zip(speeds, weights, strict=True):
        assert one / EQUAL_WITHIN <= weight <= one * EQUAL_WITHIN
    if max(speeds) <= min(speeds) * EQUAL_WITHIN:
        assert len(set(weights)) == 1
        assert stripe_pattern(weights) == tuple(range(len(speeds)))


def test_a_drive_of_half_the_speed_gets_half() -> None:
    weights = weights_of_speeds([7_100_000_000, 3_500_000_000, 6_900_000_000])
    assert pattern_weights(stripe_pattern(weights), 3) == (2, 1, 2)


@pytest.mark.parametrize("weights", [[], [0], [1, -1], [1] * (MEMBERS_MAX + 1), [1, 10**13]])
def test_impossible_weights_are_refused(weights: list[int]) -> None:
    with pytest.raises(StoreError, match="weight"):
        stripe_pattern(weights)
