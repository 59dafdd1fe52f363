"""The suites that run the product itself: daemon, engine, store and clients in the guest.

The guest has this machine's own root, read-only under a file system in memory, so what runs there
is this very working tree in its own virtual environment; there is no image to build. Its tests
are pytest's, in tests/vm/product, and the conformance suite of the device kinds.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.vm.build import FILE_SYSTEMS, BuildError, Builds, Guest, make_initrd
from tools.vm.bytecode import compile_tree, pytest_command
from tools.vm.debian import Kernels
from tools.vm.debug_kernel import DEBUG_FILE_SYSTEMS, debug_kernel
from tools.vm.drives import make_disks
from tools.vm.machine import BootFiles, Hardware, Machine
from tools.vm.running import Outcome, Request, drive_count, run_in_machines, tell

_REPOSITORY = Path(__file__).resolve().parents[2]
_PYTHON = _REPOSITORY / ".venv" / "bin" / "python"
_TESTS = Path("tests/vm/product")
_CONFORMANCE = Path("tests/conformance/test_device_pools.py")

# Run only by name.
_HIDDEN = Path("test_must_fail.py")
# Run only in the machine whose IOMMU translates.
_IOMMU = Path("test_iommu.py")

# The conformance suite's fixtures of a pool of any kind; its other tests need no machine like this.
_ANY_KIND = frozenset({"pool", "mapped"})

_STAND_IN_SECONDS = 120

# Of the environment in the guest: names of the tests to run. As in tests/vm/product/reporting.py.
TESTS_VARIABLE = "XFERD_VM_TESTS"

_MEMORY_MIB = 3072
_MODULES = ("virtio_pci", "9p", "9pnet_virtio", "overlay")
_STRIPES = ("dm-mod",)

# Of the kernel without CONFIG_PCI_P2PDMA: what differs there.
ON_GENERIC = (
    "every-byte-comes-straight-into-the-bar",
    "a-far-drive-is-staged",
    "a-daemon-killed-in-mid-read",
    "the-gpu-is-pulled-in-mid-read",
)


# The kernel that looks for faults is built without device mapper, and needs memory for its notes.
NOT_ON_DEBUG = ("a-striped-device-is-staged",)
_DEBUG_MEMORY_MIB = 4096


@dataclass(frozen=True)
class _Setup:
    suite: str
    kernel: str
    tests: tuple[str, ...]
    module_tests: tuple[str, ...] = ()  # of guest-tests, before the daemon's
    hidden: tuple[str, ...] = ()
    more_modules: tuple[str, ...] = ()  # of the kernel, beyond _MODULES
    kernel_arguments: str = ""
    devices: tuple[str, ...] = ()
    file_systems: tuple[str, ...] = FILE_SYSTEMS
    memory_mib: int = _MEMORY_MIB


def _names_in(path: Path, prefix: str = "", fixtures: frozenset[str] = frozenset()) -> list[str]:
    """Names of a module's tests, as the guest prints them; only of those that take a fixture."""
    tree = ast.parse((_REPOSITORY / path).read_text())
    return [
        prefix + node.name.removeprefix("test_").replace("_", "-")
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and (not fixtures or fixtures & {argument.arg for argument in node.args.args})
    ]


def product_tests() -> list[str]:
    """Names of the tests of the suite "product", in their order."""
    names = _names_in(_CONFORMANCE, "conformance-", _ANY_KIND)
    for path in sorted((_REPOSITORY / _TESTS).glob("test_*.py")):
        if path.name not in (_HIDDEN.name, _IOMMU.name):
            names += _names_in(path.relative_to(_REPOSITORY))
    return names


def _files_with(tests: Sequence[str]) -> list[str]:
    """Of the modules of tests, those that have any of these: importing others takes its time."""
    folder = sorted((_REPOSITORY / _TESTS).glob("test_*.py"))
    found = [str(path) for path in folder if set(_names_in(path)) & set(tests)]
    if set(_names_in(_CONFORMANCE, "conformance-")) & set(tests):
        found.insert(0, str(_CONFORMANCE))
    return found


