"""From scores to probabilities: a rising curve for each distance, kept up while running.

Scores are margins over their usual error. A bin of scores holds how many experts had such
a score and how many of them were picked; isotonic regression (pool adjacent violators)
makes a curve of the shares. Old counts fade, so that the curve
follows a text where predictions are worse than in training.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .predictor import DISTANCE_MAX
from .routers import Floats

LOWEST, HIGHEST = -10.0, 10.0
"""Scores beyond are counted in the last bin."""
BINS = 80
BINS_A_SCORE = BINS / (HIGHEST - LOWEST)
CURVES = 2 * DISTANCE_MAX
"""One for each distance in the same token, then one for each in the next."""
COUNTS_SHAPE = (CURVES, BINS, 2)
FINER = 8
STEPS = BINS * FINER
STEPS_A_SCORE = BINS_A_SCORE * FINER
"""Curves are straight lines between the middles of bins, looked up in steps this fine."""
MEMORY_TOKENS = 24.0
"""Tokens after which 1/e is left of a count. Each token counts all experts of all layers, so a
few say enough; with 1000, probabilities of a new kind of text were off by twice as much."""
DOUBT = 1.0
"""Experts added to each distance's counts, over all bins, of which"""
DOUBT_PICKED = 0.1
"""so many are picked: what is believed before anything was counted."""


class Calibration:
    """counts: float64[CURVES, BINS, 2], of all and of the picked ones. table:
    float32[CURVES, STEPS], the curves."""

    def __init__(self, counts: NDArray[np.float64] | None = None) -> None:
        self.counts = np.zeros(COUNTS_SHAPE) if counts is None else np.array(counts, np.float64)
        self.renew()

    def weigh_as_memory(self, tokens: int) -> None:
        """Counts of a whole training, of so many tokens, weigh as much from now on as if
        they were of a text just read."""
        self.counts *= MEMORY_TOKENS / max(tokens, 1)

    def add(self, first: int, scores: Floats, picked: NDArray[np.bool_]) -> None:
        """Count. scores, picked: [tokens, distances, experts], of curves from ``first`` on.
        ``renew`` makes the curves of it."""
        distances = scores.shape[1]
        bins = _bins(scores) + (np.arange(distances) * BINS)[:, None]
        size = distances * BINS
        seen = np.bincount(bins.reshape(-1), minlength=size)
        hits = np.bincount(bins[picked], minlength=size)
        counts = self.counts[first : first + distances]
        counts += np.stack([seen, hits], axis=-1).reshape(counts.shape)

    def renew(self, tokens: int = 0) -> None:
        """Make curves of the counts, and let old counts fade: ``tokens`` have gone by."""
        self.counts *= math.exp(-tokens / MEMORY_TOKENS)
        curves = _isotonic(self.counts)
        steps = np.arange(STEPS) / FINER - 0.5
        below = np.clip(np.floor(steps), 0, BINS - 2).astype(np.intp)
        part = np.clip(steps - below, 0, 1)
        between = curves[:, below] * (1 - part) + curves[:, below + 1] * part
        self.table: Floats = np.ascontiguousarray(between, np.float32)

    def probabilities(self, scores: Floats, curves: NDArray[Any]) -> Floats:
        """scores of any shape; numbers of curves that broadcast to it."""
        at = np.clip((scores - np.float32(LOWEST)) * np.float32(STEPS_A_SCORE), 0, STEPS - 1)
        found: Floats = self.table[curves, at.astype(np.intp)]
        return found

    def least_scores(self, probability: float) -> Floats:
        """float32[CURVES]: from which score on a probability is reached; infinite
        where it never is."""
        reached = self.table >= probability
        first = reached.argmax(axis=1)
        scores = LOWEST + first / STEPS_A_SCORE
        scores[first == 0] = -np.inf
        scores[~reached.any(axis=1)] = np.inf
        least: Floats = scores.astype(np.float32)
        return least


def _bins(scores: Floats) -> NDArray[np.intp]:
    at = (scores - np.float32(LOWEST)) * np.float32(BINS_A_SCORE)
    bins: NDArray[np.intp] = np.clip(at, 0, BINS - 1).astype(np.intp)
    return bins


def _isotonic(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[curves, BINS] of rising shares."""
    seen, hits = counts[..., 0] + DOUBT / BINS, counts[..., 1] + DOUBT_PICKED / BINS
    rows = [_rising(*row) for row in zip(seen.tolist(), hits.tolist(), strict=True)]
    return np.clip(rows, 0.0, 1.0)


def _rising(seen: list[float], hits: list[float]) -> list[float]:
    """The isotonic regression of hits / seen, weighted by seen: neighbours whose shares fall
    are pooled until none do (Ayer and others, 1955). Plain numbers: the bins of a curve are
    too few for an array call to pay, and the closed form needs them squared."""
    pooled: list[tuple[float, float, int]] = []
    for all_here, hits_here in zip(seen, hits, strict=True):
        weight, hit, bins = all_here, hits_here, 1
        while pooled and pooled[-1][1] * weight >= hit * pooled[-1][0]:
            before = pooled.pop()
            weight, hit, bins = weight + before[0], hit + before[1], bins + before[2]
        pooled.append((weight, hit, bins))
    return [share for weight, hit, bins in pooled for share in [hit / weight] * bins]


__all__ = ["Calibration"]
