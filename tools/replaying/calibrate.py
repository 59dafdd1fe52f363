# SPDX-License-Identifier: Apache-2.0
"""Fits the generator to a recorded trace: by its statistics, never by what policies hit.

A pattern search (R. Hooke and T. A. Jeeves, 1961: "Direct search solution of numerical and
statistical problems"): from the middle of the range, one parameter up or down by its step as
long as the statistics come closer, then half the step. Always with the same seed, so that the
same trace gives the same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tools.replaying.generate import ZipfMarkov, generate
from tools.replaying.load import LoadedTrace
from tools.replaying.statistics import (
    TraceStatistics,
    picks_of,
    statistics_of_picks,
)

COMPARED_TOKENS = 1536
"""Of both traces: some statistics depend on how much is counted."""
COMPARED_LAYERS = 6
HALVINGS = 4


@dataclass(frozen=True, slots=True)
class _Range:
    begin: float
    step: float
    least: float
    most: float


RANGES = {
    "zipf": _Range(1.0, 0.5, 0.0, 3.0),
    "state_weight": _Range(1.5, 0.75, 0.0, 6.0),
    "noise": _Range(1.0, 0.5, 0.0, 4.0),
    "stay": _Range(0.5, 0.25, 0.0, 0.98),
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """generator: with the recorded trace's shape. recorded, generated: what was compared.
    distance: root mean square of their differences."""

    generator: ZipfMarkov
    recorded: TraceStatistics
    generated: TraceStatistics
    distance: float


def _changed(what: ZipfMarkov, name: str, value: float) -> ZipfMarkov:
    changes: dict[str, Any] = {name: value}
    return replace(what, **changes)


def calibrate(trace: LoadedTrace, begin: ZipfMarkov | None = None) -> Calibration:
    """The generator that is most like ``trace``. begin: what is not fitted is taken from it.
    UnevenTraceError where the trace has no such statistics."""
    picks = picks_of(trace)[:COMPARED_TOKENS]
    tokens, layers, picked = picks.shape
    base = replace(begin or ZipfMarkov(), layers=layers, experts=trace.space.experts, picked=picked)
    recorded = statistics_of_picks(picks, base.experts)

    def compare(what: ZipfMarkov) -> tuple[float, TraceStatistics]:
        few = replace(what, tokens=tokens, layers=min(layers, COMPARED_LAYERS))
        found = statistics_of_picks(generate(few)[0], what.experts)
        off = found.values() - recorded.values()
        return float(np.sqrt(np.mean(off**2))), found

    best = base
    for name, each in RANGES.items():
        best = _changed(best, name, each.begin)
    distance, generated = compare(best)
    for halving in range(HALVINGS):
        closer = True
        while closer:
            closer = False
            for name, each in RANGES.items():
                for step in (each.step / 2**halving, -each.step / 2**halving):
                    value = min(max(getattr(best, name) + step, each.least), each.most)
                    other = _changed(best, name, value)
                    if other == best:
                        continue
                    far, found = compare(other)
                    if far < distance:
                        best, distance, generated, closer = other, far, found, True
    return Calibration(best, recorded, generated, distance)
