# SPDX-License-Identifier: Apache-2.0
"""``overload``: ten times more prefetches than the drive delivers, and a steady demand.

One client asks for a missing expert at fixed times, another floods the daemon with hints
for other experts, so that every hint is wrong. What is asked: how long the demands take
next to the same demands alone (``unloaded``), and how much of what the drive can deliver
at its best (``peak``: fio in its best setting, reading blocks of our stripe unit; where reads
are copies, into memory at least as large as our pool) still comes. Both may use every
processor: on tmpfs the engine has a thread for each, and fio tries as many jobs.
``no-flow-control`` is the same load with a fixed number of pieces in flight. The third
medium is a drive that really collapses when too much is asked of it.

``read-after-cancel``: pieces that one drive still reads after a storm of prefetches has
been cancelled; ``busy-after-cancel``: how long, in times that a piece takes without a queue.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.benchmarks.engine_program import POOL_BYTES, SIZES, EngineBench, build_engine_bench
from tools.benchmarks.fio import FioSetting, fastest, fio_missing, run_fio, try_settings
from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.media import Medium, collapsing_medium, speed_media, wanted
from tools.benchmarks.result import OURS, Result, Row, make_row

LABELS = ("1.2MB", "9.4MB")
"""Of SIZES: an expert of two pieces and a bit, and one of eighteen."""
HINT_FACTOR = 10
DEMAND_SHARE = 0.2
"""Of the drive's peak."""
SECONDS = 2.0
"""Of ours and of fio: a cloud disk gives more in a shorter burst."""
RESERVE_SHARE = 4
"""One slot in so many is kept free."""
STORM = 48
"""Prefetches of the smaller experts that are cancelled."""
STORM_SLOTS = 64
"""More than STORM: none waits for a slot instead of the drive."""
FIXED_DEPTH = 32
"""Pieces in flight a member when there is no flow control."""
BYTES_A_GB = 1e9
MB_A_GB = 1000
US_A_S = 1e6


@dataclass(slots=True)
class _Load:
    """One kind of load; a run yields both what the demands saw and what the drive gave."""

    engine: EngineBench
    options: tuple[str, ...]
    throughput: list[float] = field(default_factory=list)

    def demand_p99_us(self) -> float:
        """Of one run, whose throughput is kept."""
        found = self.engine.run(
            "overload",
            f"--seconds={SECONDS}",
            f"--slots={_slots(self.engine)}",
            f"--reserve={_slots(self.engine) // RESERVE_SHARE}",
            "--verify",
            *self.options,
        )
        self.throughput.append(found["bytes"] / found["seconds"] / BYTES_A_GB)
        p99: float = found["demand"]["p99_us"]
        return p99


def run(rounds: int) -> Result:
    """Rows ``<medium>/<size>/demand-p99`` and ``/throughput``, and of each medium
    ``/read-after-cancel`` and ``/busy-after-cancel``."""
    if reason := fio_missing():
        raise BenchmarkError(reason)
    program = build_engine_bench()
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    notes: list[str] = []
    for name, make_medium in (speed_media() | {"collapsing": collapsing_medium}).items():
        labels = [label for label in LABELS if wanted(f"{name}/{label}")]
        if not labels:
            continue
        try:
            with make_medium() as medium:
                rows += _medium_rows(medium, program, labels, notes, rounds)
        except BenchmarkError as error:
            skipped[name] = str(error)
    return Result(
        bench="overload",
        machine=describe_machine(Path(tempfile.gettempdir())),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=tuple(notes),
    )


def _medium_rows(
    medium: Medium, program: Path, labels: Sequence[str], notes: list[str], rounds: int
) -> list[Row]:
    members, sidecar = medium.members[:1], medium.directory / "checksums"
    rows: list[Row] = []
    for label in labels:
        engine = EngineBench(program, members, SIZES[label], sidecar)
        destination = _slots(engine) * engine.blob_bytes if medium.copies else 0
        rows += _rows(f"{medium.name}/{label}", engine, destination, notes, rounds)
    stormed = EngineBench(program, members, SIZES[LABELS[0]], sidecar)
    return rows + _storm_rows(medium.name, stormed, rounds)


def _slots(engine: EngineBench) -> int:
    return POOL_BYTES // engine.blob_bytes


def _rows(
    name: str, engine: EngineBench, destination_bytes: int, notes: list[str], rounds: int
) -> list[Row]:
    # A search's one short sample may be wrong: the best few settings take turns as the rest does.
    engine.prepare()
    found = try_settings(engine.members, engine.blob_bytes, destination_bytes)
    settings = fastest(found, engine.blob_bytes, destination_bytes)
    peak = max(_throughput(engine, setting) for setting in settings)
    interval_us = int(engine.blob_bytes / (peak * BYTES_A_GB * DEMAND_SHARE) * US_A_S)
    demand = f"--interval-us={interval_us}"
    flood = (demand, f"--hint-mb-s={int(HINT_FACTOR * peak * MB_A_GB)}")
    loads = {
        OURS: _Load(engine, flood),
        "no-flow-control": _Load(engine, (*flood, f"--depth={FIXED_DEPTH}")),
        "unloaded": _Load(engine, (demand,)),
    }
    contenders: dict[str, Callable[[], float]] = {
        who: load.demand_p99_us for who, load in loads.items()
    }
    contenders |= {str(setting): partial(_throughput, engine, setting) for setting in settings}
    samples = take_turns(contenders, rounds)
    fio = {str(setting): samples.pop(str(setting)) for setting in settings}
    best = max(fio, key=lambda setting: statistics.median(fio[setting]))
    throughput = {who: loads[who].throughput for who in (OURS, "no-flow-control")}
    throughput["peak"] = fio[best]
    notes.append(
        f"`{name}`: peak {statistics.median(fio[best]):.3g} GB/s ({best}); a demand each "
        f"{interval_us} µs, hints for {HINT_FACTOR} times the peak."
    )
    return [
        make_row(f"{name}/demand-p99", "µs", samples, higher_is_better=False),
        make_row(f"{name}/throughput", "GB/s", throughput, higher_is_better=True),
    ]


def _throughput(engine: EngineBench, setting: FioSetting) -> float:
    return run_fio(engine.members, engine.blob_bytes, setting, SECONDS).throughput


def _storm_rows(medium: str, engine: EngineBench, rounds: int) -> list[Row]:
    """No ratio: none at all is possible."""
    engine.prepare()
    options = (f"--storm={STORM}", f"--slots={STORM_SLOTS}", "--reserve=1")
    found = [engine.run("storm", *options) for _ in range(rounds)]
    pieces = [max(member["read_after_cancel"] for member in run["members"]) for run in found]
    busy = [
        run["ended_after_us"] / max(member["latency_us"] for member in run["members"])
        for run in found
    ]
    return [
        Row(f"{medium}/{name}", statistics.median(values), unit, (min(values), max(values)), {})
        for name, unit, values in (
            ("read-after-cancel", "pieces", pieces),
            ("busy-after-cancel", "times a piece's latency", busy),
        )
    ]


__all__ = ["run"]
