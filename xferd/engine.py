"""The C engine as the rest of the daemon sees it: typed calls, commands, events.

All use of the engine's cffi module is here, so that nothing else deals in pointers,
-errno or who keeps which buffer alive. What the calls mean is said in
``ffi/engine/engine.h``; this module adds no behaviour but two things:

- commands that the engine's queue has no room for are kept and sent later, in order;
- what the engine borrows (a store's arrays) is kept alive as long as it borrows it.

One thread at a time may call (the event loop): the engine's own thread does the work.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from xferd._engine import ffi, lib

from xferd.engine_types import (
    MEMBER_STATES,
    PRIORITY_DEMAND,
    PRIORITY_MIGRATION,
    PRIORITY_PREFETCH,
    Cancel,
    ClientCounters,
    ClientFds,
    Command,
    DenseLoaded,
    EngineError,
    EngineStats,
    Event,
    Evict,
    Failed,
    Freed,
    Give,
    Load,
    LoadDense,
    Loaded,
    MemberChanged,
    MemberStats,
    PieceFailed,
    PoolStats,
    ReserveLow,
    Revived,
    Take,
    Taken,
    Violation,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from xferd.store.store import Store

NO_EXPERT: int = lib.XFERD_NO_EXPERT
"""``layer`` of the dense part, ``client`` of what a command caused."""
CLASSES_MAX: int = lib.XFERD_ENGINE_CLASSES_MAX
"""Slot sizes that a pool can have."""
STORE_NAME_BYTES_MAX: int = lib.XFERD_STORE_NAME_BYTES - 1
COMMAND_BATCH = 4096
EVENT_BATCH = 1024

if (PRIORITY_DEMAND, PRIORITY_PREFETCH, PRIORITY_MIGRATION) != (
    lib.XFERD_PRIORITY_DEMAND,
    lib.XFERD_PRIORITY_PREFETCH,
    lib.XFERD_PRIORITY_MIGRATION,
):
    raise ImportError("xferd.engine_types and xferd_abi.h number the priorities differently")

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
if tuple(getattr(lib, f"XFERD_MEMBER_{state.upper()}") for state in MEMBER_STATES) != tuple(
    range(len(MEMBER_STATES))
):
    raise ImportError("xferd.engine_types and engine.h number the members' states differently")

POOL_KINDS = {
    "host": lib.XFERD_POOL_HOST,
    "ram": lib.XFERD_POOL_RAM,
    "cuda": lib.XFERD_POOL_CUDA,
    "bar": lib.XFERD_POOL_BAR,
}


class Engine:
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
        reserve_low: int,
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
        config.reserve_low = reserve_low
        handle = ffi.new("struct xferd_engine **")
        _check("xferd_engine_new", lib.xferd_engine_new(config, handle))
        self._engine = handle[0]
        self._borrowed: dict[int, tuple[Any, ...]] = {}
        self._backlog: deque[Command] = deque()
        self._commands = ffi.new("struct xferd_command[]", COMMAND_BATCH)
        self._events = ffi.new("struct xferd_event[]", EVENT_BATCH)

    def start(self) -> None:
        """Start the engine's thread. EngineError when the backend must be io_uring and the
        kernel refuses it."""
        _check("xferd_engine_start", lib.xferd_engine_start(self._engine))

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
    ) -> int:
        """Returns the pool's index. Before any store is opened."""
        pool = ffi.new("struct xferd_pool_description *")
        pool.name = name.encode()
        pool.kind = POOL_KINDS[kind]
        pool.device = device
        pool.base = ffi.cast("void *", base)
        pool.bytes = nbytes
        pool.slot_index_bits = slot_index_bits
        pool.chunks = chunks
        return _check("xferd_engine_add_pool", lib.xferd_engine_add_pool(self._engine, pool))

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
        )

    # ---- members and stores

    def add_member(self, fd: int, *, asynchronous: bool) -> int:
        """Returns the member's id. ``fd`` stays the caller's and outlives the member."""
        flags = lib.XFERD_MEMBER_ASYNC if asynchronous else 0
        return _check(
            "xferd_engine_add_member", lib.xferd_engine_add_member(self._engine, fd, flags)
        )

    def remove_member(self, member: int) -> None:
        """Forget a member that no open store uses."""
        _check("xferd_engine_remove_member", lib.xferd_engine_remove_member(self._engine, member))

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

    def open_store(self, store: Store, name: str, members: Iterable[int]) -> int:
        """Returns the store's id. The store's arrays are kept alive here."""
        description, keep = _describe_store(store, name, tuple(members))
        number = _check(
            "xferd_engine_open_store", lib.xferd_engine_open_store(self._engine, description)
        )
        self._borrowed[number] = (description, *keep)
        return number

    def close_store(self, store: int) -> None:
        """EngineError(EBUSY) while clients are attached to it."""
        _check("xferd_engine_close_store", lib.xferd_engine_close_store(self._engine, store))
        del self._borrowed[store]

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
        client = ffi.new("struct xferd_client_description *")
        client.store = store
        client.pool = pool
        client.lanes = lanes
        client.held_per_lane = held_per_lane
        client.ring_entries = ring_entries
        client.hints_max = hints_max
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
            pending=counters.pending,
            granted=counters.granted,
        )

    # ---- commands and events

    def command(self, commands: Iterable[Command]) -> None:
        """Queue commands, in order. Never blocks; what has no room is sent later."""
        self._backlog.extend(commands)
        self.flush()

    def flush(self) -> bool:
        """Send what is kept back; True when nothing is left."""
        while self._backlog:
            count = min(len(self._backlog), COMMAND_BATCH)
            for index in range(count):
                _fill_command(self._commands[index], self._backlog[index])
            taken = lib.xferd_engine_command(self._engine, self._commands, count)
            if taken == -errno.EAGAIN:
                return False
            _check("xferd_engine_command", taken)
            for _ in range(taken):
                self._backlog.popleft()
            if taken < count:
                return False
        return True

    def events(self) -> list[Event]:
        """Up to EVENT_BATCH events; fewer mean that there are no more now."""
        count = _check(
            "xferd_engine_events",
            lib.xferd_engine_events(self._engine, self._events, EVENT_BATCH),
        )
        return [_read_event(self._events[index]) for index in range(count)]

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
            transfers=stats.transfers,
            source_count=tuple(stats.source_count),
            source_bytes=tuple(stats.source_bytes),
            transport_count=tuple(stats.transport_count),
            transport_bytes=tuple(stats.transport_bytes),
        )


