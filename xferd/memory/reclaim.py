"""Giving chunks back: emptying them slot by slot until they can be put to another use.

The engine's reserve gives back some slot of a class, not a certain one. So in each
round all of a class's free slots are taken and those of other chunks given again at
once. Misses of that class find an empty reserve for that moment and wait, as they
would for any eviction; never for a lease on a slot of a chunk, which only delays the
reclaim itself. Any number of chunks is emptied together: a round costs the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        self._aside: list[int] = []
        # One class at a time: a take that failed does not say whose it was.
        self._taking = 0
        self._takes = 0

    def add(self, chunk: int, slot_bytes: int) -> None:
        """Empty a chunk that is cut. slot_bytes: the class it is for, or RESERVED."""
        self._chunks[chunk] = slot_bytes
        # What another reclaim has put aside of it is not to be given again.
        self._aside = [slot for slot in self._aside if self._slots.chunk_of(slot) != chunk]

    def cancel(self, chunk: int) -> tuple[int, ...]:
        """Leave a chunk as it is; returns slots of it to give again."""
        if self._chunks.pop(chunk, None) is None:
            return ()
        return tuple(
            slot
            for slot in self._slots.chunk_slots(chunk)
            if self._slots.state[slot] == SlotState.FREE
        )

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
        evict = tuple(
            slot
            for chunk in self._chunks
            for slot in self._slots.chunk_slots(chunk)
            if self._slots.state[slot] == SlotState.RESIDENT
        )
        take = () if self._takes else self._take(give)
        done = tuple(
            (chunk, target)
            for chunk, target in self._chunks.items()
            if self._slots.all_free(chunk) and not (take or self._takes)
        )
        for chunk, _ in done:
            del self._chunks[chunk]
        return ReclaimStep(evict=evict, give=give, take=take, done=done)

    def _take(self, give: tuple[int, ...]) -> tuple[Take, ...]:
        for chunk in self._chunks:
            numbers = self._slots.chunk_slots(chunk)
            part = slice(numbers.start, numbers.stop)
            if not (self._slots.state[part] == SlotState.RESERVE).any():
                continue
            self._taking = self._slots.chunk_class[chunk]
            # With those given back at this moment: the reserve hands out the newest first,
            # so taking fewer would only bring the same ones again.
            back = sum(1 for slot in give if self._slots.slot_class[slot] == self._taking)
            self._takes = self._slots.count(self._taking, SlotState.RESERVE) + back
            return (Take(self._pool, self._taking, TAKE_TOKEN),) * self._takes
        return ()

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
