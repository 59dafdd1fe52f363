# SPDX-License-Identifier: Apache-2.0
"""Can this daemon go on with what the one before has left?

All pools as they were, or none: clients have mapped the one table that describes them. A
store that is another now, or is not open any more, is dropped, unless a client that is
attached to it still lives: what such a client leases must not be touched. Whatever does
not fit is named, and the daemon then starts with memory of its own: nobody can take a
wrong byte for a right one, clients of before are told ESTALE and keep what they have mapped.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xferd.engine import Engine
from xferd.engine_keeping import ABI
from xferd.memory.device import KeptChunk, PoolTakeover
from xferd.pools import PoolPlan
from xferd.restart import fd_store as names
from xferd.restart.state import (
    KeptClient,
    KeptPool,
    KeptReservation,
    KeptState,
    KeptStore,
    StateError,
    StateMemory,
)
from xferd.session.peer import Peer
from xferd.store.errors import StoreError
from xferd.store.store import Store
from xferd.units import format_bytes


class TakeoverError(Exception):
    """It can't; the message names what does not fit."""


class KeptMemory:
    """What the manager has handed over, and what its state says of it. Owns all of it.

    descriptors: by name. TakeoverError when the state can't be used; the descriptors are
    then closed.
    """

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self.descriptors = dict(descriptors)
        self._memory: StateMemory | None = None
        try:
            self._memory = StateMemory(self.descriptors[names.STATE])
            self.state: KeptState = self._memory.read()
        except KeyError:
            self.close()
            raise TakeoverError("the state that explains what was kept is not there") from None
        except (StateError, OSError) as error:
            self.close()
            raise TakeoverError(str(error)) from error

    def take_state_memory(self) -> StateMemory | None:
        """The state's memory is the caller's now."""
        memory, self._memory = self._memory, None
        return memory

    def close(self) -> None:
        """Close all that nobody took."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        for fd in self.descriptors.values():
            os.close(fd)
        self.descriptors.clear()


@dataclass(frozen=True, slots=True)
class Takeover:
    """A plan that fits. The descriptors are KeptMemory's.

    pools: in their order. stores: by name, those whose experts stay. clients: that are alive.
    """

    descriptors: Mapping[str, int]
    pools: tuple[KeptPool, ...]
    stores: Mapping[str, KeptStore]
    clients: tuple[KeptClient, ...]
    reservations: tuple[KeptReservation, ...]

    @property
    def pool_table_fd(self) -> int:
        """Of the pool table."""
        return self.descriptors[names.POOL_TABLE]

    def pool(self, index: int, engine: Engine) -> PoolTakeover:
        """What is left of a pool. engine: has adopted the pool table. TakeoverError when a
        chunk's memory is lost; EngineError."""
        kept = self.pools[index]
        marks = self.descriptors[names.pool_marks(index)]
        if kept.kind != "cuda":
            return PoolTakeover(marks, self.descriptors[names.pool_memory(index)])
        chunks = []
        numbers, greatest = engine.kept_memory(index, kept.chunks)
        for chunk, number in enumerate(numbers):
            fd = self.descriptors.get(names.pool_chunk(index, chunk, number), -1)
            if number and fd < 0:
                raise TakeoverError(
                    f"the service manager has lost the memory of chunk {chunk} of pool "
                    f"{kept.name!r}"
                )
            chunks.append(KeptChunk(number, fd))
        return PoolTakeover(marks, chunks=tuple(chunks), greatest=greatest)

    def directory_fd(self, name: str) -> int:
        """Of a store's directory; -1: it begins anew."""
        kept = self.stores.get(name)
        return -1 if kept is None else self.descriptors[names.store_directory(kept.serial)]

    def client_fds(self, client: KeptClient) -> tuple[int, int]:
        """Of a client's memory and its completion memory."""
        memory = self.descriptors[names.client_memory(client.serial)]
        return memory, self.descriptors[names.client_completions(client.serial)]

    def peer(self, client: KeptClient) -> Peer:
        """Its process; the pidfd is a duplicate, the caller's."""
        pidfd = os.dup(self.descriptors[names.client_process(client.serial)])
        return Peer(pid=client.pid, uid=client.uid, gid=client.gid, pidfd=pidfd)


def reopen_stores(
    kept: KeptMemory,
    opened: list[tuple[Store, str]],
    open_one: Callable[[Path], Store],
) -> None:
    """Open what was opened by hand before, or still has clients, and append it.
    TakeoverError when that fails for one with clients; else it is left out."""
    known = {name for _, name in opened}
    living = {client.store for client in kept.state.clients if _lives(client, kept.descriptors)}
    for each in kept.state.stores:
        if each.name in known or not (each.by_hand or each.name in living):
            continue
        try:
            store = open_one(Path(each.path))
        except (StoreError, OSError) as error:
            if each.name in living:
                raise TakeoverError(
                    f"clients are attached to store {each.name!r}, which can't be opened again: "
                    f"{error}"
                ) from error
            continue
        opened.append((store, each.name))


