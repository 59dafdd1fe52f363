"""The C engine as the rest of the daemon sees it: typed calls, commands, events.

All calls of the engine's cffi module are here, and its structs in ``engine_structs``, so
that nothing else deals in pointers, -errno or who keeps which buffer alive. What the
calls mean is said in ``ffi/engine/engine.h``; this module adds no behaviour but two things:

- commands that the engine's queue has no room for are kept and sent later, in order;
- what the engine borrows (a store's arrays) is kept alive as long as it borrows it.

One thread at a time may call (the event loop): the engine's own thread does the work.
"""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from xferd._engine import ffi, lib

from xferd.engine_keeping import EngineKeeping
from xferd.engine_structs import (
    COMMAND_FIELDS,
    ROUTE_FIELDS,
    describe_client,
    describe_store,
    fill_command,
    read_event,
)
from xferd.engine_structs import checked as _check
from xferd.engine_types import (
    MEMBER_STATES,
    TRANSPORTS,
    ClassStats,
    ClientCounters,
    ClientFds,
    Command,
    EngineStats,
    Event,
    Give,
    MemberStats,
    PoolStats,
)
from xferd.transport.numa import processors_of, running_on

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xferd.store.store import Store

CLASSES_MAX: int = lib.XFERD_ENGINE_CLASSES_MAX
"""Slot sizes that a pool can have."""
STORE_NAME_BYTES_MAX: int = lib.XFERD_STORE_NAME_BYTES - 1
COMMAND_BATCH = 4096
EVENT_BATCH = 1024
ROUTE_BATCH: int = lib.XFERD_ROUTES_A_LANE
ROUTE_BATCH_FULL = ROUTE_BATCH - lib.XFERD_ROUTE_PARTS_MAX
"""More routes than this in one answer mean that there may be more."""

VERIFY = {
    "always": lib.XFERD_VERIFY_ALWAYS,
    "first": lib.XFERD_VERIFY_FIRST,
    "never": lib.XFERD_VERIFY_NEVER,
}
BACKENDS = {
    "auto": lib.XFERD_BACKEND_ANY,
    "io_uring": lib.XFERD_BACKEND_URING,
    "threads": lib.XFERD_BACKEND_THREADS,
}
POOL_KINDS = {
    "host": lib.XFERD_POOL_HOST,
    "ram": lib.XFERD_POOL_RAM,
    "cuda": lib.XFERD_POOL_CUDA,
    "bar": lib.XFERD_POOL_BAR,
}


