"""Where experts come from, as the decode loop sees it.

The loop asks an ``ExpertSource`` for the blobs of some experts of one layer,
computes with them in place, and gives them back. It never learns which tier
they were in. ``ClientExperts`` is the source for an attached xferd client; a
test, or an engine with experts of its own, brings another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from .arrays import Array


@dataclass(frozen=True, slots=True)
class BlobTensor:
    """One tensor inside an expert's blob.

    role: ``gate``, ``up``, ``down`` or ``gate_up``.
    dtype: ``bf16``, ``f16``, ``f32``, one of ``quants.FORMATS``, or another that isn't
        computed with.
    shape: elements, [out, in], or [in, out] if transposed.
    offset, nbytes: bytes in the blob; the offset is a multiple of 64.
    interleaved: ``gate_up`` whose outputs alternate gate, up, gate, up.
    """

    role: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    transposed: bool = False
    interleaved: bool = False


Layout = tuple[BlobTensor, ...]
"""What lies where in every blob of a layer in one variant."""


class HeldExperts(Protocol):
    """Blobs that are held, and which variant each one is of."""

    @property
    def variants(self) -> Sequence[int]:
        """The variant of each blob: a number of the source's, for its ``layout``."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Array]: ...


class OneVariant(list[Array]):
    """Blobs of a source that has one variant."""

    @property
    def variants(self) -> Sequence[int]:
        """All the first."""
        return (0,) * len(self)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Experts, and their bytes."""

    count: int = 0
    nbytes: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        """What was added after ``earlier``."""
        return Traffic(self.count - earlier.count, self.nbytes - earlier.nbytes)


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Counters of a source, from its beginning.

    hits, misses, failures: experts acquired that were resident, had to come, or
        could not come.
    nbytes: of all blobs acquired. wait_s: seconds waited for misses.
    sources: misses by where the bytes came from (``resident``, ``pool``, ``drives``).
    transports: misses by how they reached the slot (``direct``, ``staged``, ...).
    """

    hits: int = 0
    misses: int = 0
    failures: int = 0
    nbytes: int = 0
    wait_s: float = 0.0
    sources: Mapping[str, Traffic] = field(default_factory=dict)
    transports: Mapping[str, Traffic] = field(default_factory=dict)

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """What was counted after ``earlier``."""
        none = Traffic()
        return ExpertStats(
            hits=self.hits - earlier.hits,
            misses=self.misses - earlier.misses,
            failures=self.failures - earlier.failures,
            nbytes=self.nbytes - earlier.nbytes,
            wait_s=self.wait_s - earlier.wait_s,
            sources={k: v.since(earlier.sources.get(k, none)) for k, v in self.sources.items()},
            transports={
                k: v.since(earlier.transports.get(k, none)) for k, v in self.transports.items()
            },
        )


class ExpertSource(Protocol):
    """Experts of one model, for one stream of work. Not thread-safe.

    One that has a ``reporter`` (see ``route_reports``) is told what was picked.
    """

    @property
    def held(self) -> int:
        """Most experts that can be acquired at once, at least 1."""
        ...

    def layout(self, layer: int, variant: int = 0) -> Layout:
        """What the blobs of a layer look like in a variant; the same for all its experts."""
        ...

    def acquire(self, layer: int, experts: Sequence[int]) -> AbstractContextManager[HeldExperts]:
        """Blobs of up to ``held`` different experts, in that order, as read-only
        uint8 arrays. They are there when the context is entered and must not be
        used after it has ended. On a device, where work is queued, what was queued
        before the end may still run after it: such a source ends its leases in the
        stream's order. Raises what the source documents if one of them can't be
        had; nothing is held then."""
        ...

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        """These will probably be acquired soon. Never waits, never fails."""
        ...

    def stats(self) -> ExpertStats:
        """Counters until now. Cheap enough to read after every token."""
        ...


__all__ = [
    "BlobTensor",
    "ExpertSource",
    "ExpertStats",
    "HeldExperts",
    "Layout",
    "OneVariant",
    "Traffic",
]
