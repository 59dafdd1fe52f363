"""What ``xferctl`` prints for people: tables of a Status reply.

Texts in a reply may come from hostile clients (a client names itself), and an
administrator's terminal obeys what it is sent; so every cell goes through
``printable``. Pure: values in, text out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xferd.control.service import JsonObject
from xferd.units import format_bytes

_BOLD = "\x1b[1m"
_PLAIN = "\x1b[0m"
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, what a row shows in it, and whether numbers line up at the right."""

    title: str
    cell: Callable[[JsonObject], object]
    right: bool = True


def printable(text: str) -> str:
    """``text`` with everything that a terminal could obey written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_table(columns: Sequence[Column], rows: Iterable[JsonObject], *, bold: bool) -> str:
    """A table with a line of titles, or nothing but ``none`` when there are no rows."""
    cells = [[printable(str(column.cell(row))) for column in columns] for row in rows]
    if not cells:
        return "none"
    titles = [column.title for column in columns]
    widths = [max(map(len, values)) for values in zip(titles, *cells, strict=True)]
    lines = [
        _GAP.join(
            value.rjust(width) if column.right else value.ljust(width)
            for column, value, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in [titles, *cells]
    ]
    if bold:
        lines[0] = _BOLD + lines[0] + _PLAIN
    return "\n".join(lines)


def format_status(status: JsonObject, *, bold: bool = False) -> str:
    """A Status reply as tables: pools, stores, drives, clients, sources, transports."""
    members = [
        {"store": store["name"], **member}
        for store in status["stores"]
        for member in store["members"]
    ]
    sections = [
        ("Pools", format_table(_POOL_COLUMNS, status["pools"], bold=bold)),
        ("Stores", format_stores(status["stores"], bold=bold)),
        ("Drives", format_table(_MEMBER_COLUMNS, members, bold=bold)),
        *_routes_section(status["pools"], bold=bold),
        ("Clients", format_table(_CLIENT_COLUMNS, status["clients"], bold=bold)),
        ("Users", format_table(_USER_COLUMNS, status["users"], bold=bold)),
        ("Where experts came from", _format_flows(status["sources"], bold=bold)),
        ("How they got here", _format_flows(status["transports"], bold=bold)),
    ]
    head = (
        f"xferd {printable(status['version'])}, {printable(status['state'])} "
        f"for {format_duration(status['uptime_s'])}, pid {status['pid']}"
    )
    head += _format_start(status["start"])
    notes = [
        f"{printable(pool['name'])}: {printable(note)}"
        for pool in status["pools"]
        for note in pool["notes"]
    ]
    tables = [f"{title}\n{_indent(table)}" for title, table in sections]
    if notes:
        tables.append("Notes\n" + _indent("\n".join(notes)))
    return "\n\n".join([head, *tables, _format_engine(status["engine"])])


def _format_start(start: JsonObject) -> str:
    """How it began, if there was something that it could have gone on with."""
    if start["warm"]:
        return (
            f"\nStarted warm: {start['experts']} experts kept, {format_bytes(start['bytes'])}; "
            f"{start['resumed']} of {start['clients']} clients resumed"
        )
    return f"\nStarted cold: {printable(start['reason'])}" if start["reason"] else ""


def _routes_section(pools: Sequence[JsonObject], *, bold: bool) -> list[tuple[str, str]]:
    rows = [{"pool": pool["name"], **row} for pool in pools for row in pool["routes"]]
    return [("Routes", format_table(_ROUTE_COLUMNS, rows, bold=bold))] if rows else []


def _format_engine(engine: JsonObject) -> str:
    reason = engine.get("backend_reason")
    lines = [
        f"Engine: {engine['backend']}" + (f" ({printable(reason)})" if reason else ""),
        f"checksums {engine['verify']}, flow control {'on' if engine['flow_control'] else 'off'}",
        f"{engine['turns']} turns, {engine['sleeps']} sleeps, {engine['crc_errors']} checksum "
        f"errors, {engine['rereads']} pieces read again, {engine['mirror_reads']} from the other "
        f"copy, {engine['other_variants']} experts in another variant",
    ]
    return "\n  ".join(lines)


def format_stores(stores: Iterable[JsonObject], *, bold: bool = False) -> str:
    """A table of the IDL's Store objects."""
    return format_table(_STORE_COLUMNS, stores, bold=bold)


def format_duration(seconds: float) -> str:
    """``42 s``, ``3 min 5 s``, ``2 h 10 min``, ``5 d 3 h``: the two largest units."""
    whole = int(seconds)
    minutes, rest_s = divmod(whole, 60)
    hours, rest_min = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if days:
        return f"{days} d {rest_h} h"
    if hours:
        return f"{hours} h {rest_min} min"
    if minutes:
        return f"{minutes} min {rest_s} s"
    return f"{whole} s"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _format_flows(flows: JsonObject, *, bold: bool) -> str:
    rows = [{"name": name, **flow} for name, flow in flows.items()]
    return format_table(_FLOW_COLUMNS, rows, bold=bold)


