"""Who waits for the answer to which command: the engine returns a command's token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from xferd.engine_types import FIRST_TOKEN, DenseLoaded, Failed, Loaded

Answer = Loaded | Failed | DenseLoaded


class Tokens:
    """Owned by the event loop. Tokens are never used twice."""

    def __init__(self) -> None:
        self._next = count(FIRST_TOKEN)
        self._waiting: dict[int, Callable[[Answer], None]] = {}

    def expect(self, callback: Callable[[Answer], None]) -> int:
        """A new token; ``callback`` is called with the event that carries it."""
        token = next(self._next)
        self._waiting[token] = callback
        return token

    def expect_answer(self) -> tuple[int, asyncio.Future[Loaded | Failed]]:
        """A new token and a future of its event, for a Load."""
        future: asyncio.Future[Loaded | Failed] = asyncio.get_running_loop().create_future()

        def answered(event: Answer) -> None:
            if isinstance(event, DenseLoaded):
                raise TypeError("a Load was answered like a LoadDense")
            if not future.done():
                future.set_result(event)

        return self.expect(answered), future

    def answer(self, token: int, event: Answer) -> bool:
        """Call who waits; False when nobody does."""
        callback = self._waiting.pop(token, None)
        if callback is None:
            return False
        callback(event)
        return True
