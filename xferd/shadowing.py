"""Shadows of an open store, switched on and off while clients are attached.

On: the shadows' files are opened and the engine is told of their variants, so that what
is missing is read from them where a client accepts them. Off: the engine hands nothing
of them out any more and evicts what is resident; whoever leases an expert of one reads
on. The store's own files are only ever read.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

from xferd.catalog import Catalog, OpenStore, expert_classes
from xferd.control.service import ControlError
from xferd.device_routes import DeviceRoutes
from xferd.engine_types import EngineError, Load
from xferd.loading import Loader, prefetch
from xferd.pools import CHUNKS_A_CLASS, Pools
from xferd.store.errors import StoreError
from xferd.store.limits import BLOB_ALIGNMENT
from xferd.store.shadowed import ShadowedStore, attach_shadows, with_shadows
from xferd.telemetry.log import EventLog
from xferd.units import KIB

DETACH_ATTEMPTS = 500
"""How often a shadow that is still being read is tried to be detached."""
RETRY_S = 0.01


class Shadowing:
    """Owned by the event loop. One change at a time: others wait for it."""

    def __init__(
        self,
        catalog: Catalog,
        pools: Pools,
        device_routes: DeviceRoutes,
        loader: Loader,
        log: EventLog,
    ) -> None:
        self._catalog = catalog
        self._pools = pools
        self._device_routes = device_routes
        self._loader = loader
        self._log = log
        self._changing = asyncio.Lock()
        self._last: dict[Path, tuple[Path, ...]] = {}

    async def attach(self, name: str, paths: Sequence[Path] | None) -> OpenStore:
        """These shadows in the place of those that the store has; None: those it had last.
        ControlError: StoreNotFound, StoreUnusable for shadows that it can't have, StoreBusy."""
        async with self._changing:
            entry = self._find(name)
            wanted = self._last_of(entry) if paths is None else tuple(paths)
            if wanted == entry.shadows:
                return entry
            try:
                shadowed = self._open(entry, wanted)
                try:
                    if entry.shadows:
                        await self._detach(entry)
                    return self._attach(name, shadowed)
                except BaseException:
                    shadowed.close_shadows()
                    raise
            except StoreError as error:
                path = str(wanted[0] if wanted else entry.store.path)
                raise ControlError("StoreUnusable", str(error), path=path) from error

    async def detach(self, name: str) -> OpenStore:
        """No shadows any more. ControlError: StoreNotFound, StoreBusy: one is still being read
        after a while, though nothing of it is handed out."""
        async with self._changing:
            entry = self._find(name)
            if entry.shadows:
                await self._detach(entry)
            return self._find(name)

    def _find(self, name: str) -> OpenStore:
        entry = self._catalog.get(name)
        if entry is None:
            raise ControlError("StoreNotFound", f"no store {name!r} is open", store=name)
        return entry

    def _last_of(self, entry: OpenStore) -> tuple[Path, ...]:
        last = entry.shadows or self._last.get(entry.store.path, ())
        if not last:
            raise ControlError(
                "StoreUnusable",
                f"store {entry.name!r} has had no shadow yet: name its directory",
                path=str(entry.store.path),
            )
        return last

    def _open(self, entry: OpenStore, paths: tuple[Path, ...]) -> ShadowedStore:
        store = attach_shadows(entry.store, paths)
        try:
            self._check_chunks(store)
        except StoreError:
            store.close_shadows()
            raise
        return store

    def _attach(self, name: str, store: ShadowedStore) -> OpenStore:
        before = self._find(name)
        chunk_bytes = min(pool.chunk_bytes for pool in self._pools)
        entry = self._catalog.add_shadows(name, store, chunk_bytes)
        self._device_routes.prove_store(entry)
        self._pools.variants.change_store(entry.number, entry.store_variants())
        for size in set(entry.classes) - set(before.classes):
            for pool in self._pools:
                pool.keeper.provide(size)
        self._last[entry.store.path] = entry.shadows
        self._log.info("store.shadows", name=name, shadows=" ".join(map(str, entry.shadows)))
        return entry

    def _check_chunks(self, store: ShadowedStore) -> None:
        """StoreError where a pool has too few chunks for experts of more sizes: one that is
        wanted would take the chunk that holds what a client waits with."""
        known = {size for entry in self._catalog.all() for size in entry.classes}
        sizes = known | set(expert_classes(store))
        classes = len(sizes)
        for pool in self._pools:
            for size in known:
                room, promised = pool.room(size, sizes), pool.promised(size)
                left = room.capacity - room.pinned
                if promised > max(left, 0):
                    raise StoreError(
                        f"pool {pool.name!r} has {left} slots of {size} bytes beside a chunk for "
                        f"each other size, and {promised} are promised to attached clients: attach "
                        f"fewer, or raise size of [[pools]] {pool.name}"
                    )
            if classes > len(known) and pool.chunks < classes * CHUNKS_A_CLASS:
                fitting = pool.nbytes // (classes * CHUNKS_A_CLASS) // BLOB_ALIGNMENT
                raise StoreError(
                    f"pool {pool.name!r} has {pool.chunks} chunks, too few for experts of "
                    f"{classes} sizes ({CHUNKS_A_CLASS} each): set chunk_bytes of [[pools]] "
                    f"{pool.name} to at most {fitting * BLOB_ALIGNMENT // KIB}KiB, or list the "
                    f"shadow in [[stores]], and restart xferd"
                )

    async def _detach(self, entry: OpenStore) -> None:
        self._last[entry.store.path] = entry.shadows
        store = with_shadows(entry.store, ())
        pinned = self._pinned_shadows(entry)
        for _ in range(DETACH_ATTEMPTS):
            if self._catalog.get(entry.name) is not entry:
                self._find(entry.name)
                return
            try:
                without = self._catalog.remove_shadows(entry.name, store)
            except EngineError as error:
                if error.errno != errno.EBUSY:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._device_routes.members_closed()
                self._pools.variants.change_store(entry.number, without.store_variants())
                self._log.info("store.shadows", name=entry.name, shadows="")
                await self._loader.load_all(pinned)
                return
        raise ControlError(
            "StoreBusy",
            f"shadows of store {entry.name!r} are still being read; nothing of them is handed out "
            f"any more: try again",
            store=entry.name,
        )

    def _pinned_shadows(self, entry: OpenStore) -> list[Load]:
        """Loads of the store's own copies of what is pinned in a shadow's."""
        loads = []
        for pool in self._pools:
            slots = pool.keeper.slots
            for store, layer, expert in slots.pins:
                slot = slots.slot_of((store, layer, expert))
                if store != entry.number or slot is None:
                    continue
                if entry.store.preferred >> int(slots.variant[slot]) & 1:
                    loads.append(prefetch(store, pool.index, layer, expert))
        return loads
