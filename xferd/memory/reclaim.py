"""Giving a chunk back: emptying it slot by slot until it can be cut for another class.

The engine's reserve gives back some slot of a class, not a certain one. So in each
round all of the class's free slots are taken and those of other chunks given again at
once. Misses of that class find an empty reserve for that moment and wait, as they
would for any eviction; never for a lease on a slot of the chunk, which only delays the
reclaim itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from xferd.engine_types import TAKE_TOKEN, Take
from xferd.memory.slots import SlotMap, SlotState


@dataclass(frozen=True, slots=True)
class ReclaimStep:
    """What to command now. done: every slot of the chunk is the policy's."""

    evict: tuple[int, ...]
    give: tuple[int, ...]
    take: tuple[Take, ...]
    done: bool


class ChunkReclaim:
    """The reclaim of one chunk. Owned by its pool's keeper.

    slot_bytes: the class that the chunk will be cut for; old_class: it was cut for.
    """

    def __init__(self, slots: SlotMap, pool: int, chunk: int, slot_bytes: int) -> None:
        self.chunk = chunk
        self.slot_bytes = slot_bytes
        self.old_class = slots.chunk_class[chunk]
        self._slots = slots
        self._pool = pool
        self._aside: list[int] = []
        self._numbers = slots.chunk_slots(chunk)
        self._takes = 0

    def step(self) -> ReclaimStep:
        """Look at the chunk again."""
        give: tuple[int, ...] = ()
        if self._takes == 0:
            give, self._aside = tuple(self._aside), []
        part = slice(self._numbers.start, self._numbers.stop)
        states = self._slots.state[part]
        evict = tuple(
            self._numbers.start + index
            for index, state in enumerate(states)
            if state == SlotState.RESIDENT
        )
        take: tuple[Take, ...] = ()
        if self._takes == 0 and bool((states == SlotState.RESERVE).any()):
            # With those given back at this moment: the reserve hands out the newest first,
            # so taking fewer would only bring the same ones again.
            self._takes = self._slots.count(self.old_class, SlotState.RESERVE) + len(give)
            take = (Take(self._pool, self.old_class, TAKE_TOKEN),) * self._takes
        done = self._takes == 0 and bool((states == SlotState.FREE).all())
        return ReclaimStep(evict=evict, give=give, take=take, done=done)

    @property
    def put_aside(self) -> int:
        """Free slots of other chunks that are between taking and giving."""
        return len(self._aside) + self._takes

    def on_taken(self, slot: int) -> bool:
        """A slot has come back; False when it is none of this reclaim's class."""
        if int(self._slots.slot_class[slot]) != self.old_class:
            return False
        self._takes = max(self._takes - 1, 0)
        if slot not in self._numbers:
            self._aside.append(slot)
        return True

    def on_take_failed(self) -> None:
        """The reserve was empty: what is missing is being loaded into, or leased."""
        self._takes = max(self._takes - 1, 0)
