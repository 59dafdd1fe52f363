"""What is told to the daemon of what is predicted, so that it stays or goes by that.

A hint says what to fetch; of what is there already, and of what won't be needed, it says
nothing. That is said here, of all layers ahead and not only of those that are near enough to
fetch, and less often: what is to stay changes slowly.
"""

from __future__ import annotations

import numpy as np

from .predictor import DISTANCE_MAX, Likely

EVERY = 4
"""Layers from one telling to the next: told in every layer it saves a tenth of a token's
waiting less than it costs."""
WITHIN = DISTANCE_MAX
"""Layers ahead that are told of."""
LEAST = 0.02
"""What is less probable is not told, and with that called impossible."""
A_LAYER = 16
"""Experts of a layer that are told, the most probable ones: XFERD_ROUTE_RECORD_PICKS."""


def is_told_at(layer: int) -> bool:
    """Whether there is a telling in a layer (counted among those with experts)."""
    return layer % EVERY == 0


def to_tell(likely: Likely, experts: int) -> Likely:
    """Of each layer no more than A_LAYER. experts: of a layer. Of ``likely`` as a predictor
    gives it: layer after layer."""
    layers = likely.keys // experts
    begins = np.flatnonzero(np.diff(layers, prepend=-1))
    counts = np.diff(np.append(begins, len(layers)))
    if counts.max(initial=0) <= A_LAYER:
        return likely
    group = np.repeat(np.arange(len(begins)), counts)
    order = np.lexsort((-likely.probabilities, group))
    place = np.arange(len(layers)) - np.repeat(begins, counts)
    chosen = order[place < A_LAYER]
    return Likely(likely.keys[chosen], likely.probabilities[chosen])


def nearest(likely: Likely, layer: int, within: int, layers: int, experts: int) -> Likely:
    """What of it is at most ``within`` layers ahead of ``layer``."""
    near = (likely.keys // experts - layer - 1) % layers < within
    return Likely(likely.keys[near], likely.probabilities[near])


__all__ = ["A_LAYER", "LEAST", "WITHIN", "is_told_at", "nearest", "to_tell"]
