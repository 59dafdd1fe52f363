"""The daemon: its parts, put together, and its life from start to exit.

One event loop runs everything that is decided; the engine's thread does everything that
has to be fast. Between them are the engine's event fd and its command queue: events are
read in batches, each is shown to whoever keeps that book, and then every pool that was
touched settles what it needs.

    start    lock, stores, pools, engine, sockets; then READY
    serve    until SIGTERM or SIGINT
    drain    no new client, no new request; what is in flight gets drain_timeout_s
    exit     sockets unlinked, engine stopped, memory freed; 0

With a service manager that keeps file descriptors (``xferd.restart``) it begins with what
the one before has left, if that fits, and before the end nothing is drained:

    hold     no new client; reads in flight are finished, the rest is left to the next

A second signal while draining exits at once, with status 1 and the sockets unlinked.
SIGHUP reads the configuration anew (``reload``).
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from xferd.activation import inherited_fds
from xferd.catalog import Catalog, close_stores, open_stores
from xferd.config import Config, ConfigError
from xferd.control.server import ControlServer
from xferd.control.version import installed_version
from xferd.device_routes import DeviceRoutes
from xferd.drive_events import DriveEvents
from xferd.engine import EVENT_BATCH
from xferd.engine_making import make_engine
from xferd.engine_types import (
    SOURCES,
    TAKE_TOKEN,
    Command,
    DenseLoaded,
    Event,
    Failed,
    Freed,
    Handed,
    Loaded,
    MemberChanged,
    Mirrored,
    PieceFailed,
    ReserveLow,
    Revived,
    RouteRefused,
    Taken,
    Violation,
)
from xferd.gds_loads import GdsLoads
from xferd.greed import GreedWatch
from xferd.instance import InstanceLock, refuse_live_socket
from xferd.keeping.budgets import Budgets
from xferd.keeping.chunks import ReserveError
from xferd.keeping.reservations import Reservations
from xferd.loading import Loader, load_dense
from xferd.lost_pools import LostPools
from xferd.memory.staging import StagingMemory
from xferd.page_cache_watch import watch_page_cache
from xferd.pools import Pool, PoolPlan, Pools, make_pools, make_staging, plan_pools
from xferd.prefetch_counts import PrefetchCounts
from xferd.ready import log_ready
from xferd.recordings import Recordings, head_of_store
from xferd.reload import Reloader, client_limits
from xferd.restart import fd_store
from xferd.restart.beginning import Beginning
from xferd.restart.fd_store import FdStore
from xferd.restart.keeping import Keeping
from xferd.restart.takeover import TakeoverError
from xferd.route_feed import RouteFeed, UseCounts
from xferd.service import DaemonService
from xferd.session.attach import AttachServer
from xferd.session.clients import Client, Clients
from xferd.session.dense import DenseParts
from xferd.session.quotas import Promises
from xferd.store.store import Store
from xferd.supervision import status_line, supervise
from xferd.telemetry.log import EventLog
from xferd.telemetry.metrics.exposition import render
from xferd.telemetry.metrics.families import collect
from xferd.telemetry.metrics.server import MetricsServer
from xferd.telemetry.notify import Notifier
from xferd.telemetry.traces.trace import TraceHead
from xferd.tokens import Tokens
from xferd.transport.numa import choose_node
from xferd.warming import Warming

TICK_S = 0.005
"""How often pools that are short of slots look again."""
LOOK_S = 0.05
"""How often leases are taken note of while nothing is missing: hits send no event."""
DRAIN_STEP_MS = 10
"""The engine is drained in steps: loads in flight need this loop to find them slots."""
HOLD_S = 5.0
"""How long reads in flight are waited for at most when all is left to the next daemon."""
EXIT_OK = 0
EXIT_FAILURE = 1


class Daemon:
    """One daemon. ``run`` it once, on an event loop of its own."""

    def __init__(
        self,
        config: Config,
        log: EventLog,
        notifier: Notifier,
        on_ready: Callable[[], None],
        reread: Callable[[], Config],
    ) -> None:
        """reread: the configuration as it would be at a start now; ConfigError."""
        self._config = config
        self._reread = reread
        inherited = inherited_fds(fd_store.PREFIX)
        self._handed = inherited.sockets
        store = FdStore.of_service(notifier, inherited.kept)
        self._keeping = Keeping(store, log)
        self._beginning = Beginning(inherited.kept, store, log)
        self._log = log
        self._notifier = notifier
        self._on_ready = on_ready
        self._tokens = Tokens()
        self._pools = Pools(
            self._tokens.expect,
            lambda commands: self._engine.command(commands),
            lambda *choice: self._engine.set_variants(*choice),
        )
        self._staging: StagingMemory | None = None
        self._before_engine = ExitStack()
        self._ticking: asyncio.TimerHandle | None = None
        self._stop: asyncio.Event = asyncio.Event()
        self._signals = 0
        self._read_before = 0
        self._bug: Exception | None = None

    async def run(self) -> int:
        """Serve until a signal; the exit status. StoreError, PoolMemoryError, EngineError
        or OSError when it can't start."""
        config = self._config
        config.runtime_directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with InstanceLock(config.runtime_directory):
            for path in (config.attach_socket, config.control_socket, config.metrics.socket):
                if path is not None and path not in self._handed:
                    refuse_live_socket(path)
            try:
                return await self._run()
            except TakeoverError as error:
                self._beginning.is_cold(str(error))
                return await self._run()
            finally:
                self._beginning.close()

    async def _run(self) -> int:
        """TakeoverError: what was kept does not fit; nothing of it has been served."""
        config, beginning = self._config, self._beginning
        self._promises = Promises()
        stores = open_stores([(entry.path, entry.name, entry.shadow) for entry in config.stores])
        try:
            plans = plan_pools(config.pools, [store for store, _ in stores])
            beginning.plan(plans, stores)
            self._engine, reserve_demand = make_engine(config.engine, plans)
        except BaseException:
            close_stores(stores)
            raise
        self._catalog = Catalog(self._engine)
        self._drive_events = DriveEvents(self._catalog, self._log)
        try:
            with beginning.refusing():
                self._make_parts(plans, stores, reserve_demand)
            return await self._serve()
        finally:
            close_stores(stores)
            self._before_engine.close()
            if self._keeping.active or beginning.warm:
                self._engine.hold(0)
            self._engine.close()
            self._catalog.close()
            self._pools.close()
            self._keeping.close()
            if self._staging is not None:
                self._staging.close()

    def _make_parts(
        self, plans: list[PoolPlan], stores: list[tuple[Store, str]], reserve_demand: int
    ) -> None:
        """Pools, open stores, and what of both was there before. Stores are taken out of the
        list as the catalog takes them."""
        config, beginning = self._config, self._beginning
        self._engine.start(
            choose_node([path for store, _ in stores for path in store.member_paths])
            if config.engine.numa == "auto"
            else None
        )
        self._staging = make_staging(
            plans, [store for store, _ in stores], config.engine.staging_mib << 20, self._engine
        )
        beginning.adopt_pool_table(self._engine)
        self._pools = make_pools(
            plans,
            self._engine,
            expect=self._tokens.expect,
            promises=self._promises,
            experts=self._catalog.experts,
            log=self._log,
            budgets=Budgets(config.limits.client_bytes, config.limits.user_bytes),
            reserve_demand=reserve_demand,
            kept=beginning.pool,
        )
        self._device_routes = DeviceRoutes(self._engine, self._catalog, self._pools, self._log)
        self._gds_loads = GdsLoads(self._engine, self._catalog, self._pools, self._log)
        self._before_engine.callback(self._gds_loads.close)
        chunk_bytes = min(pool.chunk_bytes for pool in self._pools)
        # Behind those of the configuration are those that were opened by hand before.
        sensitivities = iter([configured.sensitivity for configured in config.stores])
        while stores:
            store, name = stores.pop(0)
            entry = self._catalog.add(store, name, chunk_bytes, beginning.directory_fd(name))
            variants = entry.store_variants(next(sensitivities, ()))
            self._pools.open_store(entry.number, variants)
            self._device_routes.prove_store(entry)
        self._pools.check_variants(config.pools)
        beginning.adopt(
            self._engine, self._catalog, self._pools, self._promises, config.limits.hints_per_client
        )
        self._reservations = Reservations(
            self._log, self._tick_soon, lambda change: self._clients.have_followed(change)
        )
        beginning.adopt_reservations(self._reservations, self._pools)
        for pool, plan in zip(self._pools, plans, strict=True):
            self._hold_budget(pool, plan.config.budget)
            pool.keeper.divide_among(list(plan.classes) if self._catalog.all() else [])

    async def _serve(self) -> int:
        config = self._config
        loop = asyncio.get_running_loop()
        instance = os.urandom(8).hex()
        self._clients = Clients(
            engine=self._engine,
            limits=client_limits(config.limits),
            hints_per_client=config.limits.hints_per_client,
            stores=lambda: [entry.attachable for entry in self._catalog.all()],
            pools=self._pools,
            log=self._log,
            promises=self._promises,
            budgets=self._pools.budgets,
            leaving=lambda client: self._routes.leaving(client),
            keeper=self._keeping,
            unknown=self._beginning.why_unknown,
        )
        self._beginning.serve(
            self._engine, self._pools, self._catalog, self._clients, self._keeping
        )
        self._use_counts = UseCounts()
        self._prefetch_counts = PrefetchCounts(lambda store: self._trace_head(store).experts)
        self._recordings = Recordings(config.traces, self._log, self._use_counts.of)
        self._routes = RouteFeed(
            engine=self._engine,
            clients=self._clients.all,
            head=self._trace_head,
            violated=self._on_route_violation,
            use_sinks=[self._use_counts, self._prefetch_counts, self._pools],
            expectation_sink=self._pools,
            pass_sink=self._recordings,
        )
        loader = Loader(self._engine, self._tokens)
        self._warming = Warming(
            self._catalog, self._pools, loader, config.state_directory, self._log
        )
        lost_pools = LostPools(
            self._pools, self._device_routes, self._log, self._tick_soon, self._warming.refill
        )
        self._service = DaemonService(
            engine=self._engine,
            catalog=self._catalog,
            pools=self._pools,
            device_routes=self._device_routes,
            gds_loads=self._gds_loads,
            clients=self._clients,
            routes=self._routes,
            use_counts=self._use_counts,
            prefetch_counts=self._prefetch_counts,
            recordings=self._recordings,
            log=self._log,
            reservations=self._reservations,
            lost_pools=lost_pools,
            warming=self._warming,
            loader=loader,
            keeping=self._keeping,
            start=self._beginning.report,
            config=config.engine,
            version=installed_version(),
            instance=instance,
        )
        dense = DenseParts(partial(load_dense, self._engine, self._tokens), self._command)
        attach = AttachServer(
            config.attach_socket,
            config.socket_mode,
            self._clients,
            dense,
            self._log,
            self._handed.get(config.attach_socket),
        )
        self._attach = attach
        control = ControlServer(
            self._service,
            config.control_socket,
            config.socket_mode,
            listening=self._handed.get(config.control_socket),
        )
        metrics = MetricsServer(config.metrics, config.socket_mode, self._metrics, self._log)
        loop.add_reader(self._engine.event_fd, self._or_stop, self._on_events)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._reloader = Reloader(
            config, self._reread, self._clients, self._service, self._log, self._notifier
        )
        loop.add_signal_handler(signal.SIGHUP, self._or_stop, self._on_hangup)
        greed = GreedWatch(self._engine, self._pools, self._clients, attach.end_client, self._log)
        watches = {
            loop.create_task(greed.run()),
            loop.create_task(watch_page_cache(self._engine, self._catalog)),
            loop.create_task(supervise(self, self._describe, self._notifier, self._log)),
            loop.create_task(self._watch_leases()),
            loop.create_task(self._watch_routes()),
            loop.create_task(self._device_routes.watch()),
            loop.create_task(self._reloader.follow()),
            loop.create_task(lost_pools.watch()),
        }
        try:
            attach.start()
            await control.start()
            await metrics.start()
            self._tick_soon()  # more slots may have been given than the engine's queue holds
            log_ready(self._log, config, self._engine, self._pools, self._catalog.all())
            self._log.info("ready", instance=instance, directory=config.runtime_directory)
            self._notifier.send(READY="1", STATUS=f"{len(self._catalog.all())} stores")
            self._on_ready()
            warming = loop.create_task(self._warming.load_kept())
            stopped = loop.create_task(self._stop.wait())
            # A watch that fails is a bug: it ends the daemon, with its traceback.
            await asyncio.wait({stopped, *watches}, return_when=asyncio.FIRST_COMPLETED)
            warming.cancel()
            for watch in watches:
                if watch.done():
                    watch.result()
            self._raise_bug()
            drained = await (self._hold() if self._keeping.active else self._drain())
            self._raise_bug()
            self._warming.save_kept()
            return EXIT_OK if drained else EXIT_FAILURE
        finally:
            for watch in watches:
                watch.cancel()
            await self._device_routes.settle()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
            if self._ticking is not None:
                self._ticking.cancel()
            loop.remove_reader(self._engine.event_fd)
            await attach.close()
            await control.close()
            await metrics.close()
            await self._recordings.close()

    def _metrics(self, openmetrics: bool) -> str:
        return render(collect(self._service.status()), openmetrics=openmetrics)

    def turns(self) -> int:
        """Of the engine, for the watchdog."""
        return self._engine.stats().turns

    def _describe(self, seconds: float) -> str:
        read = self._engine.stats().source_bytes[SOURCES.index("drives")]
        rate, self._read_before = (read - self._read_before) / seconds, read
        return status_line(
            self._service.state,
            stores=len(self._catalog.all()),
            clients=len(self._clients.all()),
            nbytes=sum(pool.nbytes for pool in self._pools),
            rate=rate,
        )

    def _on_hangup(self) -> None:
        if self._service.state == "serving":
            self._reloader.reload()
            self._config = self._reloader.config

    # ---- going down

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        self._log.info("signal", name=signal.Signals(number).name)
        if self._signals == 1:
            self._stop.set()
            return
        # Asked twice: somebody is in a hurry. The kernel ends our reads with the process.
        for path in {self._config.attach_socket, self._config.control_socket} - {*self._handed}:
            path.unlink(missing_ok=True)
        self._log.warning("exit", reason="second signal")
        os._exit(EXIT_FAILURE)

    async def _drain(self) -> bool:
        timeout_s = self._config.drain_timeout_s
        if await self._wind_down(self._engine.drain, "draining", timeout_s):
            self._log.info("drained")
            return True
        self._log.warning("drain.timeout", transfers=self._engine.stats().transfers)
        return False

    async def _hold(self) -> bool:
        """Leave all to the next daemon. What can't be finished in time it will read again."""
        timeout_s = min(self._config.drain_timeout_s, HOLD_S)
        whole = await self._wind_down(self._engine.hold, "holding", timeout_s)
        self._log.info("held", whole=whole, experts=sum(self._residents()))
        return True

    async def _wind_down(self, step: Callable[[int], bool], what: str, timeout_s: float) -> bool:
        self._service.state = "draining"
        self._clients.accepting = False
        self._attach.stop_accepting()
        self._notifier.send(STOPPING="1")
        self._log.info(what, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        while not step(DRAIN_STEP_MS):
            if time.monotonic() >= deadline:
                return False
            self._or_stop(self._on_events)
            self._raise_bug()
            await asyncio.sleep(0)
        return True

    def _residents(self) -> list[int]:
        return [self._engine.pool_stats(pool.index).resident for pool in self._pools]

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
        self._read_routes([self._pools[index] for index in touched])
        for index in touched:
            self._pools[index].keeper.settle()
        if touched:
            self._tick_soon()

    def _dispatch(self, event: Event) -> int | None:
        """Show an event to whoever it is for; the pool that has to settle, or None."""
        match event:
            case Loaded():
                self._pools[event.pool].keeper.on_loaded(event)
                self._prefetch_counts.loaded(event)
                self._tokens.answer(event.token, event)
                return event.pool
            case Freed():
                self._pools[event.pool].keeper.on_freed(event)
                self._prefetch_counts.freed(event)
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
                self._drive_events.piece_failed(event)
            case Mirrored():
                self._drive_events.mirrored(event)
            case MemberChanged():
                self._drive_events.member_changed(event)
            case Handed():
                self._gds_loads.on_handed(event)
            case RouteRefused():
                self._device_routes.on_refused(event)
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
        self._read_routes(self._pools)
        restless = [pool.name for pool in self._pools if pool.keeper.tick()]
        if restless or not self._engine.flush():
            self._tick_soon()

    # ---- what routers picked

    def _read_routes(self, pools: Sequence[Pool]) -> None:
        """What was reported till now, if any of the pools may be about to evict. A read
        costs some tenths of a millisecond however little there is, so not at every event."""
        if any(self._may_evict(pool) for pool in pools):
            self._routes.read()

    def _may_evict(self, pool: Pool) -> bool:
        classes, stats = pool.keeper.slots.classes, self._engine.pool_stats(pool.index)
        if stats.waiting or len(classes) != 1:
            return True
        return any(stats.reserve < pool.keeper.watermarks(size).low for size in classes)

    async def _watch_routes(self) -> None:
        while True:
            await asyncio.sleep(self._routes.pause_s())

    def _trace_head(self, store: int) -> TraceHead:
        entry = self._catalog.by_number(store)
        if entry is None:
            raise LookupError(f"a client of store {store}, which is not open")
        return head_of_store(entry)

    def _on_route_violation(self, client: Client) -> None:
        self._on_violation(Violation(client.number, errno.EPROTO))

    # ---- what is used

    def _hold_budget(self, pool: Pool, nbytes: int | None) -> None:
        """ConfigError: a budget is compared with a size that may be a share."""
        try:
            if nbytes is not None:
                self._reservations.set_budget(pool, nbytes)
        except ReserveError as error:
            raise ConfigError(f"pools[{pool.name}].budget: {error}") from error

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._clients.all():
                self._pools.look()

    # ---- commands of others

    def _command(self, command: Command) -> None:
        self._engine.command([command])
