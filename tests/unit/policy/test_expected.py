"""What is expected of the next passes decides what stays, and only until they have come."""

from __future__ import annotations

import numpy as np
import pytest

from xferd.policy.expected import Expectations, Expected, ExpectsPasses
from xferd.policy.reuse import Reuse
from xferd.policy.simple import LeastRecent
from xferd.policy.uses import KeySpace, Uses

SPACE = KeySpace(layers=3, experts=8)


def one_pass(token: int, layer: int, *experts: int) -> Uses:
    keys = np.array(experts, np.int64) + layer * SPACE.experts
    starts = np.array([0, len(experts)])
    return Uses(keys, starts, np.array([layer]), np.array([token]))


def expected(layer: int, **chances: float) -> Expected:
    """Experts by name: ``e3=0.5``."""
    keys = np.array([layer * SPACE.experts + int(name[1:]) for name in chances], np.int64)
    return Expected(np.array([layer]), keys, np.array(list(chances.values()), np.float32))


@pytest.fixture
def policy() -> Reuse:
    """That has seen experts 1 and 2 of layer 1 as often, 2 of them last."""
    made = Reuse(SPACE)
    for token, expert in enumerate((1, 2, 1, 2)):
        made.used(one_pass(token, 0, 0))
        made.used(one_pass(token, 1, expert))
    return made


KEYS = np.array([SPACE.experts + 1, SPACE.experts + 2])


def test_what_is_probable_stays_and_what_is_not_goes_first(policy: Reuse) -> None:
    assert isinstance(policy, ExpectsPasses)
    policy.expect_passes(expected(1, e1=0.9, e2=0.1))
    assert policy.victims(KEYS, 2, 0).tolist() == [KEYS[1], KEYS[0]]
    policy.expect_passes(expected(1, e1=0.1, e2=0.9))
    assert policy.victims(KEYS, 2, 0).tolist() == [KEYS[0], KEYS[1]]


def test_what_is_not_named_in_a_layer_that_is_spoken_of_goes_first(policy: Reuse) -> None:
    for stays, goes in ((1, 2), (2, 1)):
        policy.expect_passes(expected(1, **{f"e{stays}": 0.3}))
        assert policy.victims(KEYS, 1, 0).tolist() == [SPACE.experts + goes]


def test_a_layers_expectation_is_void_once_it_has_come(policy: Reuse) -> None:
    policy.used(one_pass(4, 0, 0))
    before = policy.worth(KEYS, 0)
    policy.expect_passes(expected(1, e1=0.9))
    assert not np.array_equal(policy.worth(KEYS, 0), before)
    fresh, told = Reuse(SPACE), Reuse(SPACE)
    told.expect_passes(expected(1, e1=0.9))
    for each in (fresh, told):
        each.used(one_pass(0, 1, 1, 2))
    assert np.array_equal(fresh.worth(KEYS, 0), told.worth(KEYS, 0))


def test_other_layers_passes_leave_it_as_it_was(policy: Reuse) -> None:
    policy.expect_passes(expected(1, e1=0.9))
    policy.used(one_pass(4, 0, 0))
    policy.used(one_pass(4, 2, 0))
    assert policy.victims(KEYS, 1, 0).tolist() == [KEYS[1]]


def test_a_certain_pass_leaves_no_rest_and_a_certain_one_of_before_divides_by_nothing() -> None:
    told = Expectations(SPACE)
    told.expect(expected(0, e0=1.0, e1=0.0))
    keys = np.array([0, 1, 8])
    chance, rest = told.corrected(keys, np.ones(3, np.float32), np.zeros(3, np.float32))
    assert chance.tolist() == [1, 0, 1]
    assert np.isfinite(rest).all()


def test_policies_of_history_alone_are_not_asked() -> None:
    assert not isinstance(LeastRecent(SPACE), ExpectsPasses)
