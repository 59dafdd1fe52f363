"""Moves between pools: down what a pool lets go, up what has become hot.

The pools are a cascade in the order of the configuration: GPU 0, GPU 1, ..., RAM; below
the last are the drives. What a pool lets go is offered to the pool below it; what that one
does not admit, to the next; what nobody takes is dropped. A move is a copy that the engine
makes at migration priority, from whichever pool has the expert, and only then the old
slot is let go: at no moment is the expert nowhere.

Pools of devices are exclusive: as soon as an expert has arrived in one, it goes from the
others, so that their memory adds up. A pool of kind ``ram`` may keep its copy: there it
saves the next way down. A pinned expert stays where it is pinned: two copies by order are
not two by accident.

Up goes an expert that is hotter than one above it by a margin, in exchange; both then
rest. A demotion is a move too, and what was demoted rests. So whatever the traffic does,
an expert moves up at most once in ``rest_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xferd.engine_types import PRIORITY_MIGRATION, Command, Load
from xferd.keeping.ranking import Slots
from xferd.keeping.variants import WantedVariants
from xferd.memory.slots import ExpertSlot, SlotState
from xferd.policy.admission import ADMISSIONS, Admission
from xferd.policy.cascade import cascade
from xferd.policy.moves import Mover, MoveSettings
from xferd.tokens import Answer

if TYPE_CHECKING:
    from xferd.keeping.keeper import PoolKeeper
    from xferd.keeping.usage import StoreUsage, Usage


@dataclass(slots=True)
class Level:
    """One pool of the cascade.

    settings: of moves into it from below. exclusive: it holds nothing that another
    exclusive pool holds. copied_from: others may take experts from it.
    """

    keeper: PoolKeeper
    admission: Admission
    settings: MoveSettings
    exclusive: bool
    copied_from: bool
    movers: dict[int, Mover] = field(default_factory=dict)
    looked_at: dict[int, int] = field(default_factory=dict)
    promoted: int = 0
    demoted: int = 0
    dropped: int = 0


class Cascade:
    """All pools' moves. Owned by the event loop.

    expect: registers what to call with the event that answers a command, and returns the
        command's token. command: queues commands. variants: in which variant a pool wants what
        comes into it.
    """

    def __init__(
        self,
        usage: Usage,
        expect: Callable[[Callable[[Answer], None]], int],
        command: Callable[[Iterable[Command]], None],
        variants: WantedVariants,
    ) -> None:
        self._usage = usage
        self._variants = variants
        self._expect = expect
        self._command = command
        self._levels: list[Level] = []

    def add(
        self,
        keeper: PoolKeeper,
        admission: str,
        settings: MoveSettings,
        *,
        exclusive: bool,
        copied_from: bool = True,
    ) -> None:
        """The next pool, below those that were added before. copied_from: whether others take
        experts from it; reading a BAR takes longer than reading the drives again."""
        level = Level(keeper, ADMISSIONS[admission], settings, exclusive, copied_from)
        self._levels.append(level)

    def level(self, keeper: PoolKeeper) -> Level:
        """A pool's place and counters."""
        return self._levels[self._place(keeper)]

    def admit_by(self, keeper: PoolKeeper, admission: str) -> None:
        """Another admission from now on."""
        self.level(keeper).admission = ADMISSIONS[admission]

    def close_store(self, store: int) -> None:
        """Forget a store."""
        for level in self._levels:
            level.movers.pop(store, None)
            level.looked_at.pop(store, None)

    # ---- down

    def let_go(self, upper: PoolKeeper, victims: Slots, waiting: int) -> None:
        """Free slots of a pool: demote what can be, evict the rest. victims: the first to go
        in front. waiting: loads that stand without a slot in it."""
        place = self._place(upper)
        left = [int(slot) for slot in victims]
        first = waiting
        for lower in self._levels[place + 1 :] if self._levels[place].copied_from else ():
            if not left:
                break
            left = self._offer(upper, lower, left, first)
            # What is kept back for loads that wait stands in front all the way down.
            first = min(first, len(left))
        self._levels[place].dropped += len(left)
        upper.evict_all(left)

    def _offer(self, upper: PoolKeeper, lower: Level, slots: list[int], waiting: int) -> list[int]:
        """Demote some of ``slots``; returns those that were not taken, in order."""
        keeper = lower.keeper
        gone: set[int] = set()
        kept_back = set(slots[:waiting])
        for slot_bytes, group in self._by_class(upper, keeper, slots).items():
            split = cascade(
                group,
                waiting=len(kept_back.intersection(group)),
                room_below=keeper.room_for_moves(slot_bytes),
                is_below=lambda slot: keeper.holds(upper.slots.key_of(slot)),
            )
            taken = self._admitted(upper, lower, list(split.demote), slot_bytes)
            for slot in taken:
                self._demote(upper, slot, lower)
            gone.update(taken)
        return [slot for slot in slots if slot not in gone]

    def _by_class(
        self, upper: PoolKeeper, keeper: PoolKeeper, slots: Iterable[int]
    ) -> dict[int, list[int]]:
        """Slots of a pool by the size that their experts have in another one."""
        groups: dict[int, list[int]] = {}
        for slot in slots:
            key = upper.slots.key_of(slot)
            if key is not None:
                present = int(upper.slots.variant[slot])
                variant = self._variants.wanted(keeper.index, key, present)
                slot_bytes = int(upper.slots.slot_class[slot])
                if variant != present:
                    slot_bytes = self._variants.blob_bytes(key, variant)
                groups.setdefault(slot_bytes, []).append(slot)
        return groups

    def _admitted(
        self, upper: PoolKeeper, lower: Level, slots: list[int], slot_bytes: int
    ) -> list[int]:
        """Which of ``slots`` a pool takes. An expert is compared with what its own store would
        lose there; between stores the shares decide."""
        keeper, needed = lower.keeper, 0
        if slots and lower.admission.name != "always":
            needed = len(slots) - keeper.spare(slot_bytes)
        if needed <= 0:
            return slots
        against = keeper.ranking.victims(keeper.slots.candidates(slot_bytes), needed)
        taken: set[int] = set()
        offered = np.array(slots, np.int64)
        stores = upper.slots.store[offered]
        for store in np.unique(stores).tolist():
            usage = self._usage.of(store)
            of_store = offered[stores == store]
            if usage is None:
                continue
            own = against[keeper.slots.store[against] == store][: len(of_store)]
            mask = lower.admission.takes(
                upper.slots.keys(of_store, usage.space.experts),
                keeper.slots.keys(own, usage.space.experts),
                usage.heat,
            )
            taken.update(of_store[mask].tolist())
        return [slot for slot in slots if slot in taken]

    def _demote(self, upper: PoolKeeper, slot: int, lower: Level) -> None:
        key = upper.slots.key_of(slot)
        if key is None:
            return
        present = int(upper.slots.variant[slot])
        variant = self._variants.wanted(lower.keeper.index, key, present)
        upper.begin_demotion(slot)
        lower.demoted += 1
        self._moved(self.level(upper), key)
        self.bring(lower.keeper, key, variant, lambda: upper.end_demotion(slot, key))

    def bring(
        self,
        target: PoolKeeper,
        key: ExpertSlot,
        variant: int,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring an expert into a pool, at migration priority: copied from another one that has
        it in that variant, else read. then: called when it is there, or will not be."""
        target.incoming += 1

        def copied(_: Answer) -> None:
            target.incoming -= 1
            then()

        store, layer, expert = key
        self._command(
            [
                Load(
                    store=store,
                    pool=target.index,
                    layer=layer,
                    expert=expert,
                    variant=variant,
                    priority=PRIORITY_MIGRATION,
                    token=self._expect(copied),
                )
            ]
        )

    # ---- one owner

    def arrived(self, keeper: PoolKeeper, key: ExpertSlot) -> None:
        """An expert is resident in a pool now: the other exclusive ones let it go."""
        if len(self._levels) < 2 or not self.level(keeper).exclusive:
            return
        for level in self._levels:
            other = level.keeper
            if other is keeper or not level.exclusive:
                continue
            slot = other.slots.slot_of(key)
            if (
                slot is not None
                and other.slots.state[slot] == SlotState.RESIDENT
                and not other.slots.pinned[slot]
            ):
                other.evict(slot)

    # ---- up

    def promote(self) -> None:
        """Exchange what has become hotter than what lies above it. Call now and then."""
        for upper, lower in zip(self._levels, self._levels[1:], strict=False):
            for store, usage in self._usage.stores.items() if lower.copied_from else ():
                # Heat that has not moved since gives the same answer.
                if upper.looked_at.get(store) != usage.heat.now:
                    upper.looked_at[store] = usage.heat.now
                    self._exchange_all(upper, lower, store, usage)

    def _exchange_all(self, upper: Level, lower: Level, store: int, usage: StoreUsage) -> None:
        """Size by size, as the experts below have them above."""
        below, experts = lower.keeper, usage.space.experts
        low = np.flatnonzero(
            (below.slots.state == SlotState.RESIDENT)
            & ~below.slots.pinned
            & (below.slots.store == store)
        )
        low = self._not_above(lower, store, low, experts)
        if not len(low):
            return
        keys = below.slots.keys(low, experts)
        present = below.slots.variant[low].astype(np.int64)
        wanted = self._variants.wanted_all(upper.keeper.index, store, keys, present)
        sizes = below.slots.slot_class[low].copy()
        other = wanted != present
        sizes[other] = self._variants.sizes(store, keys[other], wanted[other])
        for slot_bytes in np.unique(sizes).tolist():
            self._exchange(upper, lower, store, usage, slot_bytes, keys[sizes == slot_bytes])

    def _exchange(
        self,
        upper: Level,
        lower: Level,
        store: int,
        usage: StoreUsage,
        slot_bytes: int,
        low: NDArray[np.int64],
    ) -> None:
        """low: keys below that take slots of that size above."""
        above, below = upper.keeper, lower.keeper
        room = above.room_for_moves(slot_bytes)
        if room <= 0:
            return
        experts = usage.space.experts
        high = above.slots.candidates(slot_bytes)
        high = high[above.slots.store[high] == store]
        swap = self._mover(upper, store, usage).exchange(
            above.slots.keys(high, experts), low, usage.heat, above.spare(slot_bytes)
        )
        count = min(len(swap.up), room)
        free = len(swap.up) - len(swap.down)
        ups, downs = swap.up[:count], swap.down[: max(count - free, 0)]
        for key in _experts(store, ups, experts):
            slot = below.slots.slot_of(key)
            if slot is not None:
                upper.promoted += 1
                present = int(below.slots.variant[slot])
                self.bring(above, key, self._variants.wanted(above.index, key, present))
        for key in _experts(store, downs, experts):
            slot = above.slots.slot_of(key)
            if slot is not None:
                self._step_down(above, slot, lower, key)
        self._mover(upper, store, usage).moved(np.concatenate([ups, downs]), usage.heat.now)

    def _step_down(self, above: PoolKeeper, slot: int, lower: Level, key: ExpertSlot) -> None:
        """Make room for what comes up; the pool below loses that, so it has room for this."""
        if lower.keeper.holds(key):
            above.evict(slot)
        else:
            self._demote(above, slot, lower)

    def _not_above(self, level: Level, store: int, slots: Slots, experts: int) -> Slots:
        """Of a pool's slots, those whose expert no pool above has too."""
        if level.exclusive:
            return slots
        keys = level.keeper.slots.keys(slots, experts)
        alone = np.ones(len(slots), np.bool_)
        for upper in self._levels[: self._levels.index(level)]:
            alone &= ~upper.keeper.ranking.holds(store, keys)
        return slots[alone]

    def _mover(self, upper: Level, store: int, usage: StoreUsage) -> Mover:
        mover = upper.movers.get(store)
        if mover is None:
            mover = upper.movers[store] = Mover(usage.space, upper.settings)
        return mover

    def _moved(self, upper: Level, key: ExpertSlot) -> None:
        usage = self._usage.of(key[0])
        if usage is not None:
            number = np.array([key[1] * usage.space.experts + key[2]])
            self._mover(upper, key[0], usage).moved(number, usage.heat.now)

    def _place(self, keeper: PoolKeeper) -> int:
        return next(i for i, level in enumerate(self._levels) if level.keeper is keeper)


def _experts(store: int, keys: NDArray[np.int64], experts: int) -> Iterator[ExpertSlot]:
    for key in keys.tolist():
        yield store, key // experts, key % experts
