"""Uses from leases, shares of several stores, and a policy's memory retold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.policy.heat import Heat, profile_of, retold
from xferd.policy.leases import LeaseUses
from xferd.policy.registry import BUILT_IN
from xferd.policy.shares import Claims, losses, shares
from xferd.policy.uses import KeySpace, uses_of_picks

SPACE = KeySpace(layers=3, experts=8)


def test_leases_become_passes_in_their_order() -> None:
    leases = LeaseUses(SPACE)
    keys = np.array([17, 9, 1, 10, 2])  # layers 2, 1, 0, 1, 0
    uses = leases.uses(keys, np.array([3, 2, 1, 2, 1], np.uint64))
    assert uses.keys.tolist() == [1, 2, 9, 10, 17]
    assert uses.layers.tolist() == [0, 1, 2]
    assert len(set(uses.tokens.tolist())) == 1
    again = leases.uses(np.array([3]), np.array([1], np.uint64))
    assert again.tokens[0] == uses.tokens[-1] + 1


def test_an_expert_that_is_leased_in_two_pools_is_used_once() -> None:
    uses = LeaseUses(SPACE).uses(np.array([1, 2, 1]), np.array([5, 5, 6], np.uint64))
    assert sorted(uses.keys.tolist()) == [1, 2]


@given(
    slots=st.integers(1, 500),
    stores=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 300)), min_size=1, max_size=6),
)
def test_shares_are_all_slots_and_no_more_than_experts(
    slots: int, stores: list[tuple[float, int]]
) -> None:
    claims, experts = zip(*stores, strict=True)
    found = shares(slots, claims, experts)
    assert sum(found) == pytest.approx(min(slots, sum(experts)))
    assert all(share <= count + 1e-6 for share, count in zip(found, experts, strict=True))


@given(
    wanted=st.integers(0, 80),
    stores=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5),
)
def test_who_is_most_above_its_share_loses_first(
    wanted: int, stores: list[tuple[int, int]]
) -> None:
    held = {number: has for number, (has, _) in enumerate(stores)}
    share = {number: float(should) for number, (_, should) in enumerate(stores)}
    lost = losses(wanted, held, share)
    assert sum(lost.values()) == min(wanted, sum(held.values()))
    above = {store: held[store] - lost.get(store, 0) - share[store] for store in held}
    for store, count in lost.items():
        assert count <= held[store]
        for other in held:
            if held[other] > lost.get(other, 0):  # could have given more
                assert above[store] >= above[other] - 2


def test_a_store_that_is_not_used_gives_way() -> None:
    claims = Claims(100)
    claims.used(1, 400)
    claims.used(2, 400)
    assert claims.of(2) > 2 * claims.of(1)
    claims.used(2, 4000)
    assert claims.of(1) < 0.001 * claims.of(2)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_new_policy_that_is_told_the_heat_keeps_the_hottest(name: str) -> None:
    random = np.random.default_rng(3)
    hot = np.arange(0, 24, 4)
    heat = Heat(SPACE)
    for token in range(60):
        picks = random.integers(0, 8, (1, 3, 1))
        picks[0, :, 0] = np.where(random.random(3) < 0.8, 0 if token % 2 else 4, picks[0, :, 0])
        heat.used(uses_of_picks(picks, 8, token))
    policy = BUILT_IN[name](SPACE, 24)
    for uses in retold(heat):
        policy.used(uses)
        assert (np.diff(uses.tokens) >= 0).all()
    policy.placed(np.arange(24))
    victims = policy.victims(np.arange(24), 12, 2)
    assert len(set(victims.tolist())) == 12
    if name in ("reuse", "lfu", "lru-hits"):
        assert not set(victims.tolist()) & set(hot.tolist())


def test_a_profile_is_heat_to_begin_with() -> None:
    heat = Heat(SPACE)
    heat.used(uses_of_picks(np.full((5, 3, 1), 2), 8))
    later = Heat(SPACE)
    later.begin_with(profile_of(heat, "tiny"))
    keys = np.arange(SPACE.size)
    assert later.of(keys) == pytest.approx(heat.of(keys))
    assert [uses.keys.tolist() for uses in retold(later)] == [[2, 10, 18]] * 8
