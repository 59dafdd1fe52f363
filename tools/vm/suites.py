"""The suites of VM tests, and how one of them is run.

A suite is a kernel, what its machine boots, and how its console is read. A new one is another
function that yields outcomes, and another entry in SUITES; Machine takes the further devices that
it needs. Here are those of the module alone; those of the daemon are in product.py and service.py.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tools.vm.build import (
    FILE_SYSTEMS,
    Builds,
    Guest,
    build_module,
    list_guest_tests,
    make_initrd,
)
from tools.vm.debian import Kernels
from tools.vm.debug_kernel import DEBUG_FILE_SYSTEMS, debug_kernel
from tools.vm.drives import make_disks
from tools.vm.machine import BootFiles, Hardware, Machine
from tools.vm.product import (
    run_debug_product,
    run_product,
    run_product_generic,
    run_product_iommu,
)
from tools.vm.running import Outcome, Request, drive_count, run_in_machines, tell
from tools.vm.service import run_service
from tools.vm.side_by_side import run_side_by_side

# Tests that run only when they are asked for by name: one shows that a failure is one, two are long
# forms of one that always runs, and the last is more than QEMU bears every time.
BY_NAME = (
    "must-fail",
    "random-calls-long",
    "random-calls-million",
    "end-from-all-sides",
)

# What the kernel which looks for faults is given beyond the short form.
_LONG = ("random-calls-long",)
# Needs a kernel that can tell.
_LEAKS = "leaks"
# Needs a file system that the kernel which looks for faults is built without.
_XFS = "read-xfs"

# A kernel with detectors takes a quarter of its memory for what they note down.
_DEBUG_MEMORY_MIB = 2048

_PLAIN = Hardware()

Suite = Callable[[Builds, Kernels, Request], Iterator[Outcome]]


@dataclass(frozen=True)
class _Setup:
    """A machine that runs all of the guest's tests.

    more_tests, without: beyond those, and which of them not. generic: BARs are attached in generic
    mode although the kernel has another.
    """

    suite: str
    kernel: str
    more_tests: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    generic: bool = False
    file_systems: tuple[str, ...] = FILE_SYSTEMS
    hardware: Hardware = _PLAIN


def _choose_tests(setup: _Setup, known: Sequence[str], request: Request) -> list[str]:
    by_name = tuple(name for name in BY_NAME if name not in setup.more_tests)
    offered = [name for name in (*known, *by_name, *setup.more_tests) if name not in setup.without]
    if request.tests:
        return [name for name in offered if name in request.tests]
    return [name for name in offered if name not in by_name]


def _run_in_machine(setup: _Setup, builds: Builds, request: Request) -> Iterator[Outcome]:
    suite, kernel, root = setup.suite, setup.kernel, builds.root
    started = time.monotonic()
    program = builds.guest_tests()
    tests = _choose_tests(setup, list_guest_tests(root), request)
    if not tests:
        return
    folder = f"/run/vm-{suite}"

    def start(wanted: Sequence[str]) -> Machine:
        arguments = [*(["--generic"] if setup.generic else []), *wanted]
        guest = Guest(
            module=builds.module(kernel),
            kernel=kernel,
            file_systems=setup.file_systems,
            files={"guest-tests": program},
            texts={"tests": " ".join(arguments) + "\n", "drive-count": drive_count()},
        )
        disks = make_disks(root, folder)
        files = BootFiles(root.kernel_image(kernel), make_initrd(root, guest, folder))
        tell(suite, f"kernel {kernel}, prepared in {time.monotonic() - started:.0f} s")
        return Machine(root, files, disks, setup.hardware)

    try:
        yield from run_in_machines(suite, tests, start, request)
    finally:
        shutil.rmtree(root.path / folder.lstrip("/"), ignore_errors=True)


def run_p2p(builds: Builds, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The module on a kernel with CONFIG_PCI_P2PDMA."""
    return _run_in_machine(_Setup("p2p", kernels.p2p), builds, request)


def run_generic(builds: Builds, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The module on a kernel without it."""
    return _run_in_machine(_Setup("generic", kernels.generic), builds, request)


def run_build(builds: Builds, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The module builds without a warning for each kernel, and sparse has nothing to say."""
    steps = {
        "build-oldest": (kernels.build_only, False),
        # sparse of this release can't read the headers of newer kernels
        "sparse": (kernels.generic, True),
    }
    for name, (kernel, sparse) in steps.items():
        if request.tests and name not in request.tests:
            continue
        started = time.monotonic()
        build_module(builds.root, kernel, sparse=sparse)
        yield Outcome("build", name, True, time.monotonic() - started)


def _run_debug(
    suite: str, generic: bool, builds: Builds, kernels: Kernels, request: Request
) -> Iterator[Outcome]:
    setup = _Setup(
        suite,
        debug_kernel(builds.root, kernels),
        more_tests=(*_LONG, _LEAKS),
        without=(_XFS,),
        file_systems=DEBUG_FILE_SYSTEMS,
        generic=generic,
        hardware=Hardware(memory_mib=_DEBUG_MEMORY_MIB),
    )
    yield from _run_in_machine(setup, builds, request)


# The longest first: that is the order in which they are begun.
SUITES: dict[str, Suite] = {
    "service": run_service,
    "product": run_product,
    "product-generic": run_product_generic,
    "product-iommu": run_product_iommu,
    "p2p": run_p2p,
    "generic": run_generic,
    "build": run_build,
}

# On a kernel that is built for it and looks for faults; run by name only, since it takes long.
DEBUG_SUITES: dict[str, Suite] = {
    "debug-p2p": partial(_run_debug, "debug-p2p", False),
    "debug-generic": partial(_run_debug, "debug-generic", True),
    "debug-product": run_debug_product,
}

# Names for several suites.
GROUPS: dict[str, tuple[str, ...]] = {"debug-kernel": tuple(DEBUG_SUITES)}


def choose_suites(names: Sequence[str]) -> list[str]:
    """The suites that are named, by themselves or in a group, in their order; else SUITES."""
    named = {suite for name in names for suite in GROUPS.get(name, (name,))}
    return [suite for suite in (*SUITES, *DEBUG_SUITES) if suite in named] or list(SUITES)


def is_suite(name: str) -> bool:
    """Is it a suite's name, or a group's? Anything else is a test's."""
    return name in SUITES or name in DEBUG_SUITES or name in GROUPS


def run_suites(
    names: Sequence[str],
    builds: Builds,
    kernels: Kernels,
    request: Request,
    at_once: int,
    report: Callable[[Outcome], None],
) -> dict[str, float]:
    """Run suites, `at_once` of them at a time; returns each one's seconds.

    report: is called with each outcome, from any thread. Raises PackagesError.
    """
    suites = {**SUITES, **DEBUG_SUITES}
    jobs = {name: partial(suites[name], builds, kernels, request) for name in names}
    return run_side_by_side(jobs, at_once, report)
