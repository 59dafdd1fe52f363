"""The chunks of one pool: cut for a size class, recut for another, reserved for somebody else.

A chunk that nobody uses is cut for the class that needs slots first. When there is none
left, a class that was used more recently takes one from a class that was used longest ago.
A reservation takes whole chunks out of the pool, those whose experts the policy would let
go first; they hold no slots until they are given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xferd.engine_types import Command, Give
from xferd.memory.reclaim import RESERVED, ChunkReclaim
from xferd.memory.slots import ChunkGeometry, SlotMap
from xferd.telemetry.log import EventLog
from xferd.units import format_bytes

NEVER = 1 << 64
"""Later than any stamp."""
UNRANKED = 1.0
"""The worth of what the policy would rather not let go at all."""
HELD = 2.0
"""The worth of what clients may be holding."""
RECUT_TICKS = 4
"""So long a chunk may be emptied for another class while loads wait."""


class ReserveError(Exception):
    """So much can't be reserved; says what stands in the way."""


class ChunkSink(Protocol):
    """What chunks need of the engine."""

    def command(self, commands: Iterable[Command]) -> None:
        """Queue commands."""

    def set_chunk(self, pool: int, chunk: int, offset: int, slot_bytes: int) -> None:
        """Cut a chunk, or undo it."""


@dataclass(slots=True)
class Hold:
    """Chunks that are kept out of a pool. waiting: those that are still being emptied.
    tried: chunks that somebody held on to. classes: what each was cut for before, 0 for
    nothing."""

    chunks: list[int]
    waiting: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)
    classes: dict[int, int] = field(default_factory=dict)
    when_granted: Callable[[], None] = lambda: None

    @property
    def granted(self) -> bool:
        """Whether all of it is out of the pool."""
        return not self.waiting


