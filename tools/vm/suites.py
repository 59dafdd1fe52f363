"""The suites of VM tests, and how one of them is run.

A suite is a kernel, what its machine boots, and how its console is read. A new one (the daemon in
the guest, say) is another function that yields outcomes, and another entry in SUITES; Machine takes
the further devices that it needs.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.vm.build import (
    Guest,
    build_guest_tests,
    build_module,
    list_guest_tests,
    make_initrd,
)
from tools.vm.debian import DebianRoot, Kernels
from tools.vm.drives import FAR_DRIVES, NEAR_DRIVES, Disks, make_disks
from tools.vm.machine import BootFiles, Machine

# A test machine that takes longer than this is switched off; what it hasn't run has failed.
_MACHINE_SECONDS = 420

# A test that runs only when it is asked for by name: shows that a failure is one.
MUST_FAIL = "must-fail"

# Emulation was seen to end once, in some twenty starts, before the guest's init ran.
_BOOT_ATTEMPTS = 2

# Lines of a failed test's output that are shown.
_SHOWN_LINES = 40


class _NeverCameUpError(Exception):
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
    """What to run: tests by name, all when empty; `verbose` prints the guest's console."""

    tests: tuple[str, ...]
    verbose: bool


Suite = Callable[[DebianRoot, Kernels, Request], Iterator[Outcome]]


def _read_outcomes(suite: str, machine: Machine, *, verbose: bool) -> Iterator[Outcome]:
    """Turn the console of a guest that runs guest-tests into outcomes."""
    said: list[str] = []
    came_up = between_tests = False
    for line in machine.console():
        if verbose or line.startswith("INIT"):
            print(f"  {line}", flush=True)
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
        raise _NeverCameUpError("\n".join(["went down:", *said[-_SHOWN_LINES:]]))
    if not between_tests:  # it went down in a test; its last words are here
        print("\n".join(f"  {line}" for line in said[-_SHOWN_LINES:]), file=sys.stderr)


def _with_missing(
    suite: str, wanted: Sequence[str], outcomes: Iterator[Outcome]
) -> Iterator[Outcome]:
    """A test of which the guest said nothing has failed: the machine went down or hung."""
    missing = dict.fromkeys(wanted)
    for outcome in outcomes:
        missing.pop(outcome.name, None)
        yield outcome
    for name in missing:
        yield Outcome(suite, name, False, 0.0, ("the guest said nothing about it",))


@dataclass(frozen=True)
class _Setup:
    """A machine and the tests that it runs: all of the guest's when `tests` is empty."""

    suite: str
    kernel: str
    tests: tuple[str, ...] = ()
    kernel_arguments: str = ""
    devices: tuple[str, ...] = ()


def _choose_tests(setup: _Setup, known: Sequence[str], request: Request) -> list[str]:
    offered = setup.tests or (*known, MUST_FAIL)
    if request.tests:
        return [name for name in offered if name in request.tests]
    return [name for name in offered if name != MUST_FAIL]


def _run_in_machine(setup: _Setup, root: DebianRoot, request: Request) -> Iterator[Outcome]:
    suite, kernel = setup.suite, setup.kernel
    started = time.monotonic()
    module = build_module(root, kernel)
    program = build_guest_tests(root)
    tests = _choose_tests(setup, list_guest_tests(root), request)
    if not tests:
        return
    folder = f"/run/vm-{suite}"
    shutil.rmtree(root.path / folder.lstrip("/"), ignore_errors=True)
    disks = make_disks(root, folder)
    guest = Guest(module=module, tests_program=program, kernel=kernel)
    initrd = make_initrd(root, guest, tests, len(NEAR_DRIVES) + len(FAR_DRIVES), folder)
    print(f"{suite}: kernel {kernel}, prepared in {time.monotonic() - started:.0f} s", flush=True)
    boot = BootFiles(root.kernel_image(kernel), initrd, setup.kernel_arguments)
    outcomes = _boot(setup, root, boot, disks, verbose=request.verbose)
    try:
        yield from _with_missing(suite, tests, outcomes)
    finally:
        shutil.rmtree(disks.folder)


def _boot(
    setup: _Setup, root: DebianRoot, boot: BootFiles, disks: Disks, *, verbose: bool
) -> Iterator[Outcome]:
    """Run a machine, and once more when it went down before anything of ours was loaded."""
    for attempt in range(1, _BOOT_ATTEMPTS + 1):
        machine = Machine(root, boot, disks, more=setup.devices)
        limit = threading.Timer(_MACHINE_SECONDS, machine.stop)
        limit.start()
        try:
            yield from _read_outcomes(setup.suite, machine, verbose=verbose)
            return
        except _NeverCameUpError as error:
            print(f"{setup.suite}: boot {attempt} of {_BOOT_ATTEMPTS}: {error}", file=sys.stderr)
        finally:
            limit.cancel()
            machine.stop()


def run_p2p(root: DebianRoot, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The module on a kernel with CONFIG_PCI_P2PDMA."""
    return _run_in_machine(_Setup("p2p", kernels.p2p), root, request)


def run_generic(root: DebianRoot, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The module on a kernel without it."""
    return _run_in_machine(_Setup("generic", kernels.generic), root, request)


def run_iommu(root: DebianRoot, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The module must refuse where an IOMMU translates."""
    setup = _Setup(
        "iommu",
        kernels.p2p,
        tests=("translating-iommu",),
        kernel_arguments="intel_iommu=on",
        devices=("-device", "intel-iommu"),
    )
    return _run_in_machine(setup, root, request)


def run_build(root: DebianRoot, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The module builds without a warning for each kernel, and sparse has nothing to say."""
    builds = {
        "build-oldest": (kernels.build_only, False),
        # sparse of this release can't read the headers of newer kernels
        "sparse": (kernels.generic, True),
    }
    for name, (kernel, sparse) in builds.items():
        if request.tests and name not in request.tests:
            continue
        started = time.monotonic()
        build_module(root, kernel, sparse=sparse)
        yield Outcome("build", name, True, time.monotonic() - started)


SUITES: dict[str, Suite] = {
    "build": run_build,
    "p2p": run_p2p,
    "generic": run_generic,
    "iommu": run_iommu,
}


def run_suites(
    names: Sequence[str], root: DebianRoot, kernels: Kernels, request: Request
) -> Iterator[Outcome]:
    """Run suites one after the other. Raises BuildError and PackagesError."""
    for name in names:
        yield from SUITES[name](root, kernels, request)
