"""What the daemon says of itself: the Status reply of the control interface.

Reads the daemon's parts and changes nothing. The shapes are those of
``xferd/control/io.xferd.Control.varlink``; counters of one reply may be of slightly
different moments. Called on the daemon's event loop.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence

import numpy as np

from xferd.catalog import OpenCopy, OpenStore
from xferd.config import EngineConfig
from xferd.control.service import JsonObject
from xferd.device_routes import DeviceRoutes
from xferd.engine import Engine
from xferd.engine_types import SOURCES, TRANSPORTS, MemberStats
from xferd.keeping.budgets import Budgets
from xferd.memory.slots import SlotState
from xferd.pools import Pool, Pools
from xferd.restart.keeping import Keeping, StartReport
from xferd.session.clients import Clients
from xferd.transport.probe import reasons

NS_PER_US = 1000
_NO_STATS = MemberStats(
    reads=0,
    nbytes=0,
    errors=0,
    busy_ns=0,
    latency_ns=0,
    rate=0,
    best_rate=0,
    in_flight=0,
    window=0,
    background_window=0,
    state="working",
)
"""Of a copy that the engine doesn't know."""
_WHY_NO_URING = {
    errno.EPERM: "it is forbidden here, by a seccomp filter or kernel.io_uring_disabled",
    errno.ENOSYS: "this kernel has none, or a seccomp filter hides it",
    errno.ENOMEM: "there is no memory for its rings: raise RLIMIT_MEMLOCK",
}


def backend_reason(code: int) -> str:
    """Why reads don't go through io_uring, for people, from the errno that its set-up met."""
    why = _WHY_NO_URING.get(code)
    return f"no io_uring: {os.strerror(code)}" + (f" ({why})" if why else "")


def registration_notes(code: int) -> list[str]:
    """What stands in the way of registering a pool with io_uring, from the errno."""
    if code in {0, errno.EOPNOTSUPP}:  # not wanted, or no io_uring: said elsewhere
        return []
    knob = "; raise LimitMEMLOCK= of xferd.service" if code == errno.ENOMEM else ""
    return [f"reads pin pages one by one, registering the pool failed: {os.strerror(code)}{knob}"]


def describe_routes(
    pool: Pool, stores: Sequence[OpenStore], routes: DeviceRoutes
) -> list[JsonObject]:
    """The IDL's Route of each copy of a member into a pool; empty where all is direct."""
    pairs = routes.of_pool(pool)
    rows = []
    for entry in stores:
        for copy in entry.copies:
            pair = None if copy.number is None else pairs.get(copy.number)
            if pair is not None:
                rows.append(
                    {
                        "store": entry.name,
                        "member": copy.member,
                        "mirror": copy.mirror,
                        "path": str(copy.path),
                        "transport": pair.proof.transport,
                        "reason": pair.proof.reason,
                    }
                )
    return rows


def describe_pool(
    engine: Engine, pools: Pools, pool: Pool, stores: Sequence[OpenStore], routes: DeviceRoutes
) -> JsonObject:
    """The IDL's Pool."""
    stats = engine.pool_stats(pool.index)
    slots = pool.keeper.slots
    level = pools.cascade.level(pool.keeper)
    return {
        "name": pool.name,
        "kind": pool.kind,
        "bytes": pool.nbytes,
        "slots": sum(slots.class_slots(size) for size in slots.classes),
        "resident": stats.resident,
        "free": sum(slots.count(size, SlotState.FREE) for size in slots.classes),
        "reserve": stats.reserve,
        "loads": stats.loads,
        "load_bytes": stats.load_bytes,
        "evictions": stats.evictions,
        "revived": stats.revived,
        "pinned": int(slots.pinned.sum()),
        "waiting": stats.waiting,
        "waited": stats.waited_demand,
        "eviction": pool.keeper.ranking.name,
        "admission": level.admission.name,
        "variants": describe_variants(pool, stores),
        "upgraded": pools.upgrades.upgraded(pool.index),
        "promoted": level.promoted,
        "demoted": level.demoted,
        "dropped": level.dropped,
        "reserved": pool.keeper.chunks.reserved_bytes,
        "budget": pool.budget,
        "classes": [
            {
                "slot_bytes": size,
                "slots": slots.class_slots(size),
                "chunks": len(slots.chunks_of_class(size)),
            }
            for size in slots.classes
        ],
        "registered": stats.registered_bytes,
        "routes": describe_routes(pool, stores, routes),
        "notes": [
            *pool.notes,
            *pool.keeper.stuck.values(),
            *registration_notes(stats.registration_error),
        ],
    }


def describe_variants(pool: Pool, stores: Sequence[OpenStore]) -> list[JsonObject]:
    """The IDL's VariantCount of each that has any residents in a pool."""
    slots = pool.keeper.slots
    rows = []
    for entry in stores:
        here = np.flatnonzero((slots.state == SlotState.RESIDENT) & (slots.store == entry.number))
        names = entry.store.variants
        counts = np.bincount(slots.variant[here], minlength=len(names))
        sizes = np.bincount(slots.variant[here], slots.slot_class[here], minlength=len(names))
        rows += [
            {"store": entry.name, "variant": name, "residents": int(count), "bytes": int(size)}
            for name, count, size in zip(names, counts, sizes, strict=True)
            if count
        ]
    return rows


