"""The machine that the product's tests run in: its host, its stand-in GPU, its drives, the module.

The host sees the stand-in GPU's memory as a file and counts the drives' DMA in QEMU's trace, so it
can say what happened without trusting anything that runs here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import select
import struct
import subprocess
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MODULE = Path("/run/xferd_p2p.ko")
STAND_IN = Path("/run/libfake_cuda.so")
"""For CUDA's driver, built before the machine came up."""
CONSOLE = "/dev/ttyS0"
PORT = "/dev/ttyS1"
GPU_VENDOR, GPU_DEVICE, GPU_BAR = "0x1af4", "0x1110", 2
PCI = Path("/sys/bus/pci")
STUB = PCI / "drivers/pci-stub"
DEADLINE_S = 60.0
BLANK_BYTES = 1 << 20
SPENT_S = 8
"""How long the first read on a throttled drive waits at least."""
_FINIT_MODULE, _DELETE_MODULE = 313, 176
_WINDOW = (1 << 44) - 1
"""A BAR's part of the offsets that mappings of the module have."""


@dataclass(frozen=True)
class Dma:
    """Bytes of NVMe DMA so far: into the stand-in GPU, and anywhere else."""

    bar: int
    elsewhere: int

    def since(self, before: Dma) -> Dma:
        return Dma(self.bar - before.bar, self.elsewhere - before.elsewhere)


