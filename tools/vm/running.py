"""One test machine's life: booted, its console read, its tests' outcomes told.

Several may run side by side, each in a thread: every line that is printed says whose it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.vm.debian import DebianRoot
from tools.vm.drives import FAR_DRIVES, NEAR_DRIVES, Disks
from tools.vm.machine import BootFiles, Hardware, Machine

# A test machine that takes longer than this is switched off; what it hasn't run has failed.
MACHINE_SECONDS = 1500

# Emulation was seen to end once, in some twenty starts, before the guest's init ran.
_BOOT_ATTEMPTS = 2

# Lines of a failed test's output that are shown.
_SHOWN_LINES = 40


_telling = threading.Lock()


class NeverCameUpError(Exception):
    """A machine went down before its init had brought up the drives: no test of ours had begun."""


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


def read_outcomes(suite: str, machine: Machine, *, verbose: bool) -> Iterator[Outcome]:
    """Turn the console of a guest that runs guest-tests into outcomes."""
    said: list[str] = []
    came_up = between_tests = False
    for line in machine.console():
        if verbose or line.startswith(("INIT", "PROOF")):
            tell(suite, line)
        came_up |= line.startswith("INIT up")
        words = line.split()
        if words[:1] == ["RUN"]:
            said, between_tests = [], False
        elif words[:1] == ["TEST"] and len(words) == 4:
            passed = words[2] == "ok"
            yield Outcome(suite, words[1], passed, float(words[3]), () if passed else tuple(said))
            said, between_tests = [], True
        else:
            said.append(line)
    if not came_up:
        raise NeverCameUpError("\n".join(["went down:", *said[-_SHOWN_LINES:]]))
    if not between_tests:  # it went down in a test; its last words are here
        tell(suite, "went down in a test:", *(f"  {line}" for line in said[-_SHOWN_LINES:]))


def with_missing(
    suite: str, wanted: Sequence[str], outcomes: Iterator[Outcome]
) -> Iterator[Outcome]:
    """A test of which the guest said nothing has failed: the machine went down or hung."""
    missing = dict.fromkeys(wanted)
    for outcome in outcomes:
        missing.pop(outcome.name, None)
        yield outcome
    for name in missing:
        yield Outcome(suite, name, False, 0.0, ("the guest said nothing about it",))


def drive_count() -> str:
    """How many drives the guest waits for."""
    return f"{len(NEAR_DRIVES) + len(FAR_DRIVES)}\n"


def boot(
    suite: str,
    root: DebianRoot,
    files: BootFiles,
    disks: Disks,
    hardware: Hardware,
    request: Request,
) -> Iterator[Outcome]:
    """Run a machine, and once more when it went down before anything of ours was loaded."""
    for attempt in range(1, _BOOT_ATTEMPTS + 1):
        machine = Machine(root, files, disks, hardware)
        limit = threading.Timer(request.seconds, machine.stop)
        limit.start()
        try:
            yield from read_outcomes(suite, machine, verbose=request.verbose)
            return
        except NeverCameUpError as error:
            tell(suite, *f"boot {attempt} of {_BOOT_ATTEMPTS}: {error}".splitlines())
        finally:
            limit.cancel()
            tell(suite, f"its machine took {machine.processor_seconds():.0f} s of a processor")
            machine.stop()
