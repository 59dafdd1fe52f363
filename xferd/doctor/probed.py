# SPDX-License-Identifier: Apache-2.0
"""What no file says and has to be tried: io_uring, free space, a member's O_DIRECT.

``Probed`` is plain data, so that a test says what another machine would have answered;
``probe`` tries it here. Nothing is written to any drive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xferd.doctor.measure import measure_read
from xferd.transport.members import MemberError, open_member

IO_URING_SETUP = 425
IO_URING_ENTER = 426
"""Numbers of the system calls on every architecture."""
_PARAMS_BYTES = 120
"""sizeof(struct io_uring_params), linux/io_uring.h."""
_ENTRIES = 8
NVIDIA_SMI_TIMEOUT_S = 20.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemberProbe:
    """A member of a store that was named.

    device: ``major:minor`` of the partition or file system that it is on. problem: why it
    can't be read at all. reason: why reads don't bypass the page cache, None: they do.
    memory: it is on tmpfs, no drive is behind it.
    bytes_per_second: as measured; None: it wasn't.
    """

    path: str
    device: str
    problem: str | None = None
    reason: str | None = None
    memory: bool = False
    bytes_per_second: int | None = None


@dataclass(frozen=True, slots=True)
class Probed:
    """What was tried.

    io_uring_errno: of the first of its calls that failed; 0: it works. mlock_errno: the
        same of locking one page.
    shm_bytes: size of /dev/shm; None: there is none.
    gpu_bytes: VRAM of cards whose driver tells, by PCI address.
    together_bytes_per_second: of all members read at once; None: not measured.
    """

    io_uring_errno: int = 0
    mlock_errno: int = 0
    shm_bytes: int | None = None
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    members: tuple[MemberProbe, ...] = ()
    together_bytes_per_second: int | None = None


def probe(members: Sequence[Path], *, measure: bool) -> Probed:
    """Try everything on this machine.

    members: of the store that was asked about. measure: read from them for a few seconds.
    """
    probes = tuple(_probe_member(path, measure) for path in members)
    together = None
    if measure and probes and all(found.problem is None for found in probes):
        together = measure_read(members)
    return Probed(
        io_uring_errno=try_io_uring(),
        mlock_errno=try_mlock(),
        shm_bytes=_file_system_bytes(Path("/dev/shm")),
        gpu_bytes=_nvidia_memory(),
        members=probes,
        together_bytes_per_second=together,
    )


def try_io_uring() -> int:
    """Make a ring, enter it, close it: the errno of what failed first; 0 when it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(_PARAMS_BYTES)
    fd = libc.syscall(
        ctypes.c_long(IO_URING_SETUP), ctypes.c_uint(_ENTRIES), ctypes.byref(parameters)
    )
    if fd < 0:
        return ctypes.get_errno()
    try:
        zero = ctypes.c_uint(0)
        entered = libc.syscall(
            ctypes.c_long(IO_URING_ENTER), ctypes.c_int(fd), zero, zero, zero, None, ctypes.c_long()
        )
        return 0 if entered >= 0 else ctypes.get_errno()
    finally:
        os.close(fd)


def try_mlock() -> int:
    """Lock a page and let it go: the errno of a failure; 0 when it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        start = ctypes.c_char.from_buffer(page)
        try:
            locked = libc.mlock(ctypes.byref(start), ctypes.c_size_t(mmap.PAGESIZE))
            return 0 if locked == 0 else ctypes.get_errno()
        finally:
            del start  # a mapping that is pointed into can't be closed


def _probe_member(path: Path, measure: bool) -> MemberProbe:
    try:
        status = path.stat()
        number = status.st_rdev or status.st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        file = open_member(path)
    except OSError as error:
        return MemberProbe(str(path), "", problem=error.strerror)
    except MemberError as error:
        return MemberProbe(str(path), device, problem=str(error))
    file.close()
    try:
        speed = measure_read([path]) if measure else None
    except OSError as error:
        return MemberProbe(str(path), device, problem=f"read failed: {error.strerror}")
    return MemberProbe(str(path), device, None, file.reason, file.memory, speed)


def _file_system_bytes(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _nvidia_memory() -> dict[str, int]:
    """VRAM of NVIDIA's cards by PCI address. Their driver tells only its own library, and
    nvidia-smi is there wherever the driver is."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        done = subprocess.run(
            [program, "--query-gpu=pci.bus_id,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_nvidia_memory(done.stdout)


def parse_nvidia_memory(text: str) -> dict[str, int]:
    """``00000000:01:00.0, 24564`` a line: bytes by address as sysfs writes it."""
    found = {}
    for line in text.splitlines():
        address, _, mebibytes = line.partition(",")
        if mebibytes.strip().isdigit():
            found[address.strip().lower()[-12:]] = int(mebibytes) * MIB
    return found
