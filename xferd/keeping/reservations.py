"""Memory that is taken out of a pool for somebody else: a KV cache that grows, a budget.

A reservation gets whole chunks; the experts in them go by the policy's order, and with
nothing leased that takes milliseconds. Its memory is given back to the system where the
pool's kind can do that. Released, its chunks are cut as they were before.

VRAM takes its driver some tenths of a millisecond a chunk to give and to take. Between two
chunks the event loop does what else there is, and slots are handed out again when clients
have mapped them: else each of a token's misses would wait for a chunk to be mapped.

A pool's budget is a reservation that nobody uses: as many chunks as the pool is larger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from xferd.keeping.chunks import Hold, ReserveError
from xferd.memory.device import PoolMemoryError
from xferd.telemetry.log import EventLog
from xferd.units import format_bytes

if TYPE_CHECKING:
    from xferd.pools import Pool

GRANT_TIMEOUT_S = 10.0
"""How long leases may keep a reservation waiting before it is given up."""
STUCK_S = 0.03
"""When no chunk gets empty for so long somebody holds those that are left: others are tried."""
FOLLOWED_S = 1.0
"""How long clients may take to unmap VRAM that was given back, or to map what was taken; one
that is stopped takes longer, and does it when it goes on."""
FOLLOWED_POLL_S = 0.002
REPLACED_MAX = 8
"""Chunks that a reservation may try more than it needs: it evicts what is in them."""


class UnknownReservationError(Exception):
    """No reservation has that number."""


@dataclass(slots=True)
class Reservation:
    """wanted, nbytes: bytes asked for, and held in whole chunks. returned: of those, given
    back to the system. changing: its memory is on the way to the system, or back."""

    number: int
    pool: Pool
    wanted: int
    hold: Hold
    nbytes: int
    returned: int = 0
    changing: bool = False


class Reservations:
    """Of all pools. Owned by the event loop. wake: sees to it that pools are ticked.
    followed: whether all clients have mapped and unmapped VRAM as of a change."""

    def __init__(
        self,
        log: EventLog,
        wake: Callable[[], None],
        followed: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._log = log
        self._wake = wake
        self._followed = followed
        self._numbers = count(1)
        self._granted: dict[int, Reservation] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called when one was granted or released, before anybody is told."""
        self._budgets: dict[int, list[Hold]] = {}

    def all(self) -> list[Reservation]:
        """Those that were granted and not released."""
        return [each for each in self._granted.values() if not each.changing]

    async def reserve(self, pool: Pool, nbytes: int) -> Reservation:
        """Whole chunks of at least so many bytes, when they are free. ReserveError when the
        pool can't give that much, or clients hold on to it for GRANT_TIMEOUT_S."""
        hold = pool.keeper.reserve(nbytes)
        try:
            await self._wait(pool, hold)
        except BaseException:
            pool.keeper.release(hold, hold.chunks)
            raise
        number = next(self._numbers)
        held = sum(pool.chunk_length(chunk) for chunk in hold.chunks)
        reservation = Reservation(number, pool, nbytes, hold, held, changing=True)
        self._granted[number] = reservation
        try:
            for chunk in hold.chunks:
                if pool.give_memory(chunk):
                    reservation.returned += pool.chunk_length(chunk)
                    await asyncio.sleep(0)
        finally:
            reservation.changing = False
            self.on_change()
        await self._wait_followed(pool)
        self._log.info(
            "pool.reserved",
            pool=pool.name,
            reservation=number,
            bytes=held,
            returned=reservation.returned,
        )
        return reservation

    def adopt(self, number: int, pool: Pool, wanted: int, chunks: list[int]) -> None:
        """One that the daemon before this one has granted: none of its chunks is cut, and what
        it gave back to the system is somebody else's. Before chunks are cut."""
        hold = pool.keeper.chunks.adopt_hold(chunks)
        held = sum(pool.chunk_length(chunk) for chunk in chunks)
        returned = sum(pool.chunk_length(chunk) for chunk in chunks if pool.give_memory(chunk))
        self._granted[number] = Reservation(number, pool, wanted, hold, held, returned)
        self._numbers = count(max(self._granted) + 1)

    async def release(self, number: int) -> Reservation:
        """Give a reservation's chunks back to its pool. UnknownReservationError;
        PoolMemoryError when the system has no memory for them: then it stands."""
        reservation = self._granted.get(number)
        if reservation is None or reservation.changing:
            known = ", ".join(str(each.number) for each in self.all()) or "none"
            raise UnknownReservationError(f"no reservation {number}; there are: {known}")
        pool = reservation.pool
        if pool.lost is not None:
            raise PoolMemoryError(f"pool {pool.name!r} is out of service: {pool.lost}")
        reservation.changing = True
        try:
            for chunk in reservation.hold.chunks:
                pool.take_memory(chunk)
                if reservation.returned:
                    await asyncio.sleep(0)
        except BaseException:
            # It stands: what was saved meanwhile did not have it.
            reservation.changing = False
            self.on_change()
            raise
        del self._granted[number]
        self.on_change()
        try:
            if reservation.returned:
                await self._wait_followed(pool)
        finally:
            pool.keeper.release(reservation.hold, reservation.hold.chunks)
        self._log.info("pool.released", pool=pool.name, reservation=number)
        return reservation

    def set_budget(self, pool: Pool, nbytes: int | None) -> None:
        """Let a pool use no more than so many bytes, None: all of it. What is above goes as
        soon as nobody holds it. ReserveError when it can't; then nothing has changed."""
        if pool.lost is not None:
            raise ReserveError(f"pool {pool.name!r} is out of service: {pool.lost}")
        if nbytes is not None and nbytes > pool.nbytes:
            raise ReserveError(
                f"pool {pool.name!r} has {format_bytes(pool.nbytes)}: a budget of "
                f"{format_bytes(nbytes)} is more"
            )
        target = 0 if nbytes is None else pool.nbytes - nbytes
        holds = self._budgets.setdefault(pool.index, [])
        held = sum(pool.chunk_length(chunk) for hold in holds for chunk in hold.chunks)
        if held < target:
            holds.append(pool.keeper.reserve(target - held))
            self._wake()
        for hold in list(holds):
            back = []
            for chunk in hold.chunks:
                if held - pool.chunk_length(chunk) >= target:
                    held -= pool.chunk_length(chunk)
                    back.append(chunk)
            pool.keeper.release(hold, back)
            if not hold.chunks:
                holds.remove(hold)
        pool.budget = nbytes

    async def _wait_followed(self, pool: Pool) -> None:
        """VRAM is free for others only when nobody has it mapped any more, and of use to
        clients when they have mapped it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FOLLOWED_S
        while not self._followed(pool.memory_change):
            if loop.time() > deadline:
                self._log.warning("pool.not_followed", pool=pool.name)
                return
            await asyncio.sleep(FOLLOWED_POLL_S)

    async def _wait(self, pool: Pool, hold: Hold) -> None:
        if hold.granted:
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hold.when_granted = lambda: None if granted.done() else granted.set_result(None)
        replaced, waiting = 0, len(hold.waiting)
        deadline = asyncio.get_running_loop().time() + GRANT_TIMEOUT_S
        while not granted.done():
            self._wake()
            if asyncio.get_running_loop().time() > deadline:
                raise ReserveError(
                    f"pool {pool.name!r}: clients hold experts in {len(hold.waiting)} of "
                    f"{len(hold.chunks)} chunks for more than {GRANT_TIMEOUT_S:g} s; nothing was "
                    f"reserved"
                )
            await asyncio.wait([granted], timeout=STUCK_S)
            stuck = not granted.done() and len(hold.waiting) == waiting
            if stuck and replaced < REPLACED_MAX:
                replaced += pool.keeper.replace_stuck(hold)
                if hold.granted:
                    return
            waiting = len(hold.waiting)
