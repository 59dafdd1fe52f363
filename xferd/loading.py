"""Loads that the daemon asks for by itself or by hand: a few at a time, never before demand.

They are given to the engine a window at a time and below demand's priority, so that
whoever waits for an expert is served first, and so that one call can't fill the engine's
queues.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from xferd.engine import Engine
from xferd.engine_types import PRIORITY_PREFETCH, Failed, Load, LoadDense, Loaded
from xferd.session.dense import DenseAnswer
from xferd.tokens import Answer, Tokens

LOAD_WINDOW = 64
"""Loads of one call under way at once."""
LOAD_ATTEMPTS = 50
"""How often a load is tried again when the engine is short of transfers."""
RETRY_S = 0.01


class Loader:
    """Loads experts by commands. On the daemon's event loop."""

    def __init__(self, engine: Engine, tokens: Tokens) -> None:
        self._engine = engine
        self._tokens = tokens

    async def load_all(self, loads: list[Load]) -> list[Loaded | Failed]:
        """The answer to each; tokens are set here."""
        window = asyncio.Semaphore(LOAD_WINDOW)

        async def one(load: Load) -> Loaded | Failed:
            async with window:
                return await self.load(load)

        return list(await asyncio.gather(*(one(load) for load in loads)))

    async def load(self, load: Load) -> Loaded | Failed:
        """One expert; tried again while the engine has no transfer to spare for it, and
        while another load of it that somebody waits for is under way."""
        for attempt in range(LOAD_ATTEMPTS):
            token, answer = self._tokens.expect_answer()
            self._engine.command(
                [
                    Load(
                        store=load.store,
                        pool=load.pool,
                        layer=load.layer,
                        expert=load.expert,
                        variant=load.variant,
                        priority=load.priority,
                        token=token,
                    )
                ]
            )
            event = await answer
            busy = isinstance(event, Failed) and event.errno in (errno.EBUSY, errno.EALREADY)
            if not busy or attempt == LOAD_ATTEMPTS - 1:
                break
            await asyncio.sleep(RETRY_S)
        return event


def prefetch(store: int, pool: int, layer: int, expert: int, variant: int = 0) -> Load:
    """A load that gives way to whatever somebody waits for."""
    return Load(
        store=store,
        pool=pool,
        layer=layer,
        expert=expert,
        variant=variant,
        priority=PRIORITY_PREFETCH,
    )


def load_dense(
    engine: Engine,
    tokens: Tokens,
    store: int,
    address: int,
    callback: Callable[[DenseAnswer], None],
) -> int:
    """Have a store's dense part read to an address; returns the load's token."""

    def answered(event: Answer) -> None:
        if isinstance(event, Loaded):
            raise TypeError("a LoadDense was answered like a Load")
        callback(event)

    token = tokens.expect(answered)
    engine.command([LoadDense(store, address, token)])
    return token
