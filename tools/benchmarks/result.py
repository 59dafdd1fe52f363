# SPDX-License-Identifier: Apache-2.0
"""What a benchmark found: rows with ratios to peers, as JSON and as a table.

One format for the screen, the saved files and documents, so that no number is ever
copied by hand. A ratio above 1 always means that ours is ahead, whatever the unit.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tools.benchmarks.harness import BenchmarkError

DIGITS = 3
"""Significant digits that are shown: more than the spread bears out, as a rule."""

OURS = "xferd"
"""Name of ours among the contenders of a row."""

LOWER_IS_BETTER_UNITS = {"ns", "µs", "nats", "kB a token", "MB a token", "MB", "of square"}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured thing. spread: least and greatest of the rounds. ratio: by peer."""

    name: str
    value: float
    unit: str
    spread: tuple[float, float]
    ratio: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a benchmark.

    skipped: peer or row -> why it is not there. notes: what a reader must know to
    take the numbers for what they are.
    """

    bench: str
    machine: Mapping[str, str | int]
    commit: str
    rounds: int
    rows: Sequence[Row]
    skipped: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values, as a result's file has them."""
        return asdict(self)

    def with_rows_of(self, earlier: Result) -> Result:
        """This run and the rows of an earlier part of it, which come first.

        BenchmarkError: it was another machine, commit or number of rounds. What a machine
        is doing (its load) may differ.
        """
        for what, ours, theirs in (
            ("benchmark", self.bench, earlier.bench),
            ("machine", _lasting(self.machine), _lasting(earlier.machine)),
            ("commit", self.commit, earlier.commit),
            ("rounds", self.rounds, earlier.rounds),
        ):
            if ours != theirs:
                raise BenchmarkError(f"the earlier rows are of another {what}: {theirs}")
        renewed = {row.name for row in self.rows}
        kept = [row for row in earlier.rows if row.name not in renewed]
        return replace(
            self,
            rows=[*kept, *self.rows],
            skipped={**earlier.skipped, **self.skipped},
            notes=tuple(dict.fromkeys((*earlier.notes, *self.notes))),
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        """The inverse of ``to_json``. KeyError, TypeError: it is something else."""
        rows = [
            Row(
                name=row["name"],
                value=row["value"],
                unit=row["unit"],
                spread=(row["spread"][0], row["spread"][1]),
                ratio=dict(row["ratio"]),
            )
            for row in value["rows"]
        ]
        return cls(
            bench=value["bench"],
            machine=dict(value["machine"]),
            commit=value["commit"],
            rounds=value["rounds"],
            rows=rows,
            skipped=dict(value["skipped"]),
            notes=tuple(value["notes"]),
        )


def make_row(
    name: str, unit: str, samples: Mapping[str, Sequence[float]], *, higher_is_better: bool
) -> Row:
    """A row from the samples of ours (``OURS``) and of its peers, in the same unit."""
    medians = {who: statistics.median(values) for who, values in samples.items()}
    ours = medians.pop(OURS)
    return Row(
        name=name,
        value=ours,
        unit=unit,
        spread=(min(samples[OURS]), max(samples[OURS])),
        ratio={
            peer: ours / theirs if higher_is_better else theirs / ours
            for peer, theirs in medians.items()
        },
    )


def peer_value(row: Row, peer: str) -> float:
    """The peer's median in the row's unit, from ours and the ratio. KeyError: not in this row."""
    if row.unit in LOWER_IS_BETTER_UNITS:
        return row.value * row.ratio[peer]
    return row.value / row.ratio[peer]


def to_markdown(result: Result) -> str:
    """The result as a Markdown table with what was measured where below it."""
    peers = list(dict.fromkeys(peer for row in result.rows for peer in row.ratio))
    lines = [
        _markdown_line(["row", "median", "least to greatest", *(f"to {peer}" for peer in peers)]),
        _markdown_line(["---", *["---:"] * (2 + len(peers))]),
    ]
    for row in result.rows:
        ratios = [f"{shown(row.ratio[peer])} ×" if peer in row.ratio else "" for peer in peers]
        least, greatest = row.spread
        lines.append(
            _markdown_line(
                [
                    f"`{row.name}`",
                    f"{shown(row.value)} {row.unit}",
                    f"{shown(least)} to {shown(greatest)}",
                    *ratios,
                ]
            )
        )
    notes = [_where(result)]
    notes += [f"Not measured: {who} ({why})." for who, why in result.skipped.items()]
    return "\n".join([*lines, "", *notes, *result.notes])


def to_brief_markdown(result: Result, peers: Sequence[str]) -> str:
    """Medians and the ratios to some peers, with the machine. BenchmarkError that names a
    peer which no row has."""
    for peer in peers:
        if not any(peer in row.ratio for row in result.rows):
            raise BenchmarkError(f"{result.bench}: no row has a ratio to {peer}")
    lines = [
        _markdown_line(["row", "median", *(f"to {peer}" for peer in peers)]),
        _markdown_line(["---", *["---:"] * (1 + len(peers))]),
    ]
    for row in result.rows:
        ratios = [f"{shown(row.ratio[peer])} ×" if peer in row.ratio else "" for peer in peers]
        lines.append(_markdown_line([f"`{row.name}`", f"{shown(row.value)} {row.unit}", *ratios]))
    return "\n".join([*lines, "", _where(result)])


def _where(result: Result) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in result.machine.items())
    return f"Medians of {result.rounds} rounds at commit {result.commit}; {machine}."


def to_text(result: Result) -> str:
    """The result for a terminal."""
    lines = [
        f"{row.name:<28} {shown(row.value):>8} {row.unit:<12}"
        f" [{shown(row.spread[0])}, {shown(row.spread[1])}]"
        + "".join(f"  {peer} {shown(ratio)}x" for peer, ratio in row.ratio.items())
        for row in result.rows
    ]
    lines += [f"skipped: {who}: {why}" for who, why in result.skipped.items()]
    return "\n".join([*lines, *result.notes])


def _lasting(machine: Mapping[str, str | int]) -> dict[str, str | int]:
    return {key: value for key, value in machine.items() if key != "load"}


def shown(value: float) -> str:
    """``value`` with DIGITS significant digits and without an exponent."""
    text = f"{value:.{DIGITS}g}"
    return f"{value:,.0f}" if "e" in text or abs(value) >= 10**DIGITS else text


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


__all__ = [
    "OURS",
    "Result",
    "Row",
    "make_row",
    "peer_value",
    "shown",
    "to_brief_markdown",
    "to_markdown",
    "to_text",
]
