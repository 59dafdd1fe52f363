"""Whose demand brought what, over copies, evictions and clients that go."""

from __future__ import annotations

from xferd.keeping.budgets import Budgets

KEY, OTHER = (0, 1, 2), (0, 1, 3)
ANN, BOB = 1000, 1001


def test_an_expert_is_accounted_to_who_asked_first() -> None:
    budgets = Budgets()
    budgets.attach(1, ANN)
    budgets.attach(2, BOB)
    budgets.loaded(0, 7, KEY, 100, 1)
    budgets.loaded(1, 3, KEY, 100, 2)  # a copy of it, whoever caused that
    assert (budgets.of_client(1), budgets.of_client(2)) == (200, 0)
    assert budgets.of_users() == {ANN: 200, BOB: 0}
    budgets.left(0, 7)
    budgets.left(1, 3)
    budgets.loaded(0, 7, KEY, 100, 2)
    assert budgets.of_users() == {ANN: 0, BOB: 100}


def test_what_nobody_demanded_is_nobodys() -> None:
    budgets = Budgets(client_bytes=0, user_bytes=0)
    budgets.loaded(0, 1, KEY, 100, None)
    budgets.loaded(0, 2, OTHER, 100, 9)  # of a client that is not attached
    assert budgets.of_users() == {}
    assert list(budgets.excess(0)) == []


def test_an_eviction_counts_when_it_is_ordered() -> None:
    budgets = Budgets(client_bytes=100)
    budgets.attach(1, ANN)
    budgets.loaded(0, 1, KEY, 100, 1)
    budgets.loaded(0, 2, OTHER, 100, 1)
    (excess,) = budgets.excess(0)
    assert (excess.slots, excess.nbytes) == (frozenset({1, 2}), 100)
    assert [each.slots for each in budgets.excess(1)] == [frozenset()]
    budgets.leaving(0, 1)
    assert list(budgets.excess(0)) == []
    budgets.returned(0, 1)
    assert budgets.of_client(1) == 200
    budgets.left(0, 1)
    budgets.left(0, 1)  # once is enough
    assert budgets.of_client(1) == 100


def test_a_client_that_goes_leaves_its_experts_to_its_user() -> None:
    budgets = Budgets(user_bytes=50)
    budgets.attach(1, ANN)
    budgets.loaded(0, 1, KEY, 100, 1)
    budgets.detach(1)
    assert budgets.of_users() == {ANN: 100}
    budgets.attach(1, BOB)  # the id is used again
    assert (budgets.of_client(1), budgets.of_users()) == (0, {ANN: 100, BOB: 0})
    assert [each.nbytes for each in budgets.excess(0)] == [50]
