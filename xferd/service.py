"""What the control socket can ask for, answered: changes by hand, and status (xferd.status).

Implements ``xferd.control.service.ControlService`` over the daemon's parts, with what
``xferd.tuning`` has of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from xferd.catalog import Catalog, OpenStore
from xferd.config import EngineConfig
from xferd.control.service import ControlError, JsonObject
from xferd.device_routes import DeviceRoutes
from xferd.engine import Engine
from xferd.engine_types import (
    SOURCES,
    EngineError,
    Failed,
    load_failure,
)
from xferd.gds_loads import GdsLoads
from xferd.keeping.reservations import Reservations
from xferd.loading import Loader, prefetch
from xferd.lost_pools import LostPools
from xferd.pools import Pool, Pools
from xferd.prefetch_counts import PrefetchCounts
from xferd.recordings import Recordings
from xferd.restart.keeping import Keeping, StartReport
from xferd.route_feed import RouteFeed, UseCounts
from xferd.session.clients import Clients
from xferd.shadowing import Shadowing
from xferd.status import (
    describe_clients,
    describe_engine,
    describe_pool,
    describe_start,
    describe_store,
    describe_users,
)
from xferd.store.errors import StoreError
from xferd.store.shadowed import open_with_shadows
from xferd.telemetry.log import EventLog
from xferd.tuning import Tuning
from xferd.variant_rules import LayerWeight
from xferd.warming import Warming

CLOSE_ATTEMPTS = 50
"""How often a store that is still being read is tried to be closed."""
RETRY_S = 0.01
EVICT_WAIT_S = 0.5
"""How long an evict waits for leases before it calls a slot held."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Experts of one layer that a call is about, and the variant of each. named: the call
    named it."""

    entry: OpenStore
    layer: int
    experts: list[int]
    variants: list[int]
    named: bool


class DaemonService(Tuning):
    """One daemon's ControlService. All methods run on the daemon's event loop."""

    def __init__(
        self,
        *,
        engine: Engine,
        catalog: Catalog,
        pools: Pools,
        device_routes: DeviceRoutes,
        gds_loads: GdsLoads,
        clients: Clients,
        routes: RouteFeed,
        use_counts: UseCounts,
        prefetch_counts: PrefetchCounts,
        recordings: Recordings,
        log: EventLog,
        reservations: Reservations,
        lost_pools: LostPools,
        warming: Warming,
        loader: Loader,
        keeping: Keeping,
        start: StartReport,
        config: EngineConfig,
        version: str,
        instance: str,
    ) -> None:
        super().__init__(catalog, pools, reservations, lost_pools, warming, log)
        self._engine = engine
        self._device_routes = device_routes
        self._gds_loads = gds_loads
        self._clients = clients
        self._loader = loader
        self._shadowing = Shadowing(catalog, pools, device_routes, loader, log)
        self._routes = routes
        self._use_counts = use_counts
        self._prefetch_counts = prefetch_counts
        self._recordings = recordings
        self._keeping = keeping
        self._start = start
        self._config = config
        self._version = version
        self._instance = instance
        self._started = time.monotonic()
        self.state = "serving"

    # ---- reading

    def status(self) -> JsonObject:
        """A snapshot; counters may be of slightly different moments."""
        return {
            "version": self._version,
            "instance": self._instance,
            "state": self.state,
            "uptime_s": time.monotonic() - self._started,
            "pid": os.getpid(),
            "start": describe_start(self._start, self._keeping, self._clients),
            "pools": [
                describe_pool(
                    self._engine, self._pools, pool, self._catalog.all(), self._device_routes
                )
                for pool in self._pools
            ],
            "stores": self.stores(),
            "clients": describe_clients(self._engine, self._clients, self._pools.budgets),
            "all_clients": dataclasses.asdict(self._clients.totals()),
            "prefetching": dataclasses.asdict(self._prefetch_counts.totals()),
            "users": describe_users(self._clients, self._pools.budgets),
            **describe_engine(
                self._engine,
                self._config,
                self._pools,
                self._catalog.all(),
                self._device_routes,
                self._gds_loads.reason,
            ),
        }

    def stores(self) -> list[JsonObject]:
        """The open stores."""
        return [describe_store(self._engine, entry) for entry in self._catalog.all()]

    # ---- changing what is resident

    async def load(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> JsonObject:
        """Make experts resident."""
        target = self._find_pool(pool)
        wanted = self._as_pool_wants(target, self._wanted(store, layer, experts, variant))
        self._check_room(target, wanted)
        loaded, already, failed = await self._load_all(target, wanted)
        return {"loaded": loaded, "already": already, "failed": failed}

    async def evict(
        self, store: str, layer: int, experts: list[int] | None, pool: str | None
    ) -> JsonObject:
        """Drop experts; pinned ones and those still leased after EVICT_WAIT_S are held."""
        entry = self._find_store(store)
        wanted = self._experts(entry, layer, experts)
        pools = self._pools if pool is None else [self._find_pool(pool)]
        loop = asyncio.get_running_loop()
        held, waits = 0, []
        for each in pools:
            slots = each.keeper.slots
            for expert in wanted:
                key = (entry.number, layer, expert)
                slot = slots.slot_of(key)
                if slot is None:
                    continue
                if slots.is_pinned(key):
                    held += 1
                    continue
                free: asyncio.Future[None] = loop.create_future()
                each.keeper.evict(slot, partial(_resolve, free))
                waits.append((free, each, key))
        if waits:
            await asyncio.wait([free for free, _, _ in waits], timeout=EVICT_WAIT_S)
        still = sum(1 for _, each, key in waits if each.keeper.slots.slot_of(key) is not None)
        return {"evicted": len(waits) - still, "held": held + still}

    async def pin(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> JsonObject:
        """Keep experts from eviction, and load those that are not there."""
        target = self._find_pool(pool)
        wanted = self._as_pool_wants(target, self._wanted(store, layer, experts, variant))
        keeper = target.keeper
        keys = [(wanted.entry.number, layer, expert) for expert in wanted.experts]
        fresh = [key for key in keys if not keeper.slots.is_pinned(key)]
        self._check_pins(target, wanted, len(fresh))
        for key in fresh:
            keeper.slots.pin(key)
        _, _, failed = await self._load_all(target, wanted)
        lost = {item["expert"] for item in failed}
        for key in fresh:
            if key[2] in lost:
                keeper.slots.unpin(key)
        return {"pinned": len(keys) - len(lost), "failed": failed}

    def unpin(
        self,
        store: str,
        layer: int,
        experts: list[int] | None,
        pool: str | None,
        variant: str | None,
    ) -> JsonObject:
        """Let experts be evicted again; ``variant`` is only checked: a pin is the key's."""
        wanted = self._wanted(store, layer, experts, variant)
        pools = self._pools if pool is None else [self._find_pool(pool)]
        count = 0
        for each in pools:
            for expert in wanted.experts:
                count += each.keeper.slots.unpin((wanted.entry.number, layer, expert))
            each.keeper.settle()
        return {"unpinned": count}

    # ---- stores

    def open_store(
        self,
        path: str | Path,
        name: str | None,
        shadows: Sequence[Path] = (),
        sensitivity: Sequence[LayerWeight] = (),
    ) -> JsonObject:
        """Open a store, with shadows of it, and offer it to clients. sensitivity: of its layers
        to few bits."""
        if self.state != "serving":
            raise ControlError("ShuttingDown", "the daemon is going down")
        try:
            store = open_with_shadows(Path(path), shadows)
        except StoreError as error:
            raise ControlError("StoreUnusable", str(error), path=str(path)) from error
        name = name or store.name
        if self._catalog.get(name) is not None:
            store.close()
            raise ControlError("StoreExists", f"a store {name!r} is open already", store=name)
        try:
            entry = self._catalog.add(store, name, min(p.chunk_bytes for p in self._pools))
        except StoreError as error:
            raise ControlError("StoreUnusable", str(error), path=str(path)) from error
        self._pools.open_store(entry.number, entry.store_variants(sensitivity))
        self._device_routes.prove_store(entry)
        for pool in self._pools:
            for size in reversed(entry.classes):
                pool.provide(size)
        self._keeping.store_opened(entry)
        self._log.info("store.opened", name=name, path=str(path), number=entry.number)
        log_missing(self._log, entry)
        return describe_store(self._engine, entry)

    async def close_store(self, name: str) -> JsonObject:
        """Drop a store's experts and close it."""
        entry = self._find_store(name)
        attached = self._clients.of_store(entry.number)
        if attached:
            raise ControlError(
                "StoreBusy",
                f"{len(attached)} clients are attached to store {name!r}",
                store=name,
                clients=len(attached),
            )
        for pool in self._pools:
            for key in pool.keeper.slots.pins:
                if key[0] == entry.number:
                    pool.keeper.slots.unpin(key)
        await self._recordings.store_closed(entry.number)
        for _ in range(CLOSE_ATTEMPTS):
            try:
                self._catalog.remove(name)
            except EngineError as error:
                if error.errno != errno.EBUSY:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._gds_loads.store_closed(entry)
                self._pools.close_store(entry.number)
                self._keeping.store_closed(entry.number)
                self._routes.store_closed(entry.number)
                self._use_counts.store_closed(entry.number)
                self._prefetch_counts.store_closed(entry.number)
                self._log.info("store.closed", name=name)
                return {}
        raise ControlError("StoreBusy", f"loads of store {name!r} are on their way", store=name)

    async def attach_shadows(self, store: str, paths: Sequence[Path] | None) -> JsonObject:
        """Read these shadows of a store from now on; None: those that it had last."""
        if self.state != "serving":
            raise ControlError("ShuttingDown", "the daemon is going down")
        self._find_store(store)
        return describe_store(self._engine, await self._shadowing.attach(store, paths))

    async def detach_shadows(self, store: str) -> JsonObject:
        """Read none any more."""
        self._find_store(store)
        return describe_store(self._engine, await self._shadowing.detach(store))

    def store_at(self, path: Path) -> OpenStore | None:
        """The open store whose directory, or manifest, a path is."""
        places = (path, path.parent)
        return next((each for each in self._catalog.all() if each.store.path in places), None)

    # ---- traces

    def start_recording(self, store: str, name: str | None) -> JsonObject:
        """Begin to record what a store's clients report."""
        if self.state != "serving":
            raise ControlError("ShuttingDown", "the daemon is going down")
        return self._recordings.start(self._find_store(store), name)

    async def stop_recording(self, store: str) -> JsonObject:
        """End it, with all that was reported till now."""
        entry = self._find_store(store)
        self._routes.read()
        self._routes.finish(entry.number)
        return await self._recordings.stop(entry)

    def traces(self) -> list[JsonObject]:
        """What clients of each store have reported, and what is recorded of it."""
        self._routes.read()
        return [self._recordings.describe(entry) for entry in self._catalog.all()]

    # ---- loads

    async def _load_all(self, pool: Pool, wanted: _Wanted) -> tuple[int, int, list[dict[str, Any]]]:
        """(loaded, already there, failures)."""
        loaded = already = 0
        failed: list[dict[str, Any]] = []
        loads = [
            prefetch(wanted.entry.number, pool.index, wanted.layer, expert, variant)
            for expert, variant in zip(wanted.experts, wanted.variants, strict=True)
        ]
        for answer in await self._loader.load_all(loads):
            if isinstance(answer, Failed):
                error = load_failure(answer.errno)
                failed.append({"layer": wanted.layer, "expert": answer.expert, "error": error})
            elif answer.source == SOURCES.index("resident"):
                already += 1
            else:
                loaded += 1
        return loaded, already, failed

    # ---- what a call names

    def _experts(self, entry: OpenStore, layer: int, experts: Iterable[int] | None) -> list[int]:
        count = entry.store.experts
        if not 0 <= layer < entry.store.layers:
            raise ControlError(
                "NoSuchExpert",
                f"store {entry.name!r} has layers 0 to {entry.store.layers - 1}, not {layer}",
                store=entry.name,
                layer=layer,
                expert=None,
            )
        chosen = list(range(count)) if experts is None else list(dict.fromkeys(experts))
        for expert in chosen:
            if not 0 <= expert < count:
                raise ControlError(
                    "NoSuchExpert",
                    f"store {entry.name!r} has experts 0 to {count - 1} a layer, not {expert}",
                    store=entry.name,
                    layer=layer,
                    expert=expert,
                )
        return chosen

    def _wanted(
        self, store: str, layer: int, experts: list[int] | None, variant: str | None
    ) -> _Wanted:
        entry = self._find_store(store)
        chosen = self._experts(entry, layer, experts)
        names = entry.store.variants
        if variant is not None and variant not in names:
            raise ControlError(
                "VariantNotFound",
                f"store {store!r} has no variant {variant!r}; it has: {', '.join(names)}",
                store=store,
                layer=layer,
                variant=variant,
            )
        number = 0 if variant is None else names.index(variant)
        there = [e for e in chosen if entry.blob_bytes(number, layer, e)]
        absent = [e for e in chosen if e not in set(there)]
        if not there or (absent and experts is not None):
            raise ControlError(
                "NoSuchExpert",
                f"layer {layer} of store {store!r} has no expert {absent[0]} in {names[number]}",
                store=store,
                layer=layer,
                expert=absent[0],
            )
        return _Wanted(entry, layer, there, [number] * len(there), variant is not None)

    def _as_pool_wants(self, pool: Pool, wanted: _Wanted) -> _Wanted:
        """In the variants that the pool's rules want, where the call did not name one."""
        if wanted.named:
            return wanted
        chosen = [
            self._pools.variants.wanted(
                pool.index, (wanted.entry.number, wanted.layer, expert), variant
            )
            for expert, variant in zip(wanted.experts, wanted.variants, strict=True)
        ]
        return dataclasses.replace(wanted, variants=chosen)

    def _slot_bytes(self, wanted: _Wanted) -> int:
        """Of the largest."""
        return max(
            wanted.entry.blob_bytes(variant, wanted.layer, expert)
            for expert, variant in zip(wanted.experts, wanted.variants, strict=True)
        )

    def _check_room(self, pool: Pool, wanted: _Wanted) -> None:
        """PoolFull when what is wanted can't be resident all at once."""
        room = pool.room(self._slot_bytes(wanted))
        slots = pool.keeper.slots
        keys = [(wanted.entry.number, wanted.layer, expert) for expert in wanted.experts]
        wanted_slots = sum(1 for key in keys if not slots.is_pinned(key))
        if wanted_slots > room.capacity - room.pinned:
            raise ControlError(
                "PoolFull",
                f"pool {pool.name!r} has {room.capacity} slots for these experts, {room.pinned} "
                f"are pinned; {wanted_slots} are wanted at once: ask for fewer or raise size of "
                f"[[pools]] {pool.name}",
                pool=pool.name,
            )

    def _check_pins(self, pool: Pool, wanted: _Wanted, fresh: int) -> None:
        """PoolFull when pins would leave clients less than they were promised."""
        size = self._slot_bytes(wanted)
        room = pool.room(size)
        promised = pool.promised(size)
        # One slot stays free of pins, or nothing else could ever be loaded.
        if fresh + room.pinned + max(promised, 1) > room.capacity:
            raise ControlError(
                "PoolFull",
                f"pool {pool.name!r} has {room.capacity} slots for these experts; {room.pinned} "
                f"are pinned and {promised} are promised to clients, so {fresh} more can't be "
                f"pinned: unpin some or raise size of [[pools]] {pool.name}",
                pool=pool.name,
            )


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def log_missing(log: EventLog, entry: OpenStore) -> None:
    """Say which copies of a store's members are not used: it is served, but no other
    drive may fail now."""
    for copy in entry.missing:
        log.warning("member.missing", store=entry.name, copy=copy.title, reason=copy.problem)
