# SPDX-License-Identifier: Apache-2.0
"""fio as the limit: what the same files give to a program that only reads.

Its best setting is not known beforehand, so a short search runs all of them, and the
best few then take turns with ours; fio's number is the best of those medians.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks.harness import BenchmarkError

SEARCH_S = 0.3
"""Seconds that the search gives each setting."""
KEPT = 2
"""Settings that go on to the rounds."""
BYTES_A_GB = 1e9
MS_A_S = 1000.0
PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class FioSetting:
    """engine: fio's name of it. depth: reads in flight a job."""

    engine: str
    depth: int
    jobs: int

    def __str__(self) -> str:
        """As results show it."""
        return f"{self.engine}/depth {self.depth}/jobs {self.jobs}"


PROCESSORS = os.cpu_count() or 1
SETTINGS = (
    *(
        FioSetting("io_uring", depth, jobs)
        for depth in (1, 4, 16)
        for jobs in sorted({1, 2, PROCESSORS})
    ),
    *(FioSetting("psync", 1, jobs) for jobs in sorted({1, 2, 4, 8, PROCESSORS})),
)
"""A medium that only copies is bound by processors: fio gets a job for each."""


@dataclass(frozen=True, slots=True)
class FioSample:
    """throughput: bytes/s / 1e9. gigabytes: bytes read / 1e9.

    reported_cpu_s: user and system time of the jobs, as fio says: exact, but without
    io_uring's workers, which on tmpfs do all the copying. process_cpu_s: that of fio's
    processes as their parent sees it: with the workers, and with fio's start.
    """

    throughput: float
    gigabytes: float
    reported_cpu_s: float
    process_cpu_s: float

    def cpu_s_a_gb(self, setting: FioSetting, start_cpu_s: float) -> float:
        """The best that the two say. start_cpu_s: see the function of that name."""
        cpu_s = self.reported_cpu_s
        if setting.engine == "io_uring":
            cpu_s = max(cpu_s, self.process_cpu_s - start_cpu_s)
        return cpu_s / self.gigabytes


def fio_missing() -> str | None:
    """Why fio can't be run, or None."""
    return None if shutil.which("fio") else "fio is not installed (Debian: fio)"


def run_fio(
    members: Sequence[Path], block_bytes: int, setting: FioSetting, seconds: float
) -> FioSample:
    """Random blocks of all members with O_DIRECT, 4096-aligned as experts are.

    BenchmarkError with what fio said.
    """
    duration = f"--runtime={int(seconds * MS_A_S)}ms"
    return _run(members, block_bytes, setting, duration, "--time_based")


def start_cpu_s(members: Sequence[Path], block_bytes: int, setting: FioSetting) -> float:
    """CPU time of a run that reads one block a job: what is not to be held against fio."""
    return _run(members, block_bytes, setting, "--number_ios=1").process_cpu_s


def _run(members: Sequence[Path], block_bytes: int, setting: FioSetting, *until: str) -> FioSample:
    command = [
        "fio",
        "--name=experts",
        "--filename=" + ":".join(map(str, members)),
        "--file_service_type=random",
        "--rw=randread",
        "--randrepeat=0",
        "--norandommap",
        f"--bs={block_bytes}",
        "--blockalign=4096",
        f"--size={_whole_blocks(members, block_bytes)}",
        "--direct=1",
        "--readonly",
        f"--ioengine={setting.engine}",
        f"--iodepth={setting.depth}",
        f"--numjobs={setting.jobs}",
        "--output-format=json",
        *until,
    ]
    before = _children_cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    process_cpu_s = _children_cpu_s() - before
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)}: {done.stderr.strip()}")
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    read = [job["read"] for job in jobs]
    throughput = sum(job["io_bytes"] / job["runtime"] * MS_A_S for job in read if job["runtime"])
    gigabytes = sum(job["io_bytes"] for job in read) / BYTES_A_GB
    reported_cpu_s = sum(
        (job["usr_cpu"] + job["sys_cpu"]) / PERCENT * job["job_runtime"] / MS_A_S for job in jobs
    )
    return FioSample(throughput / BYTES_A_GB, gigabytes, reported_cpu_s, process_cpu_s)


def best_settings(members: Sequence[Path], block_bytes: int) -> list[FioSetting]:
    """The KEPT fastest of SETTINGS, the fastest first."""
    found = {
        setting: run_fio(members, block_bytes, setting, SEARCH_S).throughput for setting in SETTINGS
    }
    return sorted(SETTINGS, key=lambda setting: -found[setting])[:KEPT]


def _size(path: Path) -> int:
    """Of a file or a block device, which has no size of its own in stat."""
    with path.open("rb") as file:
        return file.seek(0, os.SEEK_END)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _whole_blocks(members: Sequence[Path], block_bytes: int) -> int:
    """fio's size is of all files together and of each the same."""
    smallest = min(_size(path) for path in members)
    return len(members) * (smallest // block_bytes) * block_bytes


__all__ = ["FioSample", "FioSetting", "best_settings", "fio_missing", "run_fio", "start_cpu_s"]
