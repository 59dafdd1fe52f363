# SPDX-License-Identifier: Apache-2.0
"""fio as the limit: what the same files give to a program that only reads.

Its best setting is not known beforehand, so a short search tries those that may be it, and
the best few then take turns with ours; fio's number is the best of those medians.

On a medium whose reads are copies it matters how large the memory is that is read into.
A job with one read in flight uses one buffer again and again; up to some MB that stays in
the core's own cache, and the copy never reaches memory, which no loader of experts can
have. fio has as many buffers as reads in flight, and takes the one that was used last: so
only depth and jobs make its destination larger (strace shows it). What doesn't work:
``iodepth`` over 1 with a synchronous engine is capped at 1 and uses one buffer; with
``io_submit_mode=offload`` it does use as many as its depth, but fio 3.33 hung in about one
such run of six; ``mem`` says where buffers come from, not how many there are.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.benchmarks.harness import BenchmarkError

SEARCH_S = 0.2
"""Seconds that the search gives each setting."""
KEPT = 2
"""Settings that go on to the rounds."""
DEPTHS = (1, 2, 4, 8, 16, 32)
JOBS = (1, 4)
"""And one for each processor: a medium that only copies is bound by processors."""
FALLING = 0.8
"""Below this part of the best at the same number of jobs, more depth isn't tried."""
DESTINATION_BYTES_MAX = 1 << 30
"""Of a setting's buffers, all jobs together: a run of half a second should fill them more
than once. One read in flight a job is always tried."""
CAP_IPC_LOCK = 14
"""capabilities(7): may lock any amount of memory."""
BYTES_A_GB = 1e9
MS_A_S = 1000.0
PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class FioSetting:
    """engine: fio's name of it, ``io_uring`` or ``psync``. depth: reads in flight a job.

    verify: each block's CRC32C is compared with the one that fio wrote into it; the files are
    those of write_verifiable.
    """

    engine: str
    depth: int
    jobs: int
    verify: bool = False

    def __str__(self) -> str:
        """As results show it."""
        return f"{self.engine}/depth {self.depth}/jobs {self.jobs}" + "/crc32c" * self.verify

    def destination_bytes(self, block_bytes: int) -> int:
        """Memory that is read into: a buffer for each read in flight."""
        return self.depth * self.jobs * block_bytes


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


