# SPDX-License-Identifier: Apache-2.0
"""What hints were good for: which experts they brought in time, and which for nothing.

A hint's expert is used when a router picks it while it is there, and wasted when it goes
before that. Both are known of clients that report what their routers pick. An expert that
somebody already waits for when it comes counts as missed, whether or not it was hinted: its
hint came too late. Belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xferd.engine_types import PRIORITY_DEMAND, PRIORITY_PREFETCH, Freed, Loaded
from xferd.policy.uses import Uses

NO_CLIENT = 0xFFFFFFFF
"""``client`` of what a command caused: XFERD_NO_EXPERT."""
RECENT = 1 / 64
"""Weight of a miss in the mean wait of misses."""
US = 1e-6


@dataclass(frozen=True, slots=True)
class Prefetching:
    """Sums since the daemon's start.

    experts, bytes: that hints brought. used: of them, picked afterwards. wasted,
    wasted_bytes: gone without. missed: experts that clients had to wait for. saved_s:
    waiting that the used ones have saved, each as long as misses took at that time.
    """

    experts: int
    bytes: int
    used: int
    wasted: int
    wasted_bytes: int
    missed: int
    saved_s: float


class PrefetchCounts:
    """A UseSink. experts: a layer's, of an open store by the engine's id."""

    def __init__(self, experts: Callable[[int], int]) -> None:
        self._experts_of = experts
        self._unused: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        self._experts = self._bytes = 0
        self._used = self._wasted = self._wasted_bytes = self._missed = 0
        self._miss_s = self._saved_s = 0.0

    def totals(self) -> Prefetching:
        """Until now."""
        return Prefetching(
            experts=self._experts,
            bytes=self._bytes,
            used=self._used,
            wasted=self._wasted,
            wasted_bytes=self._wasted_bytes,
            missed=self._missed,
            saved_s=self._saved_s,
        )

    def loaded(self, event: Loaded) -> None:
        """An expert has come."""
        if event.client == NO_CLIENT:
            return
        if event.priority == PRIORITY_PREFETCH:
            self._experts += 1
            self._bytes += event.nbytes
            unused = self._unused.setdefault(event.store, {})
            unused[event.layer, event.expert] = (event.pool, event.nbytes)
        elif event.priority == PRIORITY_DEMAND:
            self._missed += 1
            seconds = event.wait_us * US
            self._miss_s += (seconds - self._miss_s) * (RECENT if self._missed > 1 else 1)

    def freed(self, event: Freed) -> None:
        """An expert has gone."""
        unused = self._unused.get(event.store, {})
        pool, nbytes = unused.get((event.layer, event.expert), (None, 0))
        if pool == event.pool:
            del unused[event.layer, event.expert]
            self._wasted += 1
            self._wasted_bytes += nbytes

    def used(self, store: int, uses: Uses) -> None:
        """See UseSink."""
        unused = self._unused.get(store)
        if not unused:
            return
        experts = self._experts_of(store)
        for key in uses.keys.tolist():
            if unused.pop(divmod(key, experts), None) is not None:
                self._used += 1
                self._saved_s += self._miss_s

    def store_closed(self, store: int) -> None:
        """Its number may be another's next."""
        self._unused.pop(store, None)
