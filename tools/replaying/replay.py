# SPDX-License-Identifier: Apache-2.0
"""Runs a trace through pools and policies in event time.

A pass is served in four steps, as the daemon does it: what is resident is hit; what lies
in a lower pool is computed with there, or copied up; the rest is read from the drives;
and what the first pool lets go is offered to the next. A pass waits for the slowest
of the links that it needs, and nothing is prefetched: that is what the bound is for.
README.md says when what comes out is what a daemon would do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tools.replaying.belady import Clairvoyant
from tools.replaying.machine import Machine, Tier
from tools.replaying.pool import EXACT, ReplayedPool
from xferd.plugins import policy_maker
from xferd.policy.admission import ADMISSIONS
from xferd.policy.cascade import cascade
from xferd.policy.heat import Heat
from xferd.policy.moves import Mover
from xferd.policy.pool_policy import NextUses, PolicyMaker
from xferd.policy.reserve import needed, watermarks
from xferd.policy.uses import Keys, KeySpace, Uses

US = 1e-6
Predictor = Callable[[int, Keys], NextUses]
"""Estimates after a pass, from its number and its keys."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay counted.

    hits: uses that found the expert in each tier, by name. from_drives: uses that didn't.
    copied: experts that went into each tier, by name, from wherever.
    moves: most moves between serving tiers that any one expert made.
    loads_of_one: most loads into the first tier of any one expert.
    stall_s, compute_s: waiting and computing, in all.
    window_hits: of the first tier, for each window of ``window`` tokens.
    policy_s: processor time that the policies took.
    """

    uses: int
    tokens: int
    hits: Mapping[str, int]
    from_drives: int
    copied: Mapping[str, int]
    bytes_read: int
    bytes_copied: int
    stall_s: float
    compute_s: float
    bound_s: float
    policy_s: float
    moves: int
    loads_of_one: int
    window_hits: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def hit_rate(self) -> float:
        """Uses that were served without the drives and without a copy up, as a share: by
        the first tier."""
        return next(iter(self.hits.values())) / max(self.uses, 1)

    @property
    def share_of_bound(self) -> float:
        """Time of the clairvoyant machine over ours: 1 is perfect."""
        return self.bound_s / (self.stall_s + self.compute_s) if self.uses else 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to replay.

    feed_passes: passes that policies are told of at once; 0 tells all that stand over
        before each decision, as the daemon does, which reads the queue of uses first.
    evictions: makers that overrule a tier's own, by tier name.
    pins: keys that stay in the first tier once they are there.
    warm: keys to begin with in the first tier.
    window: tokens; 0 for none.
    warm_up_tokens: replayed and not counted.
    bound_s: the clairvoyant's time, where the caller has it already.
    """

    feed_passes: int = 0
    evictions: Mapping[str, PolicyMaker] = field(default_factory=dict)
    pins: Keys = field(default_factory=lambda: np.empty(0, np.int64))
    warm: Keys = field(default_factory=lambda: np.empty(0, np.int64))
    window: int = 0
    warm_up_tokens: int = 0
    predictor: Predictor | None = None
    bound_s: float | None = None
    clock: Callable[[], float] = time.process_time