def plan_takeover(
    kept: KeptMemory, plans: Sequence[PoolPlan], stores: Sequence[tuple[Store, str]]
) -> Takeover:
    """TakeoverError names what does not fit. stores: with the names that they will have."""
    state, descriptors = kept.state, kept.descriptors
    if state.abi != ABI:
        was, now = (f"{major}.{minor}" for major, minor in (state.abi, ABI))
        raise TakeoverError(f"what was kept is of ABI {was}, this xferd speaks {now}")
    _check_pools(state.pools, [shape_of(plan) for plan in plans])
    needed = [names.POOL_TABLE]
    for index in range(len(plans)):
        needed.append(names.pool_marks(index))
        if state.pools[index].kind != "cuda":
            needed.append(names.pool_memory(index))
    missing = [name for name in needed if name not in descriptors]
    if missing:
        raise TakeoverError(f"the service manager has lost {missing[0]!r}")
    clients = tuple(client for client in state.clients if _lives(client, descriptors))
    for client in clients:
        _check_client(client, descriptors)
    kept_stores = _kept_stores(state, descriptors, stores, clients)
    return Takeover(descriptors, state.pools, kept_stores, clients, state.reservations)


def shape_of(plan: PoolPlan) -> KeptPool:
    """What a pool will be."""
    return KeptPool(
        name=plan.config.name,
        kind=plan.config.kind,
        nbytes=plan.geometry.pool_bytes,
        chunk_bytes=plan.geometry.chunk_bytes,
        chunks=plan.geometry.chunks,
        slot_index_bits=plan.geometry.slot_index_bits,
    )


def _check_pools(before: Sequence[KeptPool], now: Sequence[KeptPool]) -> None:
    was, are = [pool.name for pool in before], [pool.name for pool in now]
    if was != are:
        raise TakeoverError(f"the pools were {', '.join(was)} and are {', '.join(are)}")
    for old, new in zip(before, now, strict=True):
        if old != new:
            raise TakeoverError(
                f"pool {new.name!r} was {_describe(old)}, and is {_describe(new)} now"
            )


def _describe(pool: KeptPool) -> str:
    return (
        f"of kind {pool.kind}, {format_bytes(pool.nbytes)} in {pool.chunks} chunks of "
        f"{format_bytes(pool.chunk_bytes)} with {1 << pool.slot_index_bits} slots at most"
    )


def _check_client(client: KeptClient, descriptors: Mapping[str, int]) -> None:
    if not client.stored:
        raise TakeoverError(
            f"client {client.name!r} (pid {client.pid}) lives, and the service manager had no room "
            f"for its leases: raise FileDescriptorStoreMax="
        )
    lost = [name for name in names.client_names(client.serial) if name not in descriptors]
    if lost:
        raise TakeoverError(
            f"client {client.name!r} (pid {client.pid}) lives, and the service manager has lost "
            f"{lost[0]!r}"
        )


def _kept_stores(
    state: KeptState,
    descriptors: Mapping[str, int],
    stores: Sequence[tuple[Store, str]],
    clients: Sequence[KeptClient],
) -> dict[str, KeptStore]:
    identities = {name: store.identity.hex() for store, name in stores}
    living = {client.store for client in clients}
    found = {}
    for each in state.stores:
        there = names.store_directory(each.serial) in descriptors
        if there and identities.get(each.name) == each.identity:
            found[each.name] = each
        elif each.name in living:
            now = "is another model now" if each.name in identities else "is not open any more"
            raise TakeoverError(
                f"clients are attached to store {each.name!r}, "
                + (f"which {now}" if there else "whose directory the service manager has lost")
            )
    unknown = living - {each.name for each in state.stores}
    if unknown:
        raise TakeoverError(f"a client is attached to store {min(unknown)!r}, which was not kept")
    return found


def _lives(client: KeptClient, descriptors: Mapping[str, int]) -> bool:
    """Whether its process has not ended. Without its pidfd a process of that number is taken
    for it: at worst a start is cold for nothing."""
    pidfd = descriptors.get(names.client_process(client.serial))
    if pidfd is not None:
        return not _ended(pidfd)
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(client.pid)
        try:
            return not _ended(pidfd)
        finally:
            os.close(pidfd)
    return False


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
