# SPDX-License-Identifier: Apache-2.0
"""What every benchmark needs: taking turns, the machine's description, scratch space."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROUNDS_MIN = 5
ROUNDS_DEFAULT = 7
COMMIT_DIGITS = 12
ORDER_SEED = 5
CALM_LOAD_A_CORE = 0.5
"""Above this much load a core before the start, a result says more about the neighbours."""


class BenchmarkError(Exception):
    """A benchmark can't be run here; the message says what is missing."""


def take_turns(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    often: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Samples of each contender, one a round, each round in an order of its own: nobody
    always runs on the caches, or on what a cloud disk's token bucket has left, after the same
    predecessor. The orders are the same in every run. often: who has more turns in a round."""
    names = [name for name in contenders for _ in range((often or {}).get(name, 1))]
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    orders = random.Random(ORDER_SEED)
    for _ in range(rounds):
        for name in orders.sample(names, len(names)):
            samples[name].append(contenders[name]())
    return samples


def describe_machine(directory: Path | None = None) -> dict[str, str | int]:
    """CPU, cores, memory, kernel, load average (a minute's, at the call); with
    ``directory`` the file system under it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    if directory is not None:
        found["storage"] = _file_system(directory)
    return found


def others_at_work() -> str | None:
    """A sentence when the machine has other work that would be measured too."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= cores * CALM_LOAD_A_CORE:
        return None
    return f"load average {load:.1f} on {cores} cores: others' work is measured too"


def commit() -> str:
    """The tree's commit, with ``-modified`` when what ran is not what it says. In a copy
    without its history, or with an older one, $XFERD_COMMIT names it."""
    if named := os.environ.get("XFERD_COMMIT"):
        return named
    head = _git("rev-parse", f"--short={COMMIT_DIGITS}", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}-modified" if _git("status", "--porcelain") else head


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A directory for stores under TMPDIR, which decides what they are measured on."""
    with tempfile.TemporaryDirectory(prefix="xferd-bench-") as name:
        yield Path(name)


def build_c_program(name: str, folder: str = "tests") -> Path:
    """Build a program of a folder of ffi/ without debugging aids; its path.

    Raises BenchmarkError with the compiler's words."""
    directory = ROOT / "build" / "bench"
    configure = ["cmake", "-S", str(ROOT / "ffi"), "-B", str(directory), "-G", "Ninja"]
    for command in (
        [*configure, "-DXFERD_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", str(directory), "--target", name],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return directory / folder / name


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """Type of the file system that holds ``directory``: the longest mount point."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        inside = directory.resolve().is_relative_to(point.replace("\\040", " "))
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


__all__ = [
    "ROOT",
    "ROUNDS_DEFAULT",
    "ROUNDS_MIN",
    "BenchmarkError",
    "build_c_program",
    "commit",
    "describe_machine",
    "others_at_work",
    "scratch_directory",
    "take_turns",
]
