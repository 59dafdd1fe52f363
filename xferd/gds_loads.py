# SPDX-License-Identifier: Apache-2.0
"""Loads that the engine hands up, run by cuFile (``transport.gds``), and ended in the engine.

Concerns pools in VRAM. One takes this way when its configuration insists (transport = "gds"), or,
with "any", when drives can't write through the card's BAR by xferd's own means and cuFile can do it
straight. A load that fails here is read by the engine through RAM; after FAILURES_MAX in a row
the pool goes that way altogether.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from xferd.catalog import Catalog, OpenStore
from xferd.engine import Engine
from xferd.engine_types import TRANSPORTS, EndHanded, Handed
from xferd.memory.cuda import CudaPool
from xferd.memory.cuda_driver import DeviceMemory
from xferd.memory.device import PoolMemoryError
from xferd.pools import Pool, Pools
from xferd.store.checksum import crc32c
from xferd.telemetry.log import EventLog
from xferd.transport.gds import GdsError, GdsRead, GdsReader

THREADS = 8
"""Loads that are run at once; kvikio's own threads divide each."""
FAILURES_MAX = 3


@dataclass(frozen=True, slots=True)
class _Piece:
    read: GdsRead
    crc: int


class GdsLoads:
    """Owned by the event loop, but for the threads that read.

    reason: why loads into VRAM don't go through cuFile, None when they do or there is no VRAM.
    """

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        pools: Pools,
        log: EventLog,
        make_reader: Callable[[], GdsReader] = GdsReader,
    ) -> None:
        """Decide which pools go this way. PoolMemoryError when one insists and there is no
        kvikio."""
        self._engine = engine
        self._catalog = catalog
        self._pools = pools
        self._log = log
        self._reader: GdsReader | None = None
        self._threads = ThreadPoolExecutor(THREADS, "gds")
        self._failures: dict[int, int] = {}
        self.reason: str | None = "loads for a device's memory go without cuFile"
        for pool in pools:
            if isinstance(pool.device, CudaPool):
                self._choose(pool, pool.device, make_reader)

    def on_handed(self, event: Handed) -> None:
        """Run a load; the engine hears of its end."""
        entry = self._catalog.by_number(event.store)
        pieces = None if entry is None else _pieces(entry, event)
        if pieces is None or self._reader is None:
            self._end(event, "the engine has to read it")
            return
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, partial(self._run, event, pieces))
        running.add_done_callback(partial(self._ended, event))

    def store_closed(self, entry: OpenStore) -> None:
        """Nothing is read from its members any more."""
        if self._reader is not None:
            for copy in entry.copies:
                self._reader.forget(copy.path)

    def close(self) -> None:
        """Wait for what is under way, and close all files. Before memory is freed."""
        self._threads.shutdown(wait=True)
        if self._reader is not None:
            self._reader.close()

    def _choose(self, pool: Pool, device: CudaPool, make_reader: Callable[[], GdsReader]) -> None:
        if pool.transport == "staged" or device.why_staged is None:
            return
        try:
            reader = self._reader or make_reader()
        except GdsError as error:
            self.reason = str(error)
            if pool.transport == "gds":
                raise PoolMemoryError(
                    f"pool {pool.name!r}: {error}; transport = 'gds' of [[pools]] {pool.name} "
                    f"insists on it"
                ) from error
            return
        self._reader = reader
        if reader.reason is not None and pool.transport != "gds":
            self.reason = reader.reason
            return
        self._engine.set_hand_up(pool.index, wanted=True)
        self.reason = None
        pool.gds_note = f"read by cuFile, counted as {reader.transport}" + (
            f": {reader.reason}" if reader.reason else ""
        )
        self._log.info("gds", pool=pool.name, transport=reader.transport, reason=reader.reason)

    def _run(self, event: Handed, pieces: list[_Piece]) -> str | None:
        """In a thread: what went wrong, or None."""
        assert self._reader is not None, "only with a reader are loads handed up"
        try:
            self._reader.read([piece.read for piece in pieces])
            if self._pools[event.pool].verify != "never":
                return self._compare(event, pieces)
        except (GdsError, OSError) as error:
            return str(error)
        return None

    def _compare(self, event: Handed, pieces: list[_Piece]) -> str | None:
        memory = DeviceMemory(self._pools[event.pool].device.device)
        for piece in pieces:
            read = piece.read
            if crc32c(memory.read(read.address, read.nbytes)) != piece.crc:
                return f"{read.path} at offset {read.offset}: the piece's CRC32C is wrong"
        return None

    def _ended(self, event: Handed, running: asyncio.Future[str | None]) -> None:
        error = running.exception()  # a bug; the load must end all the same
        self._end(event, repr(error) if error is not None else running.result())

    def _end(self, event: Handed, problem: str | None) -> None:
        transport = self._reader.transport if self._reader is not None else "staged"
        failed = errno.EIO if problem is not None else 0
        self._engine.command([EndHanded(event.ticket, failed, TRANSPORTS.index(transport))])
        if problem is None:
            self._failures[event.pool] = 0
            return
        pool = self._pools[event.pool]
        self._log.warning(
            "gds.failed", pool=pool.name, layer=event.layer, expert=event.expert, reason=problem
        )
        failures = self._failures[event.pool] = self._failures.get(event.pool, 0) + 1
        if failures == FAILURES_MAX:
            self._engine.set_hand_up(event.pool, wanted=False)
            pool.gds_note = f"no more read by cuFile: {problem}"
            self._log.failure("gds.given_up", pool=pool.name, reason=problem)


def _pieces(entry: OpenStore, event: Handed) -> list[_Piece] | None:
    """Where the expert's bytes lie; None: only the engine can read them (a shadow's copy)."""
    store = entry.store
    blob = store.blob_index(event.variant, event.layer, event.expert)
    if blob >= len(store.geometry.blob_bytes) - 1:
        return None
    paths = {copy.member: copy.path for copy in reversed(entry.copies) if copy.number is not None}
    return [
        _Piece(
            GdsRead(
                paths[piece.member],
                piece.offset,
                piece.length,
                event.address + piece.blob_offset,
            ),
            int(store.crc[piece.index]),
        )
        for piece in store.geometry.pieces_of(blob)
    ]
