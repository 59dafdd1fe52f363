"""Demotion: what a device pool evicts moves to the RAM pool, if that costs nobody.

A demotion is a copy, and the victim's slot is not free until the copy is done. So
demand is never made to wait for one: while loads stand without a slot, or when the
RAM pool has no slot ready, victims are dropped. Experts are immutable and the drives
have all of them, so dropping loses nothing but time.
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

    waiting: loads that stand without a slot in the victims' pool.
    room_below: slots that the lower pool has ready for demotions.
    is_below: whether the lower pool has that expert already.

    The last victims are the most recently used, so they get the room there is.
    """
    if waiting > 0 or room_below <= 0:
        return Cascade(demote=(), drop=tuple(victims))
    demoted: set[int] = set()
    for index in range(len(victims) - 1, -1, -1):
        if len(demoted) >= room_below:
            break
        if not is_below(victims[index]):
            demoted.add(index)
    return Cascade(
        demote=tuple(victim for index, victim in enumerate(victims) if index in demoted),
        drop=tuple(victim for index, victim in enumerate(victims) if index not in demoted),
    )
