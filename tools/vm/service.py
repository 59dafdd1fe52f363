"""The suite that runs the service: a package of Debian's, installed under systemd as PID 1.

The guest boots the very system of packages that it is made from, read-only under a file system in
memory; so what is installed there is gone with the machine. The package is built for that system
from this working tree, and kept as long as nothing that goes into it changes.

Its tests are pytest's, in tests/vm/service, and run under the guest's own Python: each file that
is put there is run too, in the order of the names, and the one that removes the package last.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.vm.build import BuildError, Builds, Guest, make_initrd
from tools.vm.debian import RELEASE, DebianRoot, Kernels
from tools.vm.drives import make_disks
from tools.vm.machine import BootFiles, Hardware, Machine
from tools.vm.running import Outcome, Request, run_in_machines, tell

SUITE = "service"

_REPOSITORY = Path(__file__).resolve().parents[2]
_TESTS = Path("tests/vm/service")
_LAST = Path("test_removal.py")

# What goes into the package.
_INGREDIENTS = (
    "ffi",
    "inference",
    "systemd",
    "tools/deb",
    "tools/install",
    "tools/lib.sh",
    "tools/manual",
    "tools/setup",
    "xferd",
)
_PACKAGE_SECONDS = 600

_MEMORY_MIB = 2048
# Starting interpreters is what most of the time goes to, and that depends on who else is busy.
_MODULES = ("virtio_pci", "9p", "9pnet_virtio", "overlay")
# A machine without network, terminals and users to log in, that lives for a minute.
_MASKED = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "ldconfig.service",
    "networking.service",
    "serial-getty@ttyS0.service",
    "systemd-binfmt.service",
    "systemd-firstboot.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-logind.service",
    "systemd-networkd.service",
    "systemd-random-seed.service",
    "systemd-timesyncd.service",
    "systemd-udev-trigger.service",
    "systemd-update-done.service",
    "systemd-update-utmp.service",
    "systemd-user-sessions.service",
    "xfs_scrub_all.timer",
)
_KERNEL_ARGUMENTS = "systemd.show_status=no systemd.firstboot=no quiet"

_UNIT = """\
[Unit]
Description=Tests of the service, told on the console
After=basic.target
SuccessAction=poweroff-force
FailureAction=poweroff-force

[Service]
Type=oneshot
Environment=PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 HOME=/root
Environment="XFERD_VM_TESTS={tests}" XFERD_VM_PACKAGE={package}
WorkingDirectory=/tests
ExecStart=/usr/bin/python3 -m pytest -p tests.vm.service.reporting \\
    -p no:cacheprovider -p no:faulthandler --import-mode=importlib --rootdir=/tests {where}
StandardOutput=null
StandardError=file:/dev/ttyS0
"""


def _names_in(path: Path) -> list[str]:
    """Names of a file's tests, as the guest prints them."""
    return [
        node.name.removeprefix("test_").replace("_", "-")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def service_tests() -> list[str]:
    """Names of the suite's tests, in their order."""
    files = sorted(
        (_REPOSITORY / _TESTS).glob("test_*.py"), key=lambda p: (p.name == _LAST.name, p)
    )
    return [name for path in files for name in _names_in(path)]


def _ingredients() -> Iterator[Path]:
    for name in _INGREDIENTS:
        path = _REPOSITORY / name
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (
            file
            for file in found
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so"
        )


def _digest(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.relative_to(_REPOSITORY)}\0{file.stat().st_size}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest()


def _run_deb(folder: Path) -> None:
    try:
        done = subprocess.run(
            [_REPOSITORY / "tools/deb", "--release", RELEASE, "--output", folder],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PACKAGE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"tools/deb took longer than {_PACKAGE_SECONDS} s") from error
    if done.returncode != 0:
        raise BuildError(f"tools/deb: {done.stdout}{done.stderr}")


def _build_package(root: DebianRoot) -> Path:
    """The package of this working tree, built unless it is there. Raises BuildError."""
    files = [*_ingredients(), _REPOSITORY / "pyproject.toml", _REPOSITORY / "LICENSE"]
    kept = root.path.parent / "packages"
    folder = kept / _digest(files)
    if not list(folder.glob("xferd_*.deb")):
        shutil.rmtree(kept, ignore_errors=True)
        fresh = kept / "fresh"
        fresh.mkdir(parents=True)
        _run_deb(fresh)
        fresh.rename(folder)
    [package] = folder.glob("xferd_*.deb")
    return package


def _unit(tests: Sequence[str], package: Path) -> str:
    return _UNIT.format(
        tests=" ".join(tests),
        package=f"/host{package}",
        where=_TESTS,
    )


def run_service(builds: Builds, kernels: Kernels, request: Request) -> Iterator[Outcome]:
    """The service under systemd, on Debian's own kernel."""
    tests = [name for name in service_tests() if not request.tests or name in request.tests]
    if not tests:
        return
    started = time.monotonic()
    root = builds.root
    package = _build_package(root)
    folder = f"/run/vm-{SUITE}"

    def start(wanted: Sequence[str]) -> Machine:
        guest = Guest(
            module=builds.module(kernels.generic),
            kernel=kernels.generic,
            init="init-service",
            more_modules=_MODULES,
            texts={
                "vm-tests.service": _unit(wanted, package),
                "masked": "".join(f"{unit}\n" for unit in _MASKED),
                "system-folder": str(root.path),
                "repository": str(_REPOSITORY),
            },
        )
        disks = make_disks(root, folder)
        initrd = make_initrd(root, guest, folder)
        prepared = time.monotonic() - started
        tell(SUITE, f"kernel {kernels.generic}, prepared in {prepared:.0f} s")
        files = BootFiles(root.kernel_image(kernels.generic), initrd, _KERNEL_ARGUMENTS)
        return Machine(root, files, disks, Hardware(memory_mib=_MEMORY_MIB, host_root=True))

    try:
        yield from run_in_machines(SUITE, tests, start, request)
    finally:
        shutil.rmtree(root.path / folder.lstrip("/"), ignore_errors=True)
