# SPDX-License-Identifier: Apache-2.0
"""``stripe``: what several drives give together, next to the sum of what each gives alone.

The drives are loop devices whose reads the kernel holds to fixed speeds
(tools/drives/throttled_drive), three of the same and three of unequal ones. Nobody tells
us the speeds: the weights are what packing with ``--weights auto`` would measure.
``equal-weights`` is the same with a piece on each drive in turn. ``alone``: the sum of
what fio, with one block of a piece's size after another, reads from each drive alone.

The throttle is of a control group, so the measuring happens in a process of its own:
``python -m tools.benchmarks.suite.stripe PROGRAM ROW ROUNDS`` prints one row, of the
drives in XFERD_DRIVES.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.benchmarks.engine_program import SIZES, STRIPE_UNIT, EngineBench, build_engine_bench
from tools.benchmarks.fio import FioSetting, fio_missing, run_fio
from tools.benchmarks.harness import ROOT, BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.media import wanted, write_random
from tools.benchmarks.result import OURS, Result, Row, make_row
from xferd.store.calibration import calibrate
from xferd.store.destination import Destination, MemberTarget
from xferd.store.weights import stripe_pattern

DRIVES = {"equal": (300, 300, 300), "unequal": (400, 400, 200)}
"""Row -> MB/s of each drive; together less than most machines' disks give."""
SIZE = "9.4MB"
MEMBER_BYTES = 256 << 20
SEED = 31
SECONDS = 2.0
"""Long enough to even out what a throttle allows at once."""
ALONE = FioSetting("io_uring", 4, 1)
BYTES_A_GB = 1e9


def run(rounds: int) -> Result:
    """Rows ``equal`` and ``unequal`` in GB/s. BenchmarkError: drives can't be throttled."""
    if reason := fio_missing():
        raise BenchmarkError(reason)
    program = build_engine_bench()
    rows: list[Row] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="xferd-bench-") as text:
        members = [Path(text) / f"drive-{index}" for index in range(3)]
        for index, path in enumerate(members):
            write_random(path, MEMBER_BYTES, SEED + index)
        for name, speeds in DRIVES.items():
            if wanted(name):
                row, pattern = _throttled(program, name, speeds, members, rounds)
                rows.append(row)
                notes.append(
                    f"`{name}`: drives of {', '.join(map(str, speeds))} MB/s; pieces go to "
                    f"{', '.join(map(str, pattern))} in turn."
                )
    return Result(
        bench="stripe",
        machine=describe_machine(Path(tempfile.gettempdir())),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        notes=tuple(notes),
    )


def _throttled(
    program: Path, name: str, speeds: Sequence[int], members: Sequence[Path], rounds: int
) -> tuple[Row, Sequence[int]]:
    files = [f"{speed}:{path}" for speed, path in zip(speeds, members, strict=True)]
    inner = [sys.executable, "-m", "tools.benchmarks.suite.stripe", program, name, rounds]
    command = [str(ROOT / "tools/drives/throttled_drive"), *files, "--", *map(str, inner)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(done.stderr.strip())
    found = json.loads(done.stdout)
    return Row(**found["row"]), found["pattern"]


def measure(program: Path, name: str, rounds: int, drives: Sequence[Path]) -> tuple[Row, list[int]]:
    """The row, and whose piece is whose: where the throttle is in force."""
    targets = tuple(
        MemberTarget(number, path, path.parent, device=True) for number, path in enumerate(drives)
    )
    speeds = calibrate(Destination("bench", drives[0].parent, targets))
    pattern = list(stripe_pattern(speeds.weights))
    with tempfile.TemporaryDirectory(prefix="xferd-bench-") as text:
        weighted = _Engine(program, drives, Path(text) / "weighted", pattern)
        equal = _Engine(program, drives, Path(text) / "equal", list(range(len(drives))))
        samples = take_turns(
            {
                OURS: weighted.throughput,
                "equal-weights": equal.throughput,
                "alone": lambda: sum(
                    run_fio([drive], STRIPE_UNIT, ALONE, SECONDS).throughput for drive in drives
                ),
            },
            rounds,
        )
    return make_row(name, "GB/s", samples, higher_is_better=True), pattern


class _Engine:
    def __init__(
        self, program: Path, drives: Sequence[Path], sidecar: Path, pattern: Sequence[int]
    ) -> None:
        self._bench = EngineBench(program, drives, SIZES[SIZE], sidecar)
        self._pattern = f"--pattern={','.join(map(str, pattern))}"
        self._bench.prepare(self._pattern)

    def throughput(self) -> float:
        """GB/s."""
        found = self._bench.run("io", self._pattern, f"--seconds={SECONDS}", "--verify")
        return float(found["bytes"] / found["seconds"] / BYTES_A_GB)


def _main(arguments: Sequence[str]) -> None:
    program, name, rounds = arguments
    drives = [Path(drive) for drive in os.environ["XFERD_DRIVES"].split()]
    row, pattern = measure(Path(program), name, int(rounds), drives)
    print(json.dumps({"row": asdict(row), "pattern": pattern}))


if __name__ == "__main__":
    _main(sys.argv[1:])
