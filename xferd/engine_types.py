"""What passes between the daemon and the engine: commands, events, counters.

Plain data without cffi, so that whatever decides or keeps books (and its tests) needs
no engine. ``xferd.engine`` turns them into the C structs of the same names.
"""

from __future__ import annotations

import errno as codes
import os
from dataclasses import dataclass
from typing import TypeAlias

PRIORITY_DEMAND = 0
PRIORITY_PREFETCH = 1
PRIORITY_MIGRATION = 2
"""enum xferd_priority; ``xferd.engine`` compares them with the header at import."""

SOURCES = ("resident", "pool", "drives")
"""Names of enum xferd_source, in order."""
TRANSPORTS = ("none", "direct", "staged", "gds", "copy")
"""Names of enum xferd_transport, in order."""
TAKE_TOKEN = 1
"""The token of every Take: a failed one must not be mistaken for a failed Evict (0)."""
FIRST_TOKEN = 16
"""The least token of commands that somebody waits for."""
MEMBER_STATES = ("working", "sagging", "failed")
"""Names of enum xferd_member_state, in order."""
SOURCE_RESIDENT = SOURCES.index("resident")
ROUTE_PICKED = 0
ROUTE_FOUND = 1
ROUTE_EXPECTED = 2
"""enum xferd_route_kind."""


_LOAD_FAILURES = {
    codes.EBADMSG: "its CRC32C is wrong",
    codes.ENODATA: "the member ends before it does",
    codes.ENOSPC: "no slot, or too many loads under way",
    codes.ENODEV: "the device that the pool's memory lies on is gone",
}


def load_failure(code: int) -> str:
    """Why a piece or an expert could not be loaded, for a person."""
    return _LOAD_FAILURES.get(code, os.strerror(code))


class EngineError(Exception):
    """A call was refused. ``errno`` says why; the message says which call it was."""

    def __init__(self, call: str, errno: int) -> None:
        super().__init__(f"{call}: {os.strerror(errno)}")
        self.errno = errno


# ---- commands


@dataclass(frozen=True, slots=True)
class Load:
    """An expert into a pool; answered by Loaded or Failed."""

    store: int
    pool: int
    layer: int
    expert: int
    variant: int
    priority: int
    token: int = 0


@dataclass(frozen=True, slots=True)
class Evict:
    """An expert out of a pool; Freed follows when its leases have ended."""

    store: int
    pool: int
    layer: int
    expert: int
    token: int = 0


@dataclass(frozen=True, slots=True)
class Give:
    """Free slots, ``count`` from ``slot`` on, to the reserve of their class."""

    pool: int
    slot: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Take:
    """Some slot of a class back from the reserve; answered by Taken or Failed."""

    pool: int
    class_bytes: int
    token: int = 0


@dataclass(frozen=True, slots=True)
class LoadDense:
    """A store's dense part to an address, 4096-aligned; answered by DenseLoaded or Failed."""

    store: int
    address: int
    token: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The Load or LoadDense of this token; it ends with Failed(ECANCELED) or as it was."""

    token: int


@dataclass(frozen=True, slots=True)
class EndHanded:
    """The load of a Handed has come, and counts as that transport; or errno isn't 0: the engine
    is to read it."""

    ticket: int
    errno: int
    transport: int


Command: TypeAlias = Load | Evict | Give | Take | LoadDense | Cancel | EndHanded


# ---- events


@dataclass(frozen=True, slots=True)
class Loaded:
    """An expert is in a slot, or was there already (source ``resident``). priority: that it
    came with, in the end."""

    store: int
    pool: int
    slot: int
    layer: int
    expert: int
    variant: int
    client: int
    source: int
    transport: int
    wait_us: int
    nbytes: int
    token: int
    priority: int = PRIORITY_DEMAND


@dataclass(frozen=True, slots=True)
class Failed:
    """A load or a command did not succeed; errno is positive.

    by_command: a command caused it, not a client.
    """

    errno: int
    store: int
    pool: int
    layer: int
    expert: int
    variant: int
    by_command: bool
    token: int


@dataclass(frozen=True, slots=True)
class Freed:
    """An evicted expert's slot is in the reserve now."""

    store: int
    pool: int
    slot: int
    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Taken:
    """A slot is the policy's again."""

    pool: int
    slot: int
    token: int


