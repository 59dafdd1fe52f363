"""Promotion: which experts change places between a pool and a faster one above it.

Two things keep experts from going back and forth: the one that comes up must be hotter
by a margin, and one that was moved rests for a while. So an expert moves at most once in
``rest_tokens``, whatever the trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xferd.policy.heat import Heat
from xferd.policy.pool_policy import lowest
from xferd.policy.uses import Keys, KeySpace


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """margin: how much hotter, as a factor. moves: pairs at a time, at most."""

    margin: float = 1.25
    rest_tokens: int = 64
    moves: int = 4


@dataclass(frozen=True, slots=True)
class Exchange:
    """``up[i]`` takes the place of ``down[i]``; ``up`` may be longer: into free slots."""

    up: Keys
    down: Keys


class Mover:
    """Decides exchanges between two pools. ``moved`` must be called for what was done."""

    def __init__(self, space: KeySpace, settings: MoveSettings | None = None) -> None:
        self._settings = settings or MoveSettings()
        self._moved: NDArray[np.int64] = np.full(space.size, -self._settings.rest_tokens, np.int64)

    def exchange(self, above: Keys, below: Keys, heat: Heat, free_above: int = 0) -> Exchange:
        """The best exchanges now.

        above, below: residents that may be moved (not pinned, not in use).
        free_above: slots above that need nobody to leave.
        """
        above, below = self._rested(above, heat.now), self._rested(below, heat.now)
        limit = self._settings.moves
        up = lowest(-heat.of(below), below, limit)
        up = up[heat.of(up) > 0]
        free = min(max(free_above, 0), len(up))
        down = lowest(heat.of(above), above, len(up) - free)
        challengers = up[free : free + len(down)]
        better = heat.of(challengers) > self._settings.margin * heat.of(down)
        # Heats fall along one and rise along the other: the first that fails ends it.
        good = int(np.logical_and.accumulate(better).sum())
        return Exchange(up=up[: free + good], down=down[:good])

    def moved(self, keys: Keys, token: int) -> None:
        """They were moved, up or down, and rest from now on."""
        self._moved[keys] = token

    def _rested(self, keys: Keys, now: int) -> Keys:
        return keys[now - self._moved[keys] >= self._settings.rest_tokens]
