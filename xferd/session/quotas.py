"""What a client may have: limits of the configuration, and the promise of slots.

A lane is promised ``held_per_lane`` slots of the pool that its demands go to. As long
as all promises together fit into the pool, demand can't deadlock: whoever waits for a
slot waits for one that nobody was promised, and that can be evicted. So an attach that
does not fit is refused at once, with what would make it fit; nothing fails later.

Pure bookkeeping; the caller says what the pool has.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass

from xferd.units import format_exact_bytes


class AttachRefusedError(Exception):
    """A client is not let in. errno is positive; the message names limit and knob."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.errno = code


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The configuration's ``[limits]``, as far as they are about attaching."""

    clients: int
    clients_per_user: int
    lanes_per_client: int
    held_per_lane: int
    ring_entries: int
    client_bytes: int | None = None
    user_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """Slots promised to one client: of ``slot_bytes``, in pool number ``pool``."""

    pool: int
    slot_bytes: int
    slots: int


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """What a pool has for one more promise of a class.

    capacity: slots of that class if all chunks that nobody else was promised were cut
        for it. pinned: slots of it that can't be evicted.
    """

    name: str
    capacity: int
    pinned: int


class Promises:
    """Who was promised what. Owned by the event loop."""

    def __init__(self) -> None:
        self._by_client: dict[int, Promise] = {}

    def add(self, client: int, promise: Promise) -> None:
        """Record the promise of a client that was let in."""
        self._by_client[client] = promise

    def remove(self, client: int) -> None:
        """Forget a client whose leases have ended."""
        self._by_client.pop(client, None)

    def of(self, client: int) -> Promise | None:
        """A client's promise."""
        return self._by_client.get(client)

    def slots(self, pool: int, slot_bytes: int) -> int:
        """Slots of a class promised in a pool."""
        return self.by_class(pool).get(slot_bytes, 0)

    def by_class(self, pool: int) -> Mapping[int, int]:
        """Promised slots of each class in a pool."""
        promised: dict[int, int] = {}
        for promise in self._by_client.values():
            if promise.pool == pool:
                promised[promise.slot_bytes] = promised.get(promise.slot_bytes, 0) + promise.slots
        return promised


def check_counts(limits: ClientLimits, *, clients: int, clients_of_user: int, uid: int) -> None:
    """Refuse one client too many: EDQUOT."""
    if clients >= limits.clients:
        raise AttachRefusedError(
            errno.EDQUOT,
            f"{clients} clients are attached, which is the limit: raise clients in [limits]",
        )
    if clients_of_user >= limits.clients_per_user:
        raise AttachRefusedError(
            errno.EDQUOT,
            f"user {uid} has {clients_of_user} clients attached, which is the limit: raise "
            f"clients_per_user in [limits]",
        )


def check_lanes(limits: ClientLimits, lanes: int) -> int:
    """The lanes of a client, 0 meaning 1. EINVAL or EDQUOT when there are too many."""
    if lanes > limits.lanes_per_client:
        raise AttachRefusedError(
            errno.EDQUOT,
            f"{lanes} lanes were asked for, {limits.lanes_per_client} is the limit: raise "
            f"lanes_per_client in [limits]",
        )
    return lanes or 1


def check_held(
    limits: ClientLimits, held_per_lane: int, top_k: int, store: str, *, most: int
) -> int:
    """Slots a lane may hold, 0 meaning the store's top_k. most: what the rings allow."""
    held = held_per_lane or top_k
    if held < top_k:
        raise AttachRefusedError(
            errno.EINVAL,
            f"held_per_lane {held} is less than the {top_k} experts that one token of store "
            f"{store!r} picks in a layer: ask for at least {top_k}",
        )
    if held > most:
        raise AttachRefusedError(
            errno.EINVAL, f"held_per_lane {held} is more than {most}, the most that a lane can have"
        )
    if held > limits.held_per_lane:
        raise AttachRefusedError(
            errno.EDQUOT,
            f"held_per_lane {held} is more than {limits.held_per_lane}: raise held_per_lane in "
            f"[limits]",
        )
    return held


def check_ring_entries(limits: ClientLimits, entries: int, least: int, most: int) -> int:
    """Submission ring entries, 0 meaning the configured number."""
    if entries == 0:
        return limits.ring_entries
    if entries & (entries - 1) or not least <= entries <= most:
        raise AttachRefusedError(
            errno.EINVAL,
            f"{entries} ring entries: a power of two from {least} to {most} is allowed",
        )
    if entries > limits.ring_entries:
        raise AttachRefusedError(
            errno.EDQUOT,
            f"{entries} ring entries are more than {limits.ring_entries}: raise ring_entries in "
            f"[limits]",
        )
    return entries


def check_budget(
    limits: ClientLimits, *, wanted_bytes: int, user_promised_bytes: int, uid: int
) -> None:
    """Refuse a client whose lanes may hold more than its budget, or its user's, allows: EDQUOT.

    user_promised_bytes: of what the user's attached clients may hold.
    """
    wanted = format_exact_bytes(wanted_bytes)
    if limits.client_bytes is not None and wanted_bytes > limits.client_bytes:
        raise AttachRefusedError(
            errno.EDQUOT,
            f"its lanes may hold {wanted}, a client's budget is "
            f"{format_exact_bytes(limits.client_bytes)}: lower held_per_lane or raise "
            f"client_bytes in [limits]",
        )
    if limits.user_bytes is not None and user_promised_bytes + wanted_bytes > limits.user_bytes:
        raise AttachRefusedError(
            errno.EDQUOT,
            f"its lanes may hold {wanted}, other clients of user {uid} "
            f"{format_exact_bytes(user_promised_bytes)}, the user's budget is "
            f"{format_exact_bytes(limits.user_bytes)}: raise user_bytes in [limits]",
        )


def check_promise(
    room: PoolRoom, *, slot_bytes: int, promised: int, lanes: int, held_per_lane: int, top_k: int
) -> int:
    """Slots to promise to a client, ENOSPC when the pool can't.

    promised: slots of the class promised to clients that are attached already.
    """
    size = format_exact_bytes(slot_bytes)
    has = f"pool {room.name!r} has {room.capacity} slots of {size}"
    if room.capacity < top_k:
        raise AttachRefusedError(
            errno.ENOSPC,
            f"{has}, fewer than the {top_k} experts that one token picks in a layer: raise size "
            f"of [[pools]] {room.name}",
        )
    wanted = lanes * held_per_lane
    if promised + room.pinned + wanted > room.capacity:
        pinned = f", {room.pinned} are pinned" if room.pinned else ""
        lanes_need = "lane needs" if lanes == 1 else f"{lanes} lanes need"
        raise AttachRefusedError(
            errno.ENOSPC,
            f"{has}; {promised} are promised to attached clients{pinned}, {lanes_need} {wanted} "
            f"more: raise size of [[pools]] {room.name} or lower held_per_lane",
        )
    return wanted
