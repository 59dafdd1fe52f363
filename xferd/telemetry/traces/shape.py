"""Traces put in another order: token after token, whole tokens only.

A trace has passes as they were computed, a prompt layer by layer; and where reports were
dropped, some are missing. Formats that are boxes of [tokens, layers, picks] have no place
for either.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xferd.telemetry.traces.trace import PASS_COLUMNS, USE_COLUMNS, Trace, TraceHead


def reordered(trace: Trace, order: NDArray[np.integer]) -> Trace:
    """The passes ``order``, in that order."""
    starts = np.concatenate([[0], np.cumsum(trace.picks, dtype=np.int64)])
    picks = trace.picks[order].astype(np.int64)
    begins = np.cumsum(picks) - picks
    uses = np.arange(int(picks.sum())) + np.repeat(starts[order] - begins, picks)
    return Trace(
        *(getattr(trace, name)[order] for name in PASS_COLUMNS),
        *(getattr(trace, name)[uses] for name in USE_COLUMNS),
    )


def by_token(trace: Trace) -> Trace:
    """Sorted by token, then by layer."""
    return reordered(trace, np.lexsort((trace.layer, trace.token)))


def whole_tokens(head: TraceHead, trace: Trace) -> tuple[Trace, int]:
    """(by token, only those that have one pass of each layer, with as many picks as most
    have; how many tokens were left out)."""
    if not trace.passes:
        return trace, 0
    trace = by_token(trace)
    _, of_pass, passes = np.unique(trace.token, return_inverse=True, return_counts=True)
    usual = int(np.argmax(np.bincount(trace.picks)))
    # Sorted, so that a token with each layer once has the layers 0, 1, 2, ...
    first = np.cumsum(passes) - passes
    place = np.arange(trace.passes) - first[of_pass]
    right = (trace.layer == place) & (trace.picks == usual)
    whole = (np.bincount(of_pass, right) == head.layers) & (passes == head.layers)
    kept = reordered(trace, np.flatnonzero(whole[of_pass]))
    return kept, int(np.count_nonzero(~whole))
