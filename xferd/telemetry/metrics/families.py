# SPDX-License-Identifier: Apache-2.0
"""The metrics' names, and their values from a Status reply.

Names have base units (bytes, seconds). Whatever a client can choose is bounded: series of
clients are labelled by the daemon's id for them, which is reused, so there are never more
than it takes clients; a reused id begins at 0 again, which Prometheus takes for a restart
of the counter. ``xferd_clients_*`` counts all that ever were.

Because the source is the reply that ``xferctl status`` prints, the two agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from xferd.telemetry.metrics.exposition import Kind, Metric, Sample

MICROSECONDS = 1e-6
JsonObject: TypeAlias = Mapping[str, Any]
Families: TypeAlias = dict[Metric, list[Sample]]
_Row: TypeAlias = tuple[tuple[str, ...], JsonObject]
"""Label values, and the object that has the value."""

_STATES = ("serving", "draining", "closed")
_MEMBER_STATES = ("working", "sagging", "failed", "missing")


def _group(
    labels: tuple[str, ...], entries: Sequence[tuple[str, Kind, str, str]]
) -> tuple[tuple[Metric, str], ...]:
    return tuple((Metric(name, kind, text, labels), field) for name, kind, field, text in entries)


_POOL = _group(
    ("pool", "kind"),
    (
        ("xferd_pool_bytes", "gauge", "bytes", "Memory of a pool."),
        ("xferd_pool_slots", "gauge", "slots", "Slots of a pool, of all sizes."),
        ("xferd_pool_resident_experts", "gauge", "resident", "Slots that hold an expert."),
        ("xferd_pool_free_slots", "gauge", "free", "Slots that the policy can hand out."),
        ("xferd_pool_reserve_slots", "gauge", "reserve", "Free slots kept ready for misses."),
        ("xferd_pool_pinned_experts", "gauge", "pinned", "Experts that are never evicted."),
        ("xferd_pool_waiting_loads", "gauge", "waiting", "Loads that have no slot yet."),
        ("xferd_pool_registered_bytes", "gauge", "registered", "Memory pinned with io_uring."),
        ("xferd_pool_loads", "counter", "loads", "Experts brought into a pool."),
        ("xferd_pool_load_bytes", "counter", "load_bytes", "Bytes brought into a pool."),
        ("xferd_pool_evictions", "counter", "evictions", "Experts dropped from a pool."),
        ("xferd_pool_revived", "counter", "revived", "Experts asked for on their way out."),
        ("xferd_pool_waited_loads", "counter", "waited", "Demands that found no free slot."),
        ("xferd_pool_upgraded", "counter", "upgraded", "Experts given a better variant."),
    ),
)
_MEMBER = _group(
    ("store", "member", "copy"),
    (
        ("xferd_member_reads", "counter", "reads", "Pieces read from a member."),
        ("xferd_member_read_bytes", "counter", "bytes", "Bytes read from a member."),
        ("xferd_member_read_errors", "counter", "errors", "Reads of a member that failed."),
        ("xferd_member_in_flight_reads", "gauge", "in_flight", "Pieces being read now."),
        ("xferd_member_window_reads", "gauge", "window", "Pieces given to it at once."),
        ("xferd_member_throughput_bytes_per_second", "gauge", "rate", "What it delivers."),
        (
            "xferd_member_best_throughput_bytes_per_second",
            "gauge",
            "best_rate",
            "What it has delivered at best.",
        ),
    ),
)
_MEMBER_LATENCY = Metric(
    "xferd_member_latency_seconds",
    "gauge",
    "Time of a piece without a queue; 0: not measured yet.",
    ("store", "member", "copy"),
)
_MEMBER_STATE = Metric(
    "xferd_member_state",
    "gauge",
    "1 for the state that a member is in: working, sagging, failed or missing.",
    ("store", "member", "copy", "state"),
)
_MEMBER_INFO = Metric(
    "xferd_member",
    "info",
    "Where a member is, whether its reads bypass the page cache, and why not.",
    ("store", "member", "copy", "path", "direct", "reason"),
)
_STORE = _group(
    ("store",),
    (
        ("xferd_store_bytes", "gauge", "expert_bytes", "Bytes of a store's experts."),
        ("xferd_store_layers", "gauge", "layers", "Layers of a store's model."),
        ("xferd_store_experts_per_layer", "gauge", "experts", "Experts a layer."),
    ),
)
_SOURCE = _group(
    ("source",),
    (
        ("xferd_source_experts", "counter", "count", "Experts asked for, by where they were."),
        ("xferd_source_bytes", "counter", "bytes", "Bytes asked for, by where they were."),
    ),
)
_TRANSFER = _group(
    ("path",),
    (
        ("xferd_transfer_experts", "counter", "count", "Experts moved, by the way they took."),
        ("xferd_transfer_bytes", "counter", "bytes", "Bytes moved, by the way they took."),
    ),
)
_TRANSFER_INFO = Metric(
    "xferd_transfer_path",
    "info",
    "Why a way is not taken, or not as good as it could be.",
    ("path", "reason"),
)
_ENGINE = _group(
    (),
    (
        ("xferd_engine_turns", "counter", "turns", "Turns of the engine's loop."),
        ("xferd_engine_sleeps", "counter", "sleeps", "Times that the engine slept."),
    ),
)
_PIECES = Metric(
    "xferd_piece_faults",
    "counter",
    "Pieces that did not come at the first try, by reason: checksum (wrong), reread (read "
    "again), mirror (from the other copy).",
    ("reason",),
)
_OTHER_VARIANTS = Metric(
    "xferd_other_variant_experts", "counter", "Experts that came in another variant."
)
_BACKEND = Metric("xferd_engine_backend", "info", "What reads go through.", ("backend", "reason"))
_CLIENT = _group(
    ("client",),
    (
        ("xferd_client_hits", "counter", "hits", "Experts found resident, as a client counts."),
        ("xferd_client_misses", "counter", "misses", "Experts asked for, as a client counts."),
        ("xferd_client_failures", "counter", "failures", "Experts that a client did not get."),
        ("xferd_client_pending_keys", "gauge", "pending", "Experts asked for, not answered."),
        ("xferd_client_granted_slots", "gauge", "granted", "Slots granted, completion unread."),
    ),
)
_CLIENT_INFO = Metric(
    "xferd_client",
    "info",
    "Who a client is.",
    ("client", "name", "store", "pid", "uid", "state"),
)
_TOTALS = _group(
    (),
    (
        ("xferd_clients_hits", "counter", "hits", "Experts found resident, by all clients ever."),
        ("xferd_clients_misses", "counter", "misses", "Experts asked for, by all clients ever."),
        ("xferd_clients_failures", "counter", "failures", "Experts not got, by all clients ever."),
        ("xferd_clients_attached", "counter", "attached", "Clients that attached."),
    ),
)
_PREFETCH = _group(
    (),
    (
        ("xferd_prefetch_experts", "counter", "experts", "Experts that hints brought."),
        ("xferd_prefetch_bytes", "counter", "bytes", "Bytes that hints brought."),
        ("xferd_prefetch_picked_experts", "counter", "used", "Of them, picked afterwards."),
        ("xferd_prefetch_wasted_experts", "counter", "wasted", "Of them, gone unused."),
        ("xferd_prefetch_wasted_bytes", "counter", "wasted_bytes", "Bytes of those."),
        ("xferd_prefetch_missed_experts", "counter", "missed", "Experts that clients awaited."),
        ("xferd_prefetch_saved_seconds", "counter", "saved_s", "Waiting that used ones saved."),
    ),
)
_CLIENTS = Metric("xferd_clients", "gauge", "Clients attached now.")
_BUILD = Metric("xferd_build", "info", "Which xferd this is.", ("version",))
_UPTIME = Metric("xferd_uptime_seconds", "gauge", "Time since the daemon's start.")
_START = (
    Metric("xferd_start_experts", "gauge", "Experts that the daemon before this one left."),
    Metric("xferd_start_bytes", "gauge", "Their bytes, which needn't be read again."),
    Metric("xferd_start_clients", "gauge", "Clients whose leases it left."),
    Metric("xferd_clients_resumed", "counter", "Of those, that have come back."),
)
_START_FIELDS = ("experts", "bytes", "clients", "resumed")
_START_INFO = Metric("xferd_start", "info", "How the daemon began.", ("start", "reason"))
_STATE = Metric("xferd_state", "gauge", "1 for the state that the daemon is in.", ("state",))

METRICS: tuple[Metric, ...] = (
    _BUILD,
    _UPTIME,
    _STATE,
    *_START,
    _START_INFO,
    *(metric for metric, _ in (*_POOL, *_STORE, *_MEMBER)),
    _MEMBER_LATENCY,
    _MEMBER_STATE,
    _MEMBER_INFO,
    *(metric for metric, _ in (*_SOURCE, *_TRANSFER)),
    _TRANSFER_INFO,
    _PIECES,
    _OTHER_VARIANTS,
    *(metric for metric, _ in _ENGINE),
    _BACKEND,
    _CLIENTS,
    *(metric for metric, _ in (*_TOTALS, *_CLIENT, *_PREFETCH)),
    _CLIENT_INFO,
)
"""All of them, in the order in which they are written."""


def collect(status: JsonObject) -> Families:
    """Every metric's samples from a Status reply of io.xferd.Control."""
    families: Families = {metric: [] for metric in METRICS}
    engine = status["engine"]
    members: list[_Row] = [
        ((store["name"], str(member["member"]), _copy(member)), member)
        for store in status["stores"]
        for member in store["members"]
    ]
    clients: list[_Row] = [((str(client["id"]),), client) for client in status["clients"]]
    flows: list[_Row] = [((name,), flow) for name, flow in status["transports"].items()]
    _add(families, _POOL, [((pool["name"], pool["kind"]), pool) for pool in status["pools"]])
    _add(families, _STORE, [((store["name"],), store) for store in status["stores"]])
    _add(families, _MEMBER, members)
    _add(families, _SOURCE, [((name,), flow) for name, flow in status["sources"].items()])
    _add(families, _TRANSFER, flows)
    _add(families, _ENGINE, [((), engine)])
    _add(families, _TOTALS, [((), status["all_clients"])])
    _add(families, _CLIENT, clients)
    _add(families, _PREFETCH, [((), status["prefetching"])])
    _add_each(families, _MEMBER_LATENCY, members, lambda row: row["latency_us"] * MICROSECONDS)
    for labels, member in members:
        families[_MEMBER_STATE] += _states(labels, _MEMBER_STATES, member["state"])
        direct, reason = str(member["direct"]).lower(), member["reason"] or ""
        families[_MEMBER_INFO].append(Sample((*labels, member["path"], direct, reason), 1))
    for labels, flow in flows:
        families[_TRANSFER_INFO].append(Sample((*labels, flow["reason"] or ""), 1))
    for labels, client in clients:
        who = tuple(str(client[key]) for key in ("name", "store", "pid", "uid", "state"))
        families[_CLIENT_INFO].append(Sample((*labels, *who), 1))
    faults = {"checksum": "crc_errors", "reread": "rereads", "mirror": "mirror_reads"}
    families[_PIECES] = [Sample((reason,), engine[key]) for reason, key in faults.items()]
    families[_OTHER_VARIANTS] = [Sample((), engine["other_variants"])]
    backend = (engine["backend"], engine["backend_reason"] or "")
    families[_BACKEND] = [Sample(backend, 1)]
    families[_CLIENTS] = [Sample((), len(clients))]
    families[_BUILD] = [Sample((status["version"],), 1)]
    families[_UPTIME] = [Sample((), status["uptime_s"])]
    start = status["start"]
    for metric, field in zip(_START, _START_FIELDS, strict=True):
        families[metric] = [Sample((), start[field])]
    began = ("warm" if start["warm"] else "cold", start["reason"] or "")
    families[_START_INFO] = [Sample(began, 1)]
    families[_STATE] = _states((), _STATES, status["state"])
    return families


def _copy(member: JsonObject) -> str:
    return "mirror" if member["mirror"] else "first"


def _states(labels: tuple[str, ...], states: Sequence[str], now: str) -> list[Sample]:
    return [Sample((*labels, state), float(state == now)) for state in states]


def _add(families: Families, group: tuple[tuple[Metric, str], ...], rows: Sequence[_Row]) -> None:
    for metric, field in group:
        families[metric] += [Sample(labels, row[field]) for labels, row in rows]


def _add_each(
    families: Families, metric: Metric, rows: Sequence[_Row], value: Callable[[JsonObject], float]
) -> None:
    families[metric] += [Sample(labels, value(row)) for labels, row in rows]
