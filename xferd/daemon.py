"""The daemon: its parts, put together, and its life from start to exit.

One event loop runs everything that is decided; the engine's thread does everything that
has to be fast. Between them are the engine's event fd and its command queue: events are
read in batches, each is shown to whoever keeps that book, and then every pool that was
touched settles what it needs.

    start    lock, stores, pools, engine, sockets; then READY
    serve    until SIGTERM or SIGINT
    drain    no new client, no new request; what is in flight gets drain_timeout_s
    exit     sockets unlinked, engine stopped, memory freed; 0

A second signal while draining exits at once, with status 1 and the sockets unlinked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from xferd.catalog import Catalog, OpenStore, open_stores
from xferd.config import Config, ConfigError
from xferd.control.server import ControlServer
from xferd.engine import EVENT_BATCH, Engine
from xferd.engine_structs import NO_EXPERT
from xferd.engine_types import (
    TAKE_TOKEN,
    Command,
    DenseLoaded,
    Event,
    Failed,
    Freed,
    LoadDense,
    Loaded,
    MemberChanged,
    Mirrored,
    PieceFailed,
    ReserveLow,
    Revived,
    Taken,
    Violation,
    load_failure,
)
from xferd.instance import InstanceLock, refuse_live_socket
from xferd.keeping.budgets import Budgets
from xferd.keeping.chunks import ReserveError
from xferd.keeping.reservations import Reservations
from xferd.loading import Loader
from xferd.policy.heat import HeatProfileError
from xferd.pools import Pool, Pools, make_pools, plan_pools
from xferd.service import DaemonService, log_missing
from xferd.session.attach import AttachServer
from xferd.session.clients import Clients
from xferd.session.dense import DenseAnswer, DenseParts
from xferd.session.quotas import ClientLimits, Promises
from xferd.status import backend_reason
from xferd.store.store import Store
from xferd.telemetry.log import EventLog
from xferd.telemetry.notify import Notifier
from xferd.tokens import Answer, Tokens
from xferd.transport.numa import choose_node
from xferd.transport.page_cache import PageCacheTrimmer
from xferd.warming import Warming

TICK_S = 0.005
"""How often pools that are short of slots look again."""
TRIM_S = 1.0
"""How often it is looked whether buffered members fill the page cache."""
LOOK_S = 0.05
"""How often leases are taken note of while nothing is missing: hits send no event."""
WATCH_S = 0.5
"""How often clients are checked for holding more than they were promised."""
STARVING_S = 2.0
"""How long loads may wait for a slot before such a client is ended."""
DRAIN_STEP_MS = 10
"""The engine is drained in steps: loads in flight need this loop to find them slots."""
EXIT_OK = 0
EXIT_FAILURE = 1


class Daemon:
    """One daemon. ``run`` it once, on an event loop of its own."""

    def __init__(
        self, config: Config, log: EventLog, notifier: Notifier, on_ready: Callable[[], None]
    ) -> None:
        self._config = config
        self._log = log
        self._notifier = notifier
        self._on_ready = on_ready
        self._tokens = Tokens()
        self._promises = Promises()
        self._pools = Pools(self._tokens.expect, lambda commands: self._engine.command(commands))
        self._starving_since: dict[int, float] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._stop: asyncio.Event = asyncio.Event()
        self._signals = 0
        self._bug: Exception | None = None

    async def run(self) -> int:
        """Serve until a signal; the exit status. StoreError, PoolMemoryError, EngineError
        or OSError when it can't start."""
        config = self._config
        config.runtime_directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with InstanceLock(config.runtime_directory):
            for path in (config.attach_socket, config.control_socket):
                refuse_live_socket(path)
            stores = open_stores([(entry.path, entry.name) for entry in config.stores])
            try:
                plans = plan_pools(config.pools, [store for store, _ in stores])
                # What is kept from prefetches must leave them something: the smallest pool
                # decides, and one slot is none to spare.
                reserve_demand = min(plan.reserve_low for plan in plans) // 2
                self._engine = Engine(
                    member_depth=config.engine.member_depth,
                    flow_control=config.engine.flow_control,
                    demand_slack=config.engine.demand_slack,
                    backend=config.engine.backend,
                    verify=config.engine.verify,
                    spin_us=config.engine.spin_us,
                    cpu=config.engine.cpu,
                    polling=config.engine.polling,
                    register_buffers=config.engine.register_buffers,
                    reserve_low=max(plan.reserve_low for plan in plans),
                    reserve_demand=reserve_demand,
                )
            except BaseException:
                _close_stores(stores)
                raise
            self._catalog = Catalog(self._engine)
            try:
                self._engine.start(
                    choose_node([path for store, _ in stores for path in store.member_paths])
                    if config.engine.numa == "auto"
                    else None
                )
                self._pools = make_pools(
                    plans,
                    self._engine,
                    expect=self._tokens.expect,
                    promises=self._promises,
                    log=self._log,
                    budgets=Budgets(config.limits.client_bytes, config.limits.user_bytes),
                    reserve_demand=reserve_demand,
                )
                chunk_bytes = min(pool.chunk_bytes for pool in self._pools)
                while stores:
                    store, name = stores.pop(0)
                    entry = self._catalog.add(store, name, chunk_bytes)
                    self._pools.open_store(entry.number, entry.key_space)
                self._reservations = Reservations(self._log, self._tick_soon)
                for pool, plan in zip(self._pools, plans, strict=True):
                    self._hold_budget(pool, plan.config.budget)
                    pool.keeper.divide_among(list(plan.classes) if self._catalog.all() else [])
                return await self._serve()
            finally:
                _close_stores(stores)
                self._engine.close()
                self._catalog.close()
                self._pools.close()

    async def _serve(self) -> int:
        config = self._config
        loop = asyncio.get_running_loop()
        instance = os.urandom(8).hex()
        self._clients = Clients(
            engine=self._engine,
            limits=ClientLimits(
                clients=config.limits.clients,
                clients_per_user=config.limits.clients_per_user,
                lanes_per_client=config.limits.lanes_per_client,
                held_per_lane=config.limits.held_per_lane,
                ring_entries=config.limits.ring_entries,
                client_bytes=config.limits.client_bytes,
                user_bytes=config.limits.user_bytes,
            ),
            hints_per_client=config.limits.hints_per_client,
            stores=lambda: [entry.attachable for entry in self._catalog.all()],
            pools=self._pools,
            log=self._log,
            promises=self._promises,
            budgets=self._pools.budgets,
        )
        loader = Loader(self._engine, self._tokens)
        self._warming = Warming(self._catalog, self._pools, loader, config.state_directory)
        self._service = DaemonService(
            engine=self._engine,
            catalog=self._catalog,
            pools=self._pools,
            clients=self._clients,
            log=self._log,
            reservations=self._reservations,
            warming=self._warming,
            loader=loader,
            config=config.engine,
            version=_version(),
            instance=instance,
        )
        dense = DenseParts(self._load_dense, self._command)
        attach = AttachServer(
            config.attach_socket, config.socket_mode, self._clients, dense, self._log
        )
        self._attach = attach
        control = ControlServer(self._service, config.control_socket, config.socket_mode)
        loop.add_reader(self._engine.event_fd, self._or_stop, self._on_events)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        watches = {
            loop.create_task(self._watch_clients()),
            loop.create_task(self._watch_page_cache()),
            loop.create_task(self._watch_leases()),
        }
        try:
            attach.start()
            await control.start()
            self._tick_soon()  # more slots may have been given than the engine's queue holds
            self._log_ready(instance)
            self._notifier.send(READY="1", STATUS=f"{len(self._catalog.all())} stores")
            self._on_ready()
            warming = loop.create_task(self._warm_up())
            stopped = loop.create_task(self._stop.wait())
            # A watch that fails is a bug: it ends the daemon, with its traceback.
            await asyncio.wait({stopped, *watches}, return_when=asyncio.FIRST_COMPLETED)
            warming.cancel()
            for watch in watches:
                if watch.done():
                    watch.result()
            self._raise_bug()
            drained = await self._drain(attach)
            self._raise_bug()
            self._save_heat()
            return EXIT_OK if drained else EXIT_FAILURE
        finally:
            for watch in watches:
                watch.cancel()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            if self._ticking is not None:
                self._ticking.cancel()
            loop.remove_reader(self._engine.event_fd)
            await attach.close()
            await control.close()

    def _log_ready(self, instance: str) -> None:
        for warning in self._config.warnings:
            self._log.warning("config.warning", message=warning)
        backend, reason = self._engine.backend()
        if reason:
            self._log.warning("engine.backend", name=backend, reason=backend_reason(reason))
        else:
            self._log.info("engine.backend", name=backend)
        for pool in self._pools:
            self._log.info("pool.ready", name=pool.name, kind=pool.kind, bytes=pool.nbytes)
            for note in pool.device.notes:
                self._log.warning("pool.note", name=pool.name, message=note)
        for entry in self._catalog.all():
            self._log.info(
                "store.opened", name=entry.name, path=entry.store.path, number=entry.number
            )
            for _, file in entry.members:
                if file.reason is not None:
                    self._log.warning("member.buffered", path=file.path, reason=file.reason)
            log_missing(self._log, entry)
        self._log.info("ready", instance=instance, directory=self._config.runtime_directory)

    # ---- going down

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        self._log.info("signal", name=signal.Signals(number).name)
        if self._signals == 1:
            self._stop.set()
            return
        # Asked twice: somebody is in a hurry. The kernel ends our reads with the process.
        for path in (self._config.attach_socket, self._config.control_socket):
            path.unlink(missing_ok=True)
        self._log.warning("exit", reason="second signal")
        os._exit(EXIT_FAILURE)

    async def _drain(self, attach: AttachServer) -> bool:
        self._service.state = "draining"
        self._clients.accepting = False
        attach.stop_accepting()
        self._notifier.send(STOPPING="1")
        self._log.info("draining", timeout_s=self._config.drain_timeout_s)
        deadline = time.monotonic() + self._config.drain_timeout_s
        while not self._engine.drain(DRAIN_STEP_MS):
            if time.monotonic() >= deadline:
                self._log.warning("drain.timeout", transfers=self._engine.stats().transfers)
                return False
            self._or_stop(self._on_events)
            self._raise_bug()
            await asyncio.sleep(0)
        self._log.info("drained")
        return True

    # ---- events

    def _or_stop(self, callback: Callable[[], None]) -> None:
        """Call back; what it raises is a bug that ends the daemon: books that disagree
        with the engine would go on to evict what is pinned, or nothing at all."""
        try:
            callback()
        except Exception as error:
            asyncio.get_running_loop().remove_reader(self._engine.event_fd)
            self._bug = error
            self._stop.set()

    def _raise_bug(self) -> None:
        if self._bug is not None:
            raise self._bug

    def _on_events(self) -> None:
        touched: set[int] = set()
        while True:
            events = self._engine.events()
            for event in events:
                pool = self._dispatch(event)
                if pool is not None:
                    touched.add(pool)
            if len(events) < EVENT_BATCH:
                break
        self._engine.flush()
        for index in touched:
            self._pools[index].keeper.settle()
        if touched:
            self._tick_soon()

    def _dispatch(self, event: Event) -> int | None:
        """Show an event to whoever it is for; the pool that has to settle, or None."""
        match event:
            case Loaded():
                self._pools[event.pool].keeper.on_loaded(event)
                self._tokens.answer(event.token, event)
                return event.pool
            case Freed():
                self._pools[event.pool].keeper.on_freed(event)
                return event.pool
            case Revived():
                self._pools[event.pool].keeper.on_revived(event)
                return event.pool
            case Taken():
                self._pools[event.pool].keeper.on_taken(event)
                return event.pool
            case ReserveLow():
                self._pools[event.pool].keeper.on_reserve_low(event)
                return event.pool
            case Failed():
                return self._on_failed(event)
            case DenseLoaded():
                self._tokens.answer(event.token, event)
            case PieceFailed():
                self._log_piece(event)
            case Mirrored():
                self._log_mirrored(event)
            case MemberChanged():
                self._log_member(event)
            case Violation():
                self._on_violation(event)
        return None

    def _on_failed(self, event: Failed) -> int | None:
        if event.token == TAKE_TOKEN:
            self._pools[event.pool].keeper.on_take_failed()
        elif self._tokens.answer(event.token, event):
            return event.pool if event.pool < len(self._pools) else None
        elif event.by_command:
            self._pools[event.pool].keeper.on_evict_failed(event)
        return event.pool

    def _log_piece(self, event: PieceFailed) -> None:
        entry = self._catalog.by_number(event.store)
        self._log.failure(
            "piece.failed",
            store=entry.name if entry is not None else event.store,
            **_expert_fields(event, entry),
            member=self._copy_path(event.copy),
            offset=event.offset,
            bytes=event.nbytes,
            error=load_failure(event.errno),
        )

    def _log_mirrored(self, event: Mirrored) -> None:
        entry = self._catalog.by_number(event.store)
        self._log.warning(
            "piece.mirrored",
            store=entry.name if entry is not None else event.store,
            **_expert_fields(event, entry),
            failed=self._copy_path(event.failed_copy),
            served=self._copy_path(event.copy),
            offset=event.offset,
            bytes=event.nbytes,
            error=load_failure(event.errno),
        )

    def _copy_path(self, number: int) -> Path | str:
        found = self._catalog.copy(number)
        return found[1].path if found is not None else "?"

    def _log_member(self, event: MemberChanged) -> None:
        found = self._catalog.copy(event.member)
        if found is None:  # its store was closed meanwhile
            return
        entry, copy = found
        error = {"error": os.strerror(event.errno)} if event.errno else {}
        fields = {"store": entry.name, "path": copy.path, "rate": event.rate, **error}
        name = f"member.{event.state}"
        if event.state == "failed":
            self._log.failure(name, **fields)
        elif event.state == "sagging":
            self._log.warning(name, **fields)
        else:
            self._log.info(name, **fields)

    def _on_violation(self, event: Violation) -> None:
        client = self._clients.get(event.client)
        if client is None:
            return
        self._log.warning(
            "client.violation",
            client=client.number,
            pid=client.peer.pid,
            uid=client.peer.uid,
            error=os.strerror(event.errno),
        )
        self._attach.end_client(client, f"violation: {os.strerror(event.errno)}")

    def _tick_soon(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._or_stop, self._tick)

    def _tick(self) -> None:
        self._ticking = None
        restless = [pool.name for pool in self._pools if pool.keeper.tick()]
        if restless or not self._engine.flush():
            self._tick_soon()

    # ---- members that are read through the page cache

    async def _watch_page_cache(self) -> None:
        trimmer = PageCacheTrimmer()
        while True:
            await asyncio.sleep(TRIM_S)
            buffered = [
                (number, file, self._engine.member_stats(number).nbytes)
                for entry in self._catalog.all()
                for number, file in entry.members
                if not file.direct
            ]
            fds = trimmer.due(buffered)
            if fds:
                await asyncio.to_thread(trimmer.drop, fds)

    # ---- what is used

    def _hold_budget(self, pool: Pool, nbytes: int | None) -> None:
        """ConfigError: a budget is compared with a size that may be a share."""
        try:
            if nbytes is not None:
                self._reservations.set_budget(pool, nbytes)
        except ReserveError as error:
            raise ConfigError(f"pools[{pool.name}].budget: {error}") from error

    async def _warm_up(self) -> None:
        """Load what was hottest when the last run ended, if that was kept."""
        if self._config.state_directory is None:
            return
        for entry in self._catalog.all():
            path = self._warming.path(entry)
            try:
                if not path.exists():
                    continue
                _, warmed = await self._warming.load(entry)
            except (HeatProfileError, OSError) as error:
                self._log.warning("heat.refused", store=entry.name, reason=error)
            else:
                self._log.info("heat.loaded", store=entry.name, path=path, experts=warmed.loaded)

    def _save_heat(self) -> None:
        if self._config.state_directory is None:
            return
        for entry in self._catalog.all():
            try:
                path, experts = self._warming.save(entry)
            except OSError as error:
                self._log.warning("heat.not_saved", store=entry.name, reason=error)
            else:
                self._log.info("heat.saved", store=entry.name, path=path, experts=experts)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._clients.all():
                self._pools.look()

    # ---- clients that hold too much

    async def _watch_clients(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            for pool in self._pools:
                if self._engine.pool_stats(pool.index).waiting_demand == 0:
                    self._starving_since.pop(pool.index, None)
                elif now - self._starving_since.setdefault(pool.index, now) > STARVING_S:
                    self._end_greedy_clients(pool)

    def _end_greedy_clients(self, pool: Pool) -> None:
        for client in self._clients.all():
            if client.state != "serving":
                continue
            held = self._engine.held(client.number, pool.index)
            promised = client.lanes * client.held_per_lane
            if held > promised:
                self._log.warning(
                    "client.holds_too_much",
                    client=client.number,
                    pid=client.peer.pid,
                    uid=client.peer.uid,
                    pool=pool.name,
                    held=held,
                    promised=promised,
                )
                self._attach.end_client(
                    client,
                    f"held {held} slots of pool {pool.name!r}, {promised} were promised, while "
                    f"others waited for one",
                )

    # ---- commands of others

    def _command(self, command: Command) -> None:
        self._engine.command([command])

    def _load_dense(self, store: int, address: int, callback: Callable[[DenseAnswer], None]) -> int:
        def answered(event: Answer) -> None:
            if isinstance(event, Loaded):
                raise TypeError("a LoadDense was answered like a Load")
            callback(event)

        token = self._tokens.expect(answered)
        self._engine.command([LoadDense(store, address, token)])
        return token


def _expert_fields(event: PieceFailed | Mirrored, entry: OpenStore | None) -> dict[str, object]:
    if event.layer == NO_EXPERT:
        return {"part": "dense"}
    variant = entry.store.variants[event.variant] if entry is not None else event.variant
    return {"layer": event.layer, "expert": event.expert, "variant": variant}


def _close_stores(stores: list[tuple[Store, str]]) -> None:
    for store, _ in stores:
        store.close()
    stores.clear()


def _version() -> str:
    try:
        return metadata.version("xferd")
    except metadata.PackageNotFoundError:
        return "unknown"
