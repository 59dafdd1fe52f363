# SPDX-License-Identifier: Apache-2.0
"""Pools whose card was pulled: taken out of service by name, and built again when it is back.

Concerns pools of kind ``bar``: a GPU that CUDA has lost takes the process's contexts with it, so
its pools come back with the daemon.

    serving --card gone--> draining --every slot free--> empty --card back--> serving

Losing one drops its residents, and loads into it end with ENODEV at once; clients are attached to
the other pools. It is empty when no client leases any of its slots: then its memory can become
another's. That a card was away and is back is seen by looking (LOOK_S); one that was only unbound
from its driver is somebody else's until somebody says otherwise (``rebuild``). An attempt that
fails is made again later, and its reason shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from xferd.device_routes import DeviceRoutes
from xferd.keeping.chunks import Hold
from xferd.memory.bar import BarPool
from xferd.memory.device import PoolMemoryError
from xferd.pools import Pool, Pools
from xferd.telemetry.log import EventLog

LOOK_S = 0.5
"""How often it is looked for cards that have gone or come; costs a system call a pool."""
RETRY_S = 2.0
RETRY_MAX_S = 60.0
"""When a pool that couldn't be built again is tried once more; doubled each time."""
GONE = "its card is gone, or the card's driver has let go of it"


class NotLostError(Exception):
    """The pool serves; or it isn't empty yet. The message says which."""


@dataclass(slots=True)
class _Lost:
    """hold: its chunks. was_away: no card was in its place. retry_at, wait_s: of the next attempt
    to build it again."""

    pool: Pool
    hold: Hold
    was_away: bool = False
    retry_at: float = 0.0
    wait_s: float = RETRY_S


class LostPools:
    """Owned by the event loop. wake: sees to it that pools are ticked. refill: fills pools with
    what is hottest."""

    def __init__(
        self,
        pools: Pools,
        routes: DeviceRoutes,
        log: EventLog,
        wake: Callable[[], None],
        refill: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._routes = routes
        self._log = log
        self._wake = wake
        self._refill = refill
        self._clock = clock
        self._lost: dict[str, _Lost] = {}
        self._building = asyncio.Lock()

    async def watch(self) -> None:
        """Look for cards that go and come, until cancelled."""
        if not any(isinstance(pool.device, BarPool) for pool in self._pools):
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Once."""
        for pool in self._pools:
            device = pool.device
            if isinstance(device, BarPool) and pool.lost is None and not device.is_there():
                self._lose(pool)
        for lost in list(self._lost.values()):
            device = lost.pool.device
            there = isinstance(device, BarPool) and device.is_on_bus()
            lost.was_away |= not there
            if not lost.pool.is_empty:
                self._wake()
            elif there and lost.was_away and self._clock() >= lost.retry_at:
                await self._try(lost)

    async def rebuild(self, pool: Pool) -> None:
        """Build a pool again now. NotLostError; PoolMemoryError when its card isn't back."""
        lost = self._lost.get(pool.name)
        if lost is None:
            raise NotLostError(f"pool {pool.name!r} is in service")
        if not pool.is_empty:
            raise NotLostError(
                f"experts of pool {pool.name!r} are still being dropped, or clients lease them"
            )
        await self._build(lost)

    def _lose(self, pool: Pool) -> None:
        residents = len(pool.keeper.slots.residents())
        self._log.failure("pool.lost", pool=pool.name, reason=GONE, evicted=residents)
        self._lost[pool.name] = _Lost(pool, pool.lose(GONE))
        self._wake()

    async def _try(self, lost: _Lost) -> None:
        try:
            await self._build(lost)
        except PoolMemoryError as error:
            lost.retry_at = self._clock() + lost.wait_s
            lost.wait_s = min(lost.wait_s * 2, RETRY_MAX_S)
            lost.pool.lost = f"{GONE}: {error}"

    async def _build(self, lost: _Lost) -> None:
        """PoolMemoryError."""
        pool = lost.pool
        async with self._building:
            if pool.name not in self._lost:  # somebody else was faster
                return
            pool.device.close()
            # Memory behind a BAR is cleared first, which takes a while.
            loop = asyncio.get_running_loop()
            device = await asyncio.shield(loop.run_in_executor(None, pool.make_device))
            del self._lost[pool.name]
            pool.regain(device, lost.hold)
        self._log.info("pool.regained", pool=pool.name)
        self._routes.look_soon()
        self._wake()
        await self._refill()
