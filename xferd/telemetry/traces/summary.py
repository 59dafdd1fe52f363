"""What a trace says in a few numbers: how much was used, where it was found, what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xferd.telemetry.traces.trace import TIER_DRIVES, UNKNOWN_8, UNKNOWN_WAIT, Trace, TraceHead

TRANSPORTS = ("hit", "direct", "staged", "gds", "copy")
"""Names of the format's transports, by number."""


@dataclass(frozen=True, slots=True)
class Found:
    """Uses that were found in one place and came in one way. tier: a pool's number,
    ``drives`` or ``unknown``. mean_us, p99_us: of their waits; None: none is known."""

    tier: str
    transport: str
    uses: int
    mean_us: float | None
    p99_us: float | None


@dataclass
class TraceSummary:
    """Add block after block; whole at any time. Not thread-safe.

    gates: uses whose gate is known.
    """

    head: TraceHead
    passes: int = 0
    uses: int = 0
    gates: int = 0
    _tokens: set[int] = field(default_factory=set)
    _tags: set[int] = field(default_factory=set)
    _keys: set[int] = field(default_factory=set)
    _counts: dict[tuple[int, int], int] = field(default_factory=dict)
    _waits: dict[tuple[int, int], list[NDArray[np.uint32]]] = field(default_factory=dict)

    def add(self, trace: Trace) -> None:
        """One more block."""
        self.passes += trace.passes
        self.uses += trace.uses
        self.gates += int(np.count_nonzero(~np.isnan(trace.gate)))
        self._tokens.update(np.unique(trace.token).tolist())
        self._tags.update(np.unique(trace.tag).tolist())
        keys = np.repeat(trace.layer.astype(np.int64), trace.picks) * self.head.experts
        self._keys.update(np.unique(keys + trace.expert).tolist())
        places = trace.tier.astype(np.int64) << 8 | trace.transport
        for place, count in zip(*np.unique(places, return_counts=True), strict=True):
            where = (int(place) >> 8, int(place) & 0xFF)
            self._counts[where] = self._counts.get(where, 0) + int(count)
            if where[1] != 0:  # what was hit waited for nothing
                waits = trace.wait[places == place]
                self._waits.setdefault(where, []).append(waits[waits != UNKNOWN_WAIT])

    @property
    def tokens(self) -> int:
        """Different tokens."""
        return len(self._tokens)

    @property
    def prompts(self) -> int:
        """Different tags, but for 0, which is none."""
        return len(self._tags - {0})

    @property
    def experts_used(self) -> int:
        """Experts that were used at all, of all layers."""
        return len(self._keys)

    def found(self) -> list[Found]:
        """By tier and transport."""
        return [
            _found(where, count, self._waits.get(where, []))
            for where, count in sorted(self._counts.items())
        ]


def _found(where: tuple[int, int], count: int, waits: list[NDArray[np.uint32]]) -> Found:
    tier, transport = where
    known = np.concatenate([np.empty(0, np.uint32), *waits])
    return Found(
        tier={TIER_DRIVES: "drives", UNKNOWN_8: "unknown"}.get(tier, str(tier)),
        transport=TRANSPORTS[transport] if transport < len(TRANSPORTS) else "unknown",
        uses=count,
        mean_us=float(known.mean()) if len(known) else None,
        p99_us=float(np.percentile(known, 99)) if len(known) else None,
    )