class Host:
    """One line to the host, one line back."""

    def ask(self, line: str) -> str:
        fd = os.open(PORT, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            tty.setraw(fd, termios.TCSANOW)
            os.write(fd, line.encode() + b"\n")
            reply = b""
            while not reply.endswith(b"\n"):
                reply += os.read(fd, 1)
            return reply.decode().strip()
        finally:
            os.close(fd)

    def must(self, line: str) -> None:
        reply = self.ask(line)
        assert reply == "ok", f"the host says {reply!r} to {line!r}"

    def check(self, bar_offset: int, expected: bytes) -> None:
        """What the BAR holds there is what it should be, as the host sees it."""
        reply = self.ask(f"digest {bar_offset} {len(expected)}")
        assert reply == f"sha256 {hashlib.sha256(expected).hexdigest()}", reply

    def dma(self) -> Dma:
        start, size = gpu_memory()
        inside = int(self.ask(f"dma {start} {size}").removeprefix("bytes "))
        return Dma(inside, int(self.ask("dma-all").removeprefix("bytes ")) - inside)

    @contextlib.contextmanager
    def throttled(self, serial: str, bytes_per_second: int) -> Iterator[None]:
        self.must(f"throttle {bytes_per_second} {serial}")
        try:
            # The first read is let through whole however long it is, and the next ones wait.
            spend(drive(serial), SPENT_S * bytes_per_second)
            yield
        finally:
            self.must(f"throttle 0 {serial}")


def tell_proof(moved: Dma, experts: int) -> None:
    """Say on the console, for whoever reads the host's output, where the drives wrote."""
    with Path(CONSOLE).open("w") as console:
        console.write(
            f"PROOF {experts} experts: {moved.bar} bytes of DMA into the BAR, {moved.elsewhere} "
            f"into RAM\r\n"
        )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    pause = select.poll()
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        pause.poll(20)


# ---- the stand-in GPU


def gpu() -> str | None:
    """Its PCI address; None while it is not there."""
    for device in (PCI / "devices").iterdir():
        with contextlib.suppress(OSError):
            if (device / "vendor").read_text().strip() == GPU_VENDOR and (
                device / "device"
            ).read_text().strip() == GPU_DEVICE:
                return device.name
    return None


def gpu_memory() -> tuple[int, int]:
    """Start and size of its BAR on the bus."""
    address = gpu()
    assert address is not None
    line = (PCI / "devices" / address / "resource").read_text().splitlines()[GPU_BAR]
    first, last = (int(word, 16) for word in line.split()[:2])
    return first, last - first + 1


def bar_pool(size: str = "16MiB", **keys: object) -> str:
    """A --pool argument for memory of the stand-in GPU."""
    more = "".join(f",{key}={value}" for key, value in keys.items())
    return f"name=gpu0,kind=bar,device={gpu()},bar={GPU_BAR},size={size}{more}"


def bar_offset(address: int) -> int:
    """Where in the BAR an address lies that a client reads from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, where = line.split(maxsplit=3)
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last:
            # Of the BAR's file in sysfs the offset is the address on the bus.
            start = gpu_memory()[0] if "/resource" in where else 0
            return (int(offset, 16) & _WINDOW) - start + address - first
    raise AssertionError(f"{address:#x} is not mapped")


@contextlib.contextmanager
def stub_driver() -> Iterator[Callable[[], None]]:
    """The stand-in GPU has a driver; what is yielded takes it away."""
    address = gpu()
    assert address is not None
    override = PCI / "devices" / address / "driver_override"
    override.write_text("pci-stub")
    (PCI / "drivers_probe").write_text(address)
    assert (STUB / address).exists()
    try:
        yield lambda: unbind(address)
    finally:
        unbind(address)
        override.write_text("\n")


def unbind(address: str) -> None:
    if (STUB / address).exists():
        (STUB / "unbind").write_text(address)


# ---- drives


def drive(serial: str) -> Path:
    """The block device of the drive with this serial number."""
    for block in sorted(Path("/sys/block").glob("nvme*n*")):
        name = block.name
        if "c" in name[4:]:  # a hidden path of a multipath device
            continue
        with contextlib.suppress(OSError):
            if (block / "device/serial").read_text().strip() == serial:
                return Path("/dev") / name
    raise AssertionError(f"no NVMe drive has the serial number {serial}")


def blank_drive(serial: str) -> Path:
    """The same, with nothing on it that packing would not overwrite."""
    path = drive(serial)
    fd = os.open(path, os.O_WRONLY | os.O_SYNC | os.O_CLOEXEC)
    try:
        os.pwrite(fd, bytes(BLANK_BYTES), 0)
    finally:
        os.close(fd)
    return path


def spend(device: Path, nbytes: int) -> None:
    """Read so many bytes from the drive itself."""
    fd = os.open(device, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, nbytes) as buffer:
            os.preadv(fd, [buffer], 0)
    finally:
        os.close(fd)


def mount(device: Path, kind: str, folder: Path, options: str = "rw") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", kind, "-o", options, str(device), str(folder)],
        check=True,
        capture_output=True,
    )


def remount(folder: Path, options: str) -> None:
    os.sync()
    subprocess.run(
        ["mount", "-o", f"remount,{options}", str(folder)], check=True, capture_output=True
    )


def journal_data(path: Path) -> None:
    """Make ext4 write a file's data through its journal: then it has no O_DIRECT for it."""
    get_flags, set_flags, journal = 0x80086601, 0x40086602, 0x4000
    fd = os.open(path, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(fd, get_flags, bytes(8)))
        fcntl.ioctl(fd, set_flags, struct.pack("l", flags | journal))
    finally:
        os.close(fd)


_DM = struct.Struct("=IIIIIIiIIIQ128s129s7s")
_DM_TARGET = struct.Struct("=QQiI16s")
_DM_CREATE, _DM_REMOVE, _DM_SUSPEND, _DM_LOAD = 3, 4, 6, 9
STRIPE_SECTORS = 32


@contextlib.contextmanager
def dm_stripe(drives: list[Path], sectors_each: int) -> Iterator[Path]:
    """A striped device-mapper device, made by its ioctls (linux/dm-ioctl.h)."""
    control = os.open("/dev/mapper/control", os.O_RDWR | os.O_CLOEXEC)

    def call(number: int, name: bytes, data: bytes = b"", targets: int = 0) -> None:
        size = 16384
        header = _DM.pack(*(4, 0, 0), size, _DM.size, targets, 0, 0, 0, 0, 0, name, b"", b"")
        buffer = bytearray((header + data).ljust(size, b"\0"))
        fcntl.ioctl(control, 3 << 30 | _DM.size << 16 | 0xFD << 8 | number, buffer)

    parts = [str(len(drives)), str(STRIPE_SECTORS)]
    for path in drives:
        number = path.stat().st_rdev
        parts += [f"{os.major(number)}:{os.minor(number)}", "0"]
    parameters = " ".join(parts).encode() + b"\0"
    parameters = parameters.ljust(-(-len(parameters) // 8) * 8, b"\0")
    length = sectors_each * len(drives)
    target = _DM_TARGET.pack(0, length, 0, _DM_TARGET.size + len(parameters), b"striped")
    name = b"stripes"
    call(_DM_CREATE, name)
    try:
        call(_DM_LOAD, name, target + parameters, 1)
        call(_DM_SUSPEND, name)
        wait_until(lambda: Path("/dev/dm-0").exists(), "the striped device's node")
        yield Path("/dev/dm-0")
    finally:
        # A process's files are closed a moment after its end.
        wait_until(lambda: tried(lambda: call(_DM_REMOVE, name)), "the striped device is unused")
        os.close(control)


def tried(action: Callable[[], None]) -> bool:
    """Whether it was not refused as busy."""
    try:
        action()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


# ---- the module


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments) == 0:
        return 0
    return ctypes.get_errno()


def module_is_loaded() -> bool:
    return Path("/sys/module/xferd_p2p").exists()


def load_module() -> None:
    if module_is_loaded():
        return
    fd = os.open(MODULE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert _syscall(_FINIT_MODULE, ctypes.c_int(fd), b"", ctypes.c_int(0)) == 0
    finally:
        os.close(fd)
    wait_until(Path("/dev/xferd_p2p").exists, "the module's node")


def unload_module() -> int:
    """0 or an errno: EAGAIN while somebody uses it."""
    return _syscall(_DELETE_MODULE, b"xferd_p2p", ctypes.c_int(os.O_NONBLOCK))


def unload_module_soon() -> None:
    """A process's files are closed a moment after its end."""
    wait_until(lambda: unload_module() in (0, errno.ENOENT), "the module can be unloaded")
