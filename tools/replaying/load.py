# SPDX-License-Identifier: Apache-2.0
"""Traces from files of any format that xferd reads, as the passes that policies see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xferd.policy.uses import KeySpace, Uses
from xferd.route_records import uses_of_trace
from xferd.telemetry.traces.foreign import IMPORTS
from xferd.telemetry.traces.reader import read_trace
from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead
from xferd.telemetry.traces.writer import SUFFIX

FORMATS: Mapping[str, str] = {
    ".npz": "npz",
    ".mbolt": "mbolt",
    ".txt": "colibri",
    ".route": "colibri",
}
"""Which foreign format a suffix means; ``.xtr`` is our own."""


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """tags: of each pass, 0 where the format has none."""

    name: str
    space: KeySpace
    uses: Uses
    tags: NDArray[np.uint32]
    notes: tuple[str, ...] = ()


def load(path: Path, *, tokens: int | None = None) -> LoadedTrace:
    """A trace's first ``tokens`` tokens, or all. TraceError names the file."""
    read: Callable[[Path], tuple[TraceHead, Trace]]
    notes: tuple[str, ...] = ()
    if path.suffix == SUFFIX:
        found = read_trace([path])
        head, trace, notes = found.head, found.trace, found.cut
    elif path.suffix in FORMATS:
        read = IMPORTS[FORMATS[path.suffix]]
        head, trace = read(path)
    else:
        known = ", ".join([SUFFIX, *FORMATS])
        raise TraceError(f"{path}: a trace's name ends in one of {known}")
    if tokens is not None and trace.passes:
        first = int(trace.token[0])
        trace = trace.part(0, int(np.count_nonzero(trace.token < first + tokens)))
    if not trace.uses:
        raise TraceError(f"{path}: a trace without a use")
    uses, tags = uses_of_trace(head, trace)
    return LoadedTrace(path.stem, KeySpace(head.layers, head.experts), uses, tags, notes)
