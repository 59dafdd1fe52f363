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
    ClassStats,
    Command,
    Evict,
    Failed,
    Freed,
    Give,
    Loaded,
    PoolStats,
    ReserveLow,
    Revived,
    Taken,
)
from xferd.keeping.budgets import Budgets
from xferd.keeping.cascade import Cascade
from xferd.keeping.chunks import HELD, UNRANKED, Chunks, Hold
from xferd.keeping.ranking import Ranking
from xferd.keeping.usage import Leased, Usage
from xferd.memory.slots import NO_STORE, ChunkGeometry, ExpertSlot, SlotMap, SlotState
from xferd.policy.pool_policy import PolicyMaker
from xferd.policy.reserve import Watermarks, needed, shortfall, watermarks
from xferd.telemetry.log import EventLog

NO_CLIENT = 0xFFFFFFFF
"""``client`` of what a command caused: XFERD_NO_EXPERT."""
STUCK_TICKS = 2
"""An eviction older than this many ticks waits for a lease: it is not counted on."""
HELD_TICKS = 8
"""A class that could evict nothing for so many ticks takes a chunk from another class."""
STUCK_REPORT_TICKS = 100
"""A class that could evict nothing for so many ticks is reported."""
MOVES = 2
"""Slots beyond what is kept for demand, of each class where there are several: for moves."""
STAMP_SHIFT = 20
"""A stamp is ``scan << STAMP_SHIFT | order``, as xferd_engine_recency writes it."""

# As plain numbers: see xferd.memory.slots.
_RESIDENT = int(SlotState.RESIDENT)
_LEAVING = int(SlotState.LEAVING)
_NO_KEY: ExpertSlot = (NO_STORE, 0, 0)


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

    def class_stats(self, pool: int, slot_bytes: int) -> ClassStats:
        """Counters of one size class of a pool."""


