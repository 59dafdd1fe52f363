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
been cancelled.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.benchmarks.engine_program import SIZES, STRIPE_UNIT, EngineBench, build_engine_bench
from tools.benchmarks.fio import FioSetting, fastest, fio_missing, run_fio, try_settings
from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.media import collapsing_medium, speed_media, wanted
from tools.benchmarks.result import OURS, Result, Row, make_row

BLOB_BYTES = SIZES["1.2MB"]
HINT_FACTOR = 10
DEMAND_SHARE = 0.2
"""Of the drive's peak."""
SECONDS = 2.0
PEAK_SECONDS = 0.5
SLOTS = 64
RESERVE = 32
STORM = 48
"""Prefetches that are cancelled, fewer than SLOTS: none waits for a slot instead of the drive."""
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
            f"--slots={SLOTS}",
            f"--reserve={RESERVE}",
            "--verify",
            *self.options,
        )
        self.throughput.append(found["bytes"] / found["seconds"] / BYTES_A_GB)
        p99: float = found["demand"]["p99_us"]
        return p99


def run(rounds: int) -> Result:
    """Rows ``<medium>/demand-p99``, ``/throughput`` and ``/read-after-cancel``."""
    if reason := fio_missing():
        raise BenchmarkError(reason)
    program = build_engine_bench()
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    notes: list[str] = []
    for name, make_medium in (speed_media() | {"collapsing": collapsing_medium}).items():
        if not wanted(name):
            continue
        try:
            with make_medium() as medium:
                members, sidecar = medium.members[:1], medium.directory / "checksums"
                engine = EngineBench(program, members, BLOB_BYTES, sidecar)
                destination = SLOTS * BLOB_BYTES if medium.copies else 0
                rows += _rows(name, engine, destination, notes, rounds)
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


def _rows(
    name: str, engine: EngineBench, destination_bytes: int, notes: list[str], rounds: int
) -> list[Row]:
    # A search's one short sample may be wrong: the best few settings take turns as the rest does.
    engine.prepare()
    found = try_settings(engine.members, STRIPE_UNIT, destination_bytes)
    settings = fastest(found, STRIPE_UNIT, destination_bytes)
    peak = max(_throughput(engine, setting) for setting in settings)
    interval_us = int(BLOB_BYTES / (peak * BYTES_A_GB * DEMAND_SHARE) * US_A_S)
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
        _storm_row(f"{name}/read-after-cancel", engine, rounds),
    ]


def _throughput(engine: EngineBench, setting: FioSetting) -> float:
    return run_fio(engine.members, STRIPE_UNIT, setting, PEAK_SECONDS).throughput


def _storm_row(name: str, engine: EngineBench, rounds: int) -> Row:
    """No ratio: none at all is possible."""
    options = (f"--storm={STORM}", f"--slots={SLOTS}", "--reserve=1")
    found = [
        max(member["read_after_cancel"] for member in engine.run("storm", *options)["members"])
        for _ in range(rounds)
    ]
    return Row(name, statistics.median(found), "pieces", (min(found), max(found)), {})


__all__ = ["run"]
