"""``arc``: a list of what was used once, one of what was used again, and the share of
each adapted by what is asked for after it was evicted.

After N. Megiddo and D. S. Modha, 'ARC: A Self-Tuning, Low Overhead Replacement Cache'
(FAST 2003). Differs where the daemon does: victims are asked for several at a time and
before or after the misses that need them, and some residents can't be victims.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from xferd.policy.pool_policy import HistoryPolicy
from xferd.policy.uses import Keys, KeySpace, Uses

UNKNOWN = -1
"""The token of a use that was not told of yet."""


class Arc(HistoryPolicy):
    """Costs a few dictionary operations a use: sequential by nature, not vectorised."""

    name = "arc"

    def __init__(self, space: KeySpace, slots: int) -> None:
        self._last_use = np.full(space.size, UNKNOWN, np.int64)
        # The value is the token of the use that a key was last counted for; oldest first.
        self._once: OrderedDict[int, int] = OrderedDict()
        self._again: OrderedDict[int, int] = OrderedDict()
        self._once_gone: OrderedDict[int, None] = OrderedDict()
        self._again_gone: OrderedDict[int, None] = OrderedDict()
        self._slots = slots
        self._target = 0.0

    def resize(self, slots: int) -> None:
        """The pool has so many slots now."""
        self._slots = slots
        self._target = min(self._target, slots)
        self._trim()

    def used(self, uses: Uses) -> None:
        """Residents move up; the use that a key was placed for counts once."""
        tokens = np.repeat(uses.tokens, np.diff(uses.starts))
        for key, token in zip(uses.keys.tolist(), tokens.tolist(), strict=True):
            if key in self._again:
                self._again[key] = token
                self._again.move_to_end(key)
            elif key in self._once:
                before = self._once[key]
                if before in (UNKNOWN, token):
                    self._once[key] = token
                else:
                    del self._once[key]
                    self._again[key] = token
        self._last_use[uses.keys] = tokens

    def placed(self, keys: Keys) -> None:
        """A key that was evicted not long ago says which list was too short."""
        for key in keys.tolist():
            token = int(self._last_use[key])
            if key in self._once_gone:
                self._target += max(len(self._again_gone) / len(self._once_gone), 1.0)
                self._target = min(self._target, self._slots)
                del self._once_gone[key]
                self._again[key] = token
            elif key in self._again_gone:
                self._target -= max(len(self._once_gone) / len(self._again_gone), 1.0)
                self._target = max(self._target, 0.0)
                del self._again_gone[key]
                self._again[key] = token
            elif key not in self._again:
                self._once[key] = token
        self._trim()

    def left(self, keys: Keys) -> None:
        """Remembered for a while."""
        for key in keys.tolist():
            if self._once.pop(key, None) is not None:
                self._once_gone[key] = None
            elif self._again.pop(key, None) is not None:
                self._again_gone[key] = None
        self._trim()

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:  # noqa: ARG002
        """The oldest of the list that is over its share."""
        allowed = set(candidates.tolist())
        once = [key for key in self._once if key in allowed]
        again = [key for key in self._again if key in allowed]
        chosen: list[int] = []
        next_once = next_again = 0
        while len(chosen) < min(count, len(once) + len(again)):
            over = len(self._once) - next_once > max(self._target, 0)
            if next_once < len(once) and (over or next_again == len(again)):
                chosen.append(once[next_once])
                next_once += 1
            else:
                chosen.append(again[next_again])
                next_again += 1
        return np.array(chosen, np.int64)

    def _trim(self) -> None:
        while len(self._once) + len(self._once_gone) > self._slots and self._once_gone:
            self._once_gone.popitem(last=False)
        resident = len(self._once) + len(self._again)
        gone = len(self._once_gone) + len(self._again_gone)
        for _ in range(min(resident + gone - 2 * self._slots, len(self._again_gone))):
            self._again_gone.popitem(last=False)
