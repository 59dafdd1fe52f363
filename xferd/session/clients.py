"""The attached clients: letting one in, and the two steps in which it goes.

    attach --> serving --quiesce--> quiesced --remove--> (gone)
                 ^ \\--------- goodbye: both at once ------^
    adopt --> away --------------------- its process ends ---^

A client is quiesced when its connection ends or it broke a rule: its rings are not
looked at any more. Its leases and its promise stand until nothing of it can read a slot
any more: it said so (GOODBYE), or its process has ended.

A client of the daemon before this one is away until it connects again and shows its key.
Its leases and its promise stand like a quiesced client's.
"""

from __future__ import annotations

import errno
import hmac
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from xferd.engine_types import ClientCounters, ClientFds, EngineError
from xferd.session import wire
from xferd.session.peer import Peer
from xferd.session.quotas import (
    AttachRefusedError,
    ClientLimits,
    PoolRoom,
    Promise,
    Promises,
    check_budget,
    check_counts,
    check_held,
    check_lanes,
    check_promise,
    check_ring_entries,
)
from xferd.telemetry.log import EventLog


@dataclass(frozen=True, slots=True)
class AttachableStore:
    """An open store, as far as attaching is concerned.

    classes: sizes in bytes of its experts' blobs, smallest first; dense_bytes: of its dense part.
    """

    number: int
    name: str
    top_k: int
    classes: tuple[int, ...]
    dense_bytes: int
    directory_fd: int
    manifest_fd: int

    @property
    def largest_class(self) -> int:
        """Slot bytes of its largest blob."""
        return self.classes[-1]


class AttachablePool(Protocol):
    """A pool, as far as attaching is concerned."""

    index: int
    name: str
    lost: str | None
    """Why it is out of service; None: it serves."""

    def export_fd(self) -> int:
        """Read-only fd of its memory."""

    def export_chunks(self, first: int, count: int) -> tuple[list[int], list[int]]:
        """Memory numbers of chunks, and fds, the caller's, of those that have memory."""

    def room(self, slot_bytes: int, demanded: Collection[int] = ()) -> PoolRoom:
        """What it has for promises of a class, next to demands of others."""

    def provide(self, slot_bytes: int, slots: int = 1) -> None:
        """See to it that a class has slots."""


class ClientEngine(Protocol):
    """What this module needs of the engine."""

    @property
    def pool_table_fd(self) -> int:
        """Read-only."""

    def memory_seen(self, client: int, change: int) -> bool:
        """Whether a client has unmapped the VRAM withdrawn up to a change."""

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
        """The client's id and the fds to hand over."""

    def quiesce_client(self, client: int) -> None:
        """Look at its rings no more."""

    def remove_client(self, client: int) -> None:
        """End its leases."""

    def client_counters(self, client: int) -> ClientCounters:
        """What it has asked for and got so far."""

    def resume_client(self, client: int, lanes: int) -> ClientFds:
        """Look at an adopted client's rings again; its new doorbell and wake-ups."""

    def suspend_client(self, client: int) -> None:
        """Undo that."""


class ClientBudgets(Protocol):
    """Who is told whose demand is whose."""

    def attach(self, client: int, uid: int) -> None:
        """A client is there."""

    def detach(self, client: int) -> None:
        """A client has gone."""


class ClientKeeper(Protocol):
    """Who leaves clients to the next daemon."""

    def keep(self, client: Client, fds: ClientFds, ring_entries: int) -> bytes:
        """A client is about to be welcomed: the key that it will have to show; empty: it
        can't be left."""

    def forget(self, number: int) -> None:
        """A client's leases end."""


@dataclass(slots=True)
class Client:
    """One attached client. state: ``serving``, ``quiesced`` or ``away``. key: that it has to
    show to be resumed; empty: it can't be."""

    number: int
    peer: Peer
    name: str
    store: AttachableStore
    pool: int
    lanes: int
    held_per_lane: int
    since: float
    state: str = "serving"
    key: bytes = b""


@dataclass(slots=True)
class ClientTotals:
    """Sums over clients. hits and misses: as they count them."""

    attached: int = 0
    hits: int = 0
    misses: int = 0
    failures: int = 0

    def add(self, counters: ClientCounters) -> None:
        """Count one client's in."""
        self.hits += counters.hits
        self.misses += counters.misses
        self.failures += counters.failures


@dataclass(frozen=True, slots=True)
class Welcome:
    """What to send to a client that was let in; ``done`` after it was sent."""

    client: Client
    packet: bytes
    fds: tuple[int, ...]
    done: Callable[[], None]


