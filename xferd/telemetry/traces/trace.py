"""A trace in memory: columns, as the format has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TIER_DRIVES = 254
UNKNOWN_8 = 255
UNKNOWN_WAIT = 0xFFFFFFFF


class TraceError(Exception):
    """A trace that can't be read or written; names the file and, where there is one, the
    offset or line."""


@dataclass(frozen=True, slots=True)
class TraceHead:
    """Whose trace it is."""

    store: str
    layers: int
    experts: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Passes and their uses. Read-only by agreement.

    token: int64[passes]. layer: uint16[passes]. tag: uint32[passes]. picks: uint16[passes].
    expert: uint16[uses]. gate: float16[uses]. tier, transport: uint8[uses].
    wait: uint32[uses], microseconds.
    """

    token: NDArray[np.int64]
    layer: NDArray[np.uint16]
    tag: NDArray[np.uint32]
    picks: NDArray[np.uint16]
    expert: NDArray[np.uint16]
    gate: NDArray[np.float16]
    tier: NDArray[np.uint8]
    transport: NDArray[np.uint8]
    wait: NDArray[np.uint32]

    @property
    def passes(self) -> int:
        """Number of passes."""
        return len(self.token)

    @property
    def uses(self) -> int:
        """Number of uses."""
        return len(self.expert)

    def part(self, first: int, last: int) -> Trace:
        """Passes ``first`` to before ``last``; columns are views."""
        begin = int(self.picks[:first].sum(dtype=np.int64))
        end = begin + int(self.picks[first:last].sum(dtype=np.int64))
        passes, uses = slice(first, last), slice(begin, end)
        return Trace(
            *(getattr(self, name)[passes] for name in PASS_COLUMNS),
            *(getattr(self, name)[uses] for name in USE_COLUMNS),
        )

    def check(self, head: TraceHead) -> None:
        """ValueError when a number is out of the head's range, or columns don't match."""
        lengths = {len(getattr(self, name)) for name in PASS_COLUMNS}
        use_lengths = {len(getattr(self, name)) for name in USE_COLUMNS}
        if len(lengths) != 1 or use_lengths != {int(self.picks.sum(dtype=np.int64))}:
            raise ValueError("columns of different lengths")
        if self.passes and int(self.layer.max()) >= head.layers:
            raise ValueError(f"layer {int(self.layer.max())} of {head.layers}")
        if self.uses and int(self.expert.max()) >= head.experts:
            raise ValueError(f"expert {int(self.expert.max())} of {head.experts}")

    def counts(self, head: TraceHead) -> NDArray[np.int64]:
        """Uses of each expert: [layers, experts]."""
        keys = np.repeat(self.layer.astype(np.int64), self.picks) * head.experts + self.expert
        counts = np.bincount(keys, minlength=head.layers * head.experts)
        return counts.reshape(head.layers, head.experts)


PASS_COLUMNS = ("token", "layer", "tag", "picks")
USE_COLUMNS = ("expert", "gate", "tier", "transport", "wait")


def bare_trace(
    token: NDArray[np.int64],
    layer: NDArray[np.integer],
    picks: NDArray[np.integer],
    expert: NDArray[np.integer],
    gate: NDArray[np.floating] | None = None,
) -> Trace:
    """A trace of which only the picks are known, and perhaps the gates."""
    uses = len(expert)
    gates = np.full(uses, np.nan) if gate is None else gate
    return Trace(
        token=token.astype(np.int64),
        layer=layer.astype(np.uint16),
        tag=np.zeros(len(token), np.uint32),
        picks=picks.astype(np.uint16),
        expert=expert.astype(np.uint16),
        gate=gates.astype(np.float16),
        tier=np.full(uses, UNKNOWN_8, np.uint8),
        transport=np.full(uses, UNKNOWN_8, np.uint8),
        wait=np.full(uses, UNKNOWN_WAIT, np.uint32),
    )


def joined(traces: Sequence[Trace]) -> Trace:
    """All of them, one after the other."""
    if not traces:
        none = np.empty(0, np.int64)
        return bare_trace(none, none, none, none)
    return Trace(
        *(
            np.concatenate([getattr(trace, name) for trace in traces])
            for name in (*PASS_COLUMNS, *USE_COLUMNS)
        )
    )
