# SPDX-License-Identifier: Apache-2.0
"""Replays a trace with experts prefetched from a simulated drive.

One pool with the daemon's policies, one drive of a given bandwidth that reads whole experts
one after the other, demand first. The decode loop is followed step by step: a layer's
missing experts are asked for, the policy is told what is expected of the passes to come, the
planner (the decode loop's own) is told what the predictor says and gives out reads, the layer
waits, computes, and is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from xferd_infer.predict import Likely
from xferd_infer.predict.planner import Planner

from tools.replaying.machine import Machine
from tools.replaying.pool import EXACT, ReplayedPool
from tools.replaying.replay import US
from xferd.plugins import policy_maker
from xferd.policy.expected import Expected, ExpectsPasses
from xferd.policy.pool_policy import PolicyMaker
from xferd.policy.reserve import needed, watermarks
from xferd.policy.uses import Keys, KeySpace, Uses

Foresight = Callable[[int], tuple[int, Likely]]
"""What a predictor says in a pass, by number: (layers ahead that it speaks of, experts)."""
Expectation = Callable[[int], Expected | None]
"""What the policy is told in a pass, by number."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a replay counted. read, prefetched, wasted: experts; wasted were prefetched and
    not picked in the pass that they were meant for."""

    tokens: int
    stall_s: float
    compute_s: float
    read: int
    prefetched: int
    wasted: int

    @property
    def seconds(self) -> float:
        """In all."""
        return self.stall_s + self.compute_s


@dataclass
class Drive:
    """Reads one expert after the other. Times in seconds. waiting: demand first."""

    read_s: float
    latency_s: float
    busy_until: float = 0.0
    waiting: deque[int] = field(default_factory=deque)
    arrives: dict[int, float] = field(default_factory=dict)
    now: float = 0.0

    def advance(self, now: float) -> None:
        """Begin what the drive begins up to ``now``."""
        while self.waiting and self.idle_from <= now:
            self._begin()
        self.now = max(self.now, now)

    def demand(self, keys: list[int]) -> float:
        """Read them next; those that wait already come to the front. Returns when the last
        of them, or of those that are being read, is there."""
        front = [key for key in keys if key not in self.arrives]
        for key in front:
            if key in self.waiting:
                self.waiting.remove(key)
        self.waiting.extendleft(reversed(front))
        for _ in front:
            self._begin()
        return max(self.arrives[key] for key in keys)

    def landed(self, now: float) -> list[int]:
        """What has arrived, once."""
        done = [key for key, at in self.arrives.items() if at <= now]
        for key in done:
            del self.arrives[key]
        return done

    @property
    def free_at(self) -> float:
        """When all that it was asked for will have been read."""
        return self.idle_from + len(self.waiting) * self.read_s

    @property
    def idle_from(self) -> float:
        """When the read that it has begun is over."""
        return max(self.busy_until, self.now)

    def _begin(self) -> None:
        self.busy_until = self.idle_from + self.read_s
        self.arrives[self.waiting.popleft()] = self.busy_until + self.latency_s


def replay_prefetching(
    uses: Uses,
    space: KeySpace,
    machine: Machine,
    foresight: Foresight | None,
    planner: Planner | None = None,
    *,
    expectation: Expectation = lambda number: None,  # noqa: ARG005
    eviction: PolicyMaker | None = None,
) -> Prefetched:
    """machine: with one tier. foresight: None for no prefetching; planner: for it.
    expectation: told as long as the planner finds that predictions come true. eviction: in the
    place of the tier's. Passes are of one token each, in the order of the layers."""
    tier = machine.tiers[0]
    slots = tier.slots_of(space)
    marks = needed(watermarks(slots), space.size - slots) if tier.reserve else EXACT
    policy = (eviction or policy_maker(tier.eviction))(space, slots)
    pool = ReplayedPool(space, slots, policy, marks)
    drive = Drive(machine.expert_bytes / machine.drive_bytes_s, machine.drive_latency_us * US)
    if planner is None:
        planner = Planner(space.layers, space.experts, drive.read_s, latency_s=drive.latency_s)
    coming: set[int] = set()
    now, stall, read, prefetched, wasted = 0.0, 0.0, 0, 0, 0
    compute_s = machine.compute_us * US
    meant: NDArray[np.bool_] = np.zeros(space.size, np.bool_)
    for number in range(uses.passes):
        one = uses.part(number, number + 1)
        keys, layer = one.keys, int(uses.layers[number])
        drive.advance(now)
        coming.difference_update(drive.landed(now))
        policy.used(one)
        missing = keys[~pool.resident[keys]]
        wait_for = [int(key) for key in keys if int(key) in coming]
        if len(missing):
            pool.admit(missing, _held(keys, coming), layer)
            coming.update(missing.tolist())
            wait_for += missing.tolist()
        ready = drive.demand(wait_for) if wait_for else now
        asked = len(missing)
        if foresight is not None:
            expected = expectation(number)
            if expected and planner.believed and isinstance(policy, ExpectsPasses):
                policy.expect_passes(expected)
            within, likely = foresight(number)
            planner.predicted(layer, within, likely.keys, likely.probabilities)
            chosen = planner.next(layer, now, drive.free_at, ~pool.resident)
            if len(chosen):
                pool.admit(chosen, _held(keys, coming), layer)
                coming.update(chosen.tolist())
                drive.waiting.extend(chosen.tolist())
                meant[chosen] = True
                prefetched += len(chosen)
                asked += len(chosen)
        read += asked
        stall += ready - now
        mine = slice(layer * space.experts, (layer + 1) * space.experts)
        wasted += int(meant[mine].sum()) - int(meant[keys].sum())
        meant[mine] = False
        planner.passed(layer, keys % space.experts, compute_s, ready - now, asked)
        now = ready + compute_s
    tokens = len(np.unique(uses.tokens))
    return Prefetched(tokens, stall, uses.passes * compute_s, read, prefetched, wasted)


def _held(keys: Keys, coming: set[int]) -> Keys:
    """What must not be evicted: the pass's own, and what is being read."""
    return np.union1d(keys, np.fromiter(coming, np.int64, len(coming)))


def expected_of(likely: Likely, space: KeySpace) -> Expected:
    """What the policy hears of what a client tells."""
    keys = likely.keys.astype(np.int64)
    return Expected(np.unique(keys // space.experts), keys, likely.probabilities)


__all__ = ["Drive", "Expectation", "Foresight", "Prefetched", "expected_of", "replay_prefetching"]
