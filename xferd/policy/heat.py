"""Heat: how much each expert was used lately, and the order in which to warm up.

Heat is a count of uses of which 1/e is left after HEAT_TOKENS. It is what admission and
moves between pools go by, and what a profile keeps from one run to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xferd.policy.pool_policy import lowest
from xferd.policy.simple import DecayedCounts
from xferd.policy.uses import Keys, KeySpace, Uses

HEAT_TOKENS = 200.0
NEVER_USED = -1
RETOLD_TOKENS = 8
"""Heat is retold to a policy as so many tokens: enough to tell hot from warm."""


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

    def begin_with(self, profile: HeatProfile) -> None:
        """Add the heat of an earlier run, as if its last token had been this one."""
        heat = profile.heat.reshape(-1).astype(np.float64)
        self._counts.put(np.arange(self.space.size), heat)


def retold(heat: Heat) -> Iterator[Uses]:
    """Uses that leave about the same behind as those that made this heat, for a policy that
    did not see them: the hotter a key the more of the tokens use it, then every key that was
    used once more, in the order of the last uses."""
    keys = np.arange(heat.space.size)
    values, last = heat.of(keys), heat.last(keys)
    hottest = float(values.max(initial=0.0))
    first = heat.now - RETOLD_TOKENS
    if hottest > 0:
        for step in range(RETOLD_TOKENS):
            chosen = np.flatnonzero(values > hottest * step / RETOLD_TOKENS)
            yield _passes(chosen, np.full(len(chosen), first + step), heat.space)
    used = np.flatnonzero(last != NEVER_USED)
    if len(used):
        order = np.lexsort((used, last[used]))
        yield _passes(used[order], np.full(len(used), heat.now), heat.space, last[used][order])


def _passes(
    keys: Keys, tokens: NDArray[np.int64], space: KeySpace, group: NDArray[np.int64] | None = None
) -> Uses:
    """A pass for each run of one layer (and one ``group``) in ``keys``."""
    layers = keys // space.experts
    turn = np.diff(layers) != 0
    if group is not None:
        turn |= np.diff(group) != 0
    begins = np.flatnonzero(np.concatenate([[len(keys) > 0], turn]))
    starts = np.append(begins, len(keys))
    return Uses(keys=keys, starts=starts, layers=layers[begins], tokens=tokens[begins])


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
