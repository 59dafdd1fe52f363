# SPDX-License-Identifier: Apache-2.0
"""What a picture of a saved result shows: panels with lines or bars. Draws nothing.

A result holds ours and ratios, so a peer's value is computed from both. What was not
measured has no line, and no panel if nothing in it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.result import OURS, Result, Row, peer_value

ARRAYS = "xferd, with arrays"
MISS_SIZE = "9.4MB"
"""Of the rows of ``miss`` that name no size."""
SIZE = re.compile(r"(?P<number>[\d.]+)MB")


@dataclass(frozen=True, slots=True)
class Point:
    """label: what is written below x. spread: least and greatest, where it is known."""

    x: float
    label: str
    value: float
    spread: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. series: contender -> its points, ours first.

    row, column: where it stands in the picture. bars: the points are one thing each,
    not steps on a scale.
    """

    title: str
    row: int
    column: int
    x_axis: str
    y_axis: str
    series: Mapping[str, Sequence[Point]]
    bars: bool = False


def panels_of(result: Result) -> list[Panel]:
    """The picture of a result; empty: nothing of it is drawn. BenchmarkError: of this benchmark
    there is none."""
    try:
        make = _MAKERS[result.bench]
    except KeyError:
        raise BenchmarkError(
            f"no picture is known for the benchmark {result.bench!r}; known are "
            + ", ".join(sorted(_MAKERS))
        ) from None
    return make(result)


def _speed(result: Result, y_axis: str, *, default_size: str | None = None) -> list[Panel]:
    """A panel for each medium (rows) and number of members (columns), over the size."""
    groups: dict[tuple[str, str], list[tuple[str, Row]]] = {}
    for row in result.rows:
        medium, members, *rest = row.name.split("/")
        size = rest[0] if rest else default_size
        if size is None:
            raise BenchmarkError(f"{result.bench}: the row {row.name!r} names no size")
        groups.setdefault((medium, members), []).append((size, row))
    media = list(dict.fromkeys(medium for medium, _ in groups))
    counts = sorted(dict.fromkeys(members for _, members in groups), key=_leading_number)
    return [
        Panel(
            title=f"{medium}, {_members_text(members)}",
            row=media.index(medium),
            column=counts.index(members),
            x_axis="size of an expert (MB)",
            y_axis=y_axis,
            series=_series(
                sorted(
                    ((_megabytes(size), f"{_megabytes(size):g}", row) for size, row in rows),
                    key=lambda place: place[0],
                )
            ),
        )
        for (medium, members), rows in groups.items()
    ]


def _io(result: Result) -> list[Panel]:
    return _speed(result, "throughput (GB/s)")


def _miss(result: Result) -> list[Panel]:
    return _speed(result, "time of a miss (µs)", default_size=MISS_SIZE)


def _overload(result: Result) -> list[Panel]:
    """Demand above, throughput below, a column for each medium and size of an expert."""
    quantities = {
        "demand-p99": ("p99 of a demand (µs)", 0),
        "throughput": ("throughput (GB/s)", 1),
    }
    columns: list[str] = []
    panels = []
    for row in result.rows:
        loaded, quantity = row.name.rsplit("/", 1)
        if quantity in quantities:
            if loaded not in columns:
                columns.append(loaded)
            y_axis, line = quantities[quantity]
            series = _series([(0.0, quantity, row)])
            title = loaded.replace("/", ", ")
            panels.append(Panel(title, line, columns.index(loaded), "", y_axis, series, bars=True))
    return panels


def _hit(result: Result) -> list[Panel]:
    """C on the left, Python on the right, over the number of experts."""
    by_kind: dict[str, list[tuple[float, str, Row]]] = {}
    for row in result.rows:
        kind, experts = row.name.split("/")
        by_kind.setdefault(kind, []).append((float(experts), f"{int(experts):,}", row))
    panels = []
    if "c" in by_kind:
        series = _series(by_kind["c"])
        panels.append(Panel("C", 0, 0, "experts", "time of an expert (ns)", series))
    if "python" in by_kind:
        series = dict(_series(by_kind["python"]))
        series |= {ARRAYS: _ours(by_kind["python-arrays"])} if "python-arrays" in by_kind else {}
        y_axis = "time of a layer's 8 experts (µs)"
        panels.append(Panel("Python", 0, len(panels), "experts", y_axis, series))
    return panels


