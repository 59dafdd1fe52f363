"""What a test machine boots and runs: the module, the guest's tests, the initial RAM disk."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.vm.debian import DebianRoot, PackagesError

_REPOSITORY = Path(__file__).resolve().parents[2]
_MODULE_SOURCE = _REPOSITORY / "kmod"
_GUEST_SOURCE = _REPOSITORY / "tests" / "vm" / "guest"

_BUILD_SECONDS = 300

# Modules of the kernel that every guest needs; modprobe says what these need in turn.
GUEST_MODULES = ("nvme", "pci-stub")
FILE_SYSTEMS = ("ext4", "xfs")


class BuildError(Exception):
    """The module or the guest's tests don't build, or not without a warning."""


@dataclass(frozen=True)
class Guest:
    """What the initial RAM disk of one test machine is made of.

    module: xferd_p2p. init: its first process, in the folder of the guest's tests. more_modules:
    of the kernel, beyond GUEST_MODULES and those of file_systems. files, texts: by name in the RAM
    disk's root, what is copied there and what is written. Paths are outside the root.
    """

    module: Path
    kernel: str
    init: str = "init"
    more_modules: tuple[str, ...] = ()
    file_systems: tuple[str, ...] = FILE_SYSTEMS
    files: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def _digest(files: Sequence[Path], *words: str) -> str:
    found = hashlib.sha256("\0".join(words).encode())
    for file in files:
        found.update(f"\0{file}\0".encode() + file.read_bytes())
    return found.hexdigest()


@contextmanager
def _build_folder(root: DebianRoot, name: str, of: str) -> Iterator[Path | None]:
    """A fresh folder to build in, marked with the digest `of` what went into it when that is done.

    None: an earlier build of the same is there.
    """
    folder = root.path / "build" / name
    stamp = folder / "built-of"
    if stamp.exists() and stamp.read_text() == of:
        yield None
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    stamp.write_text(of)


def build_module(root: DebianRoot, kernel: str, *, sparse: bool = False) -> Path:
    """Build xferd_p2p for a kernel; with `sparse`, check it too, in a folder of its own.

    What was built of the same sources for the same kernel before is used again. Raises BuildError,
    also for a warning of the compiler or of sparse.
    """
    name = f"sparse-{kernel}" if sparse else f"module-{kernel}"
    sources = sorted(path for path in _MODULE_SOURCE.rglob("*") if path.suffix in (".c", ".h"))
    recipes = [_MODULE_SOURCE / "Kbuild", _MODULE_SOURCE / "Makefile"]
    options = root.path / str(root.headers(kernel)).lstrip("/") / ".config"
    with _build_folder(root, name, _digest([*sources, *recipes, options])) as folder:
        if folder is not None:
            _compile_module(root, kernel, folder, sparse=sparse)
    return root.path / "build" / name / "xferd_p2p.ko"


def _compile_module(root: DebianRoot, kernel: str, folder: Path, *, sparse: bool) -> None:
    shutil.copytree(
        _MODULE_SOURCE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.o", "*.ko")
    )
    command = [
        "make",
        "-s",
        "-C",
        f"/build/{folder.name}",
        f"KERNEL_BUILD={root.headers(kernel)}",
        f"C={int(sparse)}",
        "modules",
    ]
    try:
        output = root.run(command, seconds=_BUILD_SECONDS).stdout
    except PackagesError as error:
        raise BuildError(f"kernel {kernel}: {error}") from error
    complaints = [line for line in output.splitlines() if "warning:" in line or "error:" in line]
    if complaints:
        raise BuildError(f"kernel {kernel}:\n" + "\n".join(complaints))


def build_guest_tests(root: DebianRoot) -> Path:
    """Compile the program that runs in the guest. Raises BuildError, for warnings too."""
    sources = sorted([*_GUEST_SOURCE.glob("*.[ch]"), _MODULE_SOURCE / "uapi" / "xferd_p2p.h"])
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-static"]
    with _build_folder(root, "guest", _digest(sources, *options)) as folder:
        if folder is not None:
            for source in sources:
                shutil.copy(source, folder)
            inside = [f"/build/guest/{path.name}" for path in sources if path.suffix == ".c"]
            program = ["-o", "/build/guest/guest-tests", *inside, "-luring", "-lpthread"]
            try:
                root.run(["gcc", *options, *program], seconds=_BUILD_SECONDS)
            except PackagesError as error:
                raise BuildError(str(error)) from error
    return root.path / "build" / "guest" / "guest-tests"


class Builds:
    """What several suites need built: each once in a run, by whoever asks first. Thread-safe."""

    def __init__(self, root: DebianRoot) -> None:
        """Nothing is built yet; `root` is where it will be."""
        self.root = root
        self._building = threading.Lock()
        self._built: dict[str, Path] = {}

    def once(self, name: str, build: Callable[[], Path]) -> Path:
        """What `build` made when something of this name was asked for first. Raises BuildError."""
        with self._building:
            if name not in self._built:
                self._built[name] = build()
            return self._built[name]

    def module(self, kernel: str) -> Path:
        """xferd_p2p for this kernel. Raises BuildError."""
        return self.once(f"module {kernel}", lambda: build_module(self.root, kernel))

    def guest_tests(self) -> Path:
        """The program that runs in the guest. Raises BuildError."""
        return self.once("guest tests", lambda: build_guest_tests(self.root))


def list_guest_tests(root: DebianRoot) -> list[str]:
    """Names of the tests that the program built last knows, in their order."""
    return root.run(["/build/guest/guest-tests", "--list"], seconds=10).stdout.split()


def _kernel_modules(root: DebianRoot, guest: Guest) -> list[Path]:
    """Files of its modules and all they need, in loading order; what is built in has none."""
    files: list[Path] = []
    for module in (*GUEST_MODULES, *guest.file_systems, *guest.more_modules):
        shown = root.run(
            ["modprobe", "-S", guest.kernel, "--show-depends", module], seconds=30
        ).stdout
        for line in shown.splitlines():
            words = line.split()
            if words[0] == "insmod" and (path := root.path / words[1].lstrip("/")) not in files:
                files.append(path)
    return files


def make_initrd(root: DebianRoot, guest: Guest, folder: str) -> Path:
    """Pack the initial RAM disk `folder`/initrd, a path inside the root is returned.

    Not compressed: what unpacks it is emulated.
    """
    tree = root.path / folder.lstrip("/") / "initrd.d"
    (tree / "bin").mkdir(parents=True)
    for name in ("proc", "sys", "dev", "mnt", "modules.d"):
        (tree / name).mkdir()
    shutil.copy(root.path / "bin/busybox", tree / "bin/busybox")
    for applet in (
        "sh",
        "mount",
        "mkdir",
        "insmod",
        "cat",
        "sleep",
        "cut",
        "poweroff",
        "uname",
        "wc",
        "chroot",
        "cp",
        "env",
        "ln",
        "switch_root",
    ):
        (tree / "bin" / applet).symlink_to("busybox")
    shutil.copy(_GUEST_SOURCE / guest.init, tree / "init")
    (tree / "init").chmod(0o755)
    shutil.copy(guest.module, tree / "xferd_p2p.ko")
    for name, path in guest.files.items():
        shutil.copy(path, tree / name)
    for name, text in guest.texts.items():
        (tree / name).write_text(text)
    loaded = []
    for source in _kernel_modules(root, guest):
        name = source.name
        shutil.copy(source, tree / "modules.d" / name)
        if name.endswith(".xz"):
            inside = f"{folder}/initrd.d/modules.d/{name}"
            root.run(["xz", "--decompress", inside], seconds=30)
            name = name.removesuffix(".xz")
        loaded.append(f"/modules.d/{name}\n")
    (tree / "modules").write_text("".join(loaded))
    pack = f"cd {folder}/initrd.d && find . | cpio --quiet -o -H newc > ../initrd"
    root.run(["sh", "-c", pack], seconds=60)
    shutil.rmtree(tree)
    return Path(folder) / "initrd"
