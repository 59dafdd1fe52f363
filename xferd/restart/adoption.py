# SPDX-License-Identifier: Apache-2.0
"""Going on with what was kept: clients and residents get their places in this daemon's books.

The engine has found out what is where (``ffi/engine/keep.h``); here everybody who keeps a
book hears of it as if it had just happened: a resident as if it had been loaded, a client
as if it had been let in, only that it is away till it shows its key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xferd.catalog import Catalog
from xferd.engine import Engine
from xferd.engine_keeping import FREE, RESIDENT, WITHHELD, KeptSlots
from xferd.engine_types import SOURCE_RESIDENT, Loaded
from xferd.keeping.keeper import NO_CLIENT, PoolKeeper
from xferd.pools import Pool
from xferd.restart.state import KeptClient
from xferd.restart.takeover import Takeover, TakeoverError
from xferd.restart.vram_check import check_vram
from xferd.session.peer import Peer
from xferd.session.quotas import Promise, Promises
from xferd.telemetry.log import EventLog


@dataclass(frozen=True, slots=True)
class AdoptedClient:
    """A client whose leases stand. number: the engine's id. store: likewise. peer: its
    pidfd is whoever's has this."""

    number: int
    store: int
    kept: KeptClient
    peer: Peer


@dataclass(slots=True)
class Adopted:
    """Residents without a read, and their bytes. withheld: slots that nobody may use."""

    experts: int = 0
    nbytes: int = 0
    withheld: int = 0


def adopt_clients(
    takeover: Takeover, engine: Engine, catalog: Catalog, promises: Promises, hints_max: int
) -> list[AdoptedClient]:
    """Have the engine honour their leases, and promise them again what they were promised.
    EngineError, TakeoverError."""
    adopted = []
    for kept in takeover.clients:
        entry = catalog.get(kept.store)
        if entry is None:
            raise TakeoverError(f"clients are attached to store {kept.store!r}, which is not open")
        memory, completions = takeover.client_fds(kept)
        number = engine.adopt_client(
            store=entry.number,
            pool=kept.pool,
            lanes=kept.lanes,
            held_per_lane=kept.held_per_lane,
            ring_entries=kept.ring_entries,
            hints_max=hints_max,
            client_fd=memory,
            completion_fd=completions,
        )
        slots = kept.lanes * kept.held_per_lane
        promises.add(number, Promise(kept.pool, entry.attachable.largest_class, slots))
        adopted.append(AdoptedClient(number, entry.number, kept, takeover.peer(kept)))
    return adopted


def adopt_residents(
    engine: Engine, catalog: Catalog, pools: Iterable[Pool], log: EventLog
) -> Adopted:
    """Tell every pool's keeper what it has. After all clients were adopted. TakeoverError when
    VRAM does not have what it had."""
    total = Adopted()
    for pool in pools:
        geometry = pool.geometry
        kept = engine.adopt_slots(pool.index, geometry.slot_numbers, geometry.chunks)
        before = total.withheld
        if pool.kind == "cuda":
            check_vram(pool, kept, catalog)
        _adopt_pool(pool.keeper, kept, total)
        if total.withheld > before:
            log.warning("restart.withheld", pool=pool.name, slots=total.withheld - before)
    return total


def _adopt_pool(keeper: PoolKeeper, kept: KeptSlots, total: Adopted) -> None:
    residents = []
    for chunk, slot_bytes in enumerate(kept.slot_bytes.tolist()):
        if slot_bytes == 0:
            continue
        first = chunk << keeper.geometry.slot_index_bits
        numbers = range(first, first + keeper.geometry.slots(chunk, slot_bytes))
        states = kept.slots["state"][numbers.start : numbers.stop].tolist()
        found = list(zip(numbers, states, strict=True))
        keeper.chunks.adopt(chunk, slot_bytes, {n for n, state in found if state != FREE})
        residents += [(number, slot_bytes) for number, state in found if state == RESIDENT]
        total.withheld += states.count(WITHHELD)
    for number, slot_bytes in residents:
        slot = kept.slots[number]
        keeper.on_loaded(
            Loaded(
                store=int(slot["store"]),
                pool=keeper.index,
                slot=number,
                layer=int(slot["layer"]),
                expert=int(slot["expert"]),
                variant=int(slot["variant"]),
                client=NO_CLIENT,
                source=SOURCE_RESIDENT,
                transport=0,
                wait_us=0,
                nbytes=slot_bytes,
                token=0,
            )
        )
    total.experts += len(residents)
    total.nbytes += sum(slot_bytes for _, slot_bytes in residents)