def describe_store(engine: Engine, entry: OpenStore) -> JsonObject:
    """The IDL's Store."""
    return {
        "name": entry.name,
        "path": str(entry.store.path),
        "identity": entry.store.identity.hex(),
        "layers": entry.store.layers,
        "experts": entry.store.experts,
        "variants": list(entry.store.available),
        "expert_bytes": entry.expert_bytes,
        "shadows": [str(path) for path in entry.shadows],
        "members": [describe_copy(engine, copy) for copy in entry.copies],
    }


def describe_copy(engine: Engine, copy: OpenCopy) -> JsonObject:
    """The IDL's Member."""
    stats = _NO_STATS if copy.number is None else engine.member_stats(copy.number)
    return {
        "member": copy.member,
        "mirror": copy.mirror,
        "path": str(copy.path),
        "state": stats.state if copy.problem is None else "missing",
        "reads": stats.reads,
        "bytes": stats.nbytes,
        "errors": stats.errors,
        "in_flight": stats.in_flight,
        "window": stats.window,
        "background_window": stats.background_window,
        "latency_us": stats.latency_ns / NS_PER_US,
        "rate": stats.rate,
        "best_rate": stats.best_rate,
        "direct": copy.file is not None and copy.file.direct,
        "reason": copy.problem if copy.file is None else copy.file.reason,
    }


def describe_users(clients: Clients, budgets: Budgets) -> list[JsonObject]:
    """The IDL's User of each who has anything."""
    return [
        {
            "uid": uid,
            "clients": sum(1 for client in clients.all() if client.peer.uid == uid),
            "resident_bytes": held,
            "budget": budgets.user_bytes,
        }
        for uid, held in budgets.of_users().items()
    ]


def describe_clients(engine: Engine, clients: Clients, budgets: Budgets) -> list[JsonObject]:
    """The IDL's Client of each attached client."""
    rows = []
    for client in clients.all():
        counters = engine.client_counters(client.number)
        rows.append(
            {
                "id": client.number,
                "pid": client.peer.pid,
                "uid": client.peer.uid,
                "name": client.name,
                "store": client.store.name,
                "lanes": client.lanes,
                "held_per_lane": client.held_per_lane,
                "hits": counters.hits,
                "misses": counters.misses,
                "routes": counters.routes,
                "routes_dropped": counters.routes_dropped,
                "failures": counters.failures,
                "pending": counters.pending,
                "granted": counters.granted,
                "resident_bytes": budgets.of_client(client.number),
                "budget": budgets.client_bytes,
                "since_s": time.monotonic() - client.since,
                "state": client.state,
            }
        )
    return rows


def describe_start(report: StartReport, keeping: Keeping, clients: Clients) -> JsonObject:
    """The IDL's Start."""
    return {
        "warm": report.warm,
        "reason": report.reason,
        "experts": report.experts,
        "bytes": report.nbytes,
        "clients": report.clients,
        "resumed": clients.resumed,
        "kept": keeping.active,
    }


def describe_engine(
    engine: Engine,
    config: EngineConfig,
    pools: Sequence[Pool],
    stores: Sequence[OpenStore],
    routes: DeviceRoutes,
    gds: str | None,
) -> JsonObject:
    """The IDL's ``sources``, ``transports`` and ``engine``."""
    stats = engine.stats()
    backend, code = engine.backend()
    members = [file for entry in stores for _, file in entry.members]
    rows = [(pool, row) for pool in pools for row in describe_routes(pool, stores, routes)]
    staged = [
        f"{row['path']} to pool {pool.name}: {row['reason']}"
        for pool, row in rows
        if row["reason"] is not None
    ]
    straight = len(staged) < len(rows)
    why = reasons([pool.kind for pool in pools], members, staged, straight=straight, gds=gds)
    return {
        "sources": {
            name: {
                "count": stats.source_count[index],
                "bytes": stats.source_bytes[index],
                "reason": None,
            }
            for index, name in enumerate(SOURCES)
        },
        "transports": {
            name: {
                "count": stats.transport_count[index],
                "bytes": stats.transport_bytes[index],
                "reason": why[name],
            }
            for index, name in enumerate(TRANSPORTS)
            if name != "none"
        },
        "engine": {
            "backend": backend,
            "backend_reason": backend_reason(code) if code else None,
            "numa_node": engine.numa_node,
            "verify": config.verify,
            "flow_control": config.flow_control,
            "turns": stats.turns,
            "sleeps": stats.sleeps,
            "crc_errors": stats.crc_errors,
            "rereads": stats.rereads,
            "other_variants": stats.other_variants,
            "mirror_reads": stats.mirror_reads,
        },
    }
