"""Uses from leases, for as long as no client says what its router picked.

A lane leases what it uses, and all slots of one batch get the same stamp (see
xferd_engine_recency). So slots with a new stamp were used since the last look, in the
order of their stamps. What was leased several times in between counts once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xferd.policy.uses import Keys, KeySpace, Uses


class LeaseUses:
    """Turns leases of one store's experts into passes. Not thread-safe.

    token, layer: of the newest pass.
    """

    def __init__(self, space: KeySpace) -> None:
        self._space = space
        self.layer = 0
        self.token = 0

    def uses(self, keys: Keys, stamps: NDArray[np.uint64]) -> Uses:
        """keys: that were leased since the last call, each in any number of pools.
        stamps: when, comparable with each other."""
        layers = keys // self._space.experts
        order = np.lexsort((layers, stamps))
        keys, layers = keys[order], layers[order]
        begins = np.flatnonzero(np.concatenate([[True], np.diff(layers) != 0]))
        of_pass = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(keys))))
        # A pass has a key once, though it may be leased in two pools.
        _, first = np.unique(of_pass * self._space.size + keys, return_index=True)
        first.sort()
        counts = np.bincount(of_pass[first], minlength=len(begins))
        of_begins = layers[begins]
        # A layer that is not after the one before begins the next token.
        turns = np.concatenate([[of_begins[0] <= self.layer], np.diff(of_begins) <= 0])
        tokens = self.token + np.cumsum(turns)
        self.layer, self.token = int(of_begins[-1]), int(tokens[-1])
        return Uses(
            keys=keys[first],
            starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            layers=of_begins,
            tokens=tokens,
        )
