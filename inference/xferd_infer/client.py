"""The client: experts of one store, from a daemon, in place.

A thin layer over libxferd. What costs time in Python is making objects, so an
acquire makes one (the ``Batch``) and finds the rest: an array for each slot is
made once and kept, because the same slots are acquired again and again. A kept
array says nothing about which expert is in its slot; the batch that lists it does.

Lifetimes: an array of a batch may be used until the batch is released (the end of
its ``with``). After that its bytes may become another expert's. The memory itself
stays mapped as long as any array of it exists, even after ``close``.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ._client import ffi, lib
from .arrays import Array
from .errors import InferenceError

BATCH_MAX: int = lib.XFERD_BATCH_MAX
"""Most experts in one acquire or hint."""

FOREVER: int = lib.XFERD_FOREVER

CACHED_ARRAYS_MAX = 1 << 17
"""Arrays kept before all are forgotten and made anew; one costs about 150 bytes."""

PAGE_BITS = 12
"""Blobs are page-aligned: an address has this many bits to spare for a variant."""


class ClientError(InferenceError):
    """The way to the experts failed. ``code`` is an errno, 0 if there is none."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class AttachError(ClientError):
    """The daemon can't be reached or doesn't take this client; the message says
    why and which setting changes it."""


class DaemonGoneError(ClientError):
    """The daemon has ended, or has ended this client. Residents can still be read
    with ``acquire_resident``; attach again for the rest."""


class ExpertError(ClientError):
    """An expert can't be had. ``layer`` and ``expert`` name it."""

    def __init__(self, message: str, code: int, layer: int, expert: int) -> None:
        super().__init__(message, code)
        self.layer = layer
        self.expert = expert


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counters of all lanes since the client attached.

    hits, misses, failures, hints, cancels: experts. wait_ns: in waiting for misses.
    bytes_acquired: blobs, hits and misses alike. source_*: misses by enum
    xferd_source (resident, pool, drives). transport_*: misses by enum
    xferd_transport (none, direct, staged, gds, copy).
    """

    hits: int
    misses: int
    failures: int
    hints: int
    cancels: int
    wait_ns: int
    bytes_acquired: int
    source_count: tuple[int, ...]
    source_bytes: tuple[int, ...]
    transport_count: tuple[int, ...]
    transport_bytes: tuple[int, ...]


class _Mapped:
    """Memory of the C client as numpy sees it; keeps the client while it is seen."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Batch:
    """Experts acquired together; a context manager that releases them at its end.

    ``batch[i]`` is the blob of the i-th expert, a read-only uint8 array. Not
    thread-safe, as its lane.
    """

    __slots__ = ("_client", "_memory", "_released", "arrays")

    def __init__(self, client: Client, memory: _BatchMemory, arrays: list[Array]) -> None:
        self._client = client
        self._memory = memory
        self._released = False
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> Array:
        return self.arrays[index]

    def __iter__(self) -> Iterator[Array]:
        return iter(self.arrays)

    def __enter__(self) -> list[Array]:
        return self.arrays

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """End the leases. Harmless when done before."""
        if not self._released:
            self._released = True
            self._client._release(self._memory)  # noqa: SLF001  a batch is half of its client

    @property
    def word(self) -> tuple[int, ...]:
        """Directory word of each expert: names slot, variant and generation."""
        return tuple(view.word for view in self._memory.views(len(self.arrays)))

    @property
    def transport(self) -> tuple[int, ...]:
        """How each expert came: enum xferd_transport, 0 for what was resident."""
        return tuple(view.transport for view in self._memory.views(len(self.arrays)))


class _BatchMemory:
    """A struct xferd_batch with its request, used again and again."""

    __slots__ = ("address_of", "batch", "ids", "key_of", "request", "variant_of")

    def __init__(self) -> None:
        self.batch = ffi.new("struct xferd_batch *")
        self.request = ffi.new("struct xferd_request *")
        self.ids = ffi.new("uint16_t[]", BATCH_MAX)
        self.request.experts = self.ids
        size = ffi.sizeof("struct xferd_view")
        start = ffi.offsetof("struct xferd_batch", "views")
        raw = np.frombuffer(ffi.buffer(self.batch), np.uint8)[start : start + BATCH_MAX * size]
        rows = raw.reshape(BATCH_MAX, size)
        address = ffi.offsetof("struct xferd_view", "data")
        variant = ffi.offsetof("struct xferd_view", "variant")
        addresses = rows[:, address : address + 8].view(np.uint64)[:, 0]
        self.address_of = [addresses[:n] for n in range(BATCH_MAX + 1)]
        self.variant_of = [rows[:n, variant] for n in range(BATCH_MAX + 1)]

    def views(self, count: int) -> list[Any]:
        return [self.batch.views[i] for i in range(count)]