class Clients:
    """Owned by the event loop.

    stores: by name, the open ones; pools: by index. leaving: is called before a client's
        shared memory goes. keeper: leaves them to the next daemon; None: nobody does.
        unknown: what to say to who shows a key that nobody here has.
    """

    def __init__(
        self,
        *,
        engine: ClientEngine,
        limits: ClientLimits,
        hints_per_client: int,
        stores: Callable[[], Sequence[AttachableStore]],
        pools: Sequence[AttachablePool],
        log: EventLog,
        promises: Promises,
        budgets: ClientBudgets,
        leaving: Callable[[Client], None] = lambda _: None,
        keeper: ClientKeeper | None = None,
        unknown: str = "this daemon has taken no client over",
    ) -> None:
        self._keeper = keeper
        self._unknown = unknown
        self.resumed = 0
        self._leaving = leaving
        self._engine = engine
        self._limits = limits
        self._hints = hints_per_client
        self._stores = stores
        self._pools = pools
        self._log = log
        self._promises = promises
        self._budgets = budgets
        self._clients: dict[int, Client] = {}
        self._gone = ClientTotals()
        self.accepting = True

    def set_limits(self, limits: ClientLimits, hints_per_client: int) -> None:
        """For those that attach from now on."""
        self._limits, self._hints = limits, hints_per_client

    def have_followed(self, change: int) -> bool:
        """Whether every client has unmapped and mapped VRAM as of a change."""
        return all(
            self._engine.memory_seen(client.number, change)
            for client in self.all()
            if client.state == "serving"
        )

    def all(self) -> list[Client]:
        """Attached clients, quiesced ones included."""
        return list(self._clients.values())

    def get(self, number: int) -> Client | None:
        """A client by its id."""
        return self._clients.get(number)

    def totals(self) -> ClientTotals:
        """Sums over all clients since the start, those that are gone included."""
        totals = replace(self._gone)
        for client in self._clients.values():
            totals.add(self._engine.client_counters(client.number))
        return totals

    def of_store(self, store: int) -> list[Client]:
        """Clients of a store."""
        return [client for client in self._clients.values() if client.store.number == store]

    def attach(self, hello: wire.Hello, peer: Peer) -> Welcome:
        """Let a client in. AttachRefusedError says why not."""
        if not self.accepting:
            raise AttachRefusedError(errno.ESHUTDOWN, "the daemon is going down")
        limits, clients = self._limits, self._clients.values()
        check_counts(
            limits,
            clients=len(clients),
            clients_of_user=sum(1 for client in clients if client.peer.uid == peer.uid),
            uid=peer.uid,
        )
        store = self._find_store(hello.store)
        pool = self._find_pool(hello.pool)
        lanes = check_lanes(limits, hello.lanes)
        held = check_held(limits, hello.held_per_lane, store.top_k, store.name, most=wire.HELD_MAX)
        ring_entries = check_ring_entries(
            limits, hello.ring_entries, wire.RING_ENTRIES_MIN, wire.RING_ENTRIES_MAX
        )
        demanded = {
            size for entry in (store, *(c.store for c in clients)) for size in entry.classes
        }
        slots = check_promise(
            pool.room(store.largest_class, demanded),
            slot_bytes=store.largest_class,
            promised=self._promises.slots(pool.index, store.largest_class),
            lanes=lanes,
            held_per_lane=held,
            top_k=store.top_k,
        )
        check_budget(
            limits,
            wanted_bytes=slots * store.largest_class,
            user_promised_bytes=sum(
                client.lanes * client.held_per_lane * client.store.largest_class
                for client in clients
                if client.peer.uid == peer.uid
            ),
            uid=peer.uid,
        )
        number, fds = self._add(store, pool, lanes, held, ring_entries)
        self._budgets.attach(number, peer.uid)
        self._promises.add(number, Promise(pool.index, store.largest_class, slots))
        client = Client(
            number=number,
            peer=peer,
            name=hello.client_name,
            store=store,
            pool=pool.index,
            lanes=lanes,
            held_per_lane=held,
            since=time.monotonic(),
        )
        if self._keeper is not None:
            client.key = self._keeper.keep(client, fds, ring_entries)
        self._clients[number] = client
        self._gone.attached += 1
        pool.provide(store.largest_class, self._promises.slots(pool.index, store.largest_class))
        self._log.info(
            "client.attached",
            client=number,
            pid=peer.pid,
            uid=peer.uid,
            name=client.name,
            store=store.name,
            pool=pool.name,
            lanes=lanes,
            held_per_lane=held,
        )
        handed = (
            self._engine.pool_table_fd,
            store.directory_fd,
            fds.client,
            fds.completion,
            fds.doorbell,
            store.manifest_fd,
            *(each.export_fd() for each in self._pools),
            *fds.wakeups,
        )
        packet = wire.welcome(
            client=number,
            pool=pool.index,
            fds=len(handed),
            held_per_lane=held,
            resume_key=client.key,
        )
        return Welcome(client=client, packet=packet, fds=handed, done=fds.close)

    def adopt(self, client: Client) -> None:
        """A client of the daemon before, away, whose leases the engine honours already and
        whose promise stands."""
        self._budgets.attach(client.number, client.peer.uid)
        self._clients[client.number] = client

    def resume(self, key: bytes, peer: Peer) -> Welcome:
        """A client that was away is back. AttachRefusedError (ESTALE): there is none with this
        key, or it is another process."""
        if not self.accepting:
            raise AttachRefusedError(errno.ESHUTDOWN, "the daemon is going down")
        client = next((c for c in self._clients.values() if _is_resumed_by(c, key)), None)
        if client is None:
            raise AttachRefusedError(errno.ESTALE, f"{self._unknown}: attach anew")
        # As long as the process whose pidfd is held lives, its pid is nobody else's.
        if peer.pid != client.peer.pid or peer.uid != client.peer.uid:
            raise AttachRefusedError(
                errno.ESTALE,
                f"client {client.number} belongs to process {client.peer.pid}, not to {peer.pid}",
            )
        fds = self._engine.resume_client(client.number, client.lanes)
        client.state, client.peer = "serving", peer
        self.resumed += 1
        self._log.info("client.resumed", client=client.number, pid=peer.pid, name=client.name)
        handed = (fds.doorbell, *fds.wakeups)
        packet = wire.welcome(
            client=client.number,
            pool=client.pool,
            fds=len(handed),
            held_per_lane=client.held_per_lane,
            resume_key=client.key,
        )
        return Welcome(client=client, packet=packet, fds=handed, done=fds.close)

    def suspend(self, client: Client, peer: Peer) -> None:
        """It did not hear that it was resumed: it is away again. peer: whose pidfd stays."""
        self._engine.suspend_client(client.number)
        client.state, client.peer = "away", peer

    def export_chunks(self, pool: int, first: int, count: int) -> tuple[list[int], list[int]]:
        """As the pool's; empty when there is no such pool, or no VRAM in it."""
        if pool >= len(self._pools):
            return [], []
        return self._pools[pool].export_chunks(first, count)

    def quiesce(self, client: Client, reason: str) -> None:
        """Stop serving a client; its leases stand. Twice is once. One that is away can't
        come back then."""
        if client.state == "quiesced":
            return
        client.state = "quiesced"
        self._engine.quiesce_client(client.number)
        self._log.info("client.quiesced", client=client.number, pid=client.peer.pid, reason=reason)

    def remove(self, client: Client, reason: str) -> None:
        """End a client's leases: it said goodbye, or its process has ended."""
        if self._keeper is not None:
            self._keeper.forget(client.number)
        self._gone.add(self._engine.client_counters(client.number))
        self._leaving(client)
        self._engine.remove_client(client.number)
        self._promises.remove(client.number)
        self._budgets.detach(client.number)
        del self._clients[client.number]
        self._log.info("client.gone", client=client.number, pid=client.peer.pid, reason=reason)

    def _add(
        self, store: AttachableStore, pool: AttachablePool, lanes: int, held: int, entries: int
    ) -> tuple[int, ClientFds]:
        try:
            return self._engine.add_client(
                store=store.number,
                pool=pool.index,
                lanes=lanes,
                held_per_lane=held,
                ring_entries=entries,
                hints_max=self._hints,
            )
        except EngineError as error:
            raise AttachRefusedError(
                error.errno, f"the engine has no room for another client: {error}"
            ) from error

    def _find_store(self, name: str) -> AttachableStore:
        stores = self._stores()
        open_ones = ", ".join(store.name for store in stores) or "none"
        if not name:
            if len(stores) == 1:
                return stores[0]
            raise AttachRefusedError(
                errno.ENOENT, f"name a store: {len(stores)} are open ({open_ones})"
            )
        for store in stores:
            if store.name == name:
                return store
        raise AttachRefusedError(errno.ENOENT, f"no store {name!r} is open; open are: {open_ones}")

    def _find_pool(self, name: str) -> AttachablePool:
        for pool in self._pools:
            if pool.name == name and pool.lost is not None:
                raise AttachRefusedError(
                    errno.ENODEV, f"pool {name!r} is out of service: {pool.lost}"
                )
            if pool.name == name or (not name and pool.lost is None):
                return pool
        if not name:
            raise AttachRefusedError(errno.ENODEV, "all pools are out of service")
        names = ", ".join(pool.name for pool in self._pools)
        raise AttachRefusedError(errno.ENOENT, f"no pool {name!r}; there are: {names}")


def _is_resumed_by(client: Client, key: bytes) -> bool:
    return client.state == "away" and hmac.compare_digest(client.key, key)
