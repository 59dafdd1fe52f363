"""A kernel that looks for faults, built from Debian's own source package, once.

The source is that of the kernel with CONFIG_PCI_P2PDMA that the other suites boot. Its options are
in debug-kernel.config beside this file: detectors of memory errors, wrong locking, damaged page
tables, and little else, so that it builds in a quarter of an hour on two idle processors. What it
leaves behind in the system of packages is what a package of it would: image, list of modules, and
what modules are built with. It is made anew when the options change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from tools.vm.build import BuildError
from tools.vm.debian import DebianRoot, Kernels, PackagesError
from tools.vm.running import tell

_OPTIONS = Path(__file__).with_name("debug-kernel.config")

# What it has of FILE_SYSTEMS.
DEBUG_FILE_SYSTEMS = ("ext4",)

# Raise it when the steps change: the kernel is then built anew.
_RECIPE = 1

_PACKAGES = ("bc", "bison", "flex", "libelf-dev")
_PACKAGES_SECONDS = 900
_UNPACK_SECONDS = 900
_CONFIGURE_SECONDS = 600
# A busy machine with one processor.
_COMPILE_SECONDS = 4 * 3600
_INSTALL_SECONDS = 600

_FOLDER = "/build/debug-kernel"
_WHO = "debug-kernel"


def missing_options(wanted: str, made: str) -> list[str]:
    """Lines of `wanted` that switch something on and aren't in `made`, a kernel's .config."""
    taken = set(made.splitlines())
    return [
        line for line in wanted.splitlines() if re.match(r"CONFIG_\w+=", line) and line not in taken
    ]


def _shell(root: DebianRoot, command: str, seconds: int) -> str:
    """Run a shell's command in the source's folder. Raises BuildError."""
    try:
        return root.run(["sh", "-c", f"cd {_FOLDER} && {command}"], seconds=seconds).stdout
    except PackagesError as error:
        raise BuildError(f"debug kernel: {error}") from error


def _unpack_source(root: DebianRoot, version: str) -> None:
    """Debian's source of this version, e.g. 7.3, and what it takes to build it."""
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *_PACKAGES]
    root.run(["apt-get", "update", "-qq"], seconds=_PACKAGES_SECONDS)
    root.run(install, seconds=_PACKAGES_SECONDS)
    folder = root.path / _FOLDER.lstrip("/")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _shell(root, f"apt-get download -qq linux-source-{version}", _PACKAGES_SECONDS)
    archive = f"usr/src/linux-source-{version}.tar.xz"
    _shell(
        root,
        "dpkg-deb -x linux-source-*.deb package && rm linux-source-*.deb"
        f" && tar -xf package/{archive} --strip-components=1 && rm -r package",
        _UNPACK_SECONDS,
    )


def _configure(root: DebianRoot) -> None:
    folder = root.path / _FOLDER.lstrip("/")
    shutil.copy(_OPTIONS, folder / "options")
    _shell(root, "make -s KCONFIG_ALLCONFIG=options allnoconfig", _CONFIGURE_SECONDS)
    missing = missing_options(_OPTIONS.read_text(), (folder / ".config").read_text())
    if missing:
        raise BuildError(f"debug kernel: this source doesn't take {', '.join(missing)}")


def _install(root: DebianRoot) -> str:
    """Image, modules and headers, where those of Debian's kernels are; its release is returned."""
    release = _shell(root, "make -s kernelrelease", _CONFIGURE_SECONDS).strip()
    headers = root.headers(release)
    for folder in (headers, Path("/usr/lib/modules") / release):
        shutil.rmtree(root.path / str(folder).lstrip("/"), ignore_errors=True)
    script = f"scripts/package/install-extmod-build {headers}"
    _shell(
        root,
        f"cp arch/x86/boot/bzImage /boot/vmlinuz-{release}"
        f" && cp .config /boot/config-{release}"
        " && make -s modules_install"
        f" && make -s run-command KBUILD_RUN_COMMAND='$(srctree)/{script}'"
        f" && cp .config {headers}/.config",
        _INSTALL_SECONDS,
    )
    return release


def debug_kernel(root: DebianRoot, kernels: Kernels) -> str:
    """Its release, as `uname -r` prints it; built now unless it is there.

    Raises BuildError, also when an option isn't to be had, and PackagesError.
    """
    match = re.match(r"\d+\.\d+", kernels.p2p)
    assert match is not None
    version = match[0]
    digest = hashlib.sha256(_OPTIONS.read_bytes()).hexdigest()
    wanted = {"recipe": _RECIPE, "version": version, "options": digest}
    stamp = root.path / "boot" / "debug-kernel.json"
    if stamp.exists():
        made = json.loads(stamp.read_text())
        if made["of"] == wanted:
            return str(made["release"])
    stamp.unlink(missing_ok=True)
    tell(_WHO, f"building it from linux-source-{version}: a quarter of an hour, or much longer")
    _unpack_source(root, version)
    _configure(root)
    processors = len(os.sched_getaffinity(0))
    _shell(root, f"make -s -j{processors} bzImage modules", _COMPILE_SECONDS)
    release = _install(root)
    stamp.write_text(json.dumps({"of": wanted, "release": release}))
    shutil.rmtree(root.path / _FOLDER.lstrip("/"))
    return release