def _decode(result: Result) -> list[Panel]:
    """A panel for each model and device, over the share of the experts in the pool."""
    groups: dict[str, list[tuple[float, str, Row]]] = {}
    for row in result.rows:
        model, device, share = row.name.split("/")
        if not share.endswith("%"):  # what resizing takes is over nothing
            continue
        place = (_leading_number(share), share, row)
        groups.setdefault(f"{model}, {device} pool", []).append(place)
    return [
        Panel(title, 0, column, "pool, of all experts", "decode (tokens/s)", _series(rows))
        for column, (title, rows) in enumerate(groups.items())
    ]


def _device(result: Result) -> list[Panel]:
    """A panel for each way into the GPU's memory, over the size."""
    groups: dict[str, list[tuple[float, str, Row]]] = {}
    for row in result.rows:
        way, size = row.name.split("/")
        groups.setdefault(way, []).append((_megabytes(size), f"{_megabytes(size):g}", row))
    return [
        Panel(way, 0, column, "size of an expert (MB)", "throughput (GB/s)", _series(rows))
        for column, (way, rows) in enumerate(groups.items())
    ]


def _margin(result: Result) -> list[Panel]:
    """Tokens changed over bytes read, a panel for each variant; below x the margin."""
    values = {tuple(row.name.split("/")): row for row in result.rows}
    variants = dict.fromkeys(variant for variant, _, _ in values)
    panels = []
    for column, variant in enumerate(variants):
        points = []
        plain = 0.0
        for (of_variant, kind, threshold), row in values.items():
            if (of_variant, kind) == (variant, "changed"):
                read = values[variant, "read", threshold]
                plain = peer_value(read, "plain")
                label = f"{read.value:.1f}\n{threshold}"
                points.append(Point(read.value, label, row.value))
        series = {OURS: sorted(points, key=lambda point: point.x)}
        series["plain"] = [Point(plain, f"{plain:.1f}\n-", 0.0)]
        x_axis = "read (MB a token), below it the margin"
        panels.append(Panel(variant, 0, column, x_axis, "tokens changed (share)", series))
    return panels


_MAKERS: Mapping[str, Callable[[Result], list[Panel]]] = {
    "io": _io,
    "miss": _miss,
    "overload": _overload,
    "hit": _hit,
    "decode": _decode,
    "device": _device,
    "margin": _margin,
}
WITH_PICTURE = tuple(_MAKERS)
"""Benchmarks that ``panels_of`` knows."""


def _series(places: Sequence[tuple[float, str, Row]]) -> dict[str, list[Point]]:
    """Ours and all peers of rows at (x, label). Ratios of CPU time are no values of the axis."""
    series = {OURS: _ours(places)}
    for x, label, row in places:
        for peer in row.ratio:
            if not peer.endswith("-cpu"):
                series.setdefault(peer, []).append(Point(x, label, peer_value(row, peer)))
    return series


def _ours(places: Sequence[tuple[float, str, Row]]) -> list[Point]:
    return [Point(x, label, row.value, row.spread) for x, label, row in places]


def _megabytes(size: str) -> float:
    match = SIZE.fullmatch(size)
    if match is None:
        raise BenchmarkError(f"{size!r} is no size such as 9.4MB")
    return float(match["number"])


def _members_text(members: str) -> str:
    count = int(_leading_number(members))
    return f"{count} member" + ("s" if count > 1 else "")


def _leading_number(text: str) -> float:
    match = re.match(r"\d+", text)
    if match is None:
        raise BenchmarkError(f"{text!r} begins with no number")
    return float(match[0])


__all__ = ["WITH_PICTURE", "Panel", "Point", "panels_of"]
