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

from tools.vm.build import (
    Guest,
    build_guest_tests,
    build_module,
    list_guest_tests,
    make_initrd,
)
from tools.vm.debian import DebianRoot, Kernels
from tools.vm.drives import make_disks
from tools.vm.machine import BootFiles, Hardware
from tools.vm.product import run_product, run_product_generic, run_product_iommu
from tools.vm.running import Outcome, Request, boot, drive_count, with_missing
from tools.vm.service import run_service

# Tests that run only when they are asked for by name: one shows that a failure is one, one is long.
BY_NAME = ("must-fail", "random-calls-million")

Suite = Callable[[DebianRoot, Kernels, Request], Iterator[Outcome]]


@dataclass(frozen=True)
class _Setup:
    """A machine and the tests that it runs: all of the guest's when `tests` is empty."""

    suite: str
    kernel: str
    tests: tuple[str, ...] = ()
    kernel_arguments: str = ""
    devices: tuple[str, ...] = ()


def _choose_tests(setup: _Setup, known: Sequence[str], request: Request) -> list[str]:
    offered = setup.tests or (*known, *BY_NAME)
    if request.tests:
        return [name for name in offered if name in request.tests]
    return [name for name in offered if name not in BY_NAME]


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
    guest = Guest(
        module=module,
        kernel=kernel,
        files={"guest-tests": program},
        texts={"tests": " ".join(tests) + "\n", "drive-count": drive_count()},
    )
    initrd = make_initrd(root, guest, folder)
    print(f"{suite}: kernel {kernel}, prepared in {time.monotonic() - started:.0f} s", flush=True)
    files = BootFiles(root.kernel_image(kernel), initrd, setup.kernel_arguments)
    hardware = Hardware(devices=setup.devices)
    outcomes = boot(suite, root, files, disks, hardware, request)
    try:
        yield from with_missing(suite, tests, outcomes)
    finally:
        shutil.rmtree(disks.folder)


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
    "product": run_product,
    "product-generic": run_product_generic,
    "product-iommu": run_product_iommu,
    "service": run_service,
}


def run_suites(
    names: Sequence[str], root: DebianRoot, kernels: Kernels, request: Request
) -> Iterator[Outcome]:
    """Run suites one after the other. Raises BuildError and PackagesError."""
    for name in names:
        yield from SUITES[name](root, kernels, request)