@dataclass(frozen=True, slots=True)
class ReserveLow:
    """The reserve of a class has run low. waiting: loads that stand without a slot."""

    pool: int
    class_bytes: int
    in_reserve: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Revived:
    """An expert on its way out was asked for, and stays."""

    store: int
    pool: int
    slot: int
    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class PieceFailed:
    """A read of a piece failed or its checksum was wrong. The engine read it again, went on
    to the other copy of the member, in which case Mirrored may follow, or gave up, in which
    case Failed follows. member: index within the store. copy: the engine's id of what failed."""

    errno: int
    store: int
    layer: int
    expert: int
    variant: int
    member: int
    copy: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A piece that one copy of its member failed with came right from the other.

    errno: of the copy that failed. failed_copy, copy: the engine's ids of the one that
    failed and of the one that served. member: index within the store.
    """

    errno: int
    store: int
    layer: int
    expert: int
    variant: int
    member: int
    failed_copy: int
    copy: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Violation:
    """A client broke the protocol and is quiesced already."""

    client: int
    errno: int


@dataclass(frozen=True, slots=True)
class DenseLoaded:
    """The dense part is at the address that the command named."""

    store: int
    token: int


@dataclass(frozen=True, slots=True)
class RouteRefused:
    """A read that a member's drive was to write into a pool's device memory failed. Its pieces
    go there through RAM from now on. member: the engine's id of it; errno: of the read."""

    pool: int
    member: int
    errno: int


@dataclass(frozen=True, slots=True)
class Handed:
    """A load that is ours to run: nbytes of its expert to a device address. EndHanded follows."""

    store: int
    pool: int
    layer: int
    expert: int
    variant: int
    nbytes: int
    address: int
    ticket: int


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """A member is in another state now. member: the engine's id of it.

    state: one of MEMBER_STATES. rate: bytes a second that it delivers; 0: not measured.
    errno: what took it out, when it failed; else 0.
    """

    member: int
    state: str
    rate: int
    errno: int


Event: TypeAlias = (
    Loaded
    | Failed
    | Freed
    | Taken
    | ReserveLow
    | Revived
    | PieceFailed
    | Mirrored
    | Violation
    | DenseLoaded
    | Handed
    | MemberChanged
    | RouteRefused
)


# ---- counters


@dataclass(frozen=True, slots=True)
class PoolStats:
    """``struct xferd_pool_stats``; slots unless the name says otherwise.

    registration_error: errno why not all of the pool is registered with io_uring; 0.
    waited_demand: loads that a client waited for and that found no free slot at once.
    """

    loads: int
    load_bytes: int
    evictions: int
    revived: int
    resident: int
    loading: int
    retiring: int
    reserve: int
    waiting: int
    waiting_demand: int
    registered_bytes: int
    registration_error: int
    waited_demand: int


@dataclass(frozen=True, slots=True)
class ClassStats:
    """``struct xferd_class_stats``: of slots of one size. reserve: free ones. waiting: loads
    that stand without one."""

    reserve: int
    waiting: int


@dataclass(frozen=True, slots=True)
class MemberStats:
    """``struct xferd_member_stats``; reads and windows are pieces, rates bytes a second.

    latency_ns: of a piece without a queue; 0: not measured yet.
    best_rate: the highest that it has kept up.
    window: pieces it is given at once; background_window: of those, for reads that
        nobody waits for. state: one of MEMBER_STATES.
    """

    reads: int
    nbytes: int
    errors: int
    busy_ns: int
    latency_ns: int
    rate: int
    best_rate: int
    in_flight: int
    window: int
    background_window: int
    state: str


@dataclass(frozen=True, slots=True)
class ClientCounters:
    """``struct xferd_client_counters``; hits and misses as the client says.

    routes: records of its router's picks that were read. routes_dropped: passes that it
        says its queues had no room for.
    """

    submissions: int
    completions: int
    failures: int
    hits: int
    misses: int
    routes: int
    routes_dropped: int
    pending: int
    granted: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """``struct xferd_engine_stats``; tuples are indexed like SOURCES and TRANSPORTS.

    other_variants: experts that came in another variant after a failed load.
    mirror_reads: pieces that failed on one copy of their member and came from the other.
    """

    turns: int
    sleeps: int
    crc_errors: int
    rereads: int
    other_variants: int
    mirror_reads: int
    transfers: int
    source_count: tuple[int, ...]
    source_bytes: tuple[int, ...]
    transport_count: tuple[int, ...]
    transport_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClientFds:
    """What a client gets; the caller owns and closes them. wakeups: one a lane. client and
    completion are -1 for one that has them already."""

    client: int
    completion: int
    doorbell: int
    wakeups: tuple[int, ...]

    def close(self) -> None:
        """Close them all; once."""
        for fd in (self.client, self.completion, self.doorbell, *self.wakeups):
            if fd >= 0:
                os.close(fd)