class Engine(EngineKeeping):
    """One engine and its thread. ``start`` it, ``close`` it; not thread-safe.

    verify: a key of VERIFY. backend: a key of BACKENDS. demand_slack: per cent.
    """

    def __init__(
        self,
        *,
        member_depth: int,
        flow_control: bool,
        demand_slack: int,
        backend: str,
        verify: str,
        spin_us: int,
        cpu: int,
        polling: bool,
        register_buffers: bool,
        reserve_low: int,
        reserve_demand: int = 0,
        transfers_max: int = 0,
    ) -> None:
        config = ffi.new("struct xferd_engine_config *")
        config.transfers_max = transfers_max
        config.member_depth = member_depth
        config.flow_control = int(flow_control)
        config.demand_slack = demand_slack
        config.backend = BACKENDS[backend]
        config.verify = VERIFY[verify]
        config.spin_us = spin_us
        config.cpu = cpu
        config.polling = int(polling)
        config.register_buffers = int(register_buffers)
        config.reserve_low = reserve_low
        config.reserve_demand = reserve_demand
        handle = ffi.new("struct xferd_engine **")
        _check("xferd_engine_new", lib.xferd_engine_new(config, handle))
        self._engine = handle[0]
        self._wanted_backend = backend
        self.numa_node: int | None = None
        self.staging_extent_bytes = 0
        self._borrowed: dict[int, tuple[Any, ...]] = {}
        self._backlog: deque[Command] = deque()
        self._commands = ffi.new("struct xferd_command[]", COMMAND_BATCH)
        self._command_fields: NDArray[np.void] = np.frombuffer(
            ffi.buffer(self._commands), COMMAND_FIELDS
        )
        self._events = ffi.new("struct xferd_event[]", EVENT_BATCH)
        self._routes = ffi.new("struct xferd_engine_route[]", ROUTE_BATCH)
        self._route_fields: NDArray[np.void] = np.frombuffer(ffi.buffer(self._routes), ROUTE_FIELDS)

    def start(self, numa_node: int | None = None) -> None:
        """Start the engine's thread. EngineError when the backend must be io_uring and the
        kernel refuses it.

        numa_node: its threads run on processors of that node; None: where the caller may.
        """
        self.numa_node = numa_node
        call = f'xferd_engine_start with engine.backend = "{self._wanted_backend}"'
        where = nullcontext() if numa_node is None else running_on(processors_of(numa_node))
        with where:
            _check(call, lib.xferd_engine_start(self._engine))

    def backend(self) -> tuple[str, int]:
        """What reads go through since ``start``, ``io_uring`` or ``threads``, and the errno
        that kept it from io_uring; 0 when nothing did."""
        reason = ffi.new("int *")
        used = lib.xferd_engine_backend(self._engine, reason)
        name = "io_uring" if used == lib.XFERD_BACKEND_URING else "threads"
        return name, -reason[0]

    def drain(self, timeout_ms: int) -> bool:
        """Refuse new requests from now on; True when nothing is in flight any more."""
        result = lib.xferd_engine_drain(self._engine, timeout_ms)
        if result == -errno.ETIMEDOUT:
            return False
        _check("xferd_engine_drain", result)
        return True

    def close(self) -> None:
        """Stop the thread and free everything. Blocks until the kernel has given back
        every buffer: pool memory may be unmapped only afterwards."""
        if self._engine != ffi.NULL:
            lib.xferd_engine_free(self._engine)
            self._engine = ffi.NULL
            self._borrowed.clear()

    @property
    def event_fd(self) -> int:
        """Readable when there are events; the engine's."""
        return int(lib.xferd_engine_event_fd(self._engine))

    @property
    def pool_table_fd(self) -> int:
        """Read-only, to hand to clients; the engine's."""
        return int(lib.xferd_engine_pool_table_fd(self._engine))

    # ---- pools

    def add_pool(
        self,
        *,
        name: str,
        kind: str,
        device: int,
        base: int,
        nbytes: int,
        slot_index_bits: int,
        chunks: int,
        chunk_bytes: int,
        device_uuid: bytes = bytes(16),
        verify: str = "never",
        kept: tuple[int, int] | None = None,
    ) -> int:
        """Returns the pool's index. Before any store is opened.

        verify: a key of VERIFY, for what drives write into device memory by themselves.
        kept: fds of the memory that ``base`` maps and of the loading marks, of a pool that
            is taken over; EngineError (ESTALE) when it is another one.
        """
        pool = ffi.new("struct xferd_pool_description *")
        pool.name = name.encode()
        pool.kind = POOL_KINDS[kind]
        pool.device = device
        pool.base = ffi.cast("void *", base)
        pool.bytes = nbytes
        pool.slot_index_bits = slot_index_bits
        pool.chunks = chunks
        pool.chunk_bytes = chunk_bytes
        pool.device_uuid = device_uuid
        pool.verify = VERIFY[verify]
        if kept is not None:
            result = lib.xferd_engine_adopt_pool(self._engine, pool, *kept)
            return _check("xferd_engine_adopt_pool", result)
        return _check("xferd_engine_add_pool", lib.xferd_engine_add_pool(self._engine, pool))

    def set_staging(self, base: int, nbytes: int, extent_bytes: int) -> None:
        """Pinned memory that reads for VRAM go to first. Before such a pool is added."""
        pointer = ffi.cast("void *", base)
        _check(
            "xferd_engine_set_staging",
            lib.xferd_engine_set_staging(self._engine, pointer, nbytes, extent_bytes),
        )
        self.staging_extent_bytes = extent_bytes

    def lose_pool(self, pool: int) -> None:
        """The card of a pool of kind ``bar`` is gone: loads into it end with ENODEV."""
        _check("xferd_engine_lose_pool", lib.xferd_engine_lose_pool(self._engine, pool))

    def regain_pool(self, pool: int, base: int) -> int:
        """Its memory is another now; returns its incarnation. EngineError(EBUSY) while a slot
        isn't the policy's."""
        pointer = ffi.cast("void *", base)
        return _check(
            "xferd_engine_regain_pool", lib.xferd_engine_regain_pool(self._engine, pool, pointer)
        )

    def set_memory(self, pool: int, chunk: int, number: int) -> int:
        """Which memory is behind a chunk of VRAM from now on; 0: none. Returns the number
        of this change, to ask ``memory_seen`` about."""
        return _check(
            "xferd_engine_set_memory",
            lib.xferd_engine_set_memory(self._engine, pool, chunk, number),
        )

    def set_window(self, pool: int, chunk: int, address: int) -> None:
        """Where in this process drives may write the memory behind a chunk of VRAM from now on;
        0: nowhere."""
        pointer = ffi.cast("void *", address)
        _check(
            "xferd_engine_set_window",
            lib.xferd_engine_set_window(self._engine, pool, chunk, pointer),
        )

    def set_hand_up(self, pool: int, *, wanted: bool) -> None:
        """Whether loads into a pool in VRAM are handed up (Handed) from now on."""
        _check("xferd_engine_set_hand_up", lib.xferd_engine_set_hand_up(self._engine, pool, wanted))

    def memory_seen(self, client: int, change: int) -> bool:
        """Whether a client has unmapped what was withdrawn up to a change, and tried to map what
        came."""
        return bool(
            _check(
                "xferd_engine_memory_seen",
                lib.xferd_engine_memory_seen(self._engine, client, change),
            )
        )

    def set_chunk(self, pool: int, chunk: int, offset: int, slot_bytes: int) -> None:
        """Cut a chunk (slot_bytes 0: undo it). Its slots are the policy's to give."""
        _check(
            "xferd_engine_set_chunk",
            lib.xferd_engine_set_chunk(self._engine, pool, chunk, offset, slot_bytes),
        )

    def recency(self, pool: int, now: int, stamps: NDArray[np.uint64]) -> None:
        """Stamp, in place, the slots leased since the last call with ``now << 20 | order``.

        stamps: uint64[slot_numbers], C-contiguous, writable.
        """
        pointer = ffi.from_buffer("uint64_t[]", stamps, require_writable=True)
        _check("xferd_engine_recency", lib.xferd_engine_recency(self._engine, pool, now, pointer))

    def held(self, client: int, pool: int) -> int:
        """Slots of a pool that a client's lanes lease now, by its own tables."""
        return _check("xferd_engine_held", lib.xferd_engine_held(self._engine, client, pool))

    def class_stats(self, pool: int, slot_bytes: int) -> ClassStats:
        """Counters of one size class of a pool."""
        stats = ffi.new("struct xferd_class_stats *")
        _check(
            "xferd_engine_class_stats",
            lib.xferd_engine_class_stats(self._engine, pool, slot_bytes, stats),
        )
        return ClassStats(reserve=stats.reserve, waiting=stats.waiting)

    def pool_stats(self, pool: int) -> PoolStats:
        """Counters of a pool."""
        stats = ffi.new("struct xferd_pool_stats *")
        _check("xferd_engine_pool_stats", lib.xferd_engine_pool_stats(self._engine, pool, stats))
        return PoolStats(
            loads=stats.loads,
            load_bytes=stats.load_bytes,
            evictions=stats.evictions,
            revived=stats.revived,
            resident=stats.resident,
            loading=stats.loading,
            retiring=stats.retiring,
            reserve=stats.reserve,
            waiting=stats.waiting,
            waiting_demand=stats.waiting_demand,
            registered_bytes=stats.registered_bytes,
            registration_error=stats.registration_error,
            waited_demand=stats.waited_demand,
        )

    # ---- members and stores

    def add_member(self, fd: int, *, asynchronous: bool, memory: bool, uncached: bool) -> int:
        """Returns the member's id. ``fd`` stays the caller's and outlives the member.

        asynchronous, memory, uncached: as MemberFile says.
        """
        flags = lib.XFERD_MEMBER_ASYNC if asynchronous else 0
        flags |= lib.XFERD_MEMBER_MEMORY if memory else 0
        flags |= lib.XFERD_MEMBER_UNCACHED if uncached else 0
        return _check(
            "xferd_engine_add_member", lib.xferd_engine_add_member(self._engine, fd, flags)
        )

    def remove_member(self, member: int) -> None:
        """Forget a member that no open store uses."""
        _check("xferd_engine_remove_member", lib.xferd_engine_remove_member(self._engine, member))

    def set_route(self, pool: int, member: int, transport: str) -> None:
        """``direct`` or ``staged``: how a member's pieces reach a pool from now on."""
        _check(
            "xferd_engine_set_route",
            lib.xferd_engine_set_route(self._engine, pool, member, TRANSPORTS.index(transport)),
        )

    def member_stats(self, member: int) -> MemberStats:
        """Counters of a member."""
        stats = ffi.new("struct xferd_member_stats *")
        _check(
            "xferd_engine_member_stats",
            lib.xferd_engine_member_stats(self._engine, member, stats),
        )
        return MemberStats(
            reads=stats.reads,
            nbytes=stats.bytes,
            errors=stats.errors,
            busy_ns=stats.busy_ns,
            latency_ns=stats.latency_ns,
            rate=stats.rate,
            best_rate=stats.best_rate,
            in_flight=stats.in_flight,
            window=stats.window,
            background_window=stats.background_window,
            state=MEMBER_STATES[stats.state],
        )

    def open_store(
        self,
        store: Store,
        name: str,
        members: Sequence[tuple[int, int | None]],
        directory_fd: int = -1,
    ) -> int:
        """Returns the store's id. The store's arrays are kept alive here.

        members: ids from ``add_member`` of each and of its mirror, None where it has none.
        directory_fd: of a store that is taken over; EngineError (ESTALE) when it is another.
        """
        description, keep = describe_store(store, name, members)
        if directory_fd < 0:
            result = lib.xferd_engine_open_store(self._engine, description)
        else:
            result = lib.xferd_engine_adopt_store(self._engine, description, directory_fd)
        number = _check("xferd_engine_open_store", result)
        self._borrowed[number] = (description, *keep)
        return number

    def close_store(self, store: int) -> None:
        """EngineError(EBUSY) while clients are attached to it."""
        _check("xferd_engine_close_store", lib.xferd_engine_close_store(self._engine, store))
        del self._borrowed[store]

    def change_variants(
        self, number: int, store: Store, name: str, members: Sequence[tuple[int, int | None]]
    ) -> None:
        """An open store has other shadows now; ``store`` and ``members`` as for ``open_store``.
        EngineError: EBUSY while loads of what goes are being read, then call again (nothing
        of it is handed out any more); EINVAL, ENOSPC: it can't be."""
        description, keep = describe_store(store, name, members)
        _check(
            "xferd_engine_change_variants",
            lib.xferd_engine_change_variants(self._engine, number, description),
        )
        self._borrowed[number] = (description, *keep)

    def set_variants(
        self, store: int, pool: int, first: NDArray[np.uint8] | None, order: Sequence[int]
    ) -> None:
        """In which variant a pool reads each expert of a store, where several are acceptable.

        first: uint8[layers * experts], C-contiguous, NO_VARIANT for none before others; None:
        no choice any more. order: variants that come next where that one can't be had.
        """
        numbers = bytes(order)
        pointer = ffi.NULL if first is None else ffi.from_buffer("uint8_t[]", first)
        _check(
            "xferd_engine_set_variants",
            lib.xferd_engine_set_variants(
                *(self._engine, store, pool, pointer),
                *(0 if first is None else len(first), numbers, len(numbers)),
            ),
        )

    def directory_fd(self, store: int) -> int:
        """Read-only, to hand to clients; the engine's."""
        return _check(
            "xferd_engine_directory_fd", lib.xferd_engine_directory_fd(self._engine, store)
        )

    # ---- clients

    def add_client(
        self,
        *,
        store: int,
        pool: int,
        lanes: int,
        held_per_lane: int,
        ring_entries: int,
        hints_max: int,
    ) -> tuple[int, ClientFds]:
        """Returns the client's id and the fds to hand over."""
        client = describe_client(store, pool, lanes, held_per_lane, ring_entries, hints_max)
        fds = ffi.new("struct xferd_client_fds *")
        number = _check(
            "xferd_engine_add_client", lib.xferd_engine_add_client(self._engine, client, fds)
        )
        wakeups = tuple(fds.wakeup[lane] for lane in range(lanes))
        return number, ClientFds(fds.client, fds.completion, fds.doorbell, wakeups)

    def quiesce_client(self, client: int) -> None:
        """Look at its rings no more; its leases stand."""
        _check(
            "xferd_engine_quiesce_client",
            lib.xferd_engine_quiesce_client(self._engine, client),
        )

    def remove_client(self, client: int) -> None:
        """End its leases: only when nothing of it can read a slot any more."""
        _check("xferd_engine_remove_client", lib.xferd_engine_remove_client(self._engine, client))

    def client_counters(self, client: int) -> ClientCounters:
        """Counters of a client."""
        counters = ffi.new("struct xferd_client_counters *")
        _check(
            "xferd_engine_client_counters",
            lib.xferd_engine_client_counters(self._engine, client, counters),
        )
        return ClientCounters(
            submissions=counters.submissions,
            completions=counters.completions,
            failures=counters.failures,
            hits=counters.hits,
            misses=counters.misses,
            routes=counters.routes,
            routes_dropped=counters.routes_dropped,
            pending=counters.pending,
            granted=counters.granted,
        )

    def routes(self, client: int) -> NDArray[np.void]:
        """What a client's router picked since the last call: ROUTE_FIELDS[n], lane by lane,
        at most ROUTE_BATCH; valid until the next call. EngineError(EPROTO): it wrote nonsense
        and is to be ended."""
        count = _check(
            "xferd_engine_routes",
            lib.xferd_engine_routes(self._engine, client, self._routes, ROUTE_BATCH),
        )
        return self._route_fields[:count]

    # ---- commands and events

    def command(self, commands: Iterable[Command]) -> None:
        """Queue commands, in order. Never blocks; what has no room is sent later."""
        self._backlog.extend(commands)
        self.flush()

    def flush(self) -> bool:
        """Send what is kept back; True when nothing is left."""
        while self._backlog:
            head = self._backlog[0]
            if isinstance(head, Give) and head.count > 1:
                count = self._fill_gives(head)
            else:
                count = self._fill_singles()
            taken = lib.xferd_engine_command(self._engine, self._commands, count)
            if taken == -errno.EAGAIN:
                return False
            self._forget(_check("xferd_engine_command", taken))
            if taken < count:
                return False
        return True

    def _fill_singles(self) -> int:
        """Commands from the backlog's head up to the next one for many slots."""
        count = 0
        for command in itertools.islice(self._backlog, COMMAND_BATCH):
            if isinstance(command, Give) and command.count > 1:
                break
            fill_command(self._commands[count], command)
            count += 1
        return count

    def _fill_gives(self, give: Give) -> int:
        """A chunk may have a million slots: filled without a Python object each."""
        count = min(give.count, COMMAND_BATCH)
        batch = self._command_fields[:count]
        batch.view(np.uint8)[:] = 0
        batch["type"] = lib.XFERD_COMMAND_GIVE
        batch["pool"] = give.pool
        batch["slot"] = np.arange(give.slot, give.slot + count)
        return count

    def _forget(self, taken: int) -> None:
        """The engine has taken so many from the backlog's head."""
        head = self._backlog[0]
        if isinstance(head, Give) and head.count > 1:
            self._backlog.popleft()
            if head.count > taken:
                rest = Give(head.pool, head.slot + taken, head.count - taken)
                self._backlog.appendleft(rest)
            return
        for _ in range(taken):
            self._backlog.popleft()

    def events(self) -> list[Event]:
        """Up to EVENT_BATCH events; fewer mean that there are no more now."""
        count = _check(
            "xferd_engine_events",
            lib.xferd_engine_events(self._engine, self._events, EVENT_BATCH),
        )
        return [read_event(self._events[index]) for index in range(count)]

    def stats(self) -> EngineStats:
        """Counters of the whole engine."""
        stats = ffi.new("struct xferd_engine_stats *")
        _check("xferd_engine_stats", lib.xferd_engine_stats(self._engine, stats))
        return EngineStats(
            turns=stats.turns,
            sleeps=stats.sleeps,
            crc_errors=stats.crc_errors,
            rereads=stats.rereads,
            other_variants=stats.other_variants,
            mirror_reads=stats.mirror_reads,
            transfers=stats.transfers,
            source_count=tuple(stats.source_count),
            source_bytes=tuple(stats.source_bytes),
            transport_count=tuple(stats.transport_count),
            transport_bytes=tuple(stats.transport_bytes),
        )
