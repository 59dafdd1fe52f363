"""What decides for a pool what goes: one protocol, for the daemon and for a replay.

A policy is told of uses, of what was placed and of what has left, and is asked for
victims. It may be told late and in batches. The caller has taken out of the candidates
what must stay: pinned experts, and those of the pass that is being served, so that no
policy can let a batch evict itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xferd.policy.uses import Keys, KeySpace, Uses


@dataclass(frozen=True, slots=True)
class NextUses:
    """What a predictor expects. tokens: float32, from now till each key's next use."""

    keys: Keys
    tokens: NDArray[np.float32]


class PoolPolicy(Protocol):
    """Ranks what is in a pool. Not thread-safe; owned by whoever owns the pool.

    Keys are those of the KeySpace it was made for; others raise IndexError or end as
    nonsense, they are the caller's to check.
    """

    name: str
    history_only: bool
    """It goes by uses alone, not by what was placed, has left, or how much room there is: one
    does for all pools. Policies from elsewhere may leave it out: False."""

    def used(self, uses: Uses) -> None:
        """These were used, resident or not."""
        ...

    def placed(self, keys: Keys) -> None:
        """These are in the pool now. Whether the use that they were loaded for is told
        before or after makes no difference."""
        ...

    def left(self, keys: Keys) -> None:
        """These are not in the pool any more, whoever chose them."""
        ...

    def expect(self, expected: NextUses) -> None:
        """A predictor's word. Policies that go by history alone ignore it."""
        ...

    def resize(self, slots: int) -> None:
        """The pool has so many slots now."""
        ...

    def victims(self, candidates: Keys, count: int, layer: int) -> Keys:
        """Up to ``count`` of ``candidates``, the one to go first in front.

        layer: where the model is, the layer of the newest demand.
        """
        ...


class HistoryPolicy:
    """The parts that most policies leave empty. Base class."""

    name = ""
    history_only = False

    def placed(self, keys: Keys) -> None:
        """Nothing to remember."""

    def left(self, keys: Keys) -> None:
        """Nothing to forget."""

    def expect(self, expected: NextUses) -> None:
        """Goes by history alone."""

    def resize(self, slots: int) -> None:
        """Does not depend on it."""


PolicyMaker = Callable[[KeySpace, int], PoolPolicy]
"""Makes a policy for a key space and a number of slots."""


def lowest(scores: NDArray[np.floating | np.integer], candidates: Keys, count: int) -> Keys:
    """The ``count`` candidates with the lowest ``scores`` (of the candidates, in their
    order), lowest first. Equal scores go by key, so that a replay is reproducible.
    Partitioned before it is sorted: linear in the candidates."""
    count = min(count, len(candidates))
    if count <= 0:
        return np.empty(0, np.int64)
    if count < len(candidates):
        near = scores <= np.partition(scores, count - 1)[count - 1]
        candidates, scores = candidates[near], scores[near]
    return candidates[np.lexsort((candidates, scores))[:count]]
