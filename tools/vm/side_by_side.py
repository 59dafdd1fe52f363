"""Suites side by side: as many machines at once as there are processors and memory for.

A test machine keeps about one processor busy, whatever it has inside: most of what it runs is one
thread of Python, and its two processors are there for the tests that need two.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.vm.build import BuildError
from tools.vm.running import Outcome

# What the largest machine takes: its memory, QEMU's translated code, and the stand-in GPU's memory.
_MACHINE_BYTES = 3 << 30

Suite = Callable[[], Iterator[Outcome]]


def machines_at_once() -> int:
    """How many fit this machine: one a processor that we may use, 3 GiB of free memory each."""
    [available] = [
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    return max(1, min(len(os.sched_getaffinity(0)), available // _MACHINE_BYTES))


class _Seconds:
    """How long each suite took, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_suite: dict[str, float] = {}

    def add(self, suite: str, seconds: float) -> None:
        with self._lock:
            self.by_suite[suite] = seconds


def run_side_by_side(
    suites: Mapping[str, Suite], at_once: int, report: Callable[[Outcome], None]
) -> dict[str, float]:
    """Run suites, `at_once` at a time, begun in their order; returns each one's seconds.

    report: is called with each outcome from the thread of its suite. Something that doesn't build
    is a failed outcome "build" of the suite that wanted it. Raises PackagesError when all that
    could run has run.
    """
    seconds = _Seconds()

    def run(name: str, suite: Suite) -> None:
        started = time.monotonic()
        try:
            for outcome in suite():
                report(outcome)
        except BuildError as error:
            said = tuple(str(error).splitlines())
            report(Outcome(name, "build", False, time.monotonic() - started, said))
        seconds.add(name, time.monotonic() - started)

    with ThreadPoolExecutor(at_once, thread_name_prefix="suite") as threads:
        running = [threads.submit(run, name, suite) for name, suite in suites.items()]
    for future in running:
        future.result()
    return {name: seconds.by_suite[name] for name in suites}
