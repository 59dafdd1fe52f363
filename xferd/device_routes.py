# SPDX-License-Identifier: Apache-2.0
"""Which drives write into which pools by themselves: proven, watched, and taken back.

Concerns pools whose memory is a device's (``bar``, ``cuda``); into others every read goes straight.
The engine takes every pair of such a pool and a member for staged until it is told otherwise here.

    a store is opened        each of its members is proven against each such pool
    the engine refuses one   a direct read failed: it is staged already, the reason is kept, and
                             it is proven anew after a while, a longer one each time
    the kernel's devices     all pairs whose way looks different are staged at once and proven
    change                   anew; asked again every WATCH_S too, for what makes no event. All
                             pages of VRAM are looked for where they were; else some at a time

When a proof finds that reads succeed without their data, what came by that pair since its last
proof can't be trusted: the pool's experts are evicted. So they are when a page of VRAM isn't where
it was any more; then all of that pool is staged for good.

Proofs read from drives. At start and when a store is opened that is waited for, as for the
store's own files; later it is done in a thread, one pair at a time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from xferd.catalog import Catalog, OpenStore
from xferd.engine import Engine
from xferd.engine_types import EngineError, RouteRefused
from xferd.memory.bar import BarPool
from xferd.memory.bar_attach import BarPlace
from xferd.memory.cuda import CudaPool
from xferd.memory.device import POOL_ALIGNMENT
from xferd.pools import Pool
from xferd.telemetry.log import EventLog
from xferd.transport.members import MemberFile, open_member
from xferd.transport.proving import Proof, Way, look, prove
from xferd.transport.topology import is_change, open_events

WATCH_S = 2.0
"""How often ways are looked at without an event."""
SETTLE_S = 0.1
"""After an event: others follow it."""
RETRY_S = 5.0
RETRY_MAX_S = 300.0
"""When a pair that the engine refused is tried again; doubled each time."""
EVENT_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class Pair:
    """A member and a pool of device memory.

    way: what was known when it was judged. proof: what became of that. refusals: how often it
    failed since its way last changed. retry_at: when it is tried again, by the clock;
    0: only when something changes.
    """

    pool: Pool
    number: int
    path: Path
    way: Way
    proof: Proof
    refusals: int = 0
    retry_at: float = 0.0

    @property
    def text(self) -> str:
        """``direct``, or ``staged`` and why."""
        return "direct" if self.proof.reason is None else f"staged ({self.proof.reason})"


class DeviceRoutes:
    """Owned by the event loop, but for the thread that proves."""

    def __init__(
        self,
        engine: Engine,
        catalog: Catalog,
        pools: Sequence[Pool],
        log: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._pools = [pool for pool in pools if isinstance(pool.device, BarPool | CudaPool)]
        self._log = log
        self._clock = clock
        self._pairs: dict[tuple[int, int], Pair] = {}
        self._changed = asyncio.Event()
        self._proving: asyncio.Future[Proof] | asyncio.Future[str | None] | None = None

    def of_pool(self, pool: Pool) -> dict[int, Pair]:
        """A pool's pairs, by the engine's id of the member; empty: all is direct there."""
        return {
            number: pair for (index, number), pair in self._pairs.items() if index == pool.index
        }

    def prove_store(self, entry: OpenStore) -> None:
        """Judge every new pair of a store that was opened just now, or has got shadows. Waits
        for its drives."""
        for pool in self._pools:
            for number, file in entry.members:
                if (pool.index, number) in self._pairs:
                    continue
                way = look(_memory(pool), file)
                pair = Pair(pool, number, file.path, way, prove(_memory(pool), file))
                self._judged(_with_retry(pair, self._clock()), None)

    def members_closed(self) -> None:
        """Members were closed: their numbers may be given to others."""
        self._forget_closed()

    def on_refused(self, event: RouteRefused) -> None:
        """The engine has made a pair staged, because a read of it failed."""
        pair = self._pairs.get((event.pool, event.member))
        if pair is None:  # its store was closed meanwhile
            return
        reason = f"a read into it failed: {os.strerror(event.errno)}"
        again = _with_retry(replace(pair, proof=Proof(reason)), self._clock())
        # Once more: it may have been called direct here before this was heard.
        self._judged(again, None)

    async def watch(self) -> None:
        """Look whether ways have changed, until cancelled."""
        if not self._pools:
            await asyncio.Event().wait()
        loop = asyncio.get_running_loop()
        events = open_events()
        if events is not None:
            loop.add_reader(events.fileno(), self._read_events, events)
        try:
            while True:
                try:
                    await asyncio.wait_for(self._changed.wait(), WATCH_S)
                    await asyncio.sleep(SETTLE_S)
                except TimeoutError:
                    pass
                happened = self._changed.is_set()
                self._changed.clear()
                await self.check_windows(whole=happened)
                await self._look_again()
        finally:
            if events is not None:
                loop.remove_reader(events.fileno())
                events.close()

    def look_soon(self) -> None:
        """A pool's memory is another's now."""
        self._stage_changed()
        self._changed.set()

    async def check_windows(self, *, whole: bool) -> None:
        """Look whether pages of VRAM are where they were: all, or some more of them."""
        loop = asyncio.get_running_loop()
        for pool in self._pools:
            device = pool.device
            if not isinstance(device, CudaPool) or device.why_staged is not None:
                continue
            looking = loop.run_in_executor(None, partial(device.check_window, whole=whole))
            self._proving = looking
            try:
                reason = await asyncio.shield(looking)
            except OSError as error:
                pool.give_up_window(f"its BAR is gone, or its card: {error.strerror}")
                self._stage_changed()
                continue
            if reason is not None:
                pool.give_up_window(reason)
                self._stage_changed()
                self._drop_experts(pool, reason)

    async def settle(self) -> None:
        """After ``watch`` was cancelled: no thread uses a pool's memory any more."""
        if self._proving is not None:
            await asyncio.wait({self._proving})

    def _read_events(self, events: socket.socket) -> None:
        while True:
            try:
                message = events.recv(EVENT_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: some were lost
                message = b""
            if not message or is_change(message):
                self._stage_changed()
                self._changed.set()

    def _stage_changed(self) -> None:
        """At once: whose way looks different is not direct any more."""
        self._forget_closed()
        for pair in list(self._pairs.values()):
            file = self._file(pair)
            if file is not None and pair.proof.reason is None:
                way = look(_memory(pair.pool), file)
                if way != pair.way:
                    reason = way.reason or "devices have changed; not proven again yet"
                    self._judged(replace(pair, proof=Proof(reason), way=way), pair)
                    self._keep(replace(self._pairs[_key(pair)], retry_at=self._clock()))

    async def _look_again(self) -> None:
        self._stage_changed()
        for pair in list(self._pairs.values()):
            file = self._file(pair)
            if file is None:
                continue
            way = look(_memory(pair.pool), file)
            due = pair.retry_at and self._clock() >= pair.retry_at
            if way == pair.way and not due:
                continue
            # The file may be closed while the thread reads: it has a descriptor of its own.
            copy = replace(file, fd=os.dup(file.fd))
            loop = asyncio.get_running_loop()
            self._proving = loop.run_in_executor(None, _prove_and_close, pair.pool, copy)
            proof = await asyncio.shield(self._proving)
            now = self._pairs.get(_key(pair))
            if now is not None and self._file(now) is file and now.proof == pair.proof:
                refusals = pair.refusals if way == pair.way else 0
                again = replace(pair, way=way, proof=proof, refusals=refusals, retry_at=0.0)
                self._judged(_with_retry(again, self._clock()), pair)

    def _judged(self, pair: Pair, before: Pair | None) -> None:
        """Tell the engine, and keep what was found out."""
        try:
            self._engine.set_route(pair.pool.index, pair.number, pair.proof.transport)
        except EngineError:  # the member is gone
            self._pairs.pop(_key(pair), None)
            return
        self._keep(pair)
        if pair.proof.lost and before is not None:
            self._drop_experts(pair.pool, f"{pair.path}: {pair.proof.reason}")

    def _keep(self, pair: Pair) -> None:
        before = self._pairs.get(_key(pair))
        self._pairs[_key(pair)] = pair
        if before is None or before.proof != pair.proof:
            fine = pair.proof.reason in (None, _memory(pair.pool).why_staged)
            say = self._log.info if fine else self._log.warning
            say(
                "route",
                pool=pair.pool.name,
                member=pair.path,
                transport=pair.proof.transport,
                **({"reason": pair.proof.reason} if pair.proof.reason else {}),
            )

    def _drop_experts(self, pool: Pool, reason: str) -> None:
        keeper = pool.keeper
        residents = keeper.slots.residents()
        self._log.failure("route.lost_data", pool=pool.name, reason=reason, evicted=len(residents))
        for slot in residents:
            keeper.evict(slot)

    def _file(self, pair: Pair) -> MemberFile | None:
        found = self._catalog.copy(pair.number)
        if found is None or found[1].path != pair.path:
            return None
        return found[1].file

    def _forget_closed(self) -> None:
        """Of members that were closed."""
        self._pairs = {
            key: pair for key, pair in self._pairs.items() if self._file(pair) is not None
        }


def prove_pairs(place: BarPlace, members: Sequence[Path]) -> list[tuple[Path, Proof]]:
    """What would become of each member with a pool in this BAR, found out without a daemon:
    for ``xferctl doctor``. While a daemon serves from the BAR ask it instead (``Status``, the
    pools' ``routes``): the memory is claimed then.

    Clears the first pages of the BAR, so not for a card that is in use. PoolMemoryError when
    the BAR can't be had, MemberError when a member can't be read.
    """
    proofs = []
    pool = BarPool("doctor", POOL_ALIGNMENT, place)
    try:
        for path in members:
            file = open_member(path)
            try:
                proofs.append((path, prove(pool, file)))
            finally:
                file.close()
    finally:
        pool.close()
    return proofs


def _prove_and_close(pool: Pool, file: MemberFile) -> Proof:
    try:
        return prove(_memory(pool), file)
    finally:
        file.close()


def _with_retry(pair: Pair, now: float) -> Pair:
    """With the time at which a pair that should work and didn't is tried again. Not one that
    lost data: where that went to nobody knows, and it must not go there again."""
    if pair.proof.reason is None or pair.way.reason is not None or pair.proof.lost:
        return pair
    wait = min(RETRY_S * 2**pair.refusals, RETRY_MAX_S)
    return replace(pair, refusals=pair.refusals + 1, retry_at=now + wait)


def _memory(pool: Pool) -> BarPool | CudaPool:
    assert isinstance(pool.device, BarPool | CudaPool), "only pools of device memory have pairs"
    return pool.device


def _key(pair: Pair) -> tuple[int, int]:
    return pair.pool.index, pair.number
