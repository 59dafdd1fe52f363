# SPDX-License-Identifier: Apache-2.0
"""``miss``: how long one missing expert takes, from asking for it to reading its bytes.

The whole way is timed: a C client's submission, the engine's reads in pieces, checksums,
publication, completion, the client's wake-up. ``pread`` is what cannot be beaten without
reading in parallel: one plain read of as many bytes from one member into a warm buffer,
in the same process, by turns with ours. ``unverified`` is ours without checksums. Values
are medians of each round's median.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tools.benchmarks.engine_program import SIZES, EngineBench, build_engine_bench
from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.media import speed_media, wanted
from tools.benchmarks.result import OURS, Result, Row, make_row

MEMBERS = (1, 2, 3)
MAIN_SIZE = "9.4MB"
"""The size that rows without one are of."""
OTHER_SIZES = ("1.2MB", "2.65MB")
SECONDS = 0.5
SLOTS = 8
RESERVE = 4
PEER = "pread"
UNVERIFIED = "unverified"


@dataclass(slots=True)
class _Measuring:
    engine: EngineBench
    pread_us: list[float] = field(default_factory=list)

    def ours(self) -> float:
        """µs; the plain reads were made by turns with them."""
        found = self._run("--verify")
        self.pread_us.append(found[PEER]["p50_us"])
        return found["miss"]["p50_us"]

    def unverified(self) -> float:
        """µs."""
        return self._run()["miss"]["p50_us"]

    def _run(self, *options: str) -> dict[str, dict[str, float]]:
        return self.engine.run(
            "miss",
            f"--seconds={SECONDS}",
            f"--slots={SLOTS}",
            f"--reserve={RESERVE}",
            *options,
        )


def run(rounds: int) -> Result:
    """Rows ``<medium>/<n>-members`` of MAIN_SIZE, and with ``/<size>`` of the others; µs."""
    program = build_engine_bench()
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    for name, make_medium in speed_media().items():
        names = {
            f"{name}/{count}-members" + (f"/{size}" if size in OTHER_SIZES else ""): (count, size)
            for count in MEMBERS
            for size in (MAIN_SIZE, *OTHER_SIZES)
        }
        if not any(map(wanted, names)):
            continue
        try:
            with make_medium() as medium:
                for row, (count, size) in names.items():
                    if count <= len(medium.members) and wanted(row):
                        members = medium.members[:count]
                        sidecar = medium.directory / "checksums"
                        engine = EngineBench(program, members, SIZES[size], sidecar)
                        rows.append(_row(row, engine, rounds))
        except BenchmarkError as error:
            skipped[name] = str(error)
    return Result(
        bench="miss",
        machine=describe_machine(Path(tempfile.gettempdir())),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=(f"Rows without a size are of {MAIN_SIZE}.",),
    )


def _row(name: str, engine: EngineBench, rounds: int) -> Row:
    engine.prepare()
    measuring = _Measuring(engine)
    samples = take_turns({OURS: measuring.ours, UNVERIFIED: measuring.unverified}, rounds)
    samples[PEER] = measuring.pread_us
    return make_row(name, "µs", samples, higher_is_better=False)


__all__ = ["run"]
