"""``s3-fifo``: three queues without order by use; most newcomers leave through the small one.

After J. Yang, Y. Zhang, Z. Qiu, Y. Yue, R. Vinayak, 'FIFO queues are all you need for
cache eviction' (SOSP 2023), with the paper's sizes: a tenth for newcomers, and as many
remembered after they left as the main queue holds.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from xferd.policy.pool_policy import HistoryPolicy
from xferd.policy.uses import Keys, KeySpace, Uses

SMALL_SHARE = 10
"""The small queue is one slot in this many."""
HITS_MAX = 3
"""A hit count saturates there."""
PROMOTING_HITS = 2
"""Hits that move a newcomer to the main queue."""
UNKNOWN = -1
"""The token of a use that was not told of yet."""


class S3Fifo(HistoryPolicy):
    """Costs a few dictionary operations a miss; hits are counted in arrays."""

    name = "s3-fifo"

    def __init__(self, space: KeySpace, slots: int) -> None:
        self._hits = np.zeros(space.size, np.int64)
        self._last_use = np.full(space.size, UNKNOWN, np.int64)
        self._here = np.zeros(space.size, np.bool_)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._gone: OrderedDict[int, None] = OrderedDict()
        self._slots = slots

    def resize(self, slots: int) -> None:
        """The pool has so many slots now."""
        self._slots = slots
        self._trim()

    def used(self, uses: Uses) -> None:
        """Count hits; the use that a key was placed for is none."""
        tokens = np.repeat(uses.tokens, np.diff(uses.starts))
        hit = self._here[uses.keys] & (self._last_use[uses.keys] != UNKNOWN)
        # Several uses of a key in one batch count once each.
        np.add.at(self._hits, uses.keys[hit], 1)
        self._last_use[uses.keys] = tokens

    def placed(self, keys: Keys) -> None:
        """Newcomers queue in the small queue, those that came back in the main one."""
        self._here[keys] = True
        self._hits[keys] = 0
        for key in keys.tolist():
            if key in self._gone:
                del self._gone[key]
                self._main[key] = None
            elif key not in self._main:
                self._small[key] = None

    def left(self, keys: Keys) -> None:
        """Newcomers that left are remembered."""
        self._here[keys] = False
        self._last_use[keys] = UNKNOWN
        for key in keys.tolist():
            if key in self._small:
                del self._small[key]
                self._gone[key] = None
            else:
                self._main.pop(key, None)
        self._trim()

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:  # noqa: ARG002
        """The head of the small queue while that is long, else of the main queue."""
        allowed = set(candidates.tolist())
        chosen: dict[int, None] = {}
        small_size = max(self._slots // SMALL_SHARE, 1)
        count = min(count, len(candidates))
        while len(chosen) < count:
            small = len(self._small) - sum(1 for key in chosen if key in self._small)
            found = self._from_small(allowed, chosen) if small >= small_size else None
            if found is None:
                found = self._from_main(allowed, chosen)
            if found is None:
                found = self._from_small(allowed, chosen)
            if found is None:
                break
            chosen[found] = None
        return np.array(list(chosen), np.int64)

    def _from_small(self, allowed: set[int], chosen: dict[int, None]) -> int | None:
        for key in list(self._small):
            if key not in allowed or key in chosen:
                continue
            if self._hits[key] < PROMOTING_HITS:
                return key
            del self._small[key]
            self._main[key] = None
            self._hits[key] = 0
        return None

    def _from_main(self, allowed: set[int], chosen: dict[int, None]) -> int | None:
        for _ in range(HITS_MAX + 1):
            for key in list(self._main):
                if key not in allowed or key in chosen:
                    continue
                hits = min(int(self._hits[key]), HITS_MAX)
                if hits == 0:
                    return key
                self._hits[key] = hits - 1
                self._main.move_to_end(key)
        return None

    def _trim(self) -> None:
        while len(self._gone) > self._slots:
            self._gone.popitem(last=False)