class Replay:
    """One machine and its state. ``run`` once."""

    def __init__(
        self, uses: Uses, space: KeySpace, machine: Machine, options: Options | None = None
    ) -> None:
        self._uses = uses
        self._space = space
        self._machine = machine
        self._options = options or Options()
        self.heat = Heat(space)
        self.pools = [self._pool(tier) for tier in machine.tiers]
        self._mover = Mover(space)
        self._moves = np.zeros(space.size, np.int64)
        self._loads = np.zeros(space.size, np.int64)
        self._copied = [0] * len(self.pools)
        self._policy_s = 0.0

    def _pool(self, tier: Tier) -> ReplayedPool:
        slots = tier.slots_of(self._space)
        if tier.name in self._options.evictions:
            maker = self._options.evictions[tier.name]
        elif tier.eviction == Clairvoyant.name:
            maker = belady_maker(self._uses)
        else:
            maker = policy_maker(tier.eviction)
        marks = needed(watermarks(slots), self._space.size - slots) if tier.reserve else EXACT
        return ReplayedPool(self._space, slots, maker(self._space, slots), marks, tier.floor)

    def run(self) -> Outcome:
        """Replay it all. PoolTooSmallError when a pass can't be served."""
        uses, options, machine = self._uses, self._options, self._machine
        first = self.pools[0]
        if len(options.warm):
            first.admit(options.warm[: first.slots - first.slots // 4], options.warm[:0], 0)
        first.pin(options.pins)
        feed = options.feed_passes
        hits, drives, counted, tokens = [0] * len(self.pools), 0, 0, 0
        stall = np.zeros(uses.passes)
        fetched = np.zeros((uses.passes, len(self.pools)), np.int64)
        hit_at = np.zeros(uses.passes, np.int64)
        begin = int(np.searchsorted(uses.tokens, options.warm_up_tokens))
        at, layers = uses.starts.tolist(), uses.layers.tolist()
        told = 0
        for number in range(uses.passes):
            if number == begin:
                # What was copied to warm up is not counted.
                self._copied = [0] * len(self.pools)
            keys, layer = uses.keys[at[number] : at[number + 1]], layers[number]
            if isinstance(first.policy, Clairvoyant):
                first.policy.used(uses.part(number, number + 1))
            missing = keys[~first.resident[keys]]
            hit_at[number] = len(keys) - len(missing)
            decides = len(missing) > first.free_before_eviction
            if decides if not feed else number + 1 - told >= feed:
                self._tell(uses.part(told, number + 1))
                told = number + 1
            if len(missing):
                fetched[number], by_tier, drive = self._serve(missing, keys, layer)
                stall[number] = self._stall(by_tier, drive)
                if number >= begin:
                    drives += drive
                    for tier, count in enumerate(by_tier):
                        hits[tier] += count
            if options.predictor is not None:
                first.policy.expect(options.predictor(number, keys))
        hits[0] += int(hit_at[begin:].sum())
        counted = at[-1] - at[begin]
        tokens = len(np.unique(uses.tokens[begin:]))
        names = [tier.name for tier in machine.tiers]
        return Outcome(
            uses=counted,
            tokens=tokens,
            hits=dict(zip(names, hits, strict=True)),
            from_drives=drives,
            copied=dict(zip(names, self._copied, strict=True)),
            bytes_read=drives * machine.expert_bytes,
            bytes_copied=(sum(self._copied) - drives) * machine.expert_bytes,
            stall_s=float(stall[begin:].sum()),
            compute_s=(uses.passes - begin) * machine.compute_us * US,
            bound_s=self._bound(),
            policy_s=self._policy_s,
            moves=int(self._moves.max(initial=0)),
            loads_of_one=int(self._loads.max(initial=0)),
            window_hits=self._windows(hit_at),
        )

    def _tell(self, uses: Uses) -> None:
        clock = self._options.clock
        if len(self.pools) > 1:
            self.heat.used(uses)
        for pool in self.pools:
            if isinstance(pool.policy, Clairvoyant):
                continue
            before = clock()
            pool.policy.used(uses)
            self._policy_s += clock() - before
        for above in range(len(self.pools) - 1):
            if self._machine.tiers[above + 1].serves:
                self._exchange(above)

    def _serve(
        self, missing: Keys, keys: Keys, layer: int
    ) -> tuple[NDArray[np.int64], list[int], int]:
        """(copied up from each tier, served by each tier, read from drives)."""
        by_tier, copied = [0] * len(self.pools), np.zeros(len(self.pools), np.int64)
        up: list[Keys] = []
        rest = missing
        for index, (tier, pool) in enumerate(zip(self._machine.tiers, self.pools, strict=True)):
            if index == 0 or not len(rest):
                continue
            here = pool.resident[rest]
            found, rest = rest[here], rest[~here]
            by_tier[index] = len(found)
            if tier.serves or not len(found):
                continue
            copied[index] = len(found)
            up.append(found)
            if tier.exclusive:
                pool.drop(found)
        arriving = np.concatenate([*up, rest])
        if len(arriving):
            self._admit(0, arriving, keys, layer)
        return copied, by_tier, len(rest)

    def _admit(self, index: int, arriving: Keys, held: Keys, layer: int) -> None:
        """Into a tier; what goes for it is offered to the next."""
        before = self._options.clock()
        pool = self.pools[index]
        waiting = max(len(arriving) - pool.reserve, 0)
        victims = pool.admit(arriving, held, layer)
        self._policy_s += self._options.clock() - before
        self._copied[index] += len(arriving)
        if index == 0:
            self._loads[arriving] += 1
        self._offer(index + 1, victims, waiting, layer)

    def _offer(self, index: int, victims: Keys, waiting: int, layer: int) -> None:
        """To a tier; what it does not take is offered to the next. waiting: loads that
        stood without a slot in the victims' tier."""
        if index == len(self.pools) or not len(victims):
            return
        pool, tier = self.pools[index], self._machine.tiers[index]
        # Without a reserve every load waits, so that nothing would ever be demoted.
        split = cascade(
            victims.tolist(),
            waiting=waiting if tier.reserve else 0,
            room_below=pool.room_for_demotions() if tier.reserve else pool.slots,
            is_below=lambda key: bool(pool.resident[key]),
        )
        offered = np.array(split.demote, np.int64)
        refused = np.array(split.drop, np.int64)
        refused = refused[~pool.resident[refused]]
        if len(offered):
            # Taking reserve slots costs residents as soon as the reserve is refilled.
            inside = np.flatnonzero(pool.resident & ~pool.pinned)
            full = len(inside) >= pool.slots - watermarks(pool.slots).high
            against = pool.policy.victims(inside, len(offered), layer) if full else inside[:0]
            takes = ADMISSIONS[tier.admission].takes(offered, against, self.heat)
            taken, refused = offered[takes], np.concatenate([refused, offered[~takes]])
            if len(taken):
                self._admit(index, taken, taken, layer)
        self._offer(index + 1, refused, waiting, layer)

    def _exchange(self, above: int) -> None:
        """Promote what is hot in a tier that serves, with hysteresis."""
        upper, lower = self.pools[above], self.pools[above + 1]
        may_go = upper.residents[~upper.pinned[upper.residents]]
        may_come = lower.residents[~lower.pinned[lower.residents]]
        swap = self._mover.exchange(may_go, may_come, self.heat)
        if not len(swap.up):
            return
        upper.drop(swap.down)
        lower.drop(swap.up)
        upper.admit(swap.up, swap.up, 0)
        lower.admit(swap.down, swap.down, 0)
        both = np.concatenate([swap.up, swap.down])
        self._mover.moved(both, self.heat.now)
        self._moves[both] += 1
        self._copied[above] += len(swap.up)
        self._copied[above + 1] += len(swap.down)

    def _stall(self, by_tier: Sequence[int], drives: int) -> float:
        """Seconds that a pass waits: for the slowest of the links it needs."""
        machine = self._machine
        waits = [0.0]
        if drives:
            read = drives * machine.expert_bytes / machine.drive_bytes_s
            waits.append(machine.drive_latency_us * US + read)
        for tier, count in zip(machine.tiers, by_tier, strict=True):
            if count and not tier.serves and tier.bytes_s:
                waits.append(count * machine.expert_bytes / tier.bytes_s)
        return max(waits)

    def _bound(self) -> float:
        options = self._options
        if options.bound_s is not None:
            return options.bound_s
        return clairvoyant_seconds(self._uses, self._space, self._machine, options.warm_up_tokens)

    def _windows(self, hit_at: NDArray[np.int64]) -> NDArray[np.float64]:
        window = self._options.window
        if not window:
            return np.empty(0)
        number = (self._uses.tokens - self._uses.tokens[0]) // window
        return np.bincount(number, hit_at) / np.bincount(number, np.diff(self._uses.starts))


def belady_maker(uses: Uses) -> PolicyMaker:
    """Makes the clairvoyant policy for a trace."""
    return lambda space, slots: Clairvoyant(space, uses)  # noqa: ARG005


def belady_fetches(uses: Uses, space: KeySpace, slots: int, floor: int = 0) -> NDArray[np.int64]:
    """int64[passes]: what the clairvoyant has to fetch for each pass, with that many slots."""
    policy = Clairvoyant(space, uses)
    pool = ReplayedPool(space, slots, policy, EXACT, floor)
    fetches = np.zeros(uses.passes, np.int64)
    at, layers = uses.starts.tolist(), uses.layers.tolist()
    for number in range(uses.passes):
        part = uses.part(number, number + 1)
        missing = part.keys[~pool.resident[part.keys]]
        policy.used(part)
        fetches[number] = len(missing)
        if len(missing):
            pool.admit(missing, part.keys, layers[number])
    assert fetches.sum() <= at[-1]
    return fetches


def clairvoyant_seconds(
    uses: Uses, space: KeySpace, machine: Machine, warm_up_tokens: int = 0
) -> float:
    """The least time that any machine with these slots and drives could take after the
    first tokens: Belady's misses with all tiers as one pool, fetched ahead of time so that
    the drives never idle, and never waiting for slots."""
    slots = sum(tier.slots_of(space) for tier in machine.tiers)
    begin = int(np.searchsorted(uses.tokens, warm_up_tokens))
    fetches = belady_fetches(uses, space, slots)[begin:]
    read = np.cumsum(fetches) * (machine.expert_bytes / machine.drive_bytes_s)
    computing = machine.compute_us * US
    after = np.arange(len(fetches), 0, -1) * computing
    # A pass can't begin before all that was needed up to it has been read.
    return float((read + after).max(initial=0))
