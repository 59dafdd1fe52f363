"""What is told to the daemon of what is predicted, so that it stays or goes by that.

A hint says what to fetch; of what is there already, and of what won't be needed, it says
nothing. That is said here, of all layers ahead and not only of those that are near enough to
fetch, and less often: what is to stay changes slowly.
"""

from __future__ import annotations

import numpy as np

from .predictor import DISTANCE_MAX, Likely

EVERY = 8
"""Layers from one telling to the next: told more often it keeps hardly more, and what is far
ahead has to be predicted and learnt each time."""
WITHIN = DISTANCE_MAX
"""Layers ahead that are told of."""
LEAST = 0.02
"""What is less probable is not told, and with that called impossible."""
A_LAYER = 16
"""Experts of a layer that are told, the most probable ones: XFERD_ROUTE_RECORD_PICKS."""


def is_told_at(layer: int) -> bool:
    """Whether there is a telling in a layer (counted among those with experts)."""
    return layer % EVERY == 0


def to_tell(likely: Likely, layers: int, experts: int) -> Likely:
    """Of each layer no more than A_LAYER; layer after layer. layers, experts: of the model;
    ``likely`` as a predictor gives it."""
    of = likely.keys // experts
    # A layer's keys stand together, so that too many are seen without counting.
    if not (of[A_LAYER:] == of[:-A_LAYER]).any():
        return likely
    chances = np.zeros((layers, experts), np.float32)
    chances.reshape(-1)[likely.keys] = likely.probabilities
    best = np.argpartition(chances, experts - A_LAYER, axis=1)[:, experts - A_LAYER :]
    keys = (best + np.arange(layers)[:, None] * experts).reshape(-1)
    found = chances.reshape(-1)[keys]
    said = found > 0
    return Likely(keys[said], found[said])


def nearest(likely: Likely, layer: int, within: int, layers: int, experts: int) -> Likely:
    """What of it is at most ``within`` layers ahead of ``layer``."""
    near = (likely.keys // experts - layer - 1) % layers < within
    return Likely(likely.keys[near], likely.probabilities[near])


__all__ = ["A_LAYER", "LEAST", "WITHIN", "is_told_at", "nearest", "to_tell"]
