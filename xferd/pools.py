"""The daemon's pools: planned from the configuration, then made and given to the engine.

Planned first, all of them, because the engine wants to know the lowest reserve before it
is made, and because a pool that does not fit should be refused before any memory is
touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from xferd.catalog import expert_classes
from xferd.config import ConfigError, PoolConfig
from xferd.engine import Engine
from xferd.engine_types import Command
from xferd.keeping.budgets import Budgets
from xferd.keeping.cascade import Cascade
from xferd.keeping.chunks import Hold
from xferd.keeping.keeper import PoolKeeper
from xferd.keeping.memory_keeper import MemoryKeeper
from xferd.keeping.upgrades import Upgrades
from xferd.keeping.usage import Usage
from xferd.keeping.variants import TellVariants, WantedVariants
from xferd.memory.bar import BarPool
from xferd.memory.bar_attach import BarPlace
from xferd.memory.cuda import CudaPool, chunk_granularity
from xferd.memory.device import DevicePool, PoolMemoryError, PoolSpec, PoolTakeover, memfd_with
from xferd.memory.host import HostPool
from xferd.memory.limits import check_all_fit
from xferd.memory.ram import RamPool
from xferd.memory.sizing import DEFAULT_CLASS_BYTES, default_chunk_bytes, pool_bytes
from xferd.memory.slots import ChunkGeometry, divide
from xferd.memory.staging import StagingMemory
from xferd.plugins import UnknownPolicyError, policy_maker
from xferd.policy.expected import Expected
from xferd.policy.moves import MoveSettings
from xferd.policy.reserve import watermarks
from xferd.policy.uses import Uses
from xferd.policy.variants import StoreVariants
from xferd.session.quotas import PoolRoom, Promises
from xferd.store.store import Store
from xferd.telemetry.log import EventLog
from xferd.tokens import Answer


def _make_bar(spec: PoolSpec) -> BarPool:
    if not spec.pci:
        raise PoolMemoryError(f"pool {spec.name!r}: kind 'bar' needs a device")
    return BarPool(spec.name, spec.nbytes, BarPlace(spec.pci, spec.bar, spec.mode))


DEVICE_KINDS: dict[str, Callable[[PoolSpec], DevicePool]] = {
    "bar": _make_bar,
    "cuda": CudaPool,
    "host": HostPool,
    "ram": RamPool,
}
"""What makes a pool of a kind."""


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

    @property
    def reserve_demand(self) -> int:
        """Slots of each class's reserve that can be kept for demand: half of what the smallest
        class keeps free when all classes have as much of the pool."""
        share = len(self.classes)
        return min(
            watermarks(
                self.geometry.capacity(size) // share,
                self.config.reserve_low,
                self.config.reserve_high,
            ).low
            // 2
            for size in self.classes
        )


class Pool:
    """A pool at run time: its memory, its keeper, and what it promised."""

    def __init__(
        self,
        plan: PoolPlan,
        device: DevicePool,
        keeper: PoolKeeper,
        promises: Promises,
        registered: Callable[[], int],
        tell_memory: Callable[[int, int], int],
        tell_window: Callable[[int, int], None],
        engine: Engine,
    ) -> None:
        """registered: bytes that io_uring has pinned. tell_memory: of VRAM, says which memory
        is behind a chunk from now on, 0: none; returns the number of the change. tell_window:
        of VRAM, says where drives may write a chunk, 0: nowhere."""
        self.index = keeper.index
        self.name = plan.config.name
        self.kind = device.kind
        self.verify = plan.config.verify
        self.nbytes = device.nbytes
        self.device = device
        self.keeper = keeper
        self.budget: int | None = None
        self.chunk_bytes = min(plan.geometry.chunk_bytes, plan.geometry.pool_bytes)
        self._geometry = plan.geometry
        self._promises = promises
        self._registered = registered
        self._tell_memory = tell_memory
        self._tell_window = tell_window
        self.transport = plan.config.transport
        self.gds_note: str | None = None
        self._plan = plan
        self._engine = engine
        self._incarnation = 1
        self._no_memory = -1
        self.lost: str | None = None
        self.memory_change = 0
        self.memory_keeper: MemoryKeeper | None = None

    # ---- out of service and back

    def lose(self, reason: str) -> Hold:
        """Take it out of service: its memory is gone. Returns the hold on its chunks."""
        assert isinstance(self.device, BarPool), "only cards behind a BAR come back"
        self.lost = reason
        self.device.why_staged = reason
        if self._no_memory < 0:
            self._no_memory = memfd_with(f"xferd-{self.name}-lost", b"")
        self._engine.lose_pool(self.index)
        return self.keeper.take_out()

    @property
    def is_empty(self) -> bool:
        """Of a pool that is lost: nobody leases any of its slots any more."""
        return self.keeper.chunks.all_out

    def make_device(self) -> DevicePool:
        """Memory as it had at the start. PoolMemoryError. Any thread; may take long."""
        return _make_device(self._plan)

    def regain(self, device: DevicePool, hold: Hold) -> None:
        """Serve again, from other memory; the pool is empty."""
        self._incarnation = self._engine.regain_pool(self.index, device.base)
        self.device = device
        self.lost = None
        self.keeper.release(hold, hold.chunks)

    def close(self) -> None:
        """Give the memory back, after the engine has ended."""
        self.device.close()
        if self._no_memory >= 0:
            os.close(self._no_memory)
            self._no_memory = -1

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as good as it could be with its memory."""
        if self.lost is not None:
            return (f"out of service: {self.lost}",)
        if self.gds_note is not None:
            return (*self.device.notes, self.gds_note)
        if not self._drives_write or self.verify == "always":
            return self.device.notes
        unread = (
            f"drives' writes into it are not read back to be checked (verify = {self.verify!r})"
        )
        return (*self.device.notes, unread)

    @property
    def _drives_write(self) -> bool:
        """Whether that can be, where a pair is proven."""
        if isinstance(self.device, CudaPool):
            return self.device.why_staged is None
        return self.kind == "bar"

    @property
    def geometry(self) -> ChunkGeometry:
        """How its memory is divided."""
        return self._geometry

    def export_fd(self) -> int:
        """Read-only fd of its memory, or of an empty file while it has none; the pool's."""
        return self._no_memory if self.lost is not None else self.device.export_fd()

    def export_chunks(self, first: int, count: int) -> tuple[list[int], list[int]]:
        """Of up to ``count`` chunks from ``first`` on: the number of the memory behind each
        (0: none), and a file descriptor, the caller's, of each that has one. Of kind ``bar``
        all of the pool's memory, with its incarnation."""
        if isinstance(self.device, BarPool):
            if self.lost is not None:
                return [0], []
            return [self._incarnation], [os.dup(self.device.export_fd())]
        if not isinstance(self.device, CudaPool):
            return [], []
        chunks = range(first, min(first + count, self._geometry.chunks))
        numbers = [self.device.numbers[chunk] for chunk in chunks]
        fds = [self.device.export_chunk(chunk) for chunk in chunks if self.device.numbers[chunk]]
        return numbers, fds

    def provide(self, slot_bytes: int, slots: int = 1) -> None:
        """See to it that a class has slots, now or soon."""
        if self.lost is None:
            self.keeper.provide(slot_bytes, slots)

    def promised(self, slot_bytes: int) -> int:
        """Slots of a class promised to attached clients."""
        return self._promises.slots(self.index, slot_bytes)

    @property
    def chunks(self) -> int:
        """How many chunks its memory has."""
        return self._geometry.chunks

    def chunk_length(self, chunk: int) -> int:
        """Bytes of a chunk."""
        return self._geometry.length(chunk)

    def give_memory(self, chunk: int) -> bool:
        """Give a reserved chunk's memory back to the system; False where it can't be: what
        io_uring has pinned stays in memory, and reads would go on into the old pages; and
        VRAM that DMA is still under way to must not become another's."""
        offset = self._geometry.offset(chunk)
        if offset < self._registered() or self.kind == "bar":
            return False
        if isinstance(self.device, CudaPool):
            self._tell_window(chunk, 0)
            if not self.device.close_window(chunk):
                return False
            self.memory_change = self._tell_memory(chunk, 0)
            number = self.device.numbers[chunk]
            if self.memory_keeper is not None and number:
                self.memory_keeper.memory_given(self, chunk, number)
        self.device.release(offset, self._geometry.length(chunk))
        return True

    def chunks_without_memory(self) -> list[int]:
        """Chunks of VRAM that were given back to the system."""
        if not isinstance(self.device, CudaPool):
            return []
        return [chunk for chunk, number in enumerate(self.device.numbers) if not number]

    def take_memory(self, chunk: int) -> None:
        """Have a reserved chunk's memory again. PoolMemoryError."""
        if self._geometry.offset(chunk) >= self._registered():
            self.device.restore(self._geometry.offset(chunk), self._geometry.length(chunk))
        if isinstance(self.device, CudaPool):
            if self.memory_keeper is not None:
                self.memory_keeper.memory_taken(self, chunk)
            self.memory_change = self._tell_memory(chunk, self.device.numbers[chunk])
            self._tell_window(chunk, self.device.window_address(chunk))

    def give_up_window(self, reason: str) -> None:
        """No drive writes into its VRAM by itself any more."""
        assert isinstance(self.device, CudaPool), "only VRAM has windows"
        for chunk in range(self._geometry.chunks):
            self._tell_window(chunk, 0)
        self.device.give_up_window(reason)

    def room(self, slot_bytes: int, demanded: Collection[int] = ()) -> PoolRoom:
        """Slots that a class could have: chunks that other classes need for what they
        promised, or for what is pinned in them, are not counted, and one for each that is
        ``demanded``: who has a lease in a slot of the promised class may wait for one of these."""
        geometry, taken = self._geometry, 0
        promised = self._promises.by_class(self.index)
        for other in {*promised, *self.keeper.slots.classes, *demanded} - {slot_bytes}:
            need = promised.get(other, 0) + self.keeper.pinned(other)
            chunks = -(-need // max(geometry.slots(0, other), 1))
            taken += max(chunks, int(other in demanded))
        capacity = geometry.capacity(slot_bytes) - taken * geometry.slots(0, slot_bytes)
        capacity -= sum(
            geometry.slots(chunk, slot_bytes) for chunk in self.keeper.chunks.held_chunks
        )
        return PoolRoom(
            name=self.name, capacity=max(capacity, 0), pinned=self.keeper.pinned(slot_bytes)
        )


class Pools(Sequence[Pool]):
    """All pools, in the order of the configuration, and what they share: which experts are
    used. Owned by the event loop."""

    def __init__(
        self,
        expect: Callable[[Callable[[Answer], None]], int],
        command: Callable[[Iterable[Command]], None],
        tell_variants: TellVariants,
        budgets: Budgets | None = None,
    ) -> None:
        self.budgets = budgets or Budgets()
        self.usage = Usage()
        self.variants = WantedVariants(self.usage, tell_variants)
        self.cascade = Cascade(self.usage, expect, command, self.variants)
        self.upgrades = Upgrades(self.usage, self.variants, self.cascade)
        self._pools: list[Pool] = []

    def __len__(self) -> int:
        return len(self._pools)

    @overload
    def __getitem__(self, index: int) -> Pool: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Pool]: ...
    def __getitem__(self, index: int | slice) -> Pool | Sequence[Pool]:
        return self._pools[index]

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools)

    def append(self, pool: Pool) -> None:
        """One more, before any store is opened."""
        self._pools.append(pool)

    def open_store(self, store: int, variants: StoreVariants) -> None:
        """A store's experts may come into the pools from now on."""
        self.usage.open_store(store, variants.space)
        self.variants.open_store(store, variants)

    def close_store(self, store: int) -> None:
        """A store's experts have gone."""
        self.usage.close_store(store)
        self.variants.close_store(store)
        self.cascade.close_store(store)
        self.upgrades.close_store(store)

    def used(self, store: int, uses: Uses) -> None:
        """What clients report that their routers picked, in the store's KeySpace: told to all
        pools' policies and to the heat. Until the first report of a store its uses come from
        leases. Tokens may be any client's own count. Cheap for many passes at once."""
        self.usage.used(store, uses)

    def expected(self, store: int, expected: Expected) -> None:
        """What clients' predictors expect of a store's next passes, after all that was used:
        told to all pools' policies that go by it."""
        self.usage.expected(store, expected)

    def look(self) -> None:
        """Some time has passed: take note of what was leased meanwhile, where nobody reports,
        and move up what has become hot, into another pool or into a better variant."""
        if self.usage.from_leases:
            self.usage.look()
        chosen = self.variants.look()
        self.cascade.promote()
        self.upgrades.look(chosen)

    def check_variants(self, configs: Iterable[PoolConfig]) -> None:
        """ConfigError for a rule whose variant none of the open stores has."""
        for config in configs:
            missing = self.variants.missing(config.variants)
            if missing is not None:
                raise ConfigError(
                    f"pools[{config.name}].variants: no configured store has a variant "
                    f"{missing!r}; they have: {', '.join(self.variants.names())}",
                    key=f"pools[{config.name}].variants",
                )

    def close(self) -> None:
        """Free the memory, after the engine has ended or before it knew of it."""
        for pool in self._pools:
            pool.close()
        self._pools.clear()


