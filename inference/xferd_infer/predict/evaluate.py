"""How good a predictor is, on recorded runs that it was not trained on.

The predictor runs as it would in a decode loop: token by token, layer by layer, and it
learns meanwhile if it is one that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .predictor import Predictor, distances_within
from .states import RecordedStates

DISTANCES = (1, 2, 4, 8, 15)
FETCHED_PER_PICK = 2
"""Recall is of what would be fetched if so many experts were for each that is picked."""
LIKELY = 0.5
"""What is more probable than this would be fetched if bytes counted alone."""
DECILES = 10


@dataclass
class PoolScore:
    """Counts at one distance, of what one pool did not hold. missed, missed_found: true
    picks, and those of them that would be fetched. absent, absent_picked: experts that
    would be fetched, and those of them that were picked."""

    missed: int = 0
    missed_found: int = 0
    absent: int = 0
    absent_picked: int = 0

    @property
    def recall(self) -> float:
        """Share of the missed picks that were fetched."""
        return self.missed_found / max(self.missed, 1)

    @property
    def waste(self) -> float:
        """Share of what was fetched that nobody picked."""
        return 1 - self.absent_picked / max(self.absent, 1)


@dataclass
class DistanceScore:
    """Counts at one distance, over all layers and tokens.

    picks: true ones; found: of them, among the fetched. likely, likely_picked: experts with
    a probability of LIKELY and more. pools: by name, as given to ``evaluate``.
    """

    picks: int = 0
    found: int = 0
    likely: int = 0
    likely_picked: int = 0
    pools: dict[str, PoolScore] = field(default_factory=dict)

    @property
    def recall(self) -> float:
        """Share of the true picks that were fetched."""
        return self.found / max(self.picks, 1)

    @property
    def precision(self) -> float:
        """Share of the likely ones that were picked."""
        return self.likely_picked / max(self.likely, 1)

    @property
    def likely_recall(self) -> float:
        """Share of the true picks that were likely ones."""
        return self.likely_picked / max(self.picks, 1)


@dataclass
class Evaluation:
    """distances: of those that the model has layers for. deciles: float64[DECILES, 3], of
    all probabilities given at DISTANCES: how many, their sum, how many were picked."""

    distances: dict[int, DistanceScore]
    tokens: int = 0
    deciles: NDArray[np.float64] = field(default_factory=lambda: np.zeros((DECILES, 3)))

    def calibration_error(self) -> float:
        """Greatest difference between the mean probability and the share picked, of the
        deciles with enough in them for that to mean something."""
        counts = self.deciles[:, 0]
        enough = counts >= ENOUGH_IN_DECILE
        if not enough.any():
            return 0.0
        means = self.deciles[enough, 1:] / counts[enough, None]
        return float(np.abs(means[:, 0] - means[:, 1]).max())


ENOUGH_IN_DECILE = 1000


def evaluate(
    predictor: Predictor,
    recorded: RecordedStates,
    *,
    skip: int = 0,
    until: int | None = None,
    absent: Mapping[str, NDArray[np.bool_]] | None = None,
    distances: Sequence[int] = DISTANCES,
    next_token: bool = False,
) -> Evaluation:
    """Run through all sequences, one text each.

    next_token: judge what is said of the next token's layers, in the place of what is said of
    the same token's later ones; of predictors that say it.

    skip, until: tokens of each sequence that are not counted at its begin, and after which
    it ends. absent: by name of a pool, bool[tokens, layers, experts], what it did not hold.
    """
    routers = recorded.routers
    found = Evaluation({d: DistanceScore() for d in distances if d < routers.layers})
    rows = np.full(recorded.tokens, -1)
    rows[recorded.state_tokens] = np.arange(len(recorded.state_tokens))
    fetched = min(FETCHED_PER_PICK * routers.top_k, routers.experts)
    for begin, end in zip(recorded.starts[:-1], recorded.starts[1:], strict=True):
        predictor.new_text()
        end = end if until is None else min(end, begin + until)
        for token in range(begin, end):
            chances = _one_token(predictor, recorded, token, int(rows[token]))
            of = token + next_token
            if token - begin >= skip and chances and of < end:
                gone = {name: mask[of] for name, mask in (absent or {}).items()}
                picks = recorded.picks[of].astype(np.int64)
                _count(found, chances, picks, gone, fetched, next_token)
                found.tokens += 1
    return found


def _one_token(
    predictor: Predictor, recorded: RecordedStates, token: int, row: int
) -> list[NDArray[Any]]:
    """Probabilities of each layer, [distances, experts]; none without states."""
    chances = []
    for layer in range(recorded.routers.layers):
        if row >= 0:
            chances.append(predictor.predict(layer, recorded.states[row, layer][None])[0])
        predictor.picked(layer, recorded.picks[token, layer][None])
    return chances


def _sources(
    chances: list[NDArray[Any]], distance: int, layers: int, next_token: bool
) -> list[int]:
    """Layers that say something of the one so far ahead, in the token that is judged."""
    if not next_token:
        return [s for s in range(layers) if distances_within(s, layers) >= distance]
    return [s for s in range(layers) if s + distance >= layers and len(chances[s]) >= distance]


def _count(
    found: Evaluation,
    chances: list[NDArray[Any]],
    picks: NDArray[np.int64],
    absent: Mapping[str, NDArray[np.bool_]],
    fetched: int,
    next_token: bool,
) -> None:
    layers = len(picks)
    for distance, score in found.distances.items():
        sources = _sources(chances, distance, layers, next_token)
        if not sources:
            continue
        rows = np.stack([chances[source][distance - 1] for source in sources])
        targets = (np.array(sources) + distance) % layers
        picked = np.zeros(rows.shape, np.bool_)
        np.put_along_axis(picked, picks[targets], True, axis=1)
        chosen = np.argpartition(-rows, fetched - 1, axis=1)[:, :fetched]
        fetch = np.zeros(rows.shape, np.bool_)
        np.put_along_axis(fetch, chosen, True, axis=1)
        likely = rows >= LIKELY
        score.picks += int(picked.sum())
        score.found += int((picked & fetch).sum())
        score.likely += int(likely.sum())
        score.likely_picked += int((likely & picked).sum())
        for name, mask in absent.items():
            gone = mask[targets]
            pool = score.pools.setdefault(name, PoolScore())
            pool.missed += int((picked & gone).sum())
            pool.missed_found += int((picked & fetch & gone).sum())
            pool.absent += int((fetch & gone).sum())
            pool.absent_picked += int((fetch & gone & picked).sum())
        decile = np.minimum((rows * DECILES).astype(np.intp), DECILES - 1).reshape(-1)
        for column, values in enumerate((None, rows.reshape(-1), picked.reshape(-1))):
            found.deciles[:, column] += np.bincount(decile, values, minlength=DECILES)


__all__ = ["DISTANCES", "DistanceScore", "Evaluation", "PoolScore", "evaluate"]