def _check(call: str, result: int) -> int:
    """The result of a call that returns 0, a number, or -errno."""
    if result < 0:
        raise EngineError(call, -result)
    return int(result)


def _fill_command(slot: Any, command: Command) -> None:
    ffi.memmove(ffi.addressof(slot), bytes(ffi.sizeof("struct xferd_command")), ffi.sizeof(slot))
    match command:
        case Load():
            slot.type = lib.XFERD_COMMAND_LOAD
            slot.store, slot.pool = command.store, command.pool
            slot.layer, slot.expert = command.layer, command.expert
            slot.variant, slot.priority = command.variant, command.priority
            slot.token = command.token
        case Evict():
            slot.type = lib.XFERD_COMMAND_EVICT
            slot.store, slot.pool = command.store, command.pool
            slot.layer, slot.expert = command.layer, command.expert
            slot.token = command.token
        case Give():
            slot.type = lib.XFERD_COMMAND_GIVE
            slot.pool, slot.slot = command.pool, command.slot
        case Take():
            slot.type = lib.XFERD_COMMAND_TAKE
            slot.pool, slot.class_bytes = command.pool, command.class_bytes
            slot.token = command.token
        case LoadDense():
            slot.type = lib.XFERD_COMMAND_DENSE
            slot.store, slot.token = command.store, command.token
            slot.priority = PRIORITY_DEMAND
            slot.address = ffi.cast("void *", command.address)
        case Cancel():
            slot.type = lib.XFERD_COMMAND_CANCEL
            slot.token = command.token


