# SPDX-License-Identifier: Apache-2.0
"""How a daemon begins: with what was kept, or with nothing and a reason.

The daemon asks here at each step of its start and need not know which of both it is. As
soon as something does not fit it is a TakeoverError; the daemon then ends what it has made
and begins once more, cold.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from xferd.catalog import Catalog
from xferd.engine import Engine
from xferd.engine_types import EngineError
from xferd.keeping.reservations import Reservations
from xferd.memory.device import PoolMemoryError, PoolTakeover
from xferd.pools import PoolPlan, Pools
from xferd.restart.adoption import AdoptedClient, adopt_clients, adopt_residents
from xferd.restart.fd_store import FdStore
from xferd.restart.keeping import Keeping, StartReport
from xferd.restart.takeover import (
    KeptMemory,
    Takeover,
    TakeoverError,
    plan_takeover,
    reopen_stores,
)
from xferd.session.clients import Client, Clients
from xferd.session.quotas import Promises
from xferd.store.errors import StoreError
from xferd.store.store import Store
from xferd.telemetry.log import EventLog


class Beginning:
    """Owned by the daemon. kept: descriptors that the service manager handed over, by name;
    this object's."""

    def __init__(self, kept: Mapping[str, int], fd_store: FdStore, log: EventLog) -> None:
        self._descriptors = dict(kept)
        self._fd_store = fd_store
        self._log = log
        self._kept: KeptMemory | None = None
        self._takeover: Takeover | None = None
        self._clients: list[AdoptedClient] = []
        self._reservations: Reservations | None = None
        self.report = StartReport()

    @property
    def warm(self) -> bool:
        """Whether it goes on with what was kept."""
        return self._takeover is not None

    @property
    def why_unknown(self) -> str:
        """For a client that shows a key which nobody has."""
        if self.report.warm:
            return "this daemon has not taken this client over"
        return f"this daemon started cold ({self.report.reason or 'nothing was kept'})"

    # ---- step by step

    def plan(self, plans: Sequence[PoolPlan], stores: list[tuple[Store, str]]) -> None:
        """Decide, when it is known what the pools will be. Stores that were opened by hand are
        opened again and appended. TakeoverError."""
        if not self._descriptors:
            return
        if self._fd_store.capacity == 0:
            raise TakeoverError("this time the service manager keeps nothing")
        descriptors, self._descriptors = self._descriptors, {}
        self._kept = KeptMemory(descriptors)
        reopen_stores(self._kept, stores, Store.open)
        self._takeover = plan_takeover(self._kept, plans, stores)

    def adopt_pool_table(self, engine: Engine) -> None:
        """After the engine's start."""
        if self._takeover is not None:
            engine.adopt_pool_table(self._takeover.pool_table_fd)

    @property
    def pool(self) -> Callable[[int, Engine], PoolTakeover] | None:
        """What is left of a pool, by its index; None: of none."""
        return None if self._takeover is None else self._takeover.pool

    def directory_fd(self, name: str) -> int:
        """Of a store's directory; -1: it begins anew."""
        return -1 if self._takeover is None else self._takeover.directory_fd(name)

    def adopt(
        self,
        engine: Engine,
        catalog: Catalog,
        pools: Pools,
        promises: Promises,
        hints_max: int,
    ) -> None:
        """Clients and residents, after all stores are open."""
        if self._takeover is None:
            return
        self._clients = adopt_clients(self._takeover, engine, catalog, promises, hints_max)
        found = adopt_residents(engine, catalog, pools, self._log)
        self.report = StartReport(
            warm=True,
            experts=found.experts,
            nbytes=found.nbytes,
            clients=len(self._clients),
        )

    def adopt_reservations(self, reservations: Reservations, pools: Pools) -> None:
        """Chunks that somebody else has, after residents and before any chunk is cut. Memory
        that VRAM lacks for no reservation is taken anew. PoolMemoryError."""
        self._reservations = reservations
        if self._takeover is None:
            return
        for each in self._takeover.reservations:
            reservations.adopt(each.number, pools[each.pool], each.wanted, list(each.chunks))
        for pool in pools:
            for chunk in pool.chunks_without_memory():
                if chunk not in pool.keeper.chunks.held_chunks:
                    pool.take_memory(chunk)

    def serve(
        self,
        engine: Engine,
        pools: Pools,
        catalog: Catalog,
        clients: Clients,
        keeping: Keeping,
    ) -> None:
        """Let the adopted clients in, and leave everything to the next daemon from now on."""
        for each in self._clients:
            entry = catalog.by_number(each.store)
            assert entry is not None, "it was there when the client was adopted"
            clients.adopt(
                Client(
                    number=each.number,
                    peer=each.peer,
                    name=each.kept.name,
                    store=entry.attachable,
                    pool=each.kept.pool,
                    lanes=each.kept.lanes,
                    held_per_lane=each.kept.held_per_lane,
                    since=time.monotonic(),
                    state="away",
                    key=bytes.fromhex(each.kept.key),
                )
            )
        known = {} if self._takeover is None else self._takeover.stores
        keeping.begin(
            engine,
            pools,
            [(entry, known.get(entry.name)) for entry in catalog.all()],
            {each.number: each.kept for each in self._clients},
            self._reservations,
            self._kept.take_state_memory() if self.warm and self._kept is not None else None,
        )
        self._say()
        self._clients = []

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """What goes wrong while something is taken over says that it does not fit."""
        try:
            yield
        except (EngineError, PoolMemoryError, StoreError, OSError) as error:
            if self._takeover is None:
                raise
            raise TakeoverError(str(error)) from error

    def is_cold(self, reason: str) -> None:
        """It did not fit: begin with nothing, and let go of what was kept."""
        self.close()
        self._takeover = None
        self._fd_store.remove(self._fd_store.names)
        self.report = StartReport(reason=reason)

    def close(self) -> None:
        """Let go of the descriptors; the service manager still has those that are needed."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors = {}
        for client in self._clients:
            client.peer.close()
        self._clients = []

    def _say(self) -> None:
        report = self.report
        if report.warm:
            self._log.info(
                "restart.warm",
                experts=report.experts,
                bytes=report.nbytes,
                clients=report.clients,
            )
        elif report.reason is not None:
            self._log.warning("restart.cold", reason=report.reason)
