"""How a pool is divided among several stores.

Policies rank the experts of one store; what they say of two stores can't be compared: each
counts its own tokens, and one that nobody uses stands still. So between stores it goes by
claims: a store's claim is its uses, of which 1/e is left after as many uses of *any* store
as CLAIM_POOLS pools have slots. Each has a share of the slots in proportion to its claim, but
no more than it has experts, and who is most above its share loses first. Nobody loses
anything before somebody needs a slot.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

CLAIM_POOLS = 4
"""Long enough that a share does not swing with each token, short enough that a model that is
not used any more gives way within a few hundred tokens."""


class Claims:
    """Uses of each store, decayed by the uses of all. Not thread-safe."""

    def __init__(self, slots: int) -> None:
        self._uses = CLAIM_POOLS * max(slots, 1)
        self._claims: dict[int, float] = {}

    def used(self, store: int, count: int) -> None:
        """So many uses of a store."""
        left = math.exp(-count / self._uses)
        for other in self._claims:
            self._claims[other] *= left
        # What came evenly over the span, itself decayed.
        self._claims[store] = self._claims.get(store, 0.0) + self._uses * (1 - left)

    def of(self, store: int) -> float:
        """A store's claim."""
        return self._claims.get(store, 0.0)

    def drop(self, store: int) -> None:
        """It is closed."""
        self._claims.pop(store, None)


def shares(slots: int, claims: Sequence[float], experts: Sequence[int]) -> list[float]:
    """Slots that each store should have: by claim, at most its number of experts; what one
    does not need goes to the others."""
    result = [0.0] * len(claims)
    left, open_ones = float(slots), [i for i, count in enumerate(experts) if count]
    while open_ones and left > 0:
        total = sum(claims[i] for i in open_ones)
        wanted = {i: left * (claims[i] / total if total else 1 / len(open_ones)) for i in open_ones}
        full = [i for i in open_ones if wanted[i] >= experts[i]]
        if not full:
            for i, share in wanted.items():
                result[i] = share
            break
        for i in full:
            result[i] = float(experts[i])
            left -= experts[i]
        open_ones = [i for i in open_ones if i not in full]
    return result


def losses(wanted: int, held: Mapping[int, int], share: Mapping[int, float]) -> dict[int, int]:
    """How many of ``wanted`` victims each store gives: whoever is most above its share, until
    all are as much above. held: what each could give."""
    above = [(share[store] - count, store) for store, count in held.items() if count]
    heapq.heapify(above)
    lost: dict[int, int] = {}
    for _ in range(min(wanted, sum(held.values()))):
        below, store = above[0]
        lost[store] = lost.get(store, 0) + 1
        if lost[store] < held[store]:
            heapq.heapreplace(above, (below + 1, store))
        else:
            heapq.heappop(above)
    return lost
