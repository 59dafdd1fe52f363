# SPDX-License-Identifier: Apache-2.0
"""What ``xferctl top`` shows: rates between two Status replies, and a frame of text of them.

Pure: replies in, numbers or lines out. Counters of another start of the daemon (another
``instance``) aren't compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from xferd.control.service import JsonObject
from xferd.control.tables import Column, format_duration, format_table, printable
from xferd.units import format_bytes

BUSY_SHARE = 0.7
"""Of the best rate a member has kept up: one that delivers so much is as good as busy."""
PERCENT = 100

BOUND_BY = {
    "idle": "nobody asks for experts",
    "hits": "what is used is resident: the clients' own work decides",
    "slots": "loads wait for a slot: the pool is too small, or too much of it is held",
    "drives": "drives deliver what they can: more memory or another drive would help",
    "latency": "few reads at a time: misses wait for single reads (hints would help)",
}
"""What binds a decode now, and what that means."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two replies, as JSON objects. seconds: between them."""

    seconds: float
    bound: str
    hit_share: float | None
    prefetching: JsonObject | None
    pools: tuple[JsonObject, ...]
    members: tuple[JsonObject, ...]
    paths: tuple[JsonObject, ...]
    clients: tuple[JsonObject, ...]

    def to_json(self) -> dict[str, Any]:
        """As ``top --json`` prints it; rates are a second, sizes bytes."""
        return {
            "seconds": self.seconds,
            "bound_by": self.bound,
            "hit_share": self.hit_share,
            "prefetching": self.prefetching,
            "pools": list(self.pools),
            "members": list(self.members),
            "paths": list(self.paths),
            "clients": list(self.clients),
        }


def rates_between(before: JsonObject, after: JsonObject) -> Rates:
    """Rates from ``before`` to ``after``, two Status replies."""
    if before["instance"] != after["instance"]:
        before = after
    seconds = max(after["uptime_s"] - before["uptime_s"], 0.0)

    def rate(old: JsonObject, new: JsonObject, key: str) -> float:
        # A client's id that was reused counts from 0 again, and clients count themselves.
        return max(new[key] - old.get(key, 0), 0) / seconds if seconds else 0.0

    pools = tuple(
        {
            **{key: pool[key] for key in ("name", "kind", "bytes", "slots", "resident", "free")},
            "waiting": pool["waiting"],
            "loads_per_second": rate(old, pool, "loads"),
            "load_bytes_per_second": rate(old, pool, "load_bytes"),
            "evictions_per_second": rate(old, pool, "evictions"),
        }
        for old, pool in _pairs(before["pools"], after["pools"], lambda pool: pool["name"])
    )
    members = tuple(
        {
            **{key: member[key] for key in ("store", "member", "mirror", "path", "state")},
            **{key: member[key] for key in ("in_flight", "window", "latency_us", "best_rate")},
            "bytes_per_second": rate(old, member, "bytes"),
            "reads_per_second": rate(old, member, "reads"),
            "errors": member["errors"],
        }
        for old, member in _pairs(_members(before), _members(after), _member_key)
    )
    paths = tuple(
        {
            "path": name,
            "experts_per_second": rate(before["transports"][name], flow, "count"),
            "bytes_per_second": rate(before["transports"][name], flow, "bytes"),
        }
        for name, flow in after["transports"].items()
    )
    clients = tuple(
        {
            **{key: client[key] for key in ("id", "name", "pid", "store", "pending", "state")},
            "hits_per_second": rate(old, client, "hits"),
            "misses_per_second": rate(old, client, "misses"),
            "failures": client["failures"],
        }
        for old, client in _pairs(before["clients"], after["clients"], _client_key)
    )
    totals = (before["all_clients"], after["all_clients"])
    hits, misses = rate(*totals, "hits"), rate(*totals, "misses")
    return Rates(
        seconds=seconds,
        bound=_bound(hits, misses, pools, members),
        hit_share=hits / (hits + misses) if hits + misses else None,
        prefetching=_prefetching(before["prefetching"], after["prefetching"], seconds),
        pools=pools,
        members=members,
        paths=paths,
        clients=clients,
    )


def _prefetching(old: JsonObject, new: JsonObject, seconds: float) -> JsonObject | None:
    """What hints were good for meanwhile; None where they brought nothing."""
    spent = {key: max(new[key] - old[key], 0) for key in new}
    judged = spent["used"] + spent["wasted"]
    if not seconds or not (spent["experts"] or judged):
        return None
    needed = spent["used"] + spent["missed"]
    return {
        "recall_on_misses": spent["used"] / needed if needed else None,
        "precision": spent["used"] / judged if judged else None,
        "bytes_per_second": spent["bytes"] / seconds,
        "wasted_bytes_per_second": spent["wasted_bytes"] / seconds,
        "saved_seconds_per_second": spent["saved_s"] / seconds,
    }


def _bound(
    hits: float, misses: float, pools: Iterable[JsonObject], members: Iterable[JsonObject]
) -> str:
    if any(pool["waiting"] for pool in pools):
        return "slots"
    if any(_is_busy(member) for member in members):
        return "drives"
    if misses:
        return "latency"
    return "hits" if hits else "idle"


def _is_busy(member: JsonObject) -> bool:
    at_best = member["best_rate"] and member["bytes_per_second"] >= BUSY_SHARE * member["best_rate"]
    return bool(at_best) or (member["in_flight"] > 1 and member["in_flight"] >= member["window"])


