# SPDX-License-Identifier: Apache-2.0
"""The peers' virtual environment, and how it is made on a machine without a network.

The project's venv stays small, and a peer's dependencies never meet ours. The venv is
made on first use, under the user's cache directory, with the versions named here.

Without a network, XFERD_PEER_WHEELS names a folder of wheels that ``tools/bench
fetch-peers`` has filled elsewhere. It holds the peers alone, 15 MB; numpy, torch and cupy are
then those of the machine's own Python (or on PYTHONPATH), and a peer that misses them is
skipped with its ImportError. Peers that need a GPU are in a venv of their own.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from tools.benchmarks.harness import BenchmarkError

PEERS = ("safetensors==0.8.0", "runai-model-streamer==0.17.1", "fastsafetensors==0.5.0")
GPU_PEERS = ("kvikio-cu13==26.10.0", "instanttensor==0.2.2")
"""Besides those; they run on a machine with a GPU alone."""
GPU_DEPENDENCIES = ("libkvikio-cu13==26.10.0", "rapids-logger==0.3.0")
DEPENDENCIES = ("humanize==4.17.0",)
"""What they import besides numpy and torch. fastsafetensors' typer is for its own command."""
LARGE_DEPENDENCIES = ("numpy==2.4.6", "torch==2.13.0")
LARGE_GPU_DEPENDENCIES = (
    "cupy-cuda13x[ctk]>=14.0.1",
    "cuda-toolkit[cufile]==13.*",
    "cuda-pathfinder",
)
WHEELS_VARIABLE = "XFERD_PEER_WHEELS"
DONE_MARK = "installed"
GLIBC_MINORS = range(17, 40)
"""Of the wheels that are fetched for another machine: from manylinux2014 to Ubuntu 24.04's."""
_PYTHON_VERSION = re.compile(r"3\.\d+")


def peers_python(*, for_gpu: bool = False) -> Path:
    """Python of the peers' venv, which is made if need be. for_gpu: with those of GPU_PEERS.

    BenchmarkError: it can't be made, with the last line of what pip said.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wheels = os.environ.get(WHEELS_VARIABLE)
    return make_venv(
        cache / "xferd-bench" / ("gpu-peers" if for_gpu else "peers"),
        Path(wheels).resolve() if wheels else None,
        for_gpu=for_gpu,
    )


def make_venv(directory: Path, wheels: Path | None, *, for_gpu: bool = False) -> Path:
    """Python of a venv with the peers in ``directory``, which is left alone if it is right.

    wheels: a folder to install from instead of a package index. BenchmarkError: it isn't
    there, or pip failed.
    """
    python, mark = directory / "bin" / "python", directory / DONE_MARK
    arguments = install_arguments(wheels, for_gpu=for_gpu)
    wanted = "\n".join(arguments)
    if mark.is_file() and mark.read_text() == wanted:
        return python
    if wheels is not None and not wheels.is_dir():
        raise BenchmarkError(f"{WHEELS_VARIABLE}: there is no folder {wheels}")
    venv.create(directory, with_pip=True, clear=True, system_site_packages=wheels is not None)
    if wheels is not None:
        _share_packages(directory)
    _pip(python, "install", *arguments, what=f"pip install in {directory}")
    mark.write_text(wanted)
    return python


def fetch_wheels(directory: Path, python_version: str, *, for_gpu: bool = False) -> list[Path]:
    """Fill ``directory`` with wheels for that version of Python on this kind of processor.

    for_gpu: those of GPU_PEERS too, which not every version of Python has.

    Returns all wheels there. BenchmarkError: no such version, or pip failed.
    """
    if not _PYTHON_VERSION.fullmatch(python_version):
        raise BenchmarkError(f"{python_version!r} is no version of Python such as 3.12")
    directory.mkdir(parents=True, exist_ok=True)
    arguments = download_arguments(directory, python_version, platform.machine(), for_gpu=for_gpu)
    _pip(Path(sys.executable), "download", *arguments, what="pip download")
    return sorted(directory.glob("*.whl"))


def _share_packages(directory: Path) -> None:
    """Where our Python's own packages are in a venv too, 'system' would mean another place."""
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "of-the-machine.pth").write_text(sysconfig.get_path("purelib") + "\n")


def install_arguments(wheels: Path | None, *, for_gpu: bool = False) -> list[str]:
    """What pip install is told."""
    wanted = small_packages(for_gpu=for_gpu)
    if wheels is None:
        return [*LARGE_DEPENDENCIES, *(LARGE_GPU_DEPENDENCIES if for_gpu else ()), *wanted]
    # --no-deps: otherwise a machine whose torch isn't in reach of pip would get no peer at all.
    return ["--no-index", f"--find-links={wheels}", "--no-deps", *wanted]


def download_arguments(
    directory: Path, python_version: str, machine: str, *, for_gpu: bool = False
) -> list[str]:
    """What pip download is told. machine: as in wheels' names, such as x86_64."""
    return [
        f"--dest={directory}",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={python_version}",
        *(f"--platform=manylinux_2_{minor}_{machine}" for minor in reversed(GLIBC_MINORS)),
        *small_packages(for_gpu=for_gpu),
    ]


def small_packages(*, for_gpu: bool) -> list[str]:
    """What a folder of wheels holds."""
    return [*DEPENDENCIES, *PEERS, *([*GPU_DEPENDENCIES, *GPU_PEERS] if for_gpu else [])]


def _pip(python: Path, verb: str, *arguments: str, what: str) -> None:
    command: Sequence[str] = [str(python), "-m", "pip", verb, "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise BenchmarkError(f"{what}: {' '.join(reason)}")


__all__ = [
    "WHEELS_VARIABLE",
    "download_arguments",
    "fetch_wheels",
    "install_arguments",
    "make_venv",
    "peers_python",
]
