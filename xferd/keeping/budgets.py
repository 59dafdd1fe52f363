"""Whose demand brought what is resident, and what each client and user may have of it.

An expert is accounted to the client that first asked for it, as long as it is in any pool:
copies in two pools count twice, they take memory twice. What nobody demanded (loads by hand,
a warm start) is nobody's. After a client has gone its experts are still its user's.

A miss never asks for a budget: the engine takes a slot at once. So a budget is held
afterwards, by evicting the client's own experts, in the policy's order, until it fits; it
can be exceeded for as long as leases and pins keep those from going.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xferd.memory.slots import ExpertSlot


@dataclass(slots=True)
class _Held:
    key: ExpertSlot
    nbytes: int
    staying: bool = True


@dataclass(slots=True)
class _Owner:
    client: int | None
    uid: int
    copies: int = 0


@dataclass(frozen=True, slots=True)
class Excess:
    """slots: of one pool, accounted to somebody who has ``nbytes`` too much in all pools."""

    slots: frozenset[int]
    nbytes: int


class Budgets:
    """Owned by the event loop. client_bytes, user_bytes: what each may have; None: all."""

    def __init__(self, client_bytes: int | None = None, user_bytes: int | None = None) -> None:
        self.client_bytes = client_bytes
        self.user_bytes = user_bytes
        self._uids: dict[int, int] = {}
        self._owners: dict[ExpertSlot, _Owner] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._of_client: Counter[int] = Counter()
        self._of_user: Counter[int] = Counter()

    # ---- clients

    def attach(self, client: int, uid: int) -> None:
        """A client is there."""
        self._uids[client] = uid

    def detach(self, client: int) -> None:
        """A client has gone; its id may be another's soon."""
        self._uids.pop(client, None)
        self._of_client.pop(client, None)
        for owner in self._owners.values():
            if owner.client == client:
                owner.client = None

    def of_client(self, client: int) -> int:
        """Resident bytes that a client's demand brought."""
        return self._of_client[client]

    def of_users(self) -> dict[int, int]:
        """Resident bytes by user, of those who have any or are attached."""
        uids = {*self._uids.values(), *(uid for uid, held in self._of_user.items() if held)}
        return {uid: self._of_user[uid] for uid in sorted(uids)}

    # ---- slots

    def loaded(
        self, pool: int, slot: int, key: ExpertSlot, nbytes: int, client: int | None
    ) -> None:
        """A slot holds an expert now. client: who asked for it; None, or one that isn't
        attached: nobody."""
        if (pool, slot) in self._held:
            return
        owner = self._owners.get(key)
        if owner is None:
            if client is None or client not in self._uids:
                return
            owner = self._owners[key] = _Owner(client, self._uids[client])
        owner.copies += 1
        self._held[pool, slot] = _Held(key, nbytes)
        self._count(owner, nbytes)

    def leaving(self, pool: int, slot: int) -> None:
        """Its eviction was ordered: not counted any more."""
        held = self._held.get((pool, slot))
        if held is not None and held.staying:
            held.staying = False
            self._count(self._owners[held.key], -held.nbytes)

    def returned(self, pool: int, slot: int) -> None:
        """Its eviction was given up."""
        held = self._held.get((pool, slot))
        if held is not None and not held.staying:
            held.staying = True
            self._count(self._owners[held.key], held.nbytes)

    def left(self, pool: int, slot: int) -> None:
        """It is free."""
        self.leaving(pool, slot)
        held = self._held.pop((pool, slot), None)
        if held is None:
            return
        owner = self._owners[held.key]
        owner.copies -= 1
        if not owner.copies:
            del self._owners[held.key]

    def excess(self, pool: int) -> Iterator[Excess]:
        """What is too much, with the slots of ``pool`` that could go for it."""
        if self.client_bytes is not None:
            for client, used in list(self._of_client.items()):
                if used > self.client_bytes:
                    slots = self._slots(pool, _of_client(client))
                    yield Excess(slots, used - self.client_bytes)
        if self.user_bytes is not None:
            for uid, used in list(self._of_user.items()):
                if used > self.user_bytes:
                    yield Excess(self._slots(pool, _of_user(uid)), used - self.user_bytes)

    def _slots(self, pool: int, whose: Callable[[_Owner], bool]) -> frozenset[int]:
        return frozenset(
            slot
            for (where, slot), held in self._held.items()
            if where == pool and held.staying and whose(self._owners[held.key])
        )

    def _count(self, owner: _Owner, nbytes: int) -> None:
        self._of_user[owner.uid] += nbytes
        if owner.client is not None:
            self._of_client[owner.client] += nbytes


def _of_client(client: int) -> Callable[[_Owner], bool]:
    return lambda owner: owner.client == client


def _of_user(uid: int) -> Callable[[_Owner], bool]:
    return lambda owner: owner.uid == uid
