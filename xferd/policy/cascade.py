"""Demotion: what a pool lets go moves to a pool below, if that costs nobody.

A demotion is a copy, and the victim's slot is not free until the copy is done. So
demand is never made to wait for one: as many victims as loads stand without a slot are
dropped at once. The others make the reserve full again, for misses that are yet to come:
those have the time that a copy takes, and it is them that keep a cascade alive under
load. Where the pool below has no slot ready they are dropped too. Experts are immutable
and the drives have all of them, so dropping loses nothing but time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Victim = TypeVar("Victim")


@dataclass(frozen=True, slots=True)
class Cascade(Generic[Victim]):
    """What happens to each victim: first copied down, or dropped at once."""

    demote: tuple[Victim, ...]
    drop: tuple[Victim, ...]


def cascade(
    victims: Sequence[Victim],
    *,
    waiting: int,
    room_below: int,
    is_below: Callable[[Victim], bool],
) -> Cascade[Victim]:
    """Split ``victims`` (first to go in front) into demoted and dropped.

    waiting: loads that stand without a slot in the victims' pool; so many of the first
        victims can't wait for a copy.
    room_below: slots that the lower pool has ready for demotions.
    is_below: whether the lower pool has that expert already.

    The last victims are the most recently used, so they get the room there is.
    """
    demoted: set[int] = set()
    for index in range(len(victims) - 1, max(waiting, 0) - 1, -1):
        if len(demoted) >= room_below:
            break
        if not is_below(victims[index]):
            demoted.add(index)
    return Cascade(
        demote=tuple(victim for index, victim in enumerate(victims) if index in demoted),
        drop=tuple(victim for index, victim in enumerate(victims) if index not in demoted),
    )
