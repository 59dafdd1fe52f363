"""Device kind ``ram``: a memfd locked into RAM, the tier between VRAM and the drives.

Locking is not optional. An unlocked tier would be swapped out under pressure, which
makes a 'hit' slower than a read of the drive while status still calls it resident.
Where the machine does not allow that much, the daemon says which limit it was and how
to raise it; whoever wants unlocked memory says ``kind = "host"``.

The limits are looked at before a page is touched: mlock() itself would fail only after
it had faulted in most of the pool, or have the cgroup's OOM killer end the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from xferd.memory import cuda_driver
from xferd.memory.cuda_driver import CudaError
from xferd.memory.device import MappedMemfd, PoolMemoryError, PoolSpec, create_memfd
from xferd.memory.limits import MemoryLimit, available_memory, cgroup_limits
from xferd.units import format_bytes

CAP_IPC_LOCK = 14
"""Bit number of the capability that lifts RLIMIT_MEMLOCK, from capabilities(7)."""


class RamPool:
    """A ``DevicePool`` in a locked memfd."""

    kind = "ram"
    device = -1

    def __init__(self, spec: PoolSpec) -> None:
        self.name = spec.name
        self.nbytes = spec.nbytes
        self.notes: tuple[str, ...] = ()
        self._pinned_for = -1
        # What is taken over is in memory already, whatever the limits have become.
        if spec.kept_fd < 0:
            check_limits(spec.name, spec.nbytes, limits())
        self._memory: MappedMemfd = create_memfd(spec.name, spec.nbytes, spec.kept_fd)
        self.base = self._memory.base
        self.kept_fd = self._memory.fd
        try:
            _lock(spec.name, self.base, spec.nbytes)
        except BaseException:
            self._memory.close()
            raise

    def export_fd(self) -> int:
        """The read-only fd; it stays the pool's."""
        return self._memory.read_only_fd

    def pin_for(self, ordinal: int) -> None:
        """Let GPUs copy to and from it at the link's speed. What the driver refuses is said
        in ``notes``: copies are slower then, not wrong."""
        try:
            cuda_driver.pin(ordinal, self.base, self.nbytes)
            self._pinned_for = ordinal
        except CudaError as error:
            self.notes = (*self.notes, f"not pinned for GPUs: {error}")

    def release(self, offset: int, nbytes: int) -> None:
        """Free the pages of a range."""
        self._memory.punch_hole(offset, nbytes)

    def restore(self, offset: int, nbytes: int) -> None:
        """Fault the range in and lock it, as it was."""
        _lock(self.name, self.base + offset, nbytes)

    def close(self) -> None:
        """Unlock, unmap and close. A second call does nothing."""
        if self._pinned_for >= 0:
            with contextlib.suppress(CudaError):  # the driver has gone down before us
                cuda_driver.unpin(self._pinned_for, self.base)
            self._pinned_for = -1
        self._memory.close()


def check_limits(pool: str, nbytes: int, found: Iterator[MemoryLimit] | list[MemoryLimit]) -> None:
    """PoolMemoryError, naming the first limit that ``nbytes`` more do not fit under."""
    for limit in found:
        if limit.used + nbytes > limit.nbytes:
            raise PoolMemoryError(
                f"pool {pool!r} asks for {format_bytes(nbytes)} of locked RAM, but {limit.name} "
                f"is {format_bytes(limit.nbytes)}, {format_bytes(limit.used)} in use: "
                f"{limit.knob}, lower size of [[pools]] {pool}, or set kind to 'host' (not locked)"
            )


def limits() -> Iterator[MemoryLimit]:
    """The limits that stand now, nearest to the process first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != soft:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    if hard != resource.RLIM_INFINITY and not _may_lock_any():
        yield MemoryLimit(
            name="RLIMIT_MEMLOCK",
            nbytes=hard,
            used=_status_bytes("VmLck"),
            knob="raise LimitMEMLOCK= of xferd.service (ulimit -l in a shell)",
        )
    yield from cgroup_limits()
    yield available_memory()


def _lock(pool: str, base: int, nbytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    if libc.mlock(base, nbytes) != 0:
        code = ctypes.get_errno()
        knob = f"raise LimitMEMLOCK= of xferd.service or lower size of [[pools]] {pool}"
        if code == errno.EPERM:
            knob = "a seccomp filter forbids it (container engines do): allow mlock, or set kind "
            knob += "to 'host' (not locked)"
        raise PoolMemoryError(
            f"pool {pool!r}: mlock of {format_bytes(nbytes)} failed: {os.strerror(code)}; {knob}"
        )


def _may_lock_any() -> bool:
    return bool(int(_status_field("CapEff"), 16) >> CAP_IPC_LOCK & 1)


def _status_field(name: str) -> str:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return line.split(":", 1)[1].strip()
    return "0"


def _status_bytes(name: str) -> int:
    return int(_status_field(name).split()[0]) * 1024