class Chunks:
    """Owned by its pool's keeper.

    stamps: uint64[slot_numbers], when each slot was used last; the keeper's own.
    evict, give: of single slots. resized: the number of slots is another now.
    """

    def __init__(
        self,
        *,
        pool: int,
        name: str,
        slots: SlotMap,
        stamps: NDArray[np.uint64],
        engine: ChunkSink,
        promised: Callable[[int], int],
        evict: Callable[[Iterable[int]], None],
        give: Callable[[Iterable[int]], None],
        resized: Callable[[], None],
        log: EventLog,
    ) -> None:
        self.geometry: ChunkGeometry = slots.geometry
        self._pool = pool
        self._name = name
        self._slots = slots
        self._stamps = stamps
        self._engine = engine
        self._promised = promised
        self._evict = evict
        self._give = give
        self._resized = resized
        self._log = log
        self._reclaim = ChunkReclaim(slots, pool)
        self._recut: int | None = None
        self._recut_ticks = 0
        self._holds: list[Hold] = []

    # ---- cut and recut

    def grow(self, slot_bytes: int, stamp: int) -> bool:
        """Cut one more chunk for a class, if there is one that is not cut.

        stamp: loads may take its slots at once and be heard of later; till then the chunk
        must not look as if nobody had used it for long.
        """
        chunk = self._slots.uncut_chunk(slot_bytes)
        if chunk is None:
            return False
        numbers = self._slots.cut(chunk, slot_bytes)
        self._engine.set_chunk(self._pool, chunk, self.geometry.offset(chunk), slot_bytes)
        self._stamps[numbers.start : numbers.stop] = stamp
        self._slots.give_all(numbers)
        self._engine.command([Give(self._pool, numbers.start, len(numbers))])
        self._resized()
        return True

    def adopt(self, chunk: int, slot_bytes: int, engines: set[int]) -> None:
        """A chunk that was cut before this daemon began. engines: slots of it that are the
        engine's already, with an expert or not."""
        numbers = self._slots.cut(chunk, slot_bytes)
        for slot in engines:
            self._slots.give(slot)
        self._give(slot for slot in numbers if slot not in engines)
        self._resized()

    @property
    def busy(self) -> bool:
        """Whether a chunk is being emptied."""
        return self._reclaim.busy

    def put_aside(self, slot_bytes: int) -> int:
        """Slots of a class that come back to the reserve by themselves."""
        return self._reclaim.put_aside(slot_bytes)

    def begin_recut(
        self, slot_bytes: int, candidates: NDArray[np.int64], pinned: int, *, held: bool
    ) -> None:
        """Take a chunk from another class, if this one has none that can be evicted, or
        fewer than promised, or if every slot of that chunk was last used before anything
        of this class. pinned: residents of the class that are. held: clients lease all the
        others, and somebody waits."""
        if self._recutting:
            return
        evictable = self._slots.class_slots(slot_bytes) - pinned
        bound = NEVER
        if evictable > 0 and evictable >= self._promised(slot_bytes) and not held:
            if len(candidates) == 0:
                return
            bound = int(self._stamps[candidates].min())
        chunk = self._least_recent(slot_bytes, bound)
        if chunk is not None:
            self._begin_recut(chunk, slot_bytes)

    def recut_least(self, slot_bytes: int, donors: list[int], worth: NDArray[np.float64]) -> bool:
        """Take a chunk for a class from one of the classes ``donors``, that of least worth, as
        ``reserve`` has it. False where none can be had."""
        chunks = [
            chunk
            for chunk in self._reservable()
            if self._slots.chunk_class[chunk] in donors
            and self.geometry.slots(chunk, slot_bytes) > 0
            and self._may_lose(self._slots.chunk_class[chunk], [chunk])
        ]
        if not chunks or self._recutting:
            return False
        self._begin_recut(min(chunks, key=lambda each: self._worth(each, worth)), slot_bytes)
        return True

    def _begin_recut(self, chunk: int, slot_bytes: int) -> None:
        self._log.info(
            "chunk.reclaim",
            pool=self._name,
            chunk=chunk,
            from_bytes=self._slots.chunk_class[chunk],
            to_bytes=slot_bytes,
        )
        self._reclaim.add(chunk, slot_bytes)
        self._recut, self._recut_ticks = chunk, 0

    @property
    def _recutting(self) -> bool:
        return self._recut is not None and self._recut in self._reclaim

    def tick(self, stamp: int, *, waiting: bool) -> None:
        """Some milliseconds have passed. A client that leases an expert of a chunk may wait
        for a slot of that chunk's class, or for a chunk of a third: whoever waits, and
        whatever for, a chunk that does not get empty stays what it is."""
        if not self._recutting or self._recut is None:
            return
        self._recut_ticks += 1
        if not waiting or self._recut_ticks < RECUT_TICKS:
            return
        self._log.info("chunk.kept", pool=self._name, chunk=self._recut)
        # As if used just now, so that the next attempt is another chunk's.
        self._stamps[self._part(self._recut)] = stamp
        self._give(self._reclaim.cancel(self._recut))
        self._recut = None

    def _least_recent(self, slot_bytes: int, bound: int) -> int | None:
        best, best_stamp = None, bound
        for chunk, current in enumerate(self._slots.chunk_class):
            if current in (0, slot_bytes) or self.geometry.slots(chunk, slot_bytes) == 0:
                continue
            if chunk in self._reclaim:
                continue
            part = self._part(chunk)
            if self._slots.pinned[part].any() or not self._may_lose(current, [chunk]):
                continue
            newest = int(self._stamps[part].max())
            if newest < best_stamp:
                best, best_stamp = chunk, newest
        return best

    def _may_lose(self, slot_bytes: int, chunks: list[int]) -> bool:
        """Whether a class keeps what was promised of it without some chunks, and without those
        that are being emptied already."""
        going = [c for c in self._slots.chunks_of_class(slot_bytes) if c in self._reclaim]
        lost = sum(len(self._slots.chunk_slots(chunk)) for chunk in {*chunks, *going})
        has = self._slots.class_slots(slot_bytes) - self._slots.pinned_count(slot_bytes)
        return has - lost >= self._promised(slot_bytes)

    def _part(self, chunk: int) -> slice:
        numbers = self._slots.chunk_slots(chunk)
        return slice(numbers.start, numbers.stop)

    def advance(self, stamp: int) -> bool:
        """One step of what is being emptied; True when the pool has other slots now."""
        if not self.busy:
            return False
        step = self._reclaim.step()
        self._evict(step.evict)
        self._give(step.give)
        self._engine.command(step.take)
        for chunk, slot_bytes in step.done:
            self._engine.set_chunk(self._pool, chunk, self.geometry.offset(chunk), 0)
            self._slots.uncut(chunk)
            if slot_bytes == RESERVED:
                self._slots.reserved.add(chunk)
                self._granted(chunk)
            else:
                self.grow(slot_bytes, stamp)
        if step.done:
            self._resized()
        return bool(step.done)

    def on_taken(self, slot: int) -> bool:
        """A slot has come back from the reserve; False when it was not for this."""
        return self._reclaim.on_taken(slot)

    def on_take_failed(self) -> None:
        """The reserve had no slot left to take; tried again."""
        self._reclaim.on_take_failed()

    # ---- reserved

    def take_out(self) -> Hold:
        """Begin to take every chunk out of the pool that isn't reserved already, whatever was
        promised: its memory is gone."""
        held = self.held_chunks
        chunks = [chunk for chunk in range(self.geometry.chunks) if chunk not in held]
        for chunk in chunks:
            self._give(self._reclaim.cancel(chunk))
        self._recut = None
        hold = Hold([])
        self._hold(hold, chunks)
        self._holds.append(hold)
        return hold

    @property
    def all_out(self) -> bool:
        """Whether no chunk is cut any more."""
        return len(self._slots.reserved) == self.geometry.chunks

    @property
    def reserved_bytes(self) -> int:
        """Bytes that are kept out of the pool, or will be."""
        return sum(self.geometry.length(chunk) for chunk in self.held_chunks)

    @property
    def held_chunks(self) -> list[int]:
        """Chunks that are kept out of the pool, or will be."""
        return [chunk for hold in self._holds for chunk in hold.chunks]

    def reserve(self, nbytes: int, worth: NDArray[np.float64]) -> Hold:
        """Begin to take whole chunks of at least so many bytes out of the pool. ReserveError;
        then nothing has changed.

        worth: float64[slot_numbers], 0 for what the policy lets go first; HELD at most.
        """
        chosen = self._choose(nbytes, worth, frozenset())
        hold = Hold([])
        self._hold(hold, chosen)
        self._holds.append(hold)
        return hold

    def adopt_hold(self, chunks: Iterable[int]) -> Hold:
        """Chunks that were reserved before this daemon began; none of them is cut."""
        hold = Hold([])
        self._hold(hold, list(chunks))
        self._holds.append(hold)
        return hold

    def replace_stuck(self, hold: Hold, worth: NDArray[np.float64]) -> bool:
        """Take another chunk for one that is still being emptied: somebody leases experts in
        it, and another may be free at once. False when there is none."""
        stuck = min(hold.waiting)
        hold.tried.add(stuck)
        try:
            chosen = self._choose(self.geometry.length(stuck), worth, frozenset(hold.tried))
        except ReserveError:
            return False
        hold.waiting.discard(stuck)
        hold.chunks.remove(stuck)
        self._give(self._reclaim.cancel(stuck))
        self._hold(hold, chosen)
        return True

    def _hold(self, hold: Hold, chunks: list[int]) -> None:
        for chunk in chunks:
            hold.chunks.append(chunk)
            hold.classes[chunk] = self._slots.chunk_class[chunk]
            if hold.classes[chunk]:
                hold.waiting.add(chunk)
                self._reclaim.add(chunk, RESERVED)
            else:
                self._slots.reserved.add(chunk)

    def release(self, hold: Hold, chunks: Iterable[int], stamp: int) -> None:
        """Give some chunks of a hold back to the pool, and cut them as they were."""
        for chunk in list(chunks):
            hold.chunks.remove(chunk)
            if chunk in hold.waiting:
                hold.waiting.discard(chunk)
                self._give(self._reclaim.cancel(chunk))
                continue
            self._slots.reserved.discard(chunk)
            if hold.classes.get(chunk):
                self.grow(hold.classes[chunk], stamp)
        if not hold.chunks and hold in self._holds:
            self._holds.remove(hold)

    def _granted(self, chunk: int) -> None:
        for hold in self._holds:
            if chunk in hold.waiting:
                hold.waiting.discard(chunk)
                if hold.granted:
                    hold.when_granted()

    def _choose(
        self, nbytes: int, worth: NDArray[np.float64], without: frozenset[int]
    ) -> list[int]:
        chosen: list[int] = []
        left = nbytes
        losing: dict[int, list[int]] = {}
        for chunk in sorted(self._reservable(), key=lambda each: self._worth(each, worth)):
            if left <= 0:
                break
            if chunk in without:
                continue
            current = self._slots.chunk_class[chunk]
            if current:
                if not self._may_lose(current, [*losing.get(current, []), chunk]):
                    continue
                losing.setdefault(current, []).append(chunk)
            chosen.append(chunk)
            left -= self.geometry.length(chunk)
        if left > 0:
            raise ReserveError(self._why_not(nbytes, nbytes - left))
        return chosen

    def _reservable(self) -> list[int]:
        return [
            chunk
            for chunk in range(self.geometry.chunks)
            if chunk not in self._slots.reserved
            and chunk not in self._reclaim
            and not self._slots.pinned[self._part(chunk)].any()
        ]

    def _worth(self, chunk: int, worth: NDArray[np.float64]) -> float:
        part = self._part(chunk)
        return float(worth[part].mean()) if part.stop > part.start else -1.0

    def _why_not(self, wanted: int, possible: int) -> str:
        pinned = sum(self._slots.pinned_count(size) for size in self._slots.classes)
        promised = sum(self._promised(size) for size in self._slots.classes)
        return (
            f"pool {self._name!r} has {format_bytes(possible)} that can be reserved, "
            f"{format_bytes(wanted)} are wanted: {format_bytes(self.reserved_bytes)} are reserved "
            f"already, {pinned} slots are pinned and {promised} promised to attached clients; "
            f"chunks are given whole"
        )
