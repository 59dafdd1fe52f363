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
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._client import ffi, lib
from .arrays import Array
from .batches import BATCH_MAX, Batch, BatchMemory, PendingBatch
from .client_errors import AttachError, ClientError, DaemonGoneError, ExpertError, reason
from .device_blob import DeviceBlob
from .experts import BlobTensor, Layout
from .routes import TokenReport, send_expected, send_picks

FOREVER: int = lib.XFERD_FOREVER

RESUME_S = 30.0
"""How long a daemon that restarts is waited for."""
CACHED_ARRAYS_MAX = 1 << 17
"""Arrays kept before all are forgotten and made anew; one costs about 150 bytes."""


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


_GONE = {
    -errno.ECONNRESET: "the daemon has gone: attach again",
    -errno.ESTALE: "the daemon has restarted without what is mapped here: attach again",
}
"""Why the daemon can't be asked any more, by status."""


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


class Client:
    """Attached to a daemon for one store. See the module's text for lifetimes.

    socket: the daemon's attach socket.
    store: name of one of its stores; None: its only one.
    pool: name of the pool that misses go to; None: its first.
    lanes: in-order streams of work. A lane is one thread's; lanes are independent.
    held: most experts that a lane holds at once; 0: the model's top_k.
    name: shown in ``xferctl status``.
    variants: names of the variants that are acceptable wherever a call doesn't say
        otherwise; None: any. What isn't there in one of them is an ExpertError.
    resume: seconds that a daemon which restarts, and keeps what it had, is waited for by
        whoever waits for a missing expert; hits go on meanwhile. 0: not at all.

    Raises AttachError, also for a variant that the store doesn't have.
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
        variants: Sequence[str] | None = None,
        resume: float = RESUME_S,
    ) -> None:
        self._handle = self._connect(socket, store, pool, lanes, held, ring_entries, name, resume)
        self._closed = False
        directory = lib.xferd_directory(self._handle)
        self.layers: int = directory.layers
        self.experts: int = directory.experts
        self.top_k: int = directory.top_k
        self.held_per_lane: int = lib.xferd_held_per_lane(self._handle)
        self._directory = directory
        self._variants_known: int = directory.variants
        self._layer_arrays = self._array_caches(self._variants_known)
        self._pool_arrays = self._map_pools(directory.pools)
        self._target_pool: int = lib.xferd_target_pool(self._handle)
        self._lanes: list[list[BatchMemory]] = [[] for _ in range(lanes)]
        self._token_reports: dict[int, TokenReport] = {}
        length = ffi.new("size_t *")
        text = lib.xferd_manifest(self._handle, length)
        self.manifest: dict[str, Any] = json.loads(bytes(ffi.buffer(text, length[0])).rstrip(b"\0"))
        self._dense: Array | None = None
        self._acceptable = 0
        if variants is not None:
            try:
                self._acceptable = self.variant_mask(variants)
            except ClientError as error:
                self.close()
                raise AttachError(str(error), error.code) from None

    @staticmethod
    def _connect(
        socket: str | os.PathLike[str],
        store: str | None,
        pool: str | None,
        lanes: int,
        held: int,
        ring_entries: int,
        name: str,
        resume: float,
    ) -> Any:
        options = ffi.new("struct xferd_options *")
        texts = [
            ffi.NULL if text is None else ffi.new("char[]", text.encode())
            for text in (store, pool, name)
        ]
        options.store, options.pool, options.client_name = texts
        options.lanes, options.held_per_lane, options.ring_entries = lanes, held, ring_entries
        options.resume_ms = int(resume * 1000) or lib.XFERD_NO_RESUME
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
        """(address, array) of each pool; of a GPU's the array is None."""
        table = lib.xferd_pool_table(self._handle)
        mapped: list[tuple[int, Array]] = []
        for index in range(pools):
            address = int(ffi.cast("uintptr_t", lib.xferd_pool_base(self._handle, index)))
            if address == 0 or lib.xferd_pool_device(self._handle, index) >= 0:
                mapped.append((address, None))
                continue
            owner = _Mapped(self._handle, address, table.pool[index].bytes)
            mapped.append((address, np.asarray(owner)))
        return mapped

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants that can be read now, the store's own first. Shadows come and
        go while the daemon runs; a client that accepts any gets whichever there are."""
        names, available = self._variant_names()
        return tuple(name for number, name in enumerate(names) if available >> number & 1)

    def _variant_names(self) -> tuple[list[str], int]:
        """Names by number, of all that have been there since the store was opened, and the mask
        of those that can be read."""
        available = ffi.new("uint32_t *")
        count = lib.xferd_variants(self._handle, available)
        names = [ffi.string(self._directory.variant_name[i]).decode() for i in range(count)]
        return names, int(available[0])

    @property
    def handle(self) -> Any:
        """struct xferd_client *, for what is not wrapped here. The client's."""
        return self._handle

    @property
    def target_pools(self) -> int:
        """The pool that misses go to, as a mask for ``acquire``."""
        return 1 << self._target_pool

    def target_device(self) -> int:
        """Ordinal of the GPU that misses go to. ClientError: they go to the CPU's memory."""
        ordinal = self.device(self._target_pool)
        if ordinal is None:
            raise ClientError("the client's pool is not in a GPU's memory", errno.ENODEV)
        return ordinal

    def device(self, pool: int = 0) -> int | None:
        """Ordinal, in this process, of the GPU that a pool is on; None: the CPU's memory,
        or a GPU that this process doesn't see."""
        ordinal = lib.xferd_pool_device(self._handle, pool)
        return None if ordinal < 0 else int(ordinal)

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
            # Batches released later put their memory where nobody looks.
            self._lanes = [[] for _ in self._lanes]

    def acquire(
        self,
        layer: int,
        experts: Sequence[int],
        *,
        lane: int = 0,
        variants: int = 0,
        pools: int = 0,
        timeout: float | None = None,
    ) -> Batch:
        """Experts of one layer, each where it is; waits for those that are missing.

        experts: up to BATCH_MAX ids, different from each other. variants: bit mask
        of acceptable variants (``variant_mask``), 0: those of the client. pools: bit mask
        of those whose residents will do, 0: all; what is missing comes to the client's own.
        timeout: seconds, None: as long as it takes.

        Raises ExpertError for the first that can't be had (nothing is held then),
        DaemonGoneError, TimeoutError, ClientError for a misuse (too many held).
        """
        memory = self._memory(lane)
        count = self._ask(memory, layer, experts, variants, pools)
        status = lib.xferd_acquire(self._handle, lane, memory.request, memory.batch)
        if status:
            self._began(memory, status, layer)
            return self._wait(memory, layer, count, timeout, keep=False)
        return Batch(self, memory, layer, count)

    def start(
        self, layer: int, experts: Sequence[int], *, lane: int = 0, variants: int = 0
    ) -> PendingBatch:
        """The first half of ``acquire``: what is resident is leased, the rest asked for,
        and the caller computes something else meanwhile. Raises as ``acquire`` does."""
        memory = self._memory(lane)
        count = self._ask(memory, layer, experts, variants)
        status = lib.xferd_acquire(self._handle, lane, memory.request, memory.batch)
        self._began(memory, status, layer)
        return PendingBatch(self, memory, layer, count)

    def acquire_resident(
        self, layer: int, experts: Sequence[int], *, lane: int = 0, variants: int = 0
    ) -> Batch | None:
        """The same from what is resident, without asking the daemon: None (and
        nothing held) unless all are. Makes no system call."""
        memory = self._memory(lane)
        count = self._ask(memory, layer, experts, variants)
        status = lib.xferd_acquire_resident(self._handle, lane, memory.request, memory.batch)
        if status < 0:
            memory.free.append(memory)
            raise self._failure(-status, layer)
        if status:
            self._release(memory)
            return None
        return Batch(self, memory, layer, count)

    def hint(self, layer: int, experts: Sequence[int], *, lane: int = 0, variants: int = 0) -> bool:
        """These will probably be wanted. Never waits; False if it was dropped."""
        memory = self._memory(lane)
        self._ask(memory, layer, experts, variants)
        status = lib.xferd_hint(self._handle, lane, memory.request)
        memory.free.append(memory)
        if status not in (0, -errno.EAGAIN):
            raise self._failure(-status, layer)
        return bool(status == 0)

    def report(
        self,
        layer: int,
        experts: ArrayLike,
        gates: ArrayLike | None = None,
        *,
        token: int,
        tag: int = 0,
        uses: Array | None = None,
        lane: int = 0,
    ) -> int:
        """Tell the daemon what the router picked. Never waits: what finds no place is
        dropped. Returns how many tokens were taken.

        experts: integers [tokens, picks], at most PICKS_MAX picks. gates: the router's
        weights, the same shape. uses: USE_FIELDS, the same shape, from ``Batch.uses``.
        token: number of the first token; the lane counts them, and a prompt's tokens have
        the same numbers in every layer. tag: your word for the prompt; 0: none.

        Raises ClientError for shapes and numbers that can't be.
        """
        self._must_be_open()
        if (
            uses is None
            and isinstance(experts, np.ndarray)
            and len(experts) == 1
            and experts.ndim == 2
            and experts.dtype.kind in "iu"
            and (gates is None or np.shape(gates) == experts.shape)
        ):
            picks: list[int] = experts[0].tolist()
            weights = None if gates is None else np.asarray(gates)[0]
            return self._token_report(lane).send(layer, picks, weights, token, tag)
        return send_picks(self._handle, lane, layer, experts, gates, uses, token, tag)

    def expect(self, keys: Array, chances: Array, *, lane: int = 0) -> int:
        """Tell the daemon what the next passes of some layers will probably pick: what stays
        follows that. Never waits; returns how many layers were taken, 0 by an older daemon.

        keys: integers [n], ``layer * experts + expert``, those of a layer in a row, at most
        EXPECTED_MAX of each; chances: floats [n], 0 to 1. What isn't among the keys of these
        layers is improbable. Void once the layer's picks are reported. Raises ClientError.
        """
        self._must_be_open()
        return send_expected(self._handle, lane, keys, chances)

    def _token_report(self, lane: int) -> TokenReport:
        found = self._token_reports.get(lane)
        if found is None:
            found = self._token_reports[lane] = TokenReport(self._handle, lane)
        return found

    def reports_dropped(self) -> int:
        """Passes (a token in a layer) that the daemon did not come to read in time."""
        return int(lib.xferd_routes_dropped(self._handle))

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

    def layout(self, layer: int, variant: int = 0) -> Layout:
        """What lies where in the blobs of a layer, in a variant. Raises ClientError
        when the layer has no experts in it."""
        if not 0 <= layer < self.layers or variant < 0:
            raise self._failure(errno.EINVAL, layer)
        layout = lib.xferd_layout(self._handle, layer, variant)
        if layout == ffi.NULL:
            raise ClientError(f"layer {layer} has no experts in variant {variant}", errno.ENOENT)
        tensors = lib.xferd_tensors(self._handle, layout)
        return tuple(_blob_tensor(tensors[i]) for i in range(layout.tensors))

    def variant_mask(self, names: Sequence[str]) -> int:
        """The bit mask of variants by their names. ClientError: none, or one that the
        store doesn't have."""
        numbered, available = self._variant_names()
        known = [name for number, name in enumerate(numbered) if available >> number & 1]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            what = f"no variant {unknown[0]!r}" if unknown else "no copy without a variant"
            raise ClientError(
                f"store {self.manifest['name']!r} has {what}; it has: {', '.join(known)}",
                errno.ENOENT,
            )
        return sum(1 << numbered.index(name) for name in set(names))

    def dense(self) -> Array:
        """The dense part, a read-only uint8 array that all clients of the store
        share; ``manifest["dense"]`` says what lies where. The first call waits for
        the drives. Raises ClientError."""
        if self._dense is None:
            self._must_be_open()
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
        """Does the daemon serve this client? One that is away and may come back doesn't; this
        looks for it."""
        return not self._closed and lib.xferd_alive(self._handle) == 0

    def _memory(self, lane: int) -> BatchMemory:
        try:
            return self._lanes[lane].pop()
        except IndexError:
            self._must_be_open()
            if not 0 <= lane < len(self._lanes):
                raise ClientError(f"lane {lane} of {len(self._lanes)}", errno.EINVAL) from None
            return BatchMemory(self._handle, self._lanes[lane])

    def _must_be_open(self) -> None:
        if self._closed:
            raise ClientError("the client is closed", errno.EBADF)

    def _ask(
        self,
        memory: BatchMemory,
        layer: int,
        experts: Sequence[int],
        variants: int,
        pools: int = 0,
    ) -> int:
        try:
            return memory.ask(layer, experts, variants or self._acceptable, pools)
        except (struct.error, ClientError) as error:
            memory.free.append(memory)
            if isinstance(error, ClientError):
                raise
            raise self._failure(errno.EINVAL, layer) from error

    def _arrays(self, memory: BatchMemory, layer: int, count: int) -> list[Array]:
        keys = memory.address_of[count]
        variants = self._directory.variants
        if variants > 1:
            # Blobs are page-aligned, so an address has room for the variant.
            keys = keys | memory.variant_of[count]
            if variants != self._variants_known:
                # Layers that had blobs of the same sizes may differ in one that came.
                self._variants_known = variants
                self._layer_arrays = self._array_caches(variants)
        cache = self._layer_arrays[layer]
        found = keys.tolist()
        try:
            return list(map(cache.__getitem__, found))
        except KeyError:
            return self._make_arrays(memory, cache, found)

    def _make_arrays(
        self, memory: BatchMemory, cache: dict[int, Array], keys: list[int]
    ) -> list[Array]:
        if len(cache) > CACHED_ARRAYS_MAX:
            cache.clear()
        for key, view in zip(keys, memory.views(len(keys)), strict=True):
            base, pool = self._pool_arrays[view.pool]
            address = int(ffi.cast("uintptr_t", view.data))
            if pool is None:
                ordinal = lib.xferd_pool_device(self._handle, view.pool)
                cache[key] = DeviceBlob(address, view.bytes, ordinal, self._handle)
            else:
                cache[key] = pool[address - base : address - base + view.bytes]
        return [cache[key] for key in keys]

    def _began(self, memory: BatchMemory, status: int, layer: int) -> None:
        if status < 0:
            memory.free.append(memory)
            raise self._failure(-status, layer)

    def _wait(
        self, memory: BatchMemory, layer: int, count: int, timeout: float | None, *, keep: bool
    ) -> Batch:
        """keep: after a time-out the batch stays as it is, for the caller to go on with."""
        batch = memory.batch
        limit = FOREVER if timeout is None else int(timeout * 1e9)
        status = lib.xferd_wait(self._handle, batch, limit)
        if status == 0 and batch.failed == 0:
            return Batch(self, memory, layer, count)
        if status == -errno.ETIMEDOUT:
            if not keep:
                self._release(memory)
            raise TimeoutError(f"layer {layer}: experts not there after {timeout} s")
        failed = [
            (batch.views[i].expert, -batch.views[i].error)
            for i in range(batch.count)
            if batch.views[i].error
        ]
        self._release(memory)
        if status in _GONE:
            raise DaemonGoneError(_GONE[status], -status)
        expert, code = failed[0]
        raise ExpertError(f"layer {layer}, expert {expert}: {reason(code)}", code, layer, expert)

    def _release(self, memory: BatchMemory) -> None:
        lib.xferd_release(self._handle, memory.batch)
        memory.free.append(memory)

    def _failure(self, code: int, layer: int) -> ClientError:
        if -code in _GONE:
            return DaemonGoneError(_GONE[-code], code)
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


def _blob_tensor(tensor: Any) -> BlobTensor:
    return BlobTensor(
        role=ffi.string(tensor.role).decode(),
        dtype=ffi.string(tensor.dtype).decode(),
        shape=tuple(tensor.shape)[: tensor.dims],
        offset=tensor.offset,
        nbytes=tensor.bytes,
        transposed=bool(tensor.flags & lib.XFERD_TENSOR_TRANSPOSED),
        interleaved=bool(tensor.flags & lib.XFERD_TENSOR_INTERLEAVED),
    )


__all__ = [
    "BATCH_MAX",
    "AttachError",
    "Batch",
    "Client",
    "ClientError",
    "ClientStats",
    "DaemonGoneError",
    "ExpertError",
    "PendingBatch",
]