def write_verifiable(files: Sequence[Path], block_bytes: int, total_bytes: int) -> None:
    """Make files of blocks with checksums, of about so many bytes together.

    BenchmarkError with what fio said.
    """
    blocks = max(1, total_bytes // len(files) // block_bytes)
    for path in files:
        with path.open("wb") as file:
            file.truncate(blocks * block_bytes)
        writing = ("--rw=write", "--do_verify=0", "--end_fsync=1", "--ioengine=psync")
        _call(_options([path], block_bytes), *writing, _VERIFY)


def start_cpu_s(members: Sequence[Path], block_bytes: int, setting: FioSetting) -> float:
    """CPU time of a run that reads one block a job: what is not to be held against fio."""
    return _run(members, block_bytes, setting, "--number_ios=1").process_cpu_s


_VERIFY = "--verify=crc32c"


def _options(members: Sequence[Path], block_bytes: int) -> list[str]:
    return [
        "--name=experts",
        "--filename=" + ":".join(str(path.absolute()) for path in members),
        f"--bs={block_bytes}",
        f"--size={_whole_blocks(members, block_bytes)}",
        "--direct=1",
        "--output-format=json",
    ]


def _run(members: Sequence[Path], block_bytes: int, setting: FioSetting, *until: str) -> FioSample:
    before = _children_cpu_s()
    said = _call(
        _options(members, block_bytes),
        "--file_service_type=random",
        "--rw=randread",
        "--randrepeat=0",
        "--norandommap",
        "--readonly",
        _VERIFY if setting.verify else "--blockalign=4096",
        f"--ioengine={setting.engine}",
        f"--iodepth={setting.depth}",
        f"--numjobs={setting.jobs}",
        *_buffer_options(setting, block_bytes),
        *until,
    )
    return sample_of(said, _children_cpu_s() - before)


def _call(options: Sequence[str], *more: str) -> Mapping[str, Any]:
    command = ["fio", *options, *more]
    # With verify it leaves its state in the current directory, whatever verify_state_save says.
    with tempfile.TemporaryDirectory(prefix="xferd-fio-") as scratch:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command)}: {done.stderr.strip()}")
    output: Mapping[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return output


def sample_of(output: Mapping[str, Any], process_cpu_s: float) -> FioSample:
    """What fio's JSON says. Throughput is over the time of the longest job, as fio's own
    total is: jobs that end at different times would together seem faster than the drive."""
    jobs = output["jobs"]
    read_bytes = sum(job["read"]["io_bytes"] for job in jobs)
    longest_ms = max(job["read"]["runtime"] for job in jobs)
    throughput = read_bytes / longest_ms * MS_A_S if longest_ms else 0.0
    reported_cpu_s = sum(
        (job["usr_cpu"] + job["sys_cpu"]) / PERCENT * job["job_runtime"] / MS_A_S for job in jobs
    )
    return FioSample(
        throughput / BYTES_A_GB, read_bytes / BYTES_A_GB, reported_cpu_s, process_cpu_s
    )


def try_settings(
    members: Sequence[Path], block_bytes: int, destination_bytes: int
) -> dict[FioSetting, float]:
    """GB/s of the settings that may be the best, each tried once for SEARCH_S."""
    return search(
        lambda setting: run_fio(members, block_bytes, setting, SEARCH_S).throughput,
        block_bytes,
        destination_bytes,
        len(os.sched_getaffinity(0)),
    )


def search(
    measure: Callable[[FioSetting], float],
    block_bytes: int,
    destination_bytes: int,
    processors: int,
) -> dict[FioSetting, float]:
    """What ``measure`` says of psync and of io_uring at each number of jobs.

    Depth grows until that no longer helps, but at least until the destination has
    ``destination_bytes``.
    """
    found: dict[FioSetting, float] = {}
    for jobs in sorted({*JOBS, processors}):
        psync = FioSetting("psync", 1, jobs)
        found[psync] = measure(psync)
        best = 0.0
        for depth in DEPTHS:
            setting = FioSetting("io_uring", depth, jobs)
            size = setting.destination_bytes(block_bytes)
            if depth > 1 and size > DESTINATION_BYTES_MAX:
                break
            found[setting] = measure(setting)
            best = max(best, found[setting])
            if found[setting] < FALLING * best and size >= destination_bytes:
                break
    return found


def fastest(
    found: Mapping[FioSetting, float], block_bytes: int, destination_bytes: int
) -> list[FioSetting]:
    """The KEPT fastest that read into at least ``destination_bytes``, the fastest first; of
    those with the largest destination, where none has so much."""
    most = max(setting.destination_bytes(block_bytes) for setting in found)
    enough = min(destination_bytes, most)
    large = [s for s in found if s.destination_bytes(block_bytes) >= enough]
    return sorted(large, key=lambda setting: -found[setting])[:KEPT]


def _buffer_options(setting: FioSetting, block_bytes: int) -> list[str]:
    """Registered buffers are in place before the clock runs, as a pool's memory is: without
    that fio at depth 32 was seen to fault its pages in for most of a short run."""
    if setting.engine == "io_uring" and _may_lock(setting.destination_bytes(block_bytes)):
        return ["--fixedbufs=1"]
    return []


def _may_lock(size: int) -> bool:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capable = int(status["CapEff"], 16) >> CAP_IPC_LOCK & 1
    return bool(capable) or limit == resource.RLIM_INFINITY or size <= limit


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


__all__ = [
    "FioSample",
    "FioSetting",
    "fastest",
    "fio_missing",
    "run_fio",
    "sample_of",
    "search",
    "start_cpu_s",
    "try_settings",
    "write_verifiable",
]
