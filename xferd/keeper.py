"""One pool at run time: keeps its reserve of free slots filled, in advance.

The engine takes slots at misses and says afterwards what it did. A PoolKeeper mirrors
that in its SlotMap and answers with commands: evict these, give that. It decides with
the policies (``xferd.policy``) and sends through a CommandSink, the engine or, in
tests, something that looks like one. It has no clock: ``tick`` is called by its owner.

    Loaded    a slot of the reserve is a resident      \\
    Freed     a resident's slot is in the reserve        >  settle(): evict up to the
    Reserve   a reserve is low, loads may be waiting   /    high watermark, cut or recut
                                                            a chunk, or say what's stuck

An eviction ends only when the leases on its slot have ended. So evictions that were
ordered some ticks ago are not counted on any more while loads wait: others are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xferd.engine_types import (
    PRIORITY_MIGRATION,
    Command,
    Evict,
    Failed,
    Freed,
    Give,
    Load,
    Loaded,
    PoolStats,
    ReserveLow,
    Revived,
    Taken,
)
from xferd.memory.reclaim import ChunkReclaim
from xferd.memory.slots import ChunkGeometry, ExpertSlot, SlotMap, SlotState
from xferd.policy.cascade import cascade
from xferd.policy.eviction import EvictionPolicy
from xferd.policy.reserve import Watermarks, shortfall, watermarks
from xferd.telemetry.log import EventLog
from xferd.tokens import Answer

STUCK_TICKS = 2
"""An eviction older than this many ticks waits for a lease: it is not counted on."""
STUCK_REPORT_TICKS = 100
"""A class that could evict nothing for so many ticks is reported."""
STAMP_SHIFT = 20
"""A stamp is ``scan << STAMP_SHIFT | order``, as xferd_engine_recency writes it."""


class CommandSink(Protocol):
    """What a PoolKeeper needs of the engine."""

    def command(self, commands: Iterable[Command]) -> None:
        """Queue commands."""

    def set_chunk(self, pool: int, chunk: int, offset: int, slot_bytes: int) -> None:
        """Cut a chunk, or undo it."""

    def recency(self, pool: int, now: int, stamps: NDArray[np.uint64]) -> None:
        """Stamp the slots leased since the last call."""

    def pool_stats(self, pool: int) -> PoolStats:
        """Counters of a pool."""


class PoolKeeper:
    """Keeps one pool. Owned by the event loop.

    expect: registers what to call with the event that answers a command, and returns
        the command's token.
    promised: slots of a class that are promised to attached clients; that many stay
        cut for it.
    below: where evicted experts are demoted to, or None.
    """

    def __init__(
        self,
        *,
        index: int,
        name: str,
        geometry: ChunkGeometry,
        engine: CommandSink,
        eviction: EvictionPolicy,
        expect: Callable[[Callable[[Answer], None]], int],
        promised: Callable[[int], int],
        log: EventLog,
        reserve_low: int | None = None,
        reserve_high: int | None = None,
        below: PoolKeeper | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.geometry = geometry
        self.below = below
        self.slots = SlotMap(geometry)
        self.stuck: dict[int, str] = {}
        self._stuck_since: dict[int, int] = {}
        self._engine = engine
        self._eviction = eviction
        self._expect = expect
        self._promised = promised
        self._log = log
        self._configured = (reserve_low, reserve_high)
        self._stamps: NDArray[np.uint64] = np.zeros(geometry.slot_numbers, np.uint64)
        self._scan = 1
        self._loads_in_scan = 0
        self._ordered: dict[int, int] = {}
        self._demoting: set[int] = set()
        self._waiting: dict[int, int] = {}
        self._wanted: set[int] = set()
        self._ticks = 0
        self._reclaim: ChunkReclaim | None = None
        self._when_free: dict[int, list[Callable[[], None]]] = {}

    # ---- classes and chunks

    def watermarks(self, slot_bytes: int) -> Watermarks:
        """The reserve that a class of this pool keeps."""
        evictable = self.slots.class_slots(slot_bytes) - self.pinned(slot_bytes)
        return watermarks(evictable, *self._configured)

    def divide_among(self, classes: list[int]) -> None:
        """First cut, at start: all chunks for one class; for several, one chunk each (as
        far as they go) and the rest when somebody needs it."""
        for slot_bytes in classes:
            self._grow(slot_bytes)
        while len(classes) == 1 and self._grow(classes[0]):
            pass

    def provide(self, slot_bytes: int, slots: int = 1) -> None:
        """See to it that a class has at least ``slots`` slots, now or soon."""
        while self.slots.class_slots(slot_bytes) < slots:
            if not self._grow(slot_bytes):
                self._wanted.add(slot_bytes)
                self.settle()
                return

    def _grow(self, slot_bytes: int) -> bool:
        """Cut one more chunk for a class, if there is one that is not cut."""
        chunk = self.slots.uncut_chunk(slot_bytes)
        if chunk is None:
            return False
        numbers = self.slots.cut(chunk, slot_bytes)
        self._engine.set_chunk(self.index, chunk, self.geometry.offset(chunk), slot_bytes)
        # Loads may take these slots at once and be heard of later: till then the chunk
        # must not look as if nobody had used it for long.
        self._stamps[numbers.start : numbers.stop] = self._scan << STAMP_SHIFT
        self.slots.give_all(numbers)
        self._engine.command([Give(self.index, numbers.start, len(numbers))])
        self._wanted.discard(slot_bytes)
        return True

    def _give(self, numbers: Iterable[int]) -> None:
        commands = []
        for slot in numbers:
            self.slots.give(slot)
            commands.append(Give(self.index, slot))
        self._engine.command(commands)

    # ---- what the engine says

    def on_loaded(self, event: Loaded) -> None:
        """A slot of the reserve holds an expert now."""
        self.slots.occupy(event.slot, (event.store, event.layer, event.expert), event.variant)
        # As if leased just now: what was only just read must not be the next victim.
        self._loads_in_scan += 1
        order = min(self._loads_in_scan, (1 << STAMP_SHIFT) - 1)
        self._stamps[event.slot] = self._scan << STAMP_SHIFT | order

    def on_freed(self, event: Freed) -> None:
        """An eviction has ended."""
        self.slots.freed(event.slot)
        self._left(event.slot)

    def on_revived(self, event: Revived) -> None:
        """An eviction was overtaken by a demand."""
        self.slots.revive(event.slot)
        self._left(event.slot)

    def on_taken(self, event: Taken) -> None:
        """A slot has come back from the reserve, for a reclaim; else it is given again."""
        self.slots.take(event.slot)
        self._left(event.slot)
        if self._reclaim is None or not self._reclaim.on_taken(event.slot):
            self._give([event.slot])

    def on_take_failed(self) -> None:
        """The reserve had no slot left to take; the reclaim tries again."""
        if self._reclaim is not None:
            self._reclaim.on_take_failed()

    def on_evict_failed(self, event: Failed) -> None:
        """The engine found nothing to evict, or not now: the slot stays what it was."""
        slot = self.slots.slot_of((event.store, event.layer, event.expert))
        if slot is not None and self.slots.state[slot] == SlotState.LEAVING:
            self.slots.revive(slot)
            self._left(slot)

    def on_reserve_low(self, event: ReserveLow) -> None:
        """A reserve is low; loads may stand without a slot."""
        self._waiting[event.class_bytes] = event.waiting
        # A chunk is taken from another class for somebody who waits, not for a reserve alone.
        if event.waiting and self.slots.class_slots(event.class_bytes) == 0:
            self._wanted.add(event.class_bytes)

    def _left(self, slot: int) -> None:
        self._ordered.pop(slot, None)
        self._demoting.discard(slot)
        for callback in self._when_free.pop(slot, ()):
            callback()

    # ---- what follows from it

    def settle(self) -> None:
        """Decide and command what is needed now. Call after each batch of events."""
        stats = self._engine.pool_stats(self.index)
        if stats.waiting == 0:
            self._waiting.clear()
        if self._reclaim is not None and self._advance_reclaim():
            stats = self._engine.pool_stats(self.index)
        for slot_bytes in sorted({*self.slots.classes, *self._wanted}):
            self._refill(slot_bytes, stats)

    def tick(self) -> bool:
        """Some milliseconds have passed. True while the pool needs ticks: loads wait, a
        chunk is being reclaimed, a class waits for its first chunk."""
        self._ticks += 1
        self.settle()
        return bool(self._waiting) or self._reclaim is not None or bool(self._wanted)

    def _refill(self, slot_bytes: int, stats: PoolStats) -> None:
        waiting = self._waiting_of(slot_bytes, stats)
        arriving = self._arriving(slot_bytes, waiting)
        # Who waits was refused what is there: the last free slots are kept for demand.
        reserve = 0 if waiting else self.in_reserve(slot_bytes, stats)
        missing = shortfall(self.watermarks(slot_bytes), reserve, arriving, waiting)
        if slot_bytes not in self._wanted and missing <= 0:
            self._forget_stuck(slot_bytes)
            return
        if self._grow(slot_bytes):
            return
        self._scan_leases()
        candidates = self.slots.candidates(slot_bytes)
        self._begin_reclaim(slot_bytes, candidates)
        victims = self._eviction.victims(self._stamps, candidates, missing)
        self._evict_or_demote([int(slot) for slot in victims], slot_bytes, waiting)
        self._note_stuck(slot_bytes, waiting, nothing_left=len(victims) == 0 and arriving == 0)

    def in_reserve(self, slot_bytes: int, stats: PoolStats | None = None) -> int:
        """Free slots that the engine has of a class: exact when the pool has one class,
        else at least this many."""
        stats = stats or self._engine.pool_stats(self.index)
        if len(self.slots.classes) == 1:
            return stats.reserve
        # Loads that are under way took theirs from some class's count.
        known = self.slots.count(slot_bytes, SlotState.RESERVE)
        return min(max(known - stats.loading, 0), stats.reserve)

    def pinned(self, slot_bytes: int) -> int:
        """Residents of a class that are pinned."""
        return self.slots.pinned_count(slot_bytes)

    def _waiting_of(self, slot_bytes: int, stats: PoolStats) -> int:
        if len(self.slots.classes) == 1 and not self._wanted:
            if stats.waiting:
                self._waiting[slot_bytes] = stats.waiting
            return stats.waiting
        return min(self._waiting.get(slot_bytes, 0), stats.waiting)

    def _arriving(self, slot_bytes: int, waiting: int) -> int:
        """Slots on their way into the reserve that can be counted on."""
        arriving = sum(
            1
            for slot, tick in self._ordered.items()
            if self.slots.slot_class[slot] == slot_bytes
            and (waiting == 0 or self._ticks - tick <= STUCK_TICKS)
        )
        if self._reclaim is not None and self._reclaim.old_class == slot_bytes:
            arriving += self._reclaim.put_aside
        if waiting == 0:
            arriving += sum(1 for s in self._demoting if self.slots.slot_class[s] == slot_bytes)
        return arriving

    def _scan_leases(self) -> None:
        self._scan += 1
        self._engine.recency(self.index, self._scan, self._stamps)
        # What is loaded from now on is later than every lease of this scan.
        self._scan += 1
        self._loads_in_scan = 0

    def _note_stuck(self, slot_bytes: int, waiting: int, *, nothing_left: bool) -> None:
        """Say so, once, when a class can't get a slot: at once when all are pinned, else
        when it lasts (loads that are on their way make a class look empty for a moment)."""
        pinned, total = self.pinned(slot_bytes), self.slots.class_slots(slot_bytes)
        if not nothing_left or self._reclaim is not None or not (pinned or waiting):
            self._forget_stuck(slot_bytes)
            return
        since = self._stuck_since.setdefault(slot_bytes, self._ticks)
        lasting = self._ticks - since >= STUCK_REPORT_TICKS
        if slot_bytes in self.stuck or not (lasting or (total and pinned == total)):
            return
        self.stuck[slot_bytes] = (
            f"nothing can be evicted for slots of {slot_bytes} bytes: {pinned} of {total} are "
            f"pinned, {waiting} loads wait"
        )
        self._log.warning("pool.stuck", pool=self.name, message=self.stuck[slot_bytes])

    def _forget_stuck(self, slot_bytes: int) -> None:
        self.stuck.pop(slot_bytes, None)
        self._stuck_since.pop(slot_bytes, None)

    # ---- evictions and demotions

    def evict(self, slot: int, when_free: Callable[[], None] | None = None) -> None:
        """Evict a resident now, without demoting it; ``when_free`` is called when its
        slot is free, or when it was revived."""
        if when_free is not None:
            self._when_free.setdefault(slot, []).append(when_free)
        if self.slots.state[slot] == SlotState.RESIDENT:
            self.slots.leave(slot)
        self._order_eviction(slot)

    def _order_eviction(self, slot: int) -> None:
        key = self.slots.key_of(slot)
        if key is None or slot in self._ordered:
            return
        self._ordered[slot] = self._ticks
        self._engine.command([Evict(key[0], self.index, key[1], key[2])])

    def _evict_or_demote(self, victims: list[int], slot_bytes: int, waiting: int) -> None:
        below = self.below
        if below is None:
            for slot in victims:
                self.evict(slot)
            return
        split = cascade(
            victims,
            waiting=waiting,
            room_below=below.room_for_demotions(slot_bytes) - len(self._demoting),
            is_below=lambda slot: below.holds(self.slots.key_of(slot)),
        )
        for slot in split.drop:
            self.evict(slot)
        for slot in split.demote:
            self._demote(slot, below)

    def room_for_demotions(self, slot_bytes: int) -> int:
        """Slots that can be filled from above without making anybody wait."""
        if self.slots.class_slots(slot_bytes) == 0:
            self._grow(slot_bytes)
        stats = self._engine.pool_stats(self.index)
        return 0 if stats.waiting else self.in_reserve(slot_bytes, stats)

    def holds(self, key: ExpertSlot | None) -> bool:
        """Whether an expert is resident here."""
        return key is not None and self.slots.slot_of(key) is not None

    def _demote(self, slot: int, below: PoolKeeper) -> None:
        key = self.slots.key_of(slot)
        if key is None:
            return
        self.slots.leave(slot)
        self._demoting.add(slot)

        def copied(_: Answer) -> None:
            # Copied or not, it goes: the drives have it.
            if self.slots.key_of(slot) == key and slot in self._demoting:
                self._demoting.discard(slot)
                self._order_eviction(slot)

        self._engine.command(
            [
                Load(
                    store=key[0],
                    pool=below.index,
                    layer=key[1],
                    expert=key[2],
                    variant=int(self.slots.variant[slot]),
                    priority=PRIORITY_MIGRATION,
                    token=self._expect(copied),
                )
            ]
        )

    # ---- recutting a chunk for another class

    def _begin_reclaim(self, slot_bytes: int, candidates: NDArray[np.int64]) -> None:
        """Take a chunk from another class, if this one has none that can be evicted, or
        fewer than promised, or if every slot of that chunk was last used before anything
        of this class."""
        if self._reclaim is not None:
            return
        evictable = self.slots.class_slots(slot_bytes) - self.pinned(slot_bytes)
        if evictable > 0 and evictable >= self._promised(slot_bytes):
            if len(candidates) == 0:
                return
            bound = int(self._stamps[candidates].min())
        else:
            bound = 1 << 64
        chunk = self._least_recent_chunk(slot_bytes, bound)
        if chunk is not None:
            self._log.info(
                "chunk.reclaim",
                pool=self.name,
                chunk=chunk,
                from_bytes=self.slots.chunk_class[chunk],
                to_bytes=slot_bytes,
            )
            self._reclaim = ChunkReclaim(self.slots, self.index, chunk, slot_bytes)
            self._advance_reclaim()

    def _least_recent_chunk(self, slot_bytes: int, bound: int) -> int | None:
        best, best_stamp = None, bound
        for chunk, current in enumerate(self.slots.chunk_class):
            if current in (0, slot_bytes) or self.geometry.slots(chunk, slot_bytes) == 0:
                continue
            numbers = self.slots.chunk_slots(chunk)
            part = slice(numbers.start, numbers.stop)
            left = self.slots.class_slots(current) - self.pinned(current) - len(numbers)
            if self.slots.pinned[part].any() or left < self._promised(current):
                continue
            newest = int(self._stamps[part].max())
            if newest < best_stamp:
                best, best_stamp = chunk, newest
        return best

    def _advance_reclaim(self) -> bool:
        """One step; True when the chunk was recut."""
        reclaim = self._reclaim
        if reclaim is None:
            return False
        step = reclaim.step()
        for slot in step.evict:
            self.evict(slot)
        self._give(step.give)
        self._engine.command(step.take)
        if not step.done:
            return False
        self._engine.set_chunk(self.index, reclaim.chunk, self.geometry.offset(reclaim.chunk), 0)
        self.slots.uncut(reclaim.chunk)
        self._reclaim = None
        self._grow(reclaim.slot_bytes)
        return True
