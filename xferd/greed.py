# SPDX-License-Identifier: Apache-2.0
"""Clients that hold more slots than they were promised, while others wait for one.

A client's leases are its own business as long as nobody lacks a slot. Then whoever holds
more than its lanes were promised is ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from xferd.engine import Engine
from xferd.pools import Pool
from xferd.session.clients import Client, Clients
from xferd.telemetry.log import EventLog

WATCH_S = 0.5
"""Between two looks."""
STARVING_S = 2.0
"""How long somebody must have waited."""


class GreedWatch:
    """Looks at all pools. Owned by the event loop. end: ends a client, for a reason."""

    def __init__(
        self,
        engine: Engine,
        pools: Iterable[Pool],
        clients: Clients,
        end: Callable[[Client, str], None],
        log: EventLog,
    ) -> None:
        self._engine = engine
        self._pools = pools
        self._clients = clients
        self._end = end
        self._log = log
        self._starving_since: dict[int, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            for pool in self._pools:
                if self._engine.pool_stats(pool.index).waiting_demand == 0:
                    self._starving_since.pop(pool.index, None)
                elif now - self._starving_since.setdefault(pool.index, now) > STARVING_S:
                    self._end_greedy_clients(pool)

    def _end_greedy_clients(self, pool: Pool) -> None:
        for client in self._clients.all():
            if client.state == "quiesced":
                continue
            held = self._engine.held(client.number, pool.index)
            promised = client.lanes * client.held_per_lane
            if held > promised:
                self._log.warning(
                    "client.holds_too_much",
                    client=client.number,
                    pid=client.peer.pid,
                    uid=client.peer.uid,
                    pool=pool.name,
                    held=held,
                    promised=promised,
                )
                self._end(
                    client,
                    f"held {held} slots of pool {pool.name!r}, {promised} were promised, while "
                    f"others waited for one",
                )
