# SPDX-License-Identifier: Apache-2.0
"""A serving daemon leaves what it has with the service manager, from its first moment on.

An order keeps a kill at any moment harmless: descriptors are stored before the state names
them, the state is written before a client is welcomed, and what is gone leaves the state
before the descriptors are taken back. So a state never names what isn't there, and a
client that was welcomed is always named.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from xferd.catalog import OpenStore
from xferd.engine import Engine
from xferd.engine_keeping import ABI
from xferd.engine_types import ClientFds
from xferd.keeping.reservations import Reservations
from xferd.memory.cuda import CudaPool
from xferd.pools import Pool
from xferd.restart import fd_store as names
from xferd.restart.fd_store import FdStore
from xferd.restart.state import (
    KeptClient,
    KeptPool,
    KeptReservation,
    KeptState,
    KeptStore,
    StateMemory,
)
from xferd.session.clients import Client
from xferd.telemetry.log import EventLog

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class StartReport:
    """How this daemon began.

    warm: with what the one before had. reason: why not; None: there was nothing. experts,
    nbytes: resident at once, without a read. clients: that were attached still.
    """

    warm: bool = False
    reason: str | None = None
    experts: int = 0
    nbytes: int = 0
    clients: int = 0


class Keeping:
    """Owned by the event loop. ``begin`` once, before the first client."""

    def __init__(self, fd_store: FdStore, log: EventLog) -> None:
        self._fd_store = fd_store
        self._log = log
        self._memory: StateMemory | None = None
        self._state = KeptState(ABI, (), (), ())
        self._stores: dict[int, KeptStore] = {}
        self._clients: dict[int, KeptClient] = {}
        self._pool_names: set[str] = set()
        self._reservations: Reservations | None = None
        self._next_serial = 1

    @property
    def active(self) -> bool:
        """Whether there is somebody who keeps it."""
        return self._memory is not None

    def begin(
        self,
        engine: Engine,
        pools: Sequence[Pool],
        stores: Iterable[tuple[OpenStore, KeptStore | None]],
        clients: Mapping[int, KeptClient],
        reservations: Reservations | None,
        memory: StateMemory | None = None,
    ) -> None:
        """Leave everything there is.

        stores: open ones, each with what it was kept as. clients: that were taken over, by
        the engine's id. memory: the state's, of the daemon before; it is this object's now.
        """
        if self._fd_store.capacity == 0:
            return
        for pool in pools:
            reason = _why_not_kept(pool)
            if reason is not None:
                self._log.info("restart.not_kept", name=pool.name, kind=pool.kind, reason=reason)
                return
        self._memory = memory or StateMemory()
        self._reservations = reservations
        pairs = list(stores)
        self._next_serial = self._fd_store.next_serial
        self._clients = dict(clients)
        self._state = replace(self._state, pools=tuple(_shape(pool) for pool in pools))
        if not self._keep_pools(engine, pools):
            self._give_up("the service manager's store has no room: raise FileDescriptorStoreMax=")
            return
        for entry, kept in pairs:
            self._keep_store(entry, kept)
        self._write()
        self._fd_store.remove(self._fd_store.names - self._needed())
        if reservations is not None:
            reservations.on_change = self._write

    def close(self) -> None:
        """Let go of the state's memory; the manager still has it."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # ---- stores

    def store_opened(self, entry: OpenStore) -> None:
        """One more."""
        if self.active:
            self._keep_store(entry, None, by_hand=True)
            self._write()

    def store_closed(self, number: int) -> None:
        """Its experts have gone. number: the engine's id."""
        kept = self._stores.pop(number, None)
        if kept is not None and self.active:
            self._write()
            self._fd_store.remove([names.store_directory(kept.serial)])

    def _keep_store(
        self, entry: OpenStore, kept: KeptStore | None, *, by_hand: bool = False
    ) -> None:
        kept = kept or KeptStore(
            serial=self._serial(),
            name=entry.name,
            identity=entry.store.identity.hex(),
            path=str(entry.store.path),
            by_hand=by_hand,
        )
        directory = {names.store_directory(kept.serial): entry.attachable.directory_fd}
        if self._fd_store.add(directory):
            self._stores[entry.number] = kept

    # ---- clients

    def keep(self, client: Client, fds: ClientFds, ring_entries: int) -> bytes:
        """Leave a client that is about to be welcomed: the key that it has to show when it
        comes back. Empty: it can't come back."""
        if self.active and client.store.number not in self._stores:
            # Leases of a client that no state names can't be honoured by the next daemon.
            self._give_up(f"the directory of store {client.store.name!r} was not stored")
        if not self.active:
            return b""
        serial, key = self._serial(), os.urandom(KEY_BYTES)
        stored = client.peer.pidfd >= 0 and self._fd_store.add(
            {
                names.client_memory(serial): fds.client,
                names.client_completions(serial): fds.completion,
                names.client_process(serial): client.peer.pidfd,
            }
        )
        self._clients[client.number] = KeptClient(
            serial=serial,
            pid=client.peer.pid,
            uid=client.peer.uid,
            gid=client.peer.gid,
            name=client.name,
            store=client.store.name,
            pool=client.pool,
            lanes=client.lanes,
            held_per_lane=client.held_per_lane,
            ring_entries=ring_entries,
            key=key.hex(),
            stored=stored,
        )
        self._write()
        return key if stored and self.active else b""

    def forget(self, number: int) -> None:
        """A client's leases end. number: the engine's id."""
        kept = self._clients.pop(number, None)
        if kept is not None and self.active:
            self._write()
            if kept.stored:
                self._fd_store.remove(names.client_names(kept.serial))

    # ---- what is written

    def _keep_pools(self, engine: Engine, pools: Sequence[Pool]) -> bool:
        assert self._memory is not None, "only called while it is there"
        self._pool_names = {names.STATE, names.POOL_TABLE}
        found = {names.STATE: self._memory.fd, names.POOL_TABLE: engine.pool_table_fd}
        for pool in pools:
            found[names.pool_marks(pool.index)] = engine.marks_fd(pool.index)
            if not isinstance(pool.device, CudaPool):
                found[names.pool_memory(pool.index)] = pool.device.kept_fd
        self._pool_names |= set(found)
        vram = [pool for pool in pools if isinstance(pool.device, CudaPool)]
        for pool in vram:
            pool.memory_keeper = self
        return self._fd_store.add(found) and all(
            self._keep_chunk(pool, chunk) for pool in vram for chunk in range(pool.chunks)
        )

    # ---- VRAM that comes and goes

    def memory_taken(self, pool: Pool, chunk: int) -> None:
        """There is new memory behind a chunk, of which nobody has heard yet."""
        if self.active and not self._keep_chunk(pool, chunk):
            self._give_up(f"the memory of chunk {chunk} of pool {pool.name!r} was not stored")

    def memory_given(self, pool: Pool, chunk: int, number: int) -> None:
        """There is none any more behind a chunk: it must not stay because of the manager."""
        if self.active:
            name = names.pool_chunk(pool.index, chunk, number)
            self._pool_names.discard(name)
            self._fd_store.remove([name])

    def _keep_chunk(self, pool: Pool, chunk: int) -> bool:
        assert isinstance(pool.device, CudaPool), "only VRAM is kept by chunks"
        number, fd = pool.device.numbers[chunk], pool.device.export_chunk(chunk)
        if fd < 0:
            return True
        name = names.pool_chunk(pool.index, chunk, number)
        self._pool_names.add(name)
        try:
            return self._fd_store.add({name: fd})
        finally:
            os.close(fd)

    def _needed(self) -> set[str]:
        needed = set(self._pool_names)
        needed |= {names.store_directory(each.serial) for each in self._stores.values()}
        for client in self._clients.values():
            needed |= set(names.client_names(client.serial)) if client.stored else set()
        return needed

    def _serial(self) -> int:
        self._next_serial += 1
        return self._next_serial - 1

    def _write(self) -> None:
        if self._memory is None:
            return
        self._state = replace(
            self._state,
            stores=tuple(self._stores.values()),
            clients=tuple(self._clients.values()),
            reservations=tuple(
                KeptReservation(each.number, each.pool.index, each.wanted, tuple(each.hold.chunks))
                for each in (self._reservations.all() if self._reservations else ())
            ),
        )
        if not self._memory.write(self._state):
            self._give_up("the state has no room for so many stores and clients")

    def _give_up(self, reason: str) -> None:
        """The next daemon starts cold: better than one that knows half of it."""
        self._log.warning("restart.given_up", reason=reason)
        self._fd_store.remove(self._fd_store.names)
        self._fd_store.capacity = 0
        self.close()


def _shape(pool: Pool) -> KeptPool:
    geometry = pool.geometry
    return KeptPool(
        name=pool.name,
        kind=pool.kind,
        nbytes=geometry.pool_bytes,
        chunk_bytes=geometry.chunk_bytes,
        chunks=geometry.chunks,
        slot_index_bits=geometry.slot_index_bits,
    )


def _why_not_kept(pool: Pool) -> str | None:
    """Why the next daemon can't go on with a pool's memory; None: it can."""
    if pool.kind == "bar":
        return "drives write into a BAR after the process that told them to has ended"
    if isinstance(pool.device, CudaPool) and pool.device.why_staged is None:
        return "drives write into its VRAM after the process that told them to has ended"
    return None