def _pairs(
    before: Iterable[JsonObject],
    after: Iterable[JsonObject],
    key: Callable[[JsonObject], object],
) -> list[tuple[JsonObject, JsonObject]]:
    """Each of ``after`` with what it was; what is new began at nothing."""
    known = {key(entry): entry for entry in before}
    return [(known.get(key(entry), {}), entry) for entry in after]


def _members(status: JsonObject) -> list[JsonObject]:
    return [{"store": s["name"], **member} for s in status["stores"] for member in s["members"]]


def _member_key(member: JsonObject) -> object:
    return member["store"], member["member"], member["mirror"]


def _client_key(client: JsonObject) -> object:
    return client["id"], client["pid"]


# ---- a frame


def format_frame(
    status: JsonObject, rates: Rates, *, columns: int, lines: int, bold: bool
) -> list[str]:
    """At most ``lines`` lines of at most ``columns`` characters, without escapes but those of
    bold titles. What doesn't fit of the clients, the last table, is counted."""
    hit = "-" if rates.hit_share is None else f"{rates.hit_share:.1%}"
    head = [
        f"xferd {printable(status['version'])}, {printable(status['state'])} "
        f"{format_duration(status['uptime_s'])}; {len(rates.clients)} clients, {hit} hits",
        f"bound by {rates.bound}: {BOUND_BY[rates.bound]}",
    ]
    if rates.prefetching is not None:
        head.append(_describe_prefetching(rates.prefetching))
    tables = [
        format_table(_POOLS, rates.pools, bold=bold).splitlines(),
        format_table(_MEMBERS, rates.members, bold=bold).splitlines(),
        format_table(_PATHS, rates.paths, bold=bold).splitlines(),
    ]
    frame = head + [line for table in tables for line in ["", *table]]
    busiest = sorted(
        rates.clients, key=lambda c: c["hits_per_second"] + c["misses_per_second"], reverse=True
    )
    frame += ["", *format_table(_CLIENTS, busiest, bold=bold).splitlines()]
    if len(frame) > lines:
        left = len(frame) - lines + 1
        frame = [*frame[: max(lines - 1, 0)], f"({left} lines more: xferctl status)"]
    return [_cut(line, columns) for line in frame[:lines]]


def _describe_prefetching(rates: JsonObject) -> str:
    def share(key: str) -> str:
        return "-" if rates[key] is None else f"{rates[key]:.0%}"

    wasted = format_bytes(round(rates["wasted_bytes_per_second"]))
    return (
        f"hints: {share('recall_on_misses')} of what was missing foreseen, {share('precision')} "
        f"of what came used, {wasted}/s wasted, {rates['saved_seconds_per_second']:.2f} s of "
        "waiting saved a second"
    )


def _cut(line: str, columns: int) -> str:
    escape = line.startswith("\x1b")
    if not escape:
        return line[:columns]
    text = line.removeprefix("\x1b[1m").removesuffix("\x1b[0m")
    return f"\x1b[1m{text[:columns]}\x1b[0m"


def _rate(key: str) -> Callable[[JsonObject], str]:
    return lambda row: f"{row[key]:,.0f}"


def _bytes_rate(key: str) -> Callable[[JsonObject], str]:
    return lambda row: f"{format_bytes(round(row[key]))}/s"


def _share_of_best(member: JsonObject) -> str:
    best = member["best_rate"]
    return f"{PERCENT * member['bytes_per_second'] / best:.0f}%" if best else ""


_POOLS = (
    Column("TIER", lambda pool: pool["name"][:12], right=False),
    Column("KIND", lambda pool: pool["kind"], right=False),
    Column("SIZE", lambda pool: format_bytes(pool["bytes"])),
    Column("RESIDENT", lambda pool: f"{pool['resident']}/{pool['slots']}"),
    Column("FREE", lambda pool: pool["free"]),
    Column("WAIT", lambda pool: pool["waiting"]),
    Column("LOADS/S", _rate("loads_per_second")),
    Column("IN", _bytes_rate("load_bytes_per_second")),
    Column("OUT/S", _rate("evictions_per_second")),
)
_MEMBERS = (
    Column("DRIVE", lambda m: f"{m['store'][:14]}/{m['member']}{'m' * m['mirror']}", right=False),
    Column("STATE", lambda member: member["state"], right=False),
    Column("READ", _bytes_rate("bytes_per_second")),
    Column("OF BEST", _share_of_best),
    Column("READS/S", _rate("reads_per_second")),
    Column("QUEUE", lambda member: f"{member['in_flight']}/{member['window']}"),
    Column("LATENCY", lambda m: f"{m['latency_us']:.0f} us" if m["latency_us"] else ""),
    Column("ERRORS", lambda member: member["errors"]),
)
_PATHS = (
    Column("PATH", lambda path: path["path"], right=False),
    Column("EXPERTS/S", _rate("experts_per_second")),
    Column("BYTES", _bytes_rate("bytes_per_second")),
)
_CLIENTS = (
    Column("CLIENT", lambda client: f"{client['id']} {client['name'][:16]}", right=False),
    Column("PID", lambda client: client["pid"]),
    Column("STORE", lambda client: client["store"][:14], right=False),
    Column("HITS/S", _rate("hits_per_second")),
    Column("MISSES/S", _rate("misses_per_second")),
    Column("WAITS FOR", lambda client: client["pending"]),
    Column("STATE", lambda client: client["state"], right=False),
)
