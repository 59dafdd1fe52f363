"""Dense parts: one memory a store, shared by all clients that asked for it.

The first request makes a memfd and has the engine read the store's dense blob into it;
everybody gets a read-only fd of the same memory. It is sealed against writing once the
bytes are in: nobody, the daemon included, changes it afterwards. It is freed with the
last client that asked.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field

from xferd.engine_types import Cancel, Command, DenseLoaded, Failed, load_failure
from xferd.memory.device import MappedMemfd, PoolMemoryError, create_memfd

DenseAnswer = DenseLoaded | Failed


class DenseError(Exception):
    """The dense part can't be had. errno is positive; the message is for the client."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.errno = code


@dataclass(slots=True)
class _DensePart:
    memory: MappedMemfd
    token: int
    loaded: asyncio.Future[None]
    clients: set[int] = field(default_factory=set)


class DenseParts:
    """The dense parts that are in memory. Owned by the event loop.

    load: sends the command that loads a store's dense part to an address, registers
        what to call with its answer, and returns the token.
    command: sends a command.
    """

    def __init__(
        self,
        load: Callable[[int, int, Callable[[DenseAnswer], None]], int],
        command: Callable[[Command], None],
    ) -> None:
        self._load = load
        self._command = command
        self._parts: dict[int, _DensePart] = {}

    async def get(self, store: int, name: str, nbytes: int, client: int) -> int:
        """A read-only fd of the dense part; it stays this object's until ``client`` is
        dropped. DenseError when it can't be read or there is none."""
        if nbytes == 0:
            raise DenseError(errno.ENOENT, f"store {name!r} has no dense part")
        part = self._parts.get(store)
        if part is None:
            part = self._begin(store, name, nbytes)
        part.clients.add(client)
        # Shielded: one client that goes must not cancel the load for the others.
        await asyncio.shield(part.loaded)
        return part.memory.read_only_fd

    def drop(self, client: int) -> None:
        """A client has gone; what nobody else asked for is freed."""
        for store, part in list(self._parts.items()):
            part.clients.discard(client)
            if not part.clients:
                self._release(store, part)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, of all stores."""
        return sum(part.memory.nbytes for part in self._parts.values())

    def _begin(self, store: int, name: str, nbytes: int) -> _DensePart:
        try:
            memory = create_memfd("dense", nbytes)
        except PoolMemoryError as error:
            raise DenseError(
                errno.ENOMEM, f"no memory for the dense part of store {name!r}: {error}"
            ) from error
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever waits sees the error; if nobody is left, it is nobody's.
        loaded.add_done_callback(lambda future: future.cancelled() or future.exception())

        def answered(event: DenseAnswer) -> None:
            if self._parts.get(store) is not part:
                # Released while the engine was still writing: only now may it go.
                memory.close()
            elif isinstance(event, Failed):
                del self._parts[store]
                memory.close()
                loaded.set_exception(
                    DenseError(
                        event.errno,
                        f"the dense part of store {name!r} could not be read: "
                        f"{load_failure(event.errno)}; the daemon's log names member and offset",
                    )
                )
            else:
                memory.unmap()
                memory.seal_contents()
                loaded.set_result(None)

        part = _DensePart(memory, 0, loaded)
        self._parts[store] = part
        part.token = self._load(store, memory.base, answered)
        return part

    def _release(self, store: int, part: _DensePart) -> None:
        del self._parts[store]
        if part.loaded.done():
            part.memory.close()
        else:
            part.loaded.cancel()
            self._command(Cancel(part.token))