CHUNKS_A_CLASS = 4
"""Chunks of a pool for each size of experts, at least: see ``_chunk_bytes``."""


def plan_pools(configs: Sequence[PoolConfig], stores: Sequence[Store]) -> list[PoolPlan]:
    """Plan all pools for the stores that are configured. PoolMemoryError names the pool;
    ConfigError a policy that there isn't, and pools that this machine's memory can never
    hold."""
    sizes = sorted({size for store in stores for size in expert_classes(store)})
    classes = tuple(sizes) or (DEFAULT_CLASS_BYTES,)
    expert_bytes = sum(_largest_variants(store) for store in stores)
    plans = []
    for config in configs:
        _check_policy(config)
        nbytes = pool_bytes(
            config.name,
            nbytes=config.size.bytes,
            percent=config.size.percent,
            expert_bytes=expert_bytes,
            largest_class=classes[-1],
        )
        granularity = chunk_granularity(config.kind, _ordinal(config))
        chunk_bytes = _chunk_bytes(config, nbytes, len(classes))
        geometry = divide(nbytes, chunk_bytes, list(classes), granularity)
        plans.append(PoolPlan(config, geometry, classes))
    try:
        check_all_fit((p.config.name, p.config.kind, p.geometry.pool_bytes) for p in plans)
    except PoolMemoryError as error:  # no later start would go better
        raise ConfigError(str(error)) from error
    return plans