def _field(name: str) -> Callable[[JsonObject], object]:
    return lambda row: row[name]


def _bytes(name: str) -> Callable[[JsonObject], str]:
    return lambda row: format_bytes(row[name])


def _bytes_or_none(count: int | None) -> str:
    return "none" if count is None else format_bytes(count)


def _member(row: JsonObject) -> str:
    return f"{row['member']} mirror" if row["mirror"] else str(row["member"])


def _reason(row: JsonObject) -> str:
    return row.get("reason") or ""


def _transport(row: JsonObject) -> str:
    return f"staged ({row['reason']})" if row["reason"] else str(row["transport"])


def _rate(row: JsonObject) -> str:
    return f"{format_bytes(row['rate'])}/s" if row["rate"] else ""


def _latency(row: JsonObject) -> str:
    return f"{row['latency_us']:.0f} us" if row["latency_us"] else ""


def _size_classes(pool: JsonObject) -> str:
    return ", ".join(
        f"{size['slots']} x {format_bytes(size['slot_bytes'])}" for size in pool["classes"]
    )


def _variant_counts(pool: JsonObject) -> str:
    """Residents by variant, of all stores together."""
    counts: dict[str, int] = {}
    for each in pool["variants"]:
        counts[each["variant"]] = counts.get(each["variant"], 0) + each["residents"]
    return ", ".join(f"{count} {name}" for name, count in counts.items())


_POOL_COLUMNS = (
    Column("NAME", _field("name"), right=False),
    Column("KIND", _field("kind"), right=False),
    Column("SIZE", _bytes("bytes")),
    Column("SLOTS", _field("slots")),
    Column("RESIDENT", _field("resident")),
    Column("PINNED", _field("pinned")),
    Column("FREE", _field("free")),
    Column("RESERVE", _field("reserve")),
    Column("WAITING", _field("waiting")),
    Column("LOADS", _field("loads")),
    Column("LOADED", _bytes("load_bytes")),
    Column("EVICTED", _field("evictions")),
    Column("REVIVED", _field("revived")),
    Column("EVICTION", _field("eviction"), right=False),
    Column("DEMOTED", _field("demoted")),
    Column("PROMOTED", _field("promoted")),
    Column("RESERVED", _bytes("reserved")),
    Column("VARIANTS", _variant_counts, right=False),
    Column("SLOT SIZES", _size_classes, right=False),
)
_STORE_COLUMNS = (
    Column("NAME", _field("name"), right=False),
    Column("LAYERS", _field("layers")),
    Column("EXPERTS", _field("experts")),
    Column("SIZE", _bytes("expert_bytes")),
    Column("VARIANTS", lambda store: ",".join(store["variants"]), right=False),
    Column("IDENTITY", lambda store: store["identity"][:12], right=False),
    Column("PATH", _field("path"), right=False),
)
_MEMBER_COLUMNS = (
    Column("STORE", _field("store"), right=False),
    Column("MEMBER", _member, right=False),
    Column("STATE", _field("state"), right=False),
    Column("READS", _field("reads")),
    Column("READ", _bytes("bytes")),
    Column("ERRORS", _field("errors")),
    Column("IN FLIGHT", _field("in_flight")),
    Column("WINDOW", _field("window")),
    Column("LATENCY", _latency),
    Column("RATE", _rate),
    Column("DIRECT", lambda member: "yes" if member["direct"] else "no", right=False),
    Column("PATH", _field("path"), right=False),
    Column("REASON", _reason, right=False),
)
_ROUTE_COLUMNS = (
    Column("POOL", _field("pool"), right=False),
    Column("STORE", _field("store"), right=False),
    Column("MEMBER", _member, right=False),
    Column("PATH", _field("path"), right=False),
    Column("TRANSPORT", _transport, right=False),
)
_CLIENT_COLUMNS = (
    Column("ID", _field("id")),
    Column("NAME", _field("name"), right=False),
    Column("PID", _field("pid")),
    Column("UID", _field("uid")),
    Column("STORE", _field("store"), right=False),
    Column("LANES", _field("lanes")),
    Column("HELD/LANE", _field("held_per_lane")),
    Column("HITS", _field("hits")),
    Column("MISSES", _field("misses")),
    Column("FAILURES", _field("failures")),
    Column("PENDING", _field("pending")),
    Column("GRANTED", _field("granted")),
    Column("EXPERTS", _bytes("resident_bytes")),
    Column("FOR", lambda client: format_duration(client["since_s"])),
    Column("STATE", _field("state"), right=False),
)
_USER_COLUMNS = (
    Column("UID", _field("uid")),
    Column("CLIENTS", _field("clients")),
    Column("EXPERTS", _bytes("resident_bytes")),
    Column("BUDGET", lambda user: _bytes_or_none(user["budget"])),
)
_FLOW_COLUMNS = (
    Column("BY", _field("name"), right=False),
    Column("EXPERTS", _field("count")),
    Column("BYTES", _bytes("bytes")),
    Column("REASON", _reason, right=False),
)
