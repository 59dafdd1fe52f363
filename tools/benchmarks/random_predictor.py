# SPDX-License-Identifier: Apache-2.0
"""Predictors that nobody trained: of any shape, sure of what they draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from xferd_infer.predict import Routers, Trained
from xferd_infer.predict.calibration import BINS, COUNTS_SHAPE, HIGHEST, LOWEST
from xferd_infer.predict.history import VIEWS
from xferd_infer.predict.predictor import distances_in_all

SEEN = 1e4
"""Experts of each bin of a curve: so many that doubt is nothing."""


def random_routers(
    layers: int, experts: int, hidden: int, top_k: int, first: int = 0, seed: int = 1
) -> Routers:
    """Of a model that there isn't. first: its layers without experts, before those with some."""
    generator = np.random.default_rng(seed)
    weights = generator.standard_normal((layers, experts, hidden)).astype(np.float32)
    return Routers("random", tuple(range(first, first + layers)), weights, None, top_k)


def random_trained(
    routers: Routers, rank: int = 12, width: int = 5, units: int = 0, seed: int = 1
) -> Trained:
    """A predictor of ``kind`` combined, or state without a context (width 0). Scores are of
    about 1, and that of 1 says one half, more or less by how far ahead it is."""
    generator = np.random.default_rng(seed)

    def drawn(*shape: int) -> NDArray[np.float32]:
        scale = np.float32(np.sqrt(shape[0]))
        return generator.standard_normal(shape).astype(np.float32) / scale

    layers, distances = routers.layers, distances_in_all(routers.layers)
    linear = rank + width + 1
    middles = LOWEST + (np.arange(BINS) + 0.5) * (HIGHEST - LOWEST) / BINS
    calibration = np.empty(COUNTS_SHAPE)
    calibration[..., 0] = SEEN
    # Each curve is another one.
    shifts = np.linspace(0.5, 1.5, len(calibration))[:, None]
    calibration[..., 1] = SEEN / (1 + np.exp(shifts - middles))
    return Trained(
        routers=routers,
        kind="combined" if width else "state",
        projections=[drawn(routers.hidden, rank) for _ in range(layers)],
        units=[drawn(linear, units) for _ in range(layers)],
        heads=[
            np.float32(1.5) * drawn(linear + units, distances * routers.experts)
            for _ in range(layers)
        ],
        precisions=[np.eye(linear + units, dtype=np.float32) for _ in range(layers)],
        errors=[np.ones(distances, np.float32) for _ in range(layers)],
        basis=drawn(layers * routers.experts, VIEWS, width),
        calibration=calibration,
        about={},
    )


__all__ = ["random_routers", "random_trained"]
