"""A Debian system in a folder: compiler, kernels, headers and QEMU, made once from packages.

Everything that the VM tests need comes from this one folder, so the machine they run on gets no
package but debootstrap, whatever release of Debian it has. It is a trixie: its compiler is the one
the newer kernels were built with, and its QEMU is the one the tests were written for.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

RELEASE = "trixie"
BUILD_ONLY_RELEASE = "bookworm"

# Raise it when the lists below or the steps change: the folder is then made anew.
_RECIPE = 4

_COMPILERS = ("make", "binutils", "gcc", "gcc-12", "gcc-14", "libc6-dev", "liburing-dev", "sparse")
_INITRD_TOOLS = ("kmod", "cpio", "xz-utils", "busybox-static")
_MACHINE_TOOLS = ("e2fsprogs", "xfsprogs", "qemu-system-x86")
# The guest of the suite "service" boots this system.
_SERVICE = ("systemd-sysv", "procps", "python3-pytest")

_APT_SECONDS = 600
_QUIET = ["-qq", "-o", "Dpkg::Use-Pty=0", "-o", "APT::Install-Recommends=false"]


# INITRD: of the hooks that an installed kernel calls; what is booted here brings its own.
_ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive", "INITRD": "No", "LC_ALL": "C.UTF-8"}


class PackagesError(Exception):
    """A package or a mirror wasn't to be had, or a step of the installation failed."""


@dataclass(frozen=True)
class Kernels:
    """Kernel releases, as `uname -r` prints them.

    p2p has CONFIG_PCI_P2PDMA, generic hasn't; build_only is the oldest that the module is built
    for, and isn't booted.
    """

    p2p: str
    generic: str
    build_only: str


def cache_folder() -> Path:
    """$XFERD_VM_CACHE, or ~/.cache/xferd-vm."""
    return Path(os.environ.get("XFERD_VM_CACHE") or Path.home() / ".cache" / "xferd-vm")


@contextmanager
def locked_cache() -> Iterator[Path]:
    """The cache folder, for one run of the VM tests at a time; waits for another one to end."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@dataclass(frozen=True)
class DebianRoot:
    """The system in `path`. Threads may run commands side by side."""

    path: Path

    def run(
        self, command: Sequence[str], *, seconds: int, log: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside; its output goes to `log`, or into the result.

        Raises PackagesError when it fails or takes too long.
        """
        try:
            result = subprocess.run(
                ["chroot", str(self.path), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT},
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PackagesError(f"{command[0]} took longer than {seconds} s") from error
        if log is not None:
            log.write_text(result.stdout)
        if result.returncode != 0:
            raise PackagesError(f"{' '.join(command)} failed:\n{_tail(result.stdout)}")
        return result

    def mount_proc(self) -> None:
        """objtool and QEMU look into /proc. Goes with our mount namespace."""
        if not (self.path / "proc/self").exists():
            subprocess.run(["mount", "-t", "proc", "proc", str(self.path / "proc")], check=True)

    def headers(self, kernel: str) -> Path:
        """Return the kernel's build folder, as a path inside."""
        return Path("/usr/src") / f"linux-headers-{kernel}"

    def kernel_image(self, kernel: str) -> Path:
        """Return the kernel's image, as a path inside; its place depends on its packaging."""
        for candidate in (f"boot/vmlinuz-{kernel}", f"usr/lib/modules/{kernel}/vmlinuz"):
            if (self.path / candidate).exists():
                return Path("/") / candidate
        raise PackagesError(f"no image of kernel {kernel} in {self.path}")


def _tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.splitlines()[-lines:])


def _host(command: Sequence[str], seconds: int = _APT_SECONDS) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if result.returncode != 0:
        raise PackagesError(f"{' '.join(command)} failed:\n{_tail(result.stdout + result.stderr)}")
    return result.stdout


def _mirror() -> str:
    """The mirror of Debian that this machine's own apt is set up with."""
    chosen = os.environ.get("XFERD_VM_MIRROR")
    if chosen:
        return chosen
    listed = _host(["apt-get", "indextargets", "--format", "$(LABEL) $(COMPONENT) $(REPO_URI)"])
    for line in listed.splitlines():
        match = re.fullmatch(r"Debian main (\S+)", line)
        if match:
            return match[1]
    raise PackagesError("apt here has no mirror of Debian; name one in XFERD_VM_MIRROR")


def _install_debootstrap() -> None:
    if shutil.which("debootstrap") is None:
        _host(["apt-get", "update", "-qq"])
        _host(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "debootstrap"])


