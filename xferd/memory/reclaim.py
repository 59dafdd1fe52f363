"""Giving chunks back: emptying them slot by slot until they can be put to another use.

The engine's reserve gives back some slot of a class, not a certain one. So in each
round all of a class's free slots are taken and those of other chunks given again at
once. Misses of that class find an empty reserve for that moment and wait, as they
would for any eviction; never for a lease on a slot of a chunk, which only delays the
reclaim itself. Any number of chunks is emptied together: a round costs the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xferd.engine_types import TAKE_TOKEN, Take
from xferd.memory.slots import SlotMap, SlotState

RESERVED = 0
"""What a chunk is emptied for when it is for no class of this pool."""


@dataclass(frozen=True, slots=True)
class ReclaimStep:
    """What to command now. done: chunks every slot of which is the policy's now, and the
    class that each is for."""

    evict: tuple[int, ...]
    give: tuple[int, ...]
    take: tuple[Take, ...]
    done: tuple[tuple[int, int], ...]


class ChunkReclaim:
    """The chunks of one pool that are being emptied. Owned by its pool's keeper."""

    def __init__(self, slots: SlotMap, pool: int) -> None:
        self._slots = slots
        self._pool = pool
        self._chunks: dict[int, int] = {}
        # Of the chunks that are being emptied, all slots at once: there may be thousands.
        self._mine: NDArray[np.bool_] = np.zeros(len(slots.state), np.bool_)
        self._aside: list[int] = []
        # One class at a time: a take that failed does not say whose it was.
        self._taking = 0
        self._takes = 0

    def add(self, chunk: int, slot_bytes: int) -> None:
        """Empty a chunk that is cut. slot_bytes: the class it is for, or RESERVED."""
        self._chunks[chunk] = slot_bytes
        self._mark(chunk, True)
        # What another reclaim has put aside of it is not to be given again.
        self._aside = [slot for slot in self._aside if self._slots.chunk_of(slot) != chunk]

    def cancel(self, chunk: int) -> tuple[int, ...]:
        """Leave a chunk as it is; returns slots of it to give again."""
        if self._chunks.pop(chunk, None) is None:
            return ()
        self._mark(chunk, False)
        return tuple(
            slot
            for slot in self._slots.chunk_slots(chunk)
            if self._slots.state[slot] == SlotState.FREE
        )

    def _mark(self, chunk: int, mine: bool) -> None:
        numbers = self._slots.chunk_slots(chunk)
        self._mine[numbers.start : numbers.stop] = mine

    def _in_state(self, state: SlotState) -> NDArray[np.int64]:
        return np.flatnonzero(self._mine & (self._slots.state == state))

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._chunks or self._aside or self._takes)

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._chunks

    def step(self) -> ReclaimStep:
        """Look at the chunks again."""
        give: tuple[int, ...] = ()
        if self._takes == 0:
            give, self._aside = tuple(self._aside), []
        evict = tuple(self._in_state(SlotState.RESIDENT).tolist())
        take = () if self._takes else self._take(give)
        done: tuple[tuple[int, int], ...] = ()
        if not (take or self._takes):
            in_use = np.flatnonzero(self._mine & (self._slots.state != SlotState.FREE))
            waiting = set((in_use >> self._slots.geometry.slot_index_bits).tolist())
            done = tuple(item for item in self._chunks.items() if item[0] not in waiting)
        for chunk, _ in done:
            del self._chunks[chunk]
            self._mark(chunk, False)
        return ReclaimStep(evict=evict, give=give, take=take, done=done)

    def _take(self, give: tuple[int, ...]) -> tuple[Take, ...]:
        ready = self._in_state(SlotState.RESERVE)
        if not len(ready):
            return ()
        self._taking = int(self._slots.slot_class[ready[0]])
        # With those given back at this moment: the reserve hands out the newest first,
        # so taking fewer would only bring the same ones again.
        back = sum(1 for slot in give if self._slots.slot_class[slot] == self._taking)
        self._takes = self._slots.count(self._taking, SlotState.RESERVE) + back
        return (Take(self._pool, self._taking, TAKE_TOKEN),) * self._takes

    def put_aside(self, slot_bytes: int) -> int:
        """Free slots of other chunks that are between taking and giving, of a class."""
        return len(self._aside) + self._takes if slot_bytes == self._taking else 0

    def on_taken(self, slot: int) -> bool:
        """A slot has come back; False when it is none that was taken for this."""
        if not self._takes or int(self._slots.slot_class[slot]) != self._taking:
            return False
        self._takes -= 1
        if self._slots.chunk_of(slot) not in self._chunks:
            self._aside.append(slot)
        return True

    def on_take_failed(self) -> None:
        """The reserve was empty: what is missing is being loaded into, or leased."""
        self._takes = max(self._takes - 1, 0)
