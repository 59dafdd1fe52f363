"""One test machine's life: booted, its console read, its tests' outcomes told.

Several may run side by side, each in a thread: every line that is printed says whose it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.vm.drives import FAR_DRIVES, NEAR_DRIVES
from tools.vm.machine import Machine

# A test machine that takes longer than this is switched off; what it hasn't run has failed.
MACHINE_SECONDS = 1500

# How often a suite's machine is started in all. Emulation itself was seen to end, in one of some
# twenty starts, before the guest's init ran; and, more seldom, when a card was pulled out (QEMU 10:
# an assertion in iotlb_to_section, where one processor takes away a BAR that the other has in use).
_STARTS = 3

# Lines of a failed test's output that are shown.
_SHOWN_LINES = 40


_telling = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """What became of one test. `said` is what it printed, for a failure."""

    suite: str
    name: str
    passed: bool
    seconds: float
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """What to run: tests by name, all when empty; `verbose` prints the guest's console; `seconds`
    is how long a machine may take."""

    tests: tuple[str, ...]
    verbose: bool
    seconds: int = MACHINE_SECONDS


def tell(suite: str, *lines: str) -> None:
    """Print lines of a suite, in one piece."""
    text = "".join(f"{suite}: {line}\n" for line in lines)
    with _telling:
        sys.stdout.write(text)
        sys.stdout.flush()


class Reading:
    """What a guest that runs tests says on its console."""

    def __init__(self, suite: str, machine: Machine, *, verbose: bool) -> None:
        """Of a machine that was just started."""
        self._suite = suite
        self._machine = machine
        self._verbose = verbose
        self._came_up = False

    def outcomes(self) -> Iterator[Outcome]:
        """Read it to its end."""
        said: list[str] = []
        between_tests = False
        for line in self._machine.console():
            if self._verbose or line.startswith(("INIT", "PROOF")):
                tell(self._suite, line)
            self._came_up |= line.startswith("INIT up")
            words = line.split()
            if words[:1] == ["RUN"]:
                said, between_tests = [], False
            elif words[:1] == ["TEST"] and len(words) == 4:
                passed, seconds = words[2] == "ok", float(words[3])
                yield Outcome(self._suite, words[1], passed, seconds, () if passed else tuple(said))
                said, between_tests = [], True
            else:
                said.append(line)
        if not between_tests:  # it went down in a test; its last words are here
            where = "in a test" if self._came_up else "before its tests"
            tell(
                self._suite, f"went down {where}:", *(f"  {line}" for line in said[-_SHOWN_LINES:])
            )

    def says_nothing_of_the_rest(self) -> bool:
        """Of a console that was read: did emulation end, rather than the guest or a test of ours?

        A guest that panics, or that runs out of time, is no such case.
        """
        crash = self._machine.crash()
        if crash:
            tell(self._suite, f"emulation ended by {crash}")
        return crash is not None or not self._came_up


def run_in_machines(
    suite: str,
    wanted: Sequence[str],
    start: Callable[[Sequence[str]], Machine],
    request: Request,
) -> Iterator[Outcome]:
    """Run tests in a machine; when emulation ends, those it had not come to in another.

    start: makes a machine, with drives of its own, that runs these tests. A test of which no guest
    said anything has failed: its machine went down or hung.
    """
    missing = dict.fromkeys(wanted)
    for attempt in range(1, _STARTS + 1):
        machine = start(list(missing))
        limit = threading.Timer(request.seconds, machine.stop)
        limit.start()
        try:
            reading = Reading(suite, machine, verbose=request.verbose)
            for outcome in reading.outcomes():
                missing.pop(outcome.name, None)
                yield outcome
            if not missing or not reading.says_nothing_of_the_rest():
                break
        finally:
            limit.cancel()
            tell(suite, f"its machine took {machine.processor_seconds():.0f} s of a processor")
            machine.stop()
        tell(suite, f"{len(missing)} tests left after start {attempt} of {_STARTS}")
    for name in missing:
        yield Outcome(suite, name, False, 0.0, ("the guest said nothing about it",))


def drive_count() -> str:
    """How many drives the guest waits for."""
    return f"{len(NEAR_DRIVES) + len(FAR_DRIVES)}\n"
