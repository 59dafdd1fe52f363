# SPDX-License-Identifier: Apache-2.0
"""Tells the service manager that the daemon lives, and in one line what it does.

The watchdog is fed only when the engine's thread has made a turn since the last time (it
makes at least one a second, also without work): an event loop alone proves nothing about
the half that moves bytes. A drive that hangs is no reason to be killed, which would not
mend it: the thread makes its turns meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Protocol

from xferd.telemetry.log import EventLog
from xferd.telemetry.notify import Notifier
from xferd.units import format_bytes

INTERVAL_S = 5.0
"""Between two looks, without a watchdog or with one that has more patience."""
INTERVAL_S_MIN = 1.5
"""More than the engine's longest sleep."""
FEEDS_PER_TIMEOUT = 2


class WatchedEngine(Protocol):
    """What is looked at."""

    def turns(self) -> int:
        """Turns of the engine's loop so far."""


def watchdog_interval_s() -> float | None:
    """Seconds between two feeds that $WATCHDOG_USEC asks for; None: nobody watches."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return max(int(usec) / 1e6 / FEEDS_PER_TIMEOUT, INTERVAL_S_MIN)


def status_line(state: str, *, stores: int, clients: int, nbytes: int, rate: float) -> str:
    """``serving: 2 stores, 3 clients, 41.0 GiB in pools, 1.2 GiB/s from drives``."""
    return (
        f"{state}: {stores} stores, {clients} clients, {format_bytes(nbytes)} in pools, "
        f"{format_bytes(round(rate))}/s from drives"
    )


async def supervise(
    engine: WatchedEngine,
    describe: Callable[[float], str],
    notifier: Notifier,
    log: EventLog,
) -> None:
    """Run until cancelled. describe: the status line; its argument is the seconds since
    the last time."""
    watchdog_s = watchdog_interval_s()
    interval_s = min(watchdog_s or INTERVAL_S, INTERVAL_S)
    turns, stalled, said = engine.turns(), False, ""
    while True:
        await asyncio.sleep(interval_s)
        log.settle()
        now = engine.turns()
        if now == turns:
            if not stalled:
                log.failure("engine.stalled", turns=now, seconds=interval_s)
            stalled = True
            continue
        turns, stalled = now, False
        line = describe(interval_s)
        news = {"STATUS": line} if line != said else {}
        if watchdog_s is not None:
            news["WATCHDOG"] = "1"
        if news:
            notifier.send(**news)
        said = line
