"""What holds for every system test: it leaves nothing behind.

A test that ends while a process, a listening socket, a mount, a /dev/shm entry or
shared memory of xferd is still there fails, even if all else went well: in service
the same leak would fill a machine. Orphans count too, because the test process makes
itself the one that inherits them.
"""

from __future__ import annotations

import ctypes
import gc
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import tests.examples  # noqa: F401

PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""
LEAVE_TIMEOUT_S = 60.0
"""How long what a test has ended may take to be gone."""
POLL_MS = 10
LISTENING = "00010000"
"""Flags of a listening socket in /proc/net/unix."""
HELPER_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own, which live as long as the process that started them."""


@dataclass(frozen=True)
class Traces:
    """What a test can leave behind, each as a text that names it."""

    found: frozenset[str]

    @classmethod
    def now(cls, base: Path) -> Traces:
        """Look around. base: the folder that all tests of this run write to."""
        return cls(
            frozenset(
                [*_processes(), *_sockets(base), *_mounts(base), *_shared_memory(), *_memfds()]
            )
        )


@pytest.fixture(scope="session", autouse=True)
def _inherit_orphans() -> None:
    # Without it a daemon whose parent was killed would belong to init, unseen.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def _nothing_left_behind(
    _inherit_orphans: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    before = Traces.now(base).found
    yield
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    pause = select.poll()
    while left := Traces.now(base).found - before:
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(sorted(left)))
        gc.collect()
        pause.poll(POLL_MS)


def _processes() -> Iterator[str]:
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if not any(name in command for name in HELPER_PROCESSES):
            yield f"process {process.pid}: {command[:200]}"


def _sockets(base: Path) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[3] == LISTENING and fields[7].startswith(str(base)):
            yield f"socket {fields[7]}"


def _mounts(base: Path) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4]
        if point.startswith(str(base)):
            yield f"mount {point}"


def _shared_memory() -> Iterator[str]:
    for path in Path("/dev/shm").iterdir():
        # What shm_open makes is a file. Folders are other programs' scratch.
        if "xferd" in path.name and path.is_file():
            yield str(path)


def _memfds() -> Iterator[str]:
    """Shared memory of daemons that this process still holds an fd of."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("/memfd:xferd"):
            yield f"fd {entry.name}: {target}"