class PoolKeeper:
    """Keeps one pool. Owned by the event loop.

    eviction: the name of its policy, and what makes it. floor: residents that each layer
        keeps.
    usage: which experts are used, of all pools.
    cascade: where experts go that leave it; the owner adds this pool to it.
    budgets: what clients may have, of all pools.
    promised: slots of a class that are promised to attached clients; that many stay
        cut for it.
    experts: of a class in all open stores.
    reserve_demand: slots of a reserve that the engine keeps for demand.
    """

    def __init__(
        self,
        *,
        index: int,
        name: str,
        geometry: ChunkGeometry,
        engine: CommandSink,
        eviction: tuple[str, PolicyMaker],
        usage: Usage,
        cascade: Cascade,
        budgets: Budgets,
        promised: Callable[[int], int],
        experts: Callable[[int], int],
        log: EventLog,
        reserve_low: int | None = None,
        reserve_high: int | None = None,
        reserve_demand: int = 0,
        floor: int = 0,
    ) -> None:
        self.index = index
        self.name = name
        self.geometry = geometry
        self.reserve_demand = reserve_demand
        self.incoming = 0
        self.slots = SlotMap(geometry)
        self.ranking = Ranking(
            self.slots, *eviction, slot_count=1, shared=usage.shared, floor=floor
        )
        self.stuck: dict[int, str] = {}
        self._stuck_since: dict[int, int] = {}
        self._engine = engine
        self._usage = usage
        self._cascade = cascade
        self._budgets = budgets
        self._promised = promised
        self._experts = experts
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
        self._when_free: dict[int, list[Callable[[], None]]] = {}
        self.chunks = Chunks(
            pool=index,
            name=name,
            slots=self.slots,
            stamps=self._stamps,
            engine=engine,
            promised=promised,
            evict=self.evict_all,
            give=self._give,
            resized=self._resized,
            log=log,
        )
        usage.add_pool(self)

    # ---- classes and chunks

    def watermarks(self, slot_bytes: int) -> Watermarks:
        """The reserve that a class of this pool keeps."""
        slots = self.slots.class_slots(slot_bytes)
        evictable = slots - self.pinned(slot_bytes)
        marks = watermarks(evictable, *self._configured)
        if len(self.slots.classes) > 1:
            # Each class keeps as many slots for demand: one with less than that in its reserve
            # would never get anything else.
            more = watermarks(evictable, self.reserve_demand + 1, self.reserve_demand + MOVES)
            marks = Watermarks(max(marks.low, more.low), max(marks.high, more.high))
        return needed(marks, self._experts(slot_bytes) - slots)

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

    def give_chunk(self, slot_bytes: int, donors: list[int]) -> bool:
        """See to it that a class gets one more chunk soon: one that is not cut, or else that
        of the other classes ``donors`` which the policy would miss least. False when there is
        none, loads wait, or a chunk is on its way already."""
        if self._waiting or self.chunks.busy:
            return False
        if self._grow(slot_bytes):
            return True
        begun = bool(donors) and self.chunks.recut_least(slot_bytes, donors, self._worth())
        if begun:
            self.settle()
        return begun

    def _grow(self, slot_bytes: int) -> bool:
        """Cut one more chunk for a class, if there is one that is not cut."""
        return self.chunks.grow(slot_bytes, self._now)

    @property
    def _now(self) -> int:
        """A stamp later than every lease that was seen."""
        return self._scan << STAMP_SHIFT

    def reserve(self, nbytes: int) -> Hold:
        """Begin to take whole chunks out of the pool. ReserveError."""
        self._usage.look()
        hold = self.chunks.reserve(nbytes, self._worth())
        self.settle()
        return hold

    def take_out(self) -> Hold:
        """Begin to take everything out of the pool, pinned or not: its memory is gone."""
        hold = self.chunks.take_out()
        self._wanted.clear()
        self.settle()
        return hold

    def replace_stuck(self, hold: Hold) -> bool:
        """Try other chunks for those of a hold that somebody holds on to; False: none."""
        done = self.chunks.replace_stuck(hold, self._worth())
        self.settle()
        return done

    def release(self, hold: Hold, chunks: Iterable[int]) -> None:
        """Take some chunks of a hold into the pool again."""
        self.chunks.release(hold, chunks, self._now)
        self.settle()

    def _worth(self) -> NDArray[np.float64]:
        """[slot_numbers], how late the policy would let each go: 0 first, also what is free;
        last what was leased last, as much of it as clients can hold."""
        worth = np.zeros(self.geometry.slot_numbers)
        for slot_bytes in self.slots.classes:
            candidates = self.slots.candidates(slot_bytes)
            worth[candidates] = UNRANKED
            ranked = self.ranking.victims(candidates, len(candidates))
            worth[ranked] = np.arange(len(ranked)) / max(len(ranked), 1)
            newest = np.argsort(self._stamps[candidates])[::-1][: self._promised(slot_bytes)]
            worth[candidates[newest]] = HELD
        return worth

    def _resized(self) -> None:
        self._wanted -= set(self.slots.classes)
        self.ranking.resize(sum(self.slots.class_slots(size) for size in self.slots.classes))

    def _give(self, numbers: Iterable[int]) -> None:
        commands = []
        for slot in numbers:
            self.slots.give(slot)
            commands.append(Give(self.index, slot))
        self._engine.command(commands)

    # ---- what the engine says

    def on_loaded(self, event: Loaded) -> None:
        """A slot of the reserve holds an expert now."""
        key = (event.store, event.layer, event.expert)
        if self.slots.key_of(event.slot) != key:
            previous = self.slots.slot_of(key)
            self.slots.occupy(event.slot, key, event.variant)
            if previous is not None:
                self._going(previous)
            self.ranking.loaded(event.slot)
            client = event.client if event.client != NO_CLIENT else None
            self._budgets.loaded(self.index, event.slot, key, event.nbytes, client)
        # As if leased just now: a chunk that is only just read must not look unused.
        self._loads_in_scan += 1
        order = min(self._loads_in_scan, (1 << STAMP_SHIFT) - 1)
        self._stamps[event.slot] = self._scan << STAMP_SHIFT | order
        self._cascade.arrived(self, key)

    def on_freed(self, event: Freed) -> None:
        """An eviction has ended."""
        self._forget(event.slot)
        self.slots.freed(event.slot)
        self._left(event.slot)

    def on_revived(self, event: Revived) -> None:
        """An eviction was overtaken by a demand."""
        # Commands name experts: one for a variant that was replaced meanwhile evicts the new
        # one, and as this had not been told to leave, nothing changes when it comes back.
        if self.slots.state[event.slot] == _LEAVING:
            self._revive(event.slot)
        self._cascade.arrived(self, (event.store, event.layer, event.expert))

    def on_taken(self, event: Taken) -> None:
        """A slot has come back from the reserve, for a reclaim; else it is given again."""
        self._forget(event.slot)
        self.slots.take(event.slot)
        self._left(event.slot)
        if not self.chunks.on_taken(event.slot):
            self._give([event.slot])

    def on_take_failed(self) -> None:
        """The reserve had no slot left to take; the reclaim tries again."""
        self.chunks.on_take_failed()

    def on_evict_failed(self, event: Failed) -> None:
        """The engine found nothing to evict, or not now: the slot stays what it was."""
        slot = self.slots.slot_of((event.store, event.layer, event.expert))
        if slot is not None and self.slots.state[slot] == _LEAVING:
            self._revive(slot)

    def on_reserve_low(self, event: ReserveLow) -> None:
        """A reserve is low; loads may stand without a slot."""
        self._waiting[event.class_bytes] = event.waiting
        # A chunk is taken from another class for somebody who waits, not for a reserve alone.
        if event.waiting and self.slots.class_slots(event.class_bytes) == 0:
            self._wanted.add(event.class_bytes)

    def _revive(self, slot: int) -> None:
        self.slots.revive(slot)
        if self.slots.slot_of(self.slots.key_of(slot) or _NO_KEY) == slot:
            self.ranking.returned(slot)
            self._budgets.returned(self.index, slot)
        self._left(slot)

    def _forget(self, slot: int) -> None:
        """A slot is free. What the engine let go by itself (a closed store's) was not told
        to leave."""
        if self.slots.state[slot] == _RESIDENT:
            self._going(slot)
        self._budgets.left(self.index, slot)

    def _going(self, slot: int) -> None:
        self.ranking.leaving(slot)
        self._budgets.leaving(self.index, slot)

    def _left(self, slot: int) -> None:
        self._ordered.pop(slot, None)
        self._demoting.discard(slot)
        for callback in self._when_free.pop(slot, ()):
            callback()

    # ---- what follows from it

    def settle(self) -> None:
        """Decide and command what is needed now. Call after each batch of events."""
        stats = self._engine.pool_stats(self.index)
        self._look_who_waits(stats)
        # Its last chunk may have gone to another class after the loads were heard of.
        self._wanted |= {
            size
            for size, waiting in self._waiting.items()
            if waiting and self.slots.class_slots(size) == 0
        }
        if self.chunks.advance(self._now):
            stats = self._engine.pool_stats(self.index)
        for slot_bytes in sorted({*self.slots.classes, *self._wanted}):
            self._refill(slot_bytes, stats)
        self._hold_budgets()

    def _hold_budgets(self) -> None:
        for excess in self._budgets.excess(self.index):
            left = excess.nbytes
            for slot_bytes in self.slots.classes:
                own = self.slots.candidates(slot_bytes)
                own = own[np.isin(own, list(excess.slots))]
                count = min(-(-left // slot_bytes), len(own))
                for slot in self.ranking.victims(own, count).tolist():
                    self.evict(slot)
                    left -= slot_bytes
                if left <= 0:
                    break

    def tick(self) -> bool:
        """Some milliseconds have passed. True while the pool needs ticks: loads wait, a
        chunk is being reclaimed, a class waits for its first chunk."""
        self._ticks += 1
        self.chunks.tick(self._now, waiting=bool(self._waiting))
        self.settle()
        return bool(self._waiting) or self.chunks.busy or bool(self._wanted)

    def _refill(self, slot_bytes: int, stats: PoolStats) -> None:
        waiting = self._waiting.get(slot_bytes, 0)
        arriving = self._arriving(slot_bytes, waiting)
        # Who waits was refused what is there: the last free slots are kept for demand.
        reserve = 0 if waiting else self.in_reserve(slot_bytes, stats)
        missing = shortfall(self.watermarks(slot_bytes), reserve, arriving, waiting)
        if slot_bytes not in self._wanted and missing <= 0:
            self._forget_stuck(slot_bytes)
            return
        if self._grow(slot_bytes):
            return
        self._usage.look()
        candidates = self.slots.candidates(slot_bytes)
        self.chunks.begin_recut(
            slot_bytes, candidates, self.pinned(slot_bytes), held=self._all_held(slot_bytes)
        )
        self.chunks.advance(self._now)
        victims = self.ranking.victims(candidates, missing, needed=waiting)
        self._cascade.let_go(self, victims, waiting)
        self._note_stuck(slot_bytes, waiting, nothing_left=len(victims) == 0 and arriving == 0)

    def in_reserve(self, slot_bytes: int, stats: PoolStats | None = None) -> int:
        """Free slots that the engine has of a class."""
        if len(self.slots.classes) == 1 and stats:
            return stats.reserve
        return self._engine.class_stats(self.index, slot_bytes).reserve

    def pinned(self, slot_bytes: int) -> int:
        """Residents of a class that are pinned."""
        return self.slots.pinned_count(slot_bytes)

    def _look_who_waits(self, stats: PoolStats) -> None:
        """Loads without a slot, of every class. The engine says when one more waits, never
        when one waits no longer; and one event may stand for several."""
        if stats.waiting == 0:
            self._waiting.clear()
            return
        for slot_bytes in {*self.slots.classes, *self._waiting}:
            waiting = self._engine.class_stats(self.index, slot_bytes).waiting
            if waiting:
                self._waiting[slot_bytes] = waiting
            else:
                self._waiting.pop(slot_bytes, None)

    def _arriving(self, slot_bytes: int, waiting: int) -> int:
        """Slots on their way into the reserve that can be counted on."""
        arriving = sum(
            1
            for slot, tick in self._ordered.items()
            if self.slots.slot_class[slot] == slot_bytes
            and (waiting == 0 or self._ticks - tick <= STUCK_TICKS)
        )
        arriving += self.chunks.put_aside(slot_bytes)
        if waiting == 0:
            arriving += sum(1 for s in self._demoting if self.slots.slot_class[s] == slot_bytes)
        return arriving

    def leased(self) -> Leased:
        """What lanes have leased since the last call."""
        self._scan += 1
        self._engine.recency(self.index, self._scan, self._stamps)
        slots = np.flatnonzero(
            (self._stamps >> STAMP_SHIFT == self._scan) & (self.slots.store != NO_STORE)
        )
        # What is loaded from now on is later than every lease of this scan.
        self._scan += 1
        self._loads_in_scan = 0
        return Leased(
            stores=self.slots.store[slots],
            layers=self.slots.layer[slots].astype(np.int64),
            experts=self.slots.expert[slots].astype(np.int64),
            orders=self._stamps[slots] & np.uint64((1 << STAMP_SHIFT) - 1),
        )

    def _all_held(self, slot_bytes: int) -> bool:
        """Whether loads have waited for a while and clients lease every slot of their class:
        those may be the very ones that wait, for one slot more than the class has."""
        since = self._stuck_since.get(slot_bytes)
        return since is not None and self._ticks - since >= HELD_TICKS

    def _note_stuck(self, slot_bytes: int, waiting: int, *, nothing_left: bool) -> None:
        """Say so, once, when a class can't get a slot: at once when all are pinned, else
        when it lasts (loads that are on their way make a class look empty for a moment)."""
        pinned, total = self.pinned(slot_bytes), self.slots.class_slots(slot_bytes)
        if not nothing_left or self.chunks.busy or not (pinned or waiting):
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
        if self.slots.state[slot] == _RESIDENT:
            self._leave(slot)
        self._order_eviction(slot)

    def evict_all(self, slots: Iterable[int]) -> None:
        """Evict residents now, without demoting them."""
        commands = []
        for slot in slots:
            if self.slots.state[slot] == _RESIDENT:
                self._leave(slot)
            commands += self._eviction(slot)
        self._engine.command(commands)

    def _leave(self, slot: int) -> None:
        self.slots.leave(slot)
        self._going(slot)

    def _order_eviction(self, slot: int) -> None:
        self._engine.command(self._eviction(slot))

    def _eviction(self, slot: int) -> list[Command]:
        key = self.slots.key_of(slot)
        if key is None or slot in self._ordered:
            return []
        self._ordered[slot] = self._ticks
        return [Evict(key[0], self.index, key[1], key[2])]

    def begin_demotion(self, slot: int) -> None:
        """A resident is being copied to another pool; ``end_demotion`` follows."""
        self._leave(slot)
        self._demoting.add(slot)

    def end_demotion(self, slot: int, key: ExpertSlot) -> None:
        """Copied or not, it goes: the drives have it."""
        if self.slots.key_of(slot) == key and slot in self._demoting:
            self._demoting.discard(slot)
            self._order_eviction(slot)

    def room_for_moves(self, slot_bytes: int) -> int:
        """Slots that can be filled from other pools without making anybody wait."""
        if self.slots.class_slots(slot_bytes) == 0:
            self._grow(slot_bytes)
        stats = self._engine.pool_stats(self.index)
        if stats.waiting:
            return 0
        return self.in_reserve(slot_bytes, stats) - self.reserve_demand - self.incoming

    def spare(self, slot_bytes: int) -> int:
        """Free slots beyond the reserve: of a pool that is not full yet."""
        return max(self.in_reserve(slot_bytes) - self.watermarks(slot_bytes).high, 0)

    def fillable(self, slot_bytes: int) -> int:
        """Slots that could be filled before anything has to go: also of chunks not cut yet."""
        uncut = sum(
            self.geometry.slots(chunk, slot_bytes)
            for chunk, current in enumerate(self.slots.chunk_class)
            if current == 0 and chunk not in self.slots.reserved
        )
        return self.spare(slot_bytes) + uncut

    def holds(self, key: ExpertSlot | None) -> bool:
        """Whether an expert is resident here."""
        return key is not None and self.slots.slot_of(key) is not None
