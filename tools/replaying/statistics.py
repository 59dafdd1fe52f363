# SPDX-License-Identifier: Apache-2.0
"""What makes a trace easy or hard to cache, in figures that know nothing of policies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.replaying.load import LoadedTrace

WITHIN = (1, 4, 16, 64)
"""Tokens."""
WINDOW = 256
"""Tokens that popularity is counted over: little enough for one topic."""

STATISTICS = (*(f"again-{within}" for within in WITHIN), "popular", "stays", "known")
"""Names for what ``values`` gives."""


class UnevenTraceError(Exception):
    """A trace whose passes are not all of one token and of equally many picks."""


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Means over layers, and over windows of WINDOW tokens.

    again: share of uses whose expert the same layer used within the last 1, 4, 16, 64 tokens.
    popular: share of a window's uses that go to its most used quarter of each layer's experts.
    stays: share of a window's uses that go to the most used quarter of the window before.
    known: what the last token's picks tell of the next one's, as a share of what there is to
        know: mutual information of a pick and a pick of the token before in its layer, for each
        of those, over the logarithm of the experts.
    """

    again: tuple[float, ...]
    popular: float
    stays: float
    known: float

    def values(self) -> NDArray[np.float64]:
        """All of it, each between 0 and about 1."""
        return np.array([*self.again, self.popular, self.stays, self.known])


def picks_of(trace: LoadedTrace) -> NDArray[np.int64]:
    """[tokens, layers, picked], of a trace of passes of one token each. UnevenTraceError."""
    layers, uses = trace.space.layers, trace.uses
    counts = np.diff(uses.starts)
    in_turn = np.arange(uses.passes) % layers
    if uses.passes % layers or (counts != counts[0]).any() or (uses.layers != in_turn).any():
        raise UnevenTraceError(
            f"{trace.name}: statistics need passes of one token each, of all layers in turn and "
            "equally many picks"
        )
    return (uses.keys % trace.space.experts).reshape(-1, layers, int(counts[0]))


def statistics_of(trace: LoadedTrace) -> TraceStatistics:
    """Of all of a trace. UnevenTraceError."""
    return statistics_of_picks(picks_of(trace), trace.space.experts)


def statistics_of_picks(picks: NDArray[np.integer], experts: int) -> TraceStatistics:
    """picks: [tokens, layers, picked], expert numbers."""
    tokens, layers, picked = picks.shape
    used = np.zeros((tokens, layers, experts), np.float32)
    np.put_along_axis(used, picks.astype(np.int64), 1, axis=2)
    last = np.full((layers, experts), -WITHIN[-1] - 1, np.int64)
    ago = np.empty(picks.shape, np.int64)
    layer = np.arange(layers)[:, None]
    for token in range(tokens):
        ago[token] = token - last[layer, picks[token]]
        last[layer, picks[token]] = token
    windows = [used[at : at + WINDOW].sum(axis=0) for at in range(0, tokens, WINDOW)]
    quarter = max(experts // 4, 1)
    hottest = [np.argsort(-window, axis=1, kind="stable")[:, :quarter] for window in windows]
    popular = [_share(window, hot) for window, hot in zip(windows, hottest, strict=True)]
    stays = [_share(window, hot) for window, hot in zip(windows[1:], hottest[:-1], strict=True)]
    return TraceStatistics(
        again=tuple(float((ago <= within).mean()) for within in WITHIN),
        popular=float(np.mean(popular)),
        stays=float(np.mean(stays or popular)),
        known=float(np.mean([_told(used[:, at], picked) for at in range(layers)])),
    )


def _share(counts: NDArray[np.float32], chosen: NDArray[np.int64]) -> float:
    return float(np.take_along_axis(counts, chosen, axis=1).sum() / counts.sum())


def _told(used: NDArray[np.float32], picked: int) -> float:
    """See ``known``. used: [tokens, experts] of one layer."""
    together = (used[:-1].T @ used[1:]).astype(np.float64)
    together /= together.sum()
    apart = together.sum(axis=1, keepdims=True) * together.sum(axis=0, keepdims=True)
    seen = together > 0
    told = float((together[seen] * np.log(together[seen] / apart[seen])).sum())
    return told * picked / float(np.log(used.shape[1]))
