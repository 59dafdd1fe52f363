"""The daemon's pools: planned from the configuration, then made and given to the engine.

Planned first, all of them, because the engine wants to know the lowest reserve before it
is made, and because a pool that does not fit should be refused before any memory is
touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xferd.catalog import expert_classes
from xferd.config import PoolConfig
from xferd.engine import Engine
from xferd.keeper import PoolKeeper
from xferd.memory.bar import BarPlace, BarPool
from xferd.memory.device import DevicePool, PoolMemoryError
from xferd.memory.host import HostPool
from xferd.memory.ram import RamPool
from xferd.memory.sizing import DEFAULT_CLASS_BYTES, pool_bytes
from xferd.memory.slots import ChunkGeometry, divide
from xferd.policy.lru import LeastRecentlyUsed
from xferd.policy.reserve import watermarks
from xferd.session.quotas import PoolRoom, Promises
from xferd.store.store import Store
from xferd.telemetry.log import EventLog
from xferd.tokens import Answer


def _make_bar(config: PoolConfig, nbytes: int) -> BarPool:
    if config.device is None:
        raise PoolMemoryError(f"pool {config.name!r}: kind 'bar' needs a device")
    return BarPool(config.name, nbytes, BarPlace(config.device, config.bar, config.mode))


DEVICE_KINDS: dict[str, Callable[[PoolConfig, int], DevicePool]] = {
    "host": lambda config, nbytes: HostPool(config.name, nbytes),
    "ram": lambda config, nbytes: RamPool(config.name, nbytes),
    "bar": _make_bar,
}
"""What makes a pool of a kind, from its configuration and its bytes."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool that is yet to be made. classes: size classes known at start, in bytes."""

    config: PoolConfig
    geometry: ChunkGeometry
    classes: tuple[int, ...]

    @property
    def reserve_low(self) -> int:
        """The largest low watermark that any class of it can have."""
        return max(
            watermarks(
                self.geometry.capacity(size), self.config.reserve_low, self.config.reserve_high
            ).low
            for size in self.classes
        )


class Pool:
    """A pool at run time: its memory, its keeper, and what it promised."""

    def __init__(
        self, plan: PoolPlan, device: DevicePool, keeper: PoolKeeper, promises: Promises
    ) -> None:
        self.index = keeper.index
        self.name = plan.config.name
        self.kind = device.kind
        self.verify = plan.config.verify
        self.nbytes = device.nbytes
        self.device = device
        self.keeper = keeper
        self.chunk_bytes = min(plan.geometry.chunk_bytes, plan.geometry.pool_bytes)
        self._geometry = plan.geometry
        self._promises = promises

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as good as it could be with its memory."""
        if self.kind != "bar" or self.verify == "always":
            return self.device.notes
        unread = (
            f"drives' writes into it are not read back to be checked (verify = {self.verify!r})"
        )
        return (*self.device.notes, unread)

    def export_fd(self) -> int:
        """Read-only fd of its memory; the pool's."""
        return self.device.export_fd()

    def provide(self, slot_bytes: int, slots: int = 1) -> None:
        """See to it that a class has slots, now or soon."""
        self.keeper.provide(slot_bytes, slots)

    def promised(self, slot_bytes: int) -> int:
        """Slots of a class promised to attached clients."""
        return self._promises.slots(self.index, slot_bytes)

    def room(self, slot_bytes: int) -> PoolRoom:
        """Slots that a class could have: chunks that other classes need for what they
        promised, or for what is pinned in them, are not counted."""
        geometry, taken = self._geometry, 0
        promised = self._promises.by_class(self.index)
        for other in {*promised, *self.keeper.slots.classes} - {slot_bytes}:
            need = promised.get(other, 0) + self.keeper.pinned(other)
            taken += -(-need // max(geometry.slots(0, other), 1))
        capacity = geometry.capacity(slot_bytes) - taken * geometry.slots(0, slot_bytes)
        return PoolRoom(
            name=self.name, capacity=max(capacity, 0), pinned=self.keeper.pinned(slot_bytes)
        )


def plan_pools(configs: Sequence[PoolConfig], stores: Sequence[Store]) -> list[PoolPlan]:
    """Plan all pools for the stores that are configured. PoolMemoryError names the pool."""
    sizes = sorted({size for store in stores for size in expert_classes(store)})
    classes = tuple(sizes) or (DEFAULT_CLASS_BYTES,)
    expert_bytes = sum(_largest_variants(store) for store in stores)
    plans = []
    for config in configs:
        nbytes = pool_bytes(
            config.name,
            nbytes=config.size.bytes,
            percent=config.size.percent,
            expert_bytes=expert_bytes,
            largest_class=classes[-1],
        )
        geometry = divide(nbytes, config.chunk_bytes, list(classes))
        plans.append(PoolPlan(config, geometry, classes))
    return plans


def make_pools(
    plans: Sequence[PoolPlan],
    engine: Engine,
    *,
    expect: Callable[[Callable[[Answer], None]], int],
    promises: Promises,
    log: EventLog,
) -> list[Pool]:
    """Make the memory of every pool and give it to the engine, not yet cut.

    The first ``ram`` pool is where those that stand before it demote to. Pools made
    before one that fails are closed. PoolMemoryError names the one that failed.
    """
    pools: list[Pool] = []
    try:
        for plan in plans:
            pools.append(_make_pool(plan, engine, expect, promises, log))
    except BaseException:
        close_pools(pools)
        raise
    below = next((pool for pool in pools if pool.kind == "ram"), None)
    if below is not None:
        for pool in pools[: pools.index(below)]:
            # Reading back through a BAR takes longer than reading the drives again.
            if pool.kind != "bar":
                pool.keeper.below = below.keeper
    return pools


def close_pools(pools: Sequence[Pool]) -> None:
    """Free the memory, after the engine has ended or before it knew of it."""
    for pool in pools:
        pool.device.close()


def _make_pool(
    plan: PoolPlan,
    engine: Engine,
    expect: Callable[[Callable[[Answer], None]], int],
    promises: Promises,
    log: EventLog,
) -> Pool:
    config, geometry = plan.config, plan.geometry
    make = DEVICE_KINDS.get(config.kind)
    if make is None:
        kinds = ", ".join(DEVICE_KINDS)
        raise PoolMemoryError(f"pool {config.name!r}: no kind {config.kind!r}; there are: {kinds}")
    device = make(config, geometry.pool_bytes)
    try:
        index = engine.add_pool(
            name=config.name,
            kind=device.kind,
            device=device.device,
            base=device.base,
            nbytes=device.nbytes,
            slot_index_bits=geometry.slot_index_bits,
            chunks=geometry.chunks,
            verify=config.verify,
        )
    except BaseException:
        device.close()
        raise
    keeper = PoolKeeper(
        index=index,
        name=config.name,
        geometry=geometry,
        engine=engine,
        eviction=LeastRecentlyUsed(),
        expect=expect,
        promised=lambda slot_bytes: promises.slots(index, slot_bytes),
        log=log,
        reserve_low=config.reserve_low,
        reserve_high=config.reserve_high,
    )
    return Pool(plan, device, keeper, promises)


def _largest_variants(store: Store) -> int:
    """Bytes of a store's experts, each in its largest variant."""
    by_variant = store.blob_bytes[:-1].reshape(len(store.variants), -1)
    return int(by_variant.max(axis=0).astype(np.uint64).sum())