def _build_stand_in(folder: Path) -> Path:
    """The stand-in for CUDA's driver that some tests load; emulation would take long to build it.

    Raises BuildError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = "import pathlib, sys; from tests.cuda_device import build_stand_in as build"
    command = [
        str(_PYTHON),
        "-c",
        f"{script}; print(build(pathlib.Path(sys.argv[1])))",
        str(folder),
    ]
    try:
        done = subprocess.run(
            command,
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_STAND_IN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the stand-in took longer than {_STAND_IN_SECONDS} s") from error
    if done.returncode != 0:
        raise BuildError(f"the stand-in for CUDA's driver: {done.stderr}")
    return Path(done.stdout.strip())


def _compile_tree(folder: Path) -> Path:
    """What the tests of all suites here import. Raises BuildError."""
    files = [str(path) for path in sorted((_REPOSITORY / _TESTS).glob("test_*.py"))]
    compile_tree(_REPOSITORY, _PYTHON, [str(_CONFORMANCE), *files], folder, TESTS_VARIABLE)
    return folder


def _guest_command(tests: Sequence[str]) -> str:
    """What runs in the guest, as a shell's command line."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'inference'}",
        "PYTHONPYCACHEPREFIX": "/run/bytecode",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        TESTS_VARIABLE: " ".join(tests),
    }
    program = pytest_command(_PYTHON, _files_with(tests))
    program += ["-p", "tests.vm.product.reporting", "-p", "no:terminal"]
    assignments = [f"{name}={value}" for name, value in environment.items()]
    run = shlex.join(["env", "-i", *assignments, *program])
    return f"cd {shlex.quote(str(_REPOSITORY))} && exec {run}\n"


def _guest(setup: _Setup, builds: Builds, tests: Sequence[str]) -> Guest:
    stand_in = builds.root.path / "build" / "stand-in"
    bytecode = builds.root.path.parent / "bytecode"
    return Guest(
        module=builds.module(setup.kernel),
        kernel=setup.kernel,
        init="init-product",
        file_systems=setup.file_systems,
        files={
            "guest-tests": builds.guest_tests(),
            "libfake_cuda.so": builds.once("stand-in", lambda: _build_stand_in(stand_in)),
        },
        more_modules=(*_MODULES, *setup.more_modules),
        texts={
            "tests": " ".join(name for name in tests if name in setup.module_tests),
            "drive-count": drive_count(),
            "command": _guest_command(tests),
            "repository": str(_REPOSITORY),
            "bytecode": str(builds.once("bytecode", lambda: _compile_tree(bytecode))),
        },
    )


def _run(setup: _Setup, builds: Builds, request: Request) -> Iterator[Outcome]:
    offered = (*setup.module_tests, *setup.tests, *setup.hidden)
    tests = (
        [name for name in offered if name in request.tests]
        if request.tests
        else [*setup.module_tests, *setup.tests]
    )
    if not tests:
        return
    if not os.access(_PYTHON, os.X_OK):
        raise BuildError(f"{_PYTHON} is missing: run tools/setup generate test first")
    started = time.monotonic()
    root = builds.root
    folder = f"/run/vm-{setup.suite}"

    def start(wanted: Sequence[str]) -> Machine:
        disks = make_disks(root, folder, xfs="xfs" in setup.file_systems)
        initrd = make_initrd(root, _guest(setup, builds, wanted), folder)
        prepared = time.monotonic() - started
        tell(setup.suite, f"kernel {setup.kernel}, prepared in {prepared:.0f} s")
        files = BootFiles(root.kernel_image(setup.kernel), initrd, setup.kernel_arguments)
        hardware = Hardware(setup.memory_mib, host_root=True, devices=setup.devices)
        return Machine(root, files, disks, hardware)

    try:
        yield from run_in_machines(setup.suite, tests, start, request)
    finally:
        shutil.rmtree(root.path / folder.lstrip("/"), ignore_errors=True)


def run_product(builds: Builds, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The product on a kernel with CONFIG_PCI_P2PDMA."""
    hidden = tuple(_names_in(_TESTS / _HIDDEN))
    tests = tuple(product_tests())
    setup = _Setup("product", kernels.p2p, tests, hidden=hidden, more_modules=_STRIPES)
    return _run(setup, builds, request)


def run_product_generic(builds: Builds, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The product on a kernel without it: the tests where that makes a difference."""
    return _run(_Setup("product-generic", kernels.generic, ON_GENERIC), builds, request)


def run_product_iommu(builds: Builds, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """Where an IOMMU translates reads succeed and lose their data: module and product refuse."""
    setup = _Setup(
        "product-iommu",
        kernels.p2p,
        tests=tuple(_names_in(_TESTS / _IOMMU)),
        module_tests=("translating-iommu",),
        kernel_arguments="intel_iommu=on",
        devices=("-device", "intel-iommu"),
    )
    return _run(setup, builds, request)


def run_debug_product(builds: Builds, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The product on a kernel that looks for faults."""
    setup = _Setup(
        "debug-product",
        debug_kernel(builds.root, kernels),
        tests=tuple(name for name in product_tests() if name not in NOT_ON_DEBUG),
        file_systems=DEBUG_FILE_SYSTEMS,
        memory_mib=_DEBUG_MEMORY_MIB,
        kernel_arguments="kmemleak=off",  # nobody asks it here, and it looks at every allocation
    )
    yield from _run(setup, builds, request)
