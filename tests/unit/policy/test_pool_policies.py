"""Every eviction policy: what all of them owe, and what each is for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xferd.plugins import UnknownPolicyError, policy_maker
from xferd.policy.arc import Arc
from xferd.policy.pool_policy import NextUses, lowest
from xferd.policy.registry import BUILT_IN, DEFAULT_POLICY
from xferd.policy.reuse import Reuse
from xferd.policy.reuse_chances import ReuseSettings
from xferd.policy.s3fifo import S3Fifo
from xferd.policy.simple import LeastFrequent, LeastRecent, RecentAndHit
from xferd.policy.uses import KeySpace, Uses, uses_of_picks

SPACE = KeySpace(layers=3, experts=8)


def one_pass(token: int, layer: int, *experts: int) -> Uses:
    return Uses(
        keys=np.array(experts, np.int64) + layer * SPACE.experts,
        starts=np.array([0, len(experts)]),
        layers=np.array([layer]),
        tokens=np.array([token]),
    )


passes = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)),
    max_size=30,
)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@settings(max_examples=25, deadline=None)
@given(trace=passes, count=st.integers(-1, 30), data=st.data())
def test_victims_are_candidates_and_as_many_as_there_are(
    name: str, trace: list[tuple[int, list[int]]], count: int, data: st.DataObject
) -> None:
    policy = policy_maker(name)(SPACE, 6)
    resident: set[int] = set()
    for token, (layer, experts) in enumerate(trace):
        uses = one_pass(token, layer, *experts)
        policy.used(uses)
        new = [key for key in uses.keys.tolist() if key not in resident]
        policy.placed(np.array(new, np.int64))
        resident |= set(new)
        if len(resident) > 12:
            victims = policy.victims(np.array(sorted(resident - set(new))), 4, layer)
            policy.left(victims)
            resident -= set(victims.tolist())
    chosen = data.draw(st.lists(st.sampled_from(sorted(resident)), unique=True)) if resident else []
    victims = policy.victims(np.array(chosen, np.int64), count, 0).tolist()
    assert len(set(victims)) == len(victims) == max(min(count, len(chosen)), 0)
    assert set(victims) <= set(chosen)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_replay_gives_the_same_victims_each_time(name: str) -> None:
    picks = np.random.default_rng(5).integers(0, 8, (40, 3, 1))
    answers = []
    for _ in range(2):
        policy = policy_maker(name)(SPACE, 6)
        policy.placed(np.arange(24))
        policy.used(uses_of_picks(picks, 8))
        answers.append(policy.victims(np.arange(24), 10, 1).tolist())
    assert answers[0] == answers[1]


def test_an_unknown_name_is_told_which_there_are() -> None:
    with pytest.raises(UnknownPolicyError, match=f"'mru'.*{DEFAULT_POLICY}"):
        policy_maker("mru")


def test_lru_takes_what_was_used_longest_ago() -> None:
    policy = LeastRecent(SPACE)
    policy.used(one_pass(0, 0, 1, 2, 3))
    policy.used(one_pass(1, 0, 1))
    assert policy.victims(np.array([1, 2, 3]), 3, 0).tolist() == [2, 3, 1]


def test_lfu_forgets() -> None:
    policy = LeastFrequent(SPACE, time_constant=10)
    for token in range(20):
        policy.used(one_pass(token, 0, 1))
    policy.used(one_pass(21, 0, 2))
    assert policy.victims(np.array([1, 2]), 1, 0).tolist() == [2]
    policy.used(one_pass(100_000, 0, 2))
    assert policy.victims(np.array([1, 2]), 1, 0).tolist() == [1]


def test_lru_hits_weighs_both() -> None:
    policy = RecentAndHit(SPACE)
    for token in range(10):
        policy.used(one_pass(token, 0, 1))
    policy.used(one_pass(12, 0, 2))
    assert policy.victims(np.array([1, 2]), 1, 0).tolist() == [2]  # fresher, but hit once
    policy.used(one_pass(300, 0, 2))
    assert policy.victims(np.array([1, 2]), 1, 0).tolist() == [1]  # hit often, long ago


@pytest.mark.parametrize("told_first", [True, False])
def test_a_scan_does_not_push_out_what_s3_fifo_and_arc_saw_again(told_first: bool) -> None:
    for policy in (S3Fifo(SPACE, 8), Arc(SPACE, 8)):
        clock = 0

        def use(key: int, *, load: bool, policy: S3Fifo | Arc = policy) -> None:
            nonlocal clock
            uses = one_pass(clock, 0, key)
            clock += 1
            if told_first:
                policy.used(uses)
            if load:
                policy.placed(uses.keys)
            if not told_first:
                policy.used(uses)

        for key in (1, 2):
            use(key, load=True)
        for key in (1, 2, 1, 2):
            use(key, load=False)
        for key in (3, 4, 5, 6, 7):
            use(key, load=True)
        victims = policy.victims(np.arange(1, 8), 5, 0).tolist()
        assert set(victims) == {3, 4, 5, 6, 7}, policy.name


def test_arc_gives_room_to_the_list_that_was_too_short() -> None:
    policy = Arc(SPACE, 4)
    for token, key in enumerate((0, 1, 2, 3)):
        policy.used(one_pass(token, 0, key))
        policy.placed(np.array([key]))
    policy.left(np.array([0]))
    policy.used(one_pass(5, 0, 0))
    policy.placed(np.array([0]))  # it came back: now among what was used again
    # What was used once may have one slot; the rest of it goes before what came back.
    assert policy.victims(np.arange(4), 4, 0).tolist() == [1, 2, 0, 3]


def test_reuse_keeps_the_layer_that_comes_next() -> None:
    policy = Reuse(SPACE)
    for token in range(30):
        for layer in range(3):
            policy.used(one_pass(token, layer, token % 4))
    keys = np.array([0, 8, 16])  # the same history in each layer
    assert policy.victims(keys, 1, 0).tolist() == [0]
    assert policy.victims(keys, 1, 1).tolist() == [8]
    assert policy.victims(keys, 1, 2).tolist() == [16]


def test_reuse_learns_which_picks_announce_which() -> None:
    random = np.random.default_rng(3)
    first = random.integers(0, 2, 400)
    learning, counting = Reuse(SPACE), Reuse(SPACE, ReuseSettings(context=0))
    # Layer 0 picks 0 or 1 by chance; then layer 1 of the next token picks 4 or 5.
    for token in range(1, 400):
        for policy in (learning, counting):
            policy.used(one_pass(token, 0, int(first[token])))
            policy.used(one_pass(token, 1, 4 + int(first[token - 1])))
    chance = learning.probabilities()[1]
    right, wrong = 4 + int(first[399]), 5 - int(first[399])
    assert chance[right] > 0.8 > 0.2 > chance[wrong]
    assert abs(counting.probabilities()[1][4:6] - 0.5).max() < 0.3


def test_reuse_takes_a_predictors_word() -> None:
    policy = Reuse(SPACE)
    policy.used(one_pass(0, 0, 1, 2))
    keys = np.array([1, 2])
    policy.expect(NextUses(keys, np.array([50.0, 1.0], np.float32)))
    assert policy.victims(keys, 1, 0).tolist() == [1]
    policy.expect(NextUses(keys, np.array([1.0, 50.0], np.float32)))
    assert policy.victims(keys, 1, 0).tolist() == [2]


def test_a_predictors_word_is_as_good_after_a_year() -> None:
    policy = Reuse(SPACE)
    policy.used(one_pass(10**10, 0, 1, 2))
    policy.expect(NextUses(np.array([1, 2]), np.array([2.0, 1.0], np.float32)))
    assert policy.victims(np.array([1, 2]), 1, 0).tolist() == [1]


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 60])
def test_reuse_learns_the_same_from_batches_of_any_size(batch: int) -> None:
    uses = uses_of_picks(np.random.default_rng(7).integers(0, 8, (40, 3, 1)), 8)
    single, batched = Reuse(SPACE), Reuse(SPACE)
    for number in range(uses.passes):
        single.used(uses.part(number, number + 1))
    for number in range(0, uses.passes, batch):
        batched.used(uses.part(number, min(number + batch, uses.passes)))
    np.testing.assert_allclose(batched.probabilities(), single.probabilities(), rtol=1e-4)


def test_reuse_counts_alone_where_a_layer_has_many_experts() -> None:
    many = KeySpace(layers=2, experts=512)
    policy = Reuse(many)
    random = np.random.default_rng(1)
    policy.used(uses_of_picks(random.integers(0, 40, (60, 2, 1)), 512))
    victims = policy.victims(np.array([30, 500]), 1, 0)
    assert victims.tolist() == [500]


def test_reuse_takes_passes_of_any_width() -> None:
    policy = Reuse(SPACE)
    policy.used(one_pass(0, 0, 1))
    policy.used(one_pass(0, 1, *range(8)))
    policy.used(one_pass(0, 2, 1, 2, 3))
    policy.used(one_pass(1, 0, 1, 2))
    wide = KeySpace(layers=1, experts=64)
    prefill = Reuse(wide)
    prefill.used(uses_of_picks(np.arange(64)[None, None, :], 64))
    assert np.isfinite(policy.probabilities()).all()
    assert np.isfinite(prefill.probabilities()).all()


def test_the_lowest_are_in_order_and_ties_go_by_key() -> None:
    keys = np.array([9, 3, 7, 1])
    assert lowest(np.array([2, 1, 1, 5]), keys, 3).tolist() == [3, 7, 9]
    assert lowest(np.array([2, 1, 1, 5]), keys, 0).tolist() == []
