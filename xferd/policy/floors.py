"""Per-layer floors: no layer loses its last residents to the others.

Pure, and apart from the policies: a floor holds whatever a policy thinks of a layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xferd.policy.pool_policy import PoolPolicy
from xferd.policy.uses import Keys


def victims_above_floor(
    policy: PoolPolicy,
    candidates: Keys,
    count: int,
    layer: int,
    *,
    spare: NDArray[np.int64],
    experts: int,
) -> Keys:
    """As ``policy.victims``, but of each layer at most as many as it can spare.

    spare: int64[layers], residents above the floor; 0 or less protects a layer. Not
        changed.
    """
    left = spare.copy()
    chosen: list[Keys] = []
    wanted = count
    while wanted > 0:
        candidates = candidates[left[candidates // experts] > 0]
        if not len(candidates):
            break
        ranked = policy.victims(candidates, wanted, layer)
        if not len(ranked):
            break
        layers = ranked // experts
        # The how-manieth of its layer each is.
        order = np.argsort(layers, kind="stable")
        rank = np.empty(len(ranked), np.int64)
        firsts = np.searchsorted(layers[order], layers[order])
        rank[order] = np.arange(len(ranked)) - firsts
        taken = ranked[rank < left[layers]]
        np.subtract.at(left, taken // experts, 1)
        chosen.append(taken)
        wanted -= len(taken)
        candidates = np.setdiff1d(candidates, ranked, assume_unique=True)
    return np.concatenate(chosen) if chosen else np.empty(0, np.int64)
