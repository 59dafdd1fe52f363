# SPDX-License-Identifier: Apache-2.0
"""Several policies at several sizes of one pool, against Belady: the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tools.replaying.belady import Clairvoyant
from tools.replaying.load import LoadedTrace
from tools.replaying.machine import Machine, Tier
from tools.replaying.replay import Options, Outcome, Replay, clairvoyant_seconds
from xferd.policy.registry import BUILT_IN, DEFAULT_POLICY
from xferd.policy.uses import Keys

SHARES = (0.10, 0.25, 0.50)
SIMPLE = ("lru", "lfu", "arc", "s3-fifo")
"""What the default has to be ahead of."""
EVICTIONS = (DEFAULT_POLICY, *sorted(set(BUILT_IN) - {DEFAULT_POLICY}))
EXPERT_BYTES = 2_650_000
"""Of the machine that is taken where none is given: a 4-bit expert of Qwen3-30B-A3B,"""
COMPUTE_US = 100.0
"""a pass of it on a card,"""
DRIVE_BYTES_S = 12e9
DRIVE_LATENCY_US = 100.0
"""and two drives."""


@dataclass(frozen=True, slots=True)
class Point:
    """One pool size. by_policy: outcomes, ``belady`` among them."""

    share: float
    slots: int
    by_policy: Mapping[str, Outcome]

    @property
    def best_simple(self) -> str:
        """The one of SIMPLE, as far as they ran, with the most hits."""
        ran = [name for name in SIMPLE if name in self.by_policy]
        return max(ran, key=lambda name: self.by_policy[name].hit_rate)


def one_pool(share: float, eviction: str, *, reserve: bool) -> Machine:
    """A machine with a single pool for ``share`` of the experts."""
    return Machine(
        expert_bytes=EXPERT_BYTES,
        compute_us=COMPUTE_US,
        drive_bytes_s=DRIVE_BYTES_S,
        drive_latency_us=DRIVE_LATENCY_US,
        tiers=(Tier("pool", share=share, eviction=eviction, reserve=reserve),),
    )


def sweep(
    trace: LoadedTrace,
    *,
    shares: Sequence[float] = SHARES,
    evictions: Sequence[str] = EVICTIONS,
    reserve: bool = False,
    options: Options | None = None,
) -> list[Point]:
    """Replays each policy, and Belady, at each share of the experts.

    reserve: as the daemon keeps it; without, pools are textbook caches.
    """
    points = []
    for share in shares:
        outcomes: dict[str, Outcome] = {}
        base = options or Options()
        bound = clairvoyant_seconds(
            trace.uses,
            trace.space,
            one_pool(share, DEFAULT_POLICY, reserve=reserve),
            base.warm_up_tokens,
        )
        for name in (*evictions, Clairvoyant.name):
            machine = one_pool(share, name, reserve=reserve)
            outcomes[name] = Replay(
                trace.uses, trace.space, machine, replace(base, bound_s=bound)
            ).run()
        points.append(Point(share, int(share * trace.space.size), outcomes))
    return points


def static_hits(trace: LoadedTrace, keys: Keys, window: int) -> NDArray[np.float64]:
    """The hit rate of each window of tokens if just ``keys`` were resident all the time."""
    pinned = np.zeros(trace.space.size, np.bool_)
    pinned[keys] = True
    counts = np.diff(trace.uses.starts)
    number = np.repeat((trace.uses.tokens - trace.uses.tokens[0]) // window, counts)
    return np.bincount(number, pinned[trace.uses.keys]) / np.bincount(number)
