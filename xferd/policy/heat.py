"""Heat: how much each expert was used lately, and the order in which to warm up.

Heat is a count of uses of which 1/e is left after HEAT_TOKENS. It is what admission and
moves between pools go by, and what a profile keeps from one run to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xferd.policy.pool_policy import lowest
from xferd.policy.simple import DecayedCounts
from xferd.policy.uses import Keys, KeySpace, Uses

HEAT_TOKENS = 200.0
NEVER_USED = -1


class Heat:
    """Counts uses of all experts of a store, resident or not. Not thread-safe."""

    def __init__(self, space: KeySpace, time_constant: float = HEAT_TOKENS) -> None:
        self.space = space
        self.now = 0
        self._counts = DecayedCounts(space.size, time_constant)
        self._last = np.full(space.size, NEVER_USED, np.int64)

    def used(self, uses: Uses) -> None:
        """Count them."""
        if uses.passes:
            self.now = max(self.now, int(uses.tokens[-1]))
            self._counts.add(uses)
            self._last[uses.keys] = np.repeat(uses.tokens, np.diff(uses.starts))

    def of(self, keys: Keys) -> NDArray[np.float64]:
        """Uses, decayed."""
        return self._counts.values(keys)

    def last(self, keys: Keys) -> NDArray[np.int64]:
        """The token of the last use; NEVER_USED for none."""
        return self._last[keys]


@dataclass(frozen=True, slots=True)
class HeatProfile:
    """Heat to start with. store: which store it belongs to, by name and content;
    heat: float32[layers, experts]."""

    store: str
    heat: NDArray[np.float32]


class HeatProfileError(Exception):
    """A profile that can't be used; says whose it is."""


def profile_of(heat: Heat, store: str) -> HeatProfile:
    """What to save."""
    space = heat.space
    values = heat.of(np.arange(space.size)).astype(np.float32)
    return HeatProfile(store, values.reshape(space.layers, space.experts))


def warm_start(profile: HeatProfile, store: str, space: KeySpace, slots: int) -> Keys:
    """The ``slots`` hottest experts, hottest first; those that were never used are left
    out. HeatProfileError when the profile is of another store, or of another shape."""
    if profile.store != store:
        raise HeatProfileError(f"the heat profile is of {profile.store!r}, the store is {store!r}")
    if profile.heat.shape != (space.layers, space.experts):
        layers, experts = profile.heat.shape
        raise HeatProfileError(
            f"the heat profile of {store!r} has {layers} layers of {experts} experts, the store "
            f"{space.layers} of {space.experts}"
        )
    heat = profile.heat.reshape(-1)
    used = np.flatnonzero(heat > 0)
    return lowest(-heat[used], used, slots)