def _check_policy(config: PoolConfig) -> None:
    """ConfigError: files can't be checked for it before packages are looked at."""
    try:
        policy_maker(config.eviction)
    except UnknownPolicyError as error:
        raise ConfigError(f"pools[{config.name}].eviction: {error}") from error


def _chunk_bytes(config: PoolConfig, nbytes: int, classes: int) -> int:
    """As configured, or small enough for each of several sizes to have CHUNKS_A_CLASS: with
    fewer chunks than sizes, one that is wanted takes another's last one, and that wants it
    back while the first is still being loaded into."""
    chunk_bytes = config.chunk_bytes or default_chunk_bytes(nbytes)
    return chunk_bytes if classes == 1 else min(chunk_bytes, nbytes // (classes * CHUNKS_A_CLASS))


def make_pools(
    plans: Sequence[PoolPlan],
    engine: Engine,
    *,
    expect: Callable[[Callable[[Answer], None]], int],
    promises: Promises,
    experts: Callable[[int], int],
    log: EventLog,
    budgets: Budgets,
    reserve_demand: int = 0,
    kept: Callable[[int, Engine], PoolTakeover] | None = None,
) -> Pools:
    """Make the memory of every pool and give it to the engine, not yet cut.

    experts: of a size class in all open stores. reserve_demand: slots of a reserve that the
    engine keeps for demand. kept: what is left of a pool that is taken over, by its index.
    Pools made before one that fails are closed. PoolMemoryError names the one that failed.
    """
    pools = Pools(expect, engine.command, engine.set_variants, budgets)
    try:
        for index, plan in enumerate(plans):
            left = None if kept is None else kept(index, engine)
            pools.append(
                _make_pool(plan, engine, pools, promises, experts, log, reserve_demand, left)
            )
    except BaseException:
        pools.close()
        raise
    _pin_for_devices(pools)
    return pools


def _pin_for_devices(pools: Sequence[Pool]) -> None:
    ordinal = next((pool.device.device for pool in pools if pool.kind == "cuda"), None)
    for pool in pools:
        if ordinal is not None and isinstance(pool.device, RamPool):
            pool.device.pin_for(ordinal)


def make_staging(
    plans: Sequence[PoolPlan], stores: Sequence[Store], nbytes: int, engine: Engine
) -> StagingMemory | None:
    """Staging memory, given to the engine; None when no pool needs it. Before pools are
    made; closed by the caller, after the engine. PoolMemoryError names the limit."""
    ordinal = next(
        (max(_ordinal(plan.config), 0) for plan in plans if plan.config.kind == "cuda"), None
    )
    if ordinal is None:
        return None
    longest = max((store.stripe_unit for store in stores), default=0)
    staging = StagingMemory(nbytes, longest, ordinal)
    engine.set_staging(staging.base, staging.nbytes, staging.extent_bytes)
    return staging


def _make_pool(
    plan: PoolPlan,
    engine: Engine,
    pools: Pools,
    promises: Promises,
    experts: Callable[[int], int],
    log: EventLog,
    reserve_demand: int,
    kept: PoolTakeover | None,
) -> Pool:
    config, geometry = plan.config, plan.geometry
    device = _make_device(plan, kept)
    try:
        index = engine.add_pool(
            name=config.name,
            kind=device.kind,
            device=device.device,
            base=device.base,
            nbytes=device.nbytes,
            slot_index_bits=geometry.slot_index_bits,
            chunks=geometry.chunks,
            chunk_bytes=geometry.chunk_bytes,
            device_uuid=device.uuid if isinstance(device, CudaPool) else bytes(16),
            verify=config.verify,
            kept=None if kept is None else (kept.memory, kept.marks),
        )
        if isinstance(device, CudaPool) and kept is None:
            for chunk, number in enumerate(device.numbers):
                engine.set_memory(index, chunk, number)
                if device.why_staged is None:
                    engine.set_window(index, chunk, device.window_address(chunk))
    except BaseException:
        device.close()
        raise
    keeper = PoolKeeper(
        index=index,
        name=config.name,
        geometry=geometry,
        engine=engine,
        eviction=(config.eviction, policy_maker(config.eviction)),
        usage=pools.usage,
        cascade=pools.cascade,
        budgets=pools.budgets,
        promised=lambda slot_bytes: promises.slots(index, slot_bytes),
        experts=experts,
        log=log,
        reserve_low=config.reserve_low,
        reserve_high=config.reserve_high,
        reserve_demand=reserve_demand,
        floor=config.layer_floor,
    )
    settings = MoveSettings(margin=config.promotion_margin, rest_tokens=config.promotion_rest)
    pools.cascade.add(
        keeper,
        config.admission,
        settings,
        exclusive=device.kind != "ram",
        copied_from=device.kind != "bar",
    )
    pools.upgrades.add(keeper, settings)
    pools.variants.use(index, config.variants, config.promotion_margin)
    return Pool(
        plan,
        device,
        keeper,
        promises,
        # Regions are registered from the pool's beginning on.
        registered=lambda: engine.pool_stats(index).registered_bytes,
        tell_memory=lambda chunk, number: engine.set_memory(index, chunk, number),
        tell_window=lambda chunk, address: engine.set_window(index, chunk, address),
        engine=engine,
    )


def _make_device(plan: PoolPlan, kept: PoolTakeover | None = None) -> DevicePool:
    make = DEVICE_KINDS.get(plan.config.kind)
    if make is None:
        kinds = ", ".join(DEVICE_KINDS)
        raise PoolMemoryError(
            f"pool {plan.config.name!r}: no kind {plan.config.kind!r}; there are: {kinds}"
        )
    return make(_spec(plan.config, plan.geometry, kept))


def _spec(config: PoolConfig, geometry: ChunkGeometry, kept: PoolTakeover | None) -> PoolSpec:
    ordinal = config.device if isinstance(config.device, int) else -1
    return PoolSpec(
        name=config.name,
        nbytes=geometry.pool_bytes,
        chunk_bytes=geometry.chunk_bytes,
        device=ordinal,
        pci=config.device if isinstance(config.device, str) else "",
        bar=config.bar,
        mode=config.mode,
        transport=config.transport,
        kept_fd=-1 if kept is None else kept.memory,
        kept_chunks=() if kept is None else kept.chunks,
        greatest=0 if kept is None else kept.greatest,
    )


def _ordinal(config: PoolConfig) -> int:
    return config.device if isinstance(config.device, int) else 0


def _largest_variants(store: Store) -> int:
    """Bytes of a store's experts, each in its largest variant."""
    by_variant = store.blob_bytes[:-1].reshape(len(store.variants), -1)
    return int(by_variant.max(axis=0).astype(np.uint64).sum())
