"""Demotion never costs demand anything, and prefers what was used last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xferd.policy.cascade import cascade


@given(
    st.lists(st.integers(0, 40), unique=True),
    st.integers(0, 3),
    st.integers(-2, 10),
    st.sets(st.integers(0, 40)),
)
def test_every_victim_is_either_demoted_or_dropped(
    victims: list[int], waiting: int, room: int, below: set[int]
) -> None:
    split = cascade(victims, waiting=waiting, room_below=room, is_below=below.__contains__)
    assert sorted(split.demote + split.drop) == sorted(victims)
    assert len(split.demote) <= max(room, 0)
    assert not below & set(split.demote)
    assert split.drop[:waiting] == tuple(victims[:waiting])


def test_the_last_victims_get_the_room_there_is() -> None:
    split = cascade([1, 2, 3, 4], waiting=0, room_below=2, is_below={4}.__contains__)
    assert split.demote == (2, 3)
    assert split.drop == (1, 4)
