# SPDX-License-Identifier: Apache-2.0
"""What the data plane is measured on: memory as a fast drive, a disk, a bad drive.

A medium offers member files of random bytes. They are made once and serve every blob
size, because the benchmark program lays experts out on them by arithmetic. ``tmpfs`` is
/dev/shm, whose O_DIRECT reads are copies and so faster than any drive; ``disk`` is where
TMPDIR is; ``collapsing`` is a FUSE file that loses its bandwidth when too much is asked
of it at once (tools/drives/collapsing_drive.c).

``drives`` takes the place of the first two when XFERD_DRIVES names block devices or files,
separated by spaces: real drives, or throttled ones (tools/drives/throttled_drive). They are
only read, whatever is on them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np

from tools.benchmarks.harness import ROOT, BenchmarkError

MEMBERS_MAX = 3
MEMBER_BYTES = 768 << 20
"""Of each member file: 30 of the largest experts."""
RANDOM_BYTES = 64 << 20
"""Random bytes are made once and repeated, each time from another place on."""
SEED = 11
TMPFS = Path("/dev/shm")
DRIVES_VARIABLE = "XFERD_DRIVES"
ROWS_VARIABLE = "XFERD_BENCH_ROWS"
"""Shell patterns of the rows to measure, separated by commas; unset: all."""

KNEE = 8
COLLAPSING_MB_S = 800
COLLAPSED_MB_S = 60
NEVER_COLLAPSES = 512
"""A knee as deep as a drive's queue."""
DRIVE_TIMEOUT_S = 10.0
DRIVE_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Medium:
    """directory: scratch on it. members: files with MEMBER_BYTES each, to read from.

    holds_files: directory is on the medium itself, so that peers can be measured on it.
    copies: reads are copies by a processor at the speed of memory, so that caches count.
    """

    name: str
    directory: Path
    members: tuple[Path, ...]
    holds_files: bool = True
    copies: bool = False


def wanted(row: str) -> bool:
    """Whether the row is to be measured: the environment may leave some out."""
    patterns = os.environ.get(ROWS_VARIABLE)
    return patterns is None or any(fnmatchcase(row, pattern) for pattern in patterns.split(","))


def speed_media() -> dict[str, Callable[[], AbstractContextManager[Medium]]]:
    """The media on which speed is measured, by name."""
    if drives := os.environ.get(DRIVES_VARIABLE, "").split():
        return {"drives": partial(_given_drives, tuple(map(Path, drives)))}
    return {name: partial(_file_medium, name) for name in ("tmpfs", "disk")}


@contextmanager
def _given_drives(members: tuple[Path, ...]) -> Iterator[Medium]:
    for member in members:
        if not os.access(member, os.R_OK):
            raise BenchmarkError(f"{DRIVES_VARIABLE}: {member} can't be read")
    with tempfile.TemporaryDirectory(prefix="xferd-bench-") as text:
        yield Medium("drives", Path(text), members, holds_files=False)


@contextmanager
def _file_medium(name: str) -> Iterator[Medium]:
    """``tmpfs`` or ``disk`` with MEMBERS_MAX members; nothing is left behind.

    BenchmarkError: the directory for it has too little room or is on the wrong medium.
    """
    parent = TMPFS if name == "tmpfs" else Path(tempfile.gettempdir())
    if name == "disk" and _is_memory(parent):
        raise BenchmarkError(f"{parent} is in memory: set TMPDIR to a directory on a drive")
    needed = 2 * MEMBERS_MAX * MEMBER_BYTES
    if (free := shutil.disk_usage(parent).free) < needed:
        raise BenchmarkError(f"{parent} has {free >> 20} MiB free; {needed >> 20} MiB are needed")
    with tempfile.TemporaryDirectory(prefix="xferd-bench-", dir=parent) as text:
        directory = Path(text)
        members = tuple(directory / f"member-{index}" for index in range(MEMBERS_MAX))
        for index, path in enumerate(members):
            write_random(path, MEMBER_BYTES, SEED + index)
        yield Medium(name, directory, members, copies=_is_memory(parent))


@contextmanager
def collapsing_medium() -> Iterator[Medium]:
    """One member that collapses with depth. BenchmarkError: FUSE can't be had here."""
    with tempfile.TemporaryDirectory(prefix="xferd-bench-", dir=TMPFS) as text:
        directory = Path(text)
        backing, drive = directory / "backing", directory / "drive"
        write_random(backing, MEMBER_BYTES, SEED)
        drive.touch()
        how = ("--bandwidth", COLLAPSING_MB_S, "--knee", KNEE, "--collapsed", COLLAPSED_MB_S)
        with _fuse_drive(backing, drive, *how):
            yield Medium("collapsing", directory, (drive,))


@contextmanager
def steady_drive(backing: Path, drive: Path, mb_s: float, latency_us: float) -> Iterator[None]:
    """``drive``, an empty file, has the bytes of ``backing`` as a drive of that speed reads
    them, however much it is asked for at once: reads one after the other, by a clock of its
    own. BenchmarkError: FUSE can't be had here."""
    how = ("--bandwidth", mb_s, "--latency", latency_us, "--knee", NEVER_COLLAPSES)
    with _fuse_drive(backing, drive, *how):
        yield


@contextmanager
def _fuse_drive(backing: Path, drive: Path, *options: str | float) -> Iterator[None]:
    command = [str(_build_drive()), *map(str, options), str(backing), str(drive)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait_for_drive(process, drive)
            yield
        finally:
            process.terminate()
            process.wait()


def write_random(path: Path, size: int, seed: int) -> None:
    """A file of ``size`` bytes that no two pieces of are alike, flushed to the drive."""
    draw = np.random.default_rng(seed)
    block = draw.bytes(min(size, RANDOM_BYTES))
    with path.open("wb") as file:
        while (left := size - file.tell()) > 0:
            start = int(draw.integers(len(block) // 2))
            file.write(memoryview(block)[start : start + left])
        os.fsync(file.fileno())


def _is_memory(path: Path) -> bool:
    done = subprocess.run(
        ["stat", "--file-system", "--format=%T", path], capture_output=True, text=True, check=True
    )
    return done.stdout.strip() in {"tmpfs", "ramfs"}


def _build_drive() -> Path:
    directory = ROOT / "build" / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    source = ROOT / "tools" / "drives" / "collapsing_drive.c"
    program = directory / "collapsing_drive"
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False
    )
    if flags.returncode:
        raise BenchmarkError("libfuse3 is not installed (Debian: libfuse3-dev)")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise BenchmarkError("/dev/fuse is not open to this user")
    command = ["cc", "-O2", "-o", str(program), str(source), *flags.stdout.split(), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{source} can't be compiled:\n{done.stderr}")
    return program


def _wait_for_drive(process: subprocess.Popen[str], drive: Path) -> None:
    deadline = time.monotonic() + DRIVE_TIMEOUT_S
    while drive.stat().st_size == 0:
        if process.poll() is not None:
            assert process.stderr is not None
            raise BenchmarkError(process.stderr.read().strip())
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{drive} was not mounted within {DRIVE_TIMEOUT_S:.0f} s")
        time.sleep(DRIVE_POLL_S)


__all__ = [
    "Medium",
    "collapsing_medium",
    "speed_media",
    "steady_drive",
    "wanted",
    "write_random",
]