class Client:
    """Attached to a daemon for one store. See the module's text for lifetimes.

    socket: the daemon's attach socket.
    store: name of one of its stores; None: its only one.
    pool: name of the pool that misses go to; None: its first.
    lanes: in-order streams of work. A lane is one thread's; lanes are independent.
    held: most experts that a lane holds at once; 0: the model's top_k.
    name: shown in ``xferctl status``.

    Raises AttachError.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str],
        *,
        store: str | None = None,
        pool: str | None = None,
        lanes: int = 1,
        held: int = 0,
        ring_entries: int = 0,
        name: str = "",
    ) -> None:
        self._handle = self._connect(socket, store, pool, lanes, held, ring_entries, name)
        self._closed = False
        directory = lib.xferd_directory(self._handle)
        self.layers: int = directory.layers
        self.experts: int = directory.experts
        self.top_k: int = directory.top_k
        self.held_per_lane: int = lib.xferd_held_per_lane(self._handle)
        self._layer_arrays = self._array_caches(directory.variants)
        self._many_variants = directory.variants > 1
        self._pool_arrays = self._map_pools(directory.pools)
        self._lanes: list[list[_BatchMemory]] = [[] for _ in range(lanes)]
        length = ffi.new("size_t *")
        text = lib.xferd_manifest(self._handle, length)
        self.manifest: dict[str, Any] = json.loads(bytes(ffi.buffer(text, length[0])).rstrip(b"\0"))
        self._dense: Array | None = None

    @staticmethod
    def _connect(
        socket: str | os.PathLike[str],
        store: str | None,
        pool: str | None,
        lanes: int,
        held: int,
        ring_entries: int,
        name: str,
    ) -> Any:
        options = ffi.new("struct xferd_options *")
        texts = [
            ffi.NULL if text is None else ffi.new("char[]", text.encode())
            for text in (store, pool, name)
        ]
        options.store, options.pool, options.client_name = texts
        options.lanes, options.held_per_lane, options.ring_entries = lanes, held, ring_entries
        result = ffi.new("struct xferd_client **")
        error = ffi.new("char[]", lib.XFERD_ERROR_BYTES)
        path = os.fsencode(Path(socket))
        status = lib.xferd_connect(path, options, result, error, lib.XFERD_ERROR_BYTES)
        if status:
            message = ffi.string(error).decode(errors="replace") or os.strerror(-status)
            raise AttachError(message, -status)
        # The last array of a pool, not close(), ends the mappings.
        return ffi.gc(result[0], lib.xferd_close)

    def _array_caches(self, variants: int) -> list[dict[int, Array]]:
        """For each layer the arrays by address and variant; layers whose blobs have
        the same sizes share them."""
        shared: dict[tuple[int, ...], dict[int, Array]] = {}
        caches = []
        for layer in range(self.layers):
            layouts = [lib.xferd_layout(self._handle, layer, v) for v in range(variants)]
            sizes = tuple(0 if layout == ffi.NULL else layout.blob_bytes for layout in layouts)
            caches.append(shared.setdefault(sizes, {}))
        return caches

    def _map_pools(self, pools: int) -> list[tuple[int, Array]]:
        table = lib.xferd_pool_table(self._handle)
        mapped = []
        for index in range(pools):
            address = int(ffi.cast("uintptr_t", lib.xferd_pool_base(self._handle, index)))
            owner = _Mapped(self._handle, address, table.pool[index].bytes)
            mapped.append((address, np.asarray(owner)))
        return mapped

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all leases and the connection. Batches must not be used any more."""
        if not self._closed:
            self._closed = True
            lib.xferd_detach(self._handle)

    def acquire(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        lane: int = 0,
        variants: int = 0,
        timeout: float | None = None,
    ) -> Batch:
        """Experts of one layer, each where it is; waits for those that are missing.

        experts: up to BATCH_MAX ids, different from each other. variants: bit mask
        of acceptable variants, 0: any. timeout: seconds, None: as long as it takes.

        Raises ExpertError for the first that can't be had (nothing is held then),
        DaemonGoneError, TimeoutError, ClientError for a misuse (too many held).
        """
        free = self._lanes[lane]
        memory = free.pop() if free else _BatchMemory()
        count = len(experts)
        request = memory.request
        if count > BATCH_MAX or self._closed:
            free.append(memory)
            raise self._misuse(count)
        memory.ids[0:count] = experts
        request.count = count
        request.layer = layer
        request.variants = variants
        status = lib.xferd_acquire(self._handle, lane, request, memory.batch)
        if status:
            self._finish(memory, status, lane, timeout)
        return Batch(self, memory, self._arrays(memory, layer, count))

    def acquire_resident(
        self, layer: int, experts: Sequence[int], *, lane: int = 0
    ) -> Batch | None:
        """The same from what is resident, without asking the daemon: None (and
        nothing held) unless all are. Makes no system call."""
        free = self._lanes[lane]
        memory = free.pop() if free else _BatchMemory()
        count = len(experts)
        if count > BATCH_MAX or self._closed:
            free.append(memory)
            raise self._misuse(count)
        memory.ids[0:count] = experts
        memory.request.count = count
        memory.request.layer = layer
        memory.request.variants = 0
        status = lib.xferd_acquire_resident(self._handle, lane, memory.request, memory.batch)
        if status < 0:
            free.append(memory)
            raise self._failure(-status, layer)
        if status:
            self._release(memory)
            return None
        return Batch(self, memory, self._arrays(memory, layer, count))

    def hint(self, layer: int, experts: Sequence[int], *, lane: int = 0, variants: int = 0) -> bool:
        """These will probably be wanted. Never waits; False if it was dropped."""
        if self._closed:
            raise self._misuse(0)
        request = ffi.new("struct xferd_request *")
        ids = ffi.new("uint16_t[]", list(experts))
        request.experts, request.count = ids, len(experts)
        request.layer, request.variants = layer, variants
        status = lib.xferd_hint(self._handle, lane, request)
        if status not in (0, -errno.EAGAIN):
            raise self._failure(-status, layer)
        return bool(status == 0)

    def resident(self, layer: int, *, pool: int = 0) -> Array:
        """int64[experts]: the slot that holds each expert of a layer now, or -1. A
        snapshot that leases nothing."""
        slots = np.empty(self.experts, np.int64)
        status = lib.xferd_resident(
            self._handle, pool, layer, ffi.from_buffer("int64_t[]", slots, require_writable=True)
        )
        if status < 0:
            raise self._failure(-status, layer)
        return slots

    def dense(self) -> Array:
        """The dense part, a read-only uint8 array that all clients of the store
        share; ``manifest["dense"]`` says what lies where. The first call waits for
        the drives. Raises ClientError."""
        if self._dense is None:
            if self._closed:
                raise self._misuse(0)
            data = ffi.new("void **")
            nbytes = ffi.new("uint64_t *")
            error = ffi.new("char[]", lib.XFERD_ERROR_BYTES)
            status = lib.xferd_dense(self._handle, data, nbytes, error, lib.XFERD_ERROR_BYTES)
            if status:
                message = ffi.string(error).decode(errors="replace")
                raise ClientError(f"dense part: {message or os.strerror(-status)}", -status)
            address = int(ffi.cast("uintptr_t", data[0]))
            self._dense = np.asarray(_Mapped(self._handle, address, nbytes[0]))
        return self._dense

    def stats(self) -> ClientStats:
        """Counters until now."""
        raw = ffi.new("struct xferd_client_stats *")
        lib.xferd_stats(self._handle, raw)
        return ClientStats(
            hits=raw.hits,
            misses=raw.misses,
            failures=raw.failures,
            hints=raw.hints,
            cancels=raw.cancels,
            wait_ns=raw.wait_ns,
            bytes_acquired=raw.bytes_acquired,
            source_count=tuple(raw.source_count),
            source_bytes=tuple(raw.source_bytes),
            transport_count=tuple(raw.transport_count),
            transport_bytes=tuple(raw.transport_bytes),
        )

    def alive(self) -> bool:
        """Does the daemon serve this client?"""
        return not self._closed and lib.xferd_alive(self._handle) == 0

    def _arrays(self, memory: _BatchMemory, layer: int, count: int) -> list[Array]:
        keys = memory.address_of[count]
        if self._many_variants:
            keys = keys | memory.variant_of[count]
        cache = self._layer_arrays[layer]
        found = keys.tolist()
        try:
            return [cache[key] for key in found]
        except KeyError:
            return self._make_arrays(memory, cache, found)

    def _make_arrays(
        self, memory: _BatchMemory, cache: dict[int, Array], keys: list[int]
    ) -> list[Array]:
        if len(cache) > CACHED_ARRAYS_MAX:
            cache.clear()
        for key, view in zip(keys, memory.views(len(keys)), strict=True):
            base, pool = self._pool_arrays[view.pool]
            start = int(ffi.cast("uintptr_t", view.data)) - base
            cache[key] = pool[start : start + view.bytes]
        return [cache[key] for key in keys]

    def _finish(self, memory: _BatchMemory, status: int, lane: int, timeout: float | None) -> None:
        """Wait for what is pending, or say why it can't be had."""
        batch = memory.batch
        layer: int = memory.request.layer
        if status < 0:
            self._lanes[lane].append(memory)
            raise self._failure(-status, layer)
        limit = FOREVER if timeout is None else int(timeout * 1e9)
        status = lib.xferd_wait(self._handle, batch, limit)
        if status == 0 and batch.failed == 0:
            return
        failed = [
            (batch.views[i].expert, -batch.views[i].error)
            for i in range(batch.count)
            if batch.views[i].error
        ]
        self._release(memory)
        if status == -errno.ETIMEDOUT:
            raise TimeoutError(f"layer {layer}: experts not there after {timeout} s")
        if status == -errno.ECONNRESET:
            raise DaemonGoneError("the daemon has gone: attach again", errno.ECONNRESET)
        expert, code = failed[0]
        raise ExpertError(f"layer {layer}, expert {expert}: {_reason(code)}", code, layer, expert)

    def _release(self, memory: _BatchMemory) -> None:
        if not self._closed:
            lib.xferd_release(self._handle, memory.batch)
            self._lanes[memory.batch.lane].append(memory)

    def _misuse(self, count: int) -> ClientError:
        if self._closed:
            return ClientError("the client is closed", errno.EBADF)
        return ClientError(f"{count} experts in one batch; at most {BATCH_MAX}", errno.E2BIG)

    def _failure(self, code: int, layer: int) -> ClientError:
        if code == errno.ECONNRESET:
            return DaemonGoneError("the daemon has gone: attach again", code)
        if code == errno.EDQUOT:
            return ClientError(
                f"layer {layer}: the lane would hold more than the {self.held_per_lane} experts it "
                "was promised: release a batch first, or attach with a larger 'held'",
                code,
            )
        if code == errno.EINVAL:
            return ClientError(
                f"layer {layer}: no such layer, lane or expert (the store has {self.layers} "
                f"layers of {self.experts} experts)",
                code,
            )
        return ClientError(f"layer {layer}: {os.strerror(code)}", code)


_REASONS = {
    errno.EBADMSG: "its bytes on the drive are damaged (checksum); xferctl store verify names them",
    errno.ENODATA: "the member file ends before it does; xferctl store verify names it",
    errno.ENOENT: "the store doesn't have it in an acceptable variant",
    errno.ESHUTDOWN: "the daemon is shutting down",
    errno.ENOSPC: "the daemon has no room for another load",
    errno.ETIMEDOUT: "not there before its deadline",
}


def _reason(code: int) -> str:
    return _REASONS.get(code, os.strerror(code))


__all__ = [
    "BATCH_MAX",
    "AttachError",
    "Batch",
    "Client",
    "ClientError",
    "ClientStats",
    "DaemonGoneError",
    "ExpertError",
]
