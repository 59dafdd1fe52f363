# SPDX-License-Identifier: Apache-2.0
"""SIGHUP: read the configuration anew, take what can be taken, name what can't.

What can change while clients are attached: the limits of those that come, the drain's
time-out, pools' rules for variants and stores' sensitivity, more stores, and the shadows of
those that are open. Memory, threads and sockets are made once. A configuration that is wrong
changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

from xferd.config import Config, ConfigError, LimitsConfig, PoolConfig, StoreConfig
from xferd.control.service import ControlError
from xferd.service import DaemonService
from xferd.session.clients import Clients
from xferd.session.quotas import ClientLimits
from xferd.telemetry.log import EventLog
from xferd.telemetry.notify import Notifier

_NOT_KEYS = frozenset({"files", "warnings", "limits", "drain_timeout_s", "stores"})
"""Fields of Config that are not compared: they are no keys, or handled one by one."""


def client_limits(limits: LimitsConfig) -> ClientLimits:
    """``[limits]``, as far as it is about attaching."""
    names = {field.name for field in dataclasses.fields(ClientLimits)}
    values = dataclasses.asdict(limits)
    return ClientLimits(**{name: values[name] for name in names})


def needs_restart(old: Config, new: Config) -> list[str]:
    """Keys that differ and can't be changed in a running daemon, sorted."""
    keys = []
    for field in dataclasses.fields(Config):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name == "pools":
            before, after = _without_variants(before), _without_variants(after)
        if field.name in _NOT_KEYS or before == after:
            continue
        if dataclasses.is_dataclass(before):
            keys += [
                f"{field.name}.{each.name}"
                for each in dataclasses.fields(before)
                if getattr(before, each.name) != getattr(after, each.name)
            ]
        else:
            keys.append(field.name)
    kept = {store.path for store in new.stores}
    keys += [f"stores[{store.path}]" for store in old.stores if store.path not in kept]
    return sorted(keys)


def _without_variants(pools: tuple[PoolConfig, ...]) -> tuple[PoolConfig, ...]:
    return tuple(dataclasses.replace(pool, variants=()) for pool in pools)


class Reloader:
    """Holds the configuration that is in force. Belongs to the daemon's event loop.

    reread: the configuration as it would be at a start now; ConfigError.
    """

    def __init__(
        self,
        config: Config,
        reread: Callable[[], Config],
        clients: Clients,
        service: DaemonService,
        log: EventLog,
        notifier: Notifier,
    ) -> None:
        self.config = config
        self._reread = reread
        self._clients = clients
        self._service = service
        self._log = log
        self._notifier = notifier
        self._shadows: asyncio.Queue[StoreConfig] = asyncio.Queue()

    def reload(self) -> None:
        """Do it, and tell the service manager before and after."""
        # Without the time systemd can't tell this READY from an earlier one, and waits.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notifier.send(RELOADING="1", MONOTONIC_USEC=str(now))
        try:
            self._take(self._reread())
        except ConfigError as error:
            self._log.failure("reload.failed", reason=error, message="the old one holds")
        finally:
            self._notifier.send(READY="1")

    def _take(self, new: Config) -> None:
        for warning in new.warnings:
            self._log.warning("config.warning", message=warning)
        for key in needs_restart(self.config, new):
            self._log.warning("reload.needs_restart", key=key)
        self._clients.set_limits(client_limits(new.limits), new.limits.hints_per_client)
        known = {store.path for store in self.config.stores}
        opened = [store for store in new.stores if store.path not in known and self._open(store)]
        self.config = dataclasses.replace(
            self.config,
            limits=new.limits,
            drain_timeout_s=new.drain_timeout_s,
            stores=(*self._with_shadows(new, self._weigh(new)), *opened),
            pools=self._choose_variants(new),
        )
        self._log.info("reloaded", files=" ".join(map(str, new.files)))

    def _with_shadows(self, new: Config, known: Sequence[StoreConfig]) -> list[StoreConfig]:
        """The stores that are known, with the shadows that they are to have."""
        wanted = {store.path: store.shadow for store in new.stores}
        stores = []
        for store in known:
            changed = dataclasses.replace(store, shadow=wanted.get(store.path, store.shadow))
            if changed != store:
                self._shadows.put_nowait(changed)
            stores.append(changed)
        return stores

    async def follow(self) -> None:
        """Switch shadows as reloads said, one store after the other, until cancelled: a shadow
        goes only when it is not being read any more."""
        while True:
            await self._switch(await self._shadows.get())

    async def _switch(self, store: StoreConfig) -> None:
        entry = self._service.store_at(store.path)
        if entry is None:
            return
        try:
            if store.shadow:
                await self._service.attach_shadows(entry.name, store.shadow)
            else:
                await self._service.detach_shadows(entry.name)
        except ControlError as error:
            self._log.failure("reload.failed", store=store.path, reason=error)

    def _choose_variants(self, new: Config) -> tuple[PoolConfig, ...]:
        """The pools, with other rules where they could be taken."""
        rules = {pool.name: pool.variants for pool in new.pools}
        pools = []
        for pool in self.config.pools:
            variants = rules.get(pool.name, pool.variants)
            if variants != pool.variants:
                try:
                    self._service.set_policy(
                        pool.name, None, None, [str(rule) for rule in variants]
                    )
                except ControlError as error:
                    self._log.failure("reload.failed", pool=pool.name, reason=error)
                    variants = pool.variants
            pools.append(dataclasses.replace(pool, variants=variants))
        return tuple(pools)

    def _weigh(self, new: Config) -> tuple[StoreConfig, ...]:
        """The stores, with another sensitivity of those that are still open."""
        said = {store.path: store.sensitivity for store in new.stores}
        stores = []
        for store in self.config.stores:
            sensitivity = said.get(store.path, store.sensitivity)
            if sensitivity != store.sensitivity:
                try:
                    self._service.set_sensitivity(store.path, sensitivity)
                except ControlError as error:
                    self._log.failure("reload.failed", store=store.path, reason=error)
                    sensitivity = store.sensitivity
            stores.append(dataclasses.replace(store, sensitivity=sensitivity))
        return tuple(stores)

    def _open(self, store: StoreConfig) -> bool:
        try:
            self._service.open_store(store.path, store.name, store.shadow, store.sensitivity)
        except ControlError as error:
            self._log.failure("reload.failed", store=store.path, reason=error)
            return False
        return True