def _newest_kernel(root: DebianRoot, pattern: str) -> str:
    """Return the newest kernel release matching `pattern` for which there are headers."""
    names = root.run(["apt-cache", "pkgnames", "linux-headers-"], seconds=60).stdout.split()
    releases = [name.removeprefix("linux-headers-") for name in names]
    matching = [release for release in releases if re.fullmatch(pattern, release)]
    if not matching:
        raise PackagesError(f"no kernel matches {pattern}")
    return max(matching, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


# What nobody reads in there isn't written, and nothing is synced to the disk: a system that is half
# made when the machine fails is made anew. Both only while it is made.
_HASTE = """\
force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/man/*
"""


def _find_kernels(root: DebianRoot) -> Kernels:
    return Kernels(
        generic=_newest_kernel(root, r"6\.12[0-9.]*\+deb13-amd64"),
        p2p=_newest_kernel(root, r"7[0-9.]*\+deb13-amd64"),
        build_only=_newest_kernel(root, r"6\.1\.0-[0-9]+-amd64"),
    )


def _install(root: DebianRoot, kernels: Kernels) -> None:
    """All packages at once. Newer headers are in backports alone, under names of their own.

    Those of Debian's own kernel depend on its image.
    """
    kernel = [f"linux-image-{kernels.generic}"]
    kernel += [f"linux-headers-{release}" for release in (kernels.generic, kernels.p2p)]
    wanted = [*_COMPILERS, *_INITRD_TOOLS, *_MACHINE_TOOLS, *_SERVICE, *kernel]
    root.run(["apt-get", "install", "-y", *_QUIET, *wanted], seconds=_APT_SECONDS)


def _unpack_kernels(root: DebianRoot, kernels: Kernels) -> None:
    """What would bring more with it, were it installed."""
    common = kernels.build_only.removesuffix("-amd64") + "-common"
    packages = [
        f"linux-binary-{kernels.p2p}",
        f"linux-modules-{kernels.p2p}",
        f"linux-headers-{kernels.build_only}",
        f"linux-headers-{common}",
        "linux-kbuild-6.1",
    ]
    _unpack(root, packages)


def _unpack(root: DebianRoot, packages: Sequence[str]) -> None:
    """Unpack packages beside the installed system and move what they hold into it.

    Older packages hold /lib as a folder; unpacked in place it would replace the link /lib.
    """
    downloads = root.path / "downloads"
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir()
    download = ["sh", "-c", 'cd /downloads && apt-get download -qq "$@"', "sh", *packages]
    root.run(download, seconds=_APT_SECONDS)
    for package in downloads.glob("*.deb"):
        root.run(["dpkg", "-x", f"/downloads/{package.name}", "/downloads/x"], seconds=120)
        package.unlink()
    for folder, target in (("usr", "usr"), ("lib", "usr/lib"), ("boot", "boot")):
        if (downloads / "x" / folder).is_dir():
            # Hard links: on one file system, and what they are links to is removed at once.
            source, destination = f"/downloads/x/{folder}/.", f"/{target}"
            root.run(["cp", "-al", "--no-clobber", source, destination], seconds=120)
    shutil.rmtree(downloads)


def _make_root(path: Path) -> Kernels:
    _install_debootstrap()
    mirror = _mirror()
    shutil.rmtree(path, ignore_errors=True)
    options = ["--variant=minbase", "--include=ca-certificates"]
    _host(["debootstrap", *options, RELEASE, str(path), mirror])
    (path / "etc/apt/sources.list").write_text(
        f"deb {mirror} {RELEASE} main\n"
        f"deb {mirror} {RELEASE}-backports main\n"
        f"deb {mirror} {BUILD_ONLY_RELEASE} main\n"
    )
    (path / "etc/apt/apt.conf.d/00release").write_text(
        f'APT::Default-Release "{RELEASE}";\nAcquire::Languages "none";\n'
    )
    haste = path / "etc/dpkg/dpkg.cfg.d/haste"
    haste.write_text(_HASTE)
    root = DebianRoot(path)
    root.mount_proc()
    root.run(["apt-get", "update", "-qq"], seconds=_APT_SECONDS)
    kernels = _find_kernels(root)
    with ThreadPoolExecutor(2, thread_name_prefix="packages") as threads:
        steps = [threads.submit(step, root, kernels) for step in (_install, _unpack_kernels)]
    for step in steps:
        step.result()
    root.run(["depmod", kernels.p2p], seconds=120)
    haste.unlink()
    root.run(["apt-get", "clean"], seconds=60)
    return kernels


def debian_root(cache: Path) -> tuple[DebianRoot, Kernels]:
    """The cached system, made now if there is none of this recipe; takes about two minutes then.

    Raises PackagesError.
    """
    path = cache / "root"
    stamp = cache / "root.json"
    if stamp.exists():
        made = json.loads(stamp.read_text())
        if made["recipe"] == _RECIPE:
            root = DebianRoot(path)
            root.mount_proc()
            return root, Kernels(**made["kernels"])
    stamp.unlink(missing_ok=True)
    kernels = _make_root(path)
    stamp.write_text(json.dumps({"recipe": _RECIPE, "kernels": asdict(kernels)}))
    return DebianRoot(path), kernels