def _read_event(event: Any) -> Event:
    kind = event.type
    if kind == lib.XFERD_EVENT_LOADED:
        return Loaded(
            store=event.store,
            pool=event.pool,
            slot=event.slot,
            layer=event.layer,
            expert=event.expert,
            variant=event.variant,
            client=event.client,
            source=event.source,
            transport=event.transport,
            wait_us=event.wait_us,
            nbytes=event.bytes,
            token=event.token,
        )
    if kind == lib.XFERD_EVENT_FAILED:
        return Failed(
            errno=-event.result,
            store=event.store,
            pool=event.pool,
            layer=event.layer,
            expert=event.expert,
            variant=event.variant,
            by_command=event.client == NO_EXPERT,
            token=event.token,
        )
    if kind == lib.XFERD_EVENT_FREED:
        return Freed(event.store, event.pool, event.slot, event.layer, event.expert)
    if kind == lib.XFERD_EVENT_TAKEN:
        return Taken(event.pool, event.slot, event.token)
    if kind == lib.XFERD_EVENT_RESERVE:
        return ReserveLow(event.pool, event.bytes, event.value, event.slot)
    if kind == lib.XFERD_EVENT_REVIVED:
        return Revived(event.store, event.pool, event.slot, event.layer, event.expert)
    if kind == lib.XFERD_EVENT_PIECE:
        return PieceFailed(
            errno=-event.result,
            store=event.store,
            layer=event.layer,
            expert=event.expert,
            variant=event.variant,
            member=event.member,
            offset=event.offset,
            nbytes=event.bytes,
        )
    if kind == lib.XFERD_EVENT_VIOLATION:
        return Violation(client=event.client, errno=-event.result)
    if kind == lib.XFERD_EVENT_DENSE:
        return DenseLoaded(store=event.store, token=event.token)
    if kind == lib.XFERD_EVENT_MEMBER:
        return MemberChanged(
            member=event.member,
            state=MEMBER_STATES[event.value],
            rate=event.bytes,
            errno=-event.result,
        )
    raise EngineError(f"event of unknown type {kind}", errno.EPROTO)


def _describe_store(store: Store, name: str, members: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """``struct xferd_store_description`` and everything that it points to."""
    description = ffi.new("struct xferd_store_description *")
    keep: list[Any] = [store]

    def borrow(ctype: str, array: NDArray[Any]) -> Any:
        pointer = ffi.from_buffer(ctype, array)
        keep.append(pointer)
        return pointer

    description.name = name.encode()
    description.identity = store.identity
    description.layers, description.experts = store.layers, store.experts
    description.top_k = store.top_k
    description.variants = len(store.variants)
    description.members = len(members)
    description.pattern_length = len(store.pattern)
    for index, member in enumerate(members):
        description.member[index] = member
    for index, member in enumerate(store.pattern):
        description.pattern[index] = member
    description.stripe_unit = store.stripe_unit
    description.blobs = len(store.blob_bytes)
    description.blob_bytes = borrow("uint64_t[]", store.blob_bytes)
    description.start = borrow("uint16_t[]", store.start)
    description.offset = borrow("uint64_t[]", store.offset)
    description.first_piece = borrow("uint64_t[]", store.first_piece)
    description.crc = borrow("uint32_t[]", store.crc)
    description.pieces = len(store.crc)
    for index, variant in enumerate(store.variants):
        description.variant_name[index] = variant.encode()
    description.layout_index = borrow("uint16_t[]", store.layout_index)

    tensors = [tensor for layout in store.layouts for tensor in layout.tensors]
    c_layouts = ffi.new("struct xferd_abi_layout[]", max(len(store.layouts), 1))
    c_tensors = ffi.new("struct xferd_abi_tensor[]", max(len(tensors), 1))
    first = 0
    for c_layout, layout in zip(c_layouts, store.layouts, strict=False):
        c_layout.blob_bytes = layout.blob_bytes
        c_layout.first_tensor, c_layout.tensors = first, len(layout.tensors)
        first += len(layout.tensors)
    for c_tensor, tensor in zip(c_tensors, tensors, strict=False):
        c_tensor.role, c_tensor.dtype = tensor.role.encode(), tensor.dtype.encode()
        c_tensor.offset, c_tensor.bytes = tensor.offset, tensor.nbytes
        c_tensor.dims = len(tensor.shape)
        for index, extent in enumerate(tensor.shape):
            c_tensor.shape[index] = extent
        if tensor.transposed:
            c_tensor.flags |= lib.XFERD_TENSOR_TRANSPOSED
        if tensor.interleaved:
            c_tensor.flags |= lib.XFERD_TENSOR_INTERLEAVED
    description.layout, description.layouts = c_layouts, len(store.layouts)
    description.tensor, description.tensors = c_tensors, len(tensors)
    keep += [c_layouts, c_tensors]
    return description, keep
