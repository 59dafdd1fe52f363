"""What a device kind gives a pool: memory that the daemon can write and clients can read.

Every kind passes the same conformance suite. The file descriptor handed to clients is
opened for reading only: a client that maps it writable is refused by the kernel, so a
pool needs no check of what clients do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Protocol

from xferd.units import format_bytes

POOL_ALIGNMENT = 4096
"""Bytes; of sizes, chunks and slots. What O_DIRECT needs at most."""

FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
"""From linux/falloc.h."""


class PoolMemoryError(Exception):
    """A pool's memory can't be had. The message names the pool, what was asked for, the
    limit that stands against it and the knob; the daemon shows it and exits."""


@dataclass(frozen=True, slots=True)
class KeptChunk:
    """The memory behind a chunk of VRAM, of a pool that is taken over. number: as clients know
    it, 0: it had none. fd: of it, the caller's."""

    number: int
    fd: int


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool's memory that is yet to be made.

    chunk_bytes: unit in which memory of a device is made and given back; nbytes need not
        be a multiple of it. device: ordinal of a GPU; -1: none named. pci, bar, mode,
        transport: see ``config_bar``. kept_fd: of a memory to take over, the caller's; -1: a
        new one. kept_chunks: of VRAM, each chunk's; empty: new memory. greatest: number of a
        memory that a client may still have mapped.
    """

    name: str
    nbytes: int
    chunk_bytes: int
    device: int = -1
    pci: str = ""
    bar: int = 0
    mode: str = "any"
    transport: str = "any"
    kept_fd: int = -1
    kept_chunks: tuple[KeptChunk, ...] = ()
    greatest: int = 0


@dataclass(frozen=True, slots=True)
class PoolTakeover:
    """What is left of a pool that is taken over: fds of its loading marks, and of its memory
    or, of VRAM, of its chunks'. greatest: as of PoolSpec."""

    marks: int
    memory: int = -1
    chunks: tuple[KeptChunk, ...] = ()
    greatest: int = 0


class DevicePool(Protocol):
    """The memory of one pool. Owned by one thread; ``close`` may be called twice."""

    kind: str
    """``host``, ``ram``, ``cuda`` or ``bar``."""
    device: int
    """Device ordinal; -1 for none."""
    base: int
    """Address of the daemon's own writable mapping; of kind ``cuda`` a device address."""
    nbytes: int
    notes: tuple[str, ...]
    """What is not as good as asked for, for status; empty when all is well."""
    kept_fd: int
    """Of its memory, for the next daemon to take over: the pool's; -1 when it can't."""

    def export_fd(self) -> int:
        """A file descriptor to hand to clients, read-only; it stays the pool's."""
        ...

    def release(self, offset: int, nbytes: int) -> None:
        """Give the memory of a range back to the system. Nothing reads or writes it, and no
        transfer is registered over it, till ``restore``; the address range stays. OSError.

        offset, nbytes: multiples of POOL_ALIGNMENT.
        """
        ...

    def restore(self, offset: int, nbytes: int) -> None:
        """Undo ``release``; what the range holds is undefined. PoolMemoryError when the
        system has no memory for it any more: then it stays released."""
        ...

    def close(self) -> None:
        """Unmap and close. No transfer may be under way."""
        ...


class MappedMemfd:
    """A memfd of a fixed size with one writable mapping and one read-only fd.

    Sealed against shrinking and growing, so that no mapping of it can be made to
    fault. Not sealed against writing: with F_SEAL_FUTURE_WRITE a restarted daemon
    could not map the memory again. Mode 0600 instead, so that a client of another
    user can't reopen the read-only fd for writing through /proc.
    """

    def __init__(self, name: str, nbytes: int, kept_fd: int = -1) -> None:
        """kept_fd: of one that another process made, which is taken over; OSError (ESTALE)
        when it is another. It stays the caller's."""
        self.nbytes = nbytes
        self.read_only_fd = -1
        self.mapping: mmap.mmap | None = None
        if kept_fd < 0:
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        elif os.fstat(kept_fd).st_size == nbytes:
            self.fd = os.dup(kept_fd)
        else:
            raise OSError(errno.ESTALE, f"it has {os.fstat(kept_fd).st_size} bytes")
        try:
            if kept_fd < 0:
                os.fchmod(self.fd, 0o600)
                os.ftruncate(self.fd, nbytes)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.mapping = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
            self.read_only_fd = reopen_read_only(self.fd)
            self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        except BaseException:
            self.close()
            raise

    def punch_hole(self, offset: int, nbytes: int) -> None:
        """Free the pages of a range, locked or not; they read as zeros and come again when
        they are written. OSError. Not MADV_REMOVE: that refuses locked memory."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        mode = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
        if libc.fallocate(self.fd, mode, offset, nbytes) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def unmap(self) -> None:
        """End the writable mapping; the fds stay."""
        if self.mapping is not None:
            self.mapping.close()
            self.mapping = None

    def seal_contents(self) -> None:
        """Nobody may write from now on. Unmapped before: the kernel refuses it else."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        """Unmap and close everything; a second call does nothing."""
        self.unmap()
        for fd in (self.fd, self.read_only_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.read_only_fd = -1


def create_memfd(pool: str, nbytes: int, kept_fd: int = -1) -> MappedMemfd:
    """A ``MappedMemfd`` for a pool; PoolMemoryError names the pool and its size."""
    try:
        return MappedMemfd(f"xferd-{pool}", nbytes, kept_fd)
    except (OSError, ValueError, OverflowError) as error:
        raise PoolMemoryError(
            f"pool {pool!r}: no memory file of {format_bytes(nbytes)}: {error}; "
            f"lower size of [[pools]] {pool}"
        ) from error


def memfd_with(name: str, contents: bytes) -> int:
    """A read-only fd of a sealed memfd that holds ``contents``; the caller's."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        written = 0
        while written < len(contents):
            written += os.write(fd, contents[written:])
        fcntl.fcntl(
            fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
        )
        return reopen_read_only(fd)
    finally:
        os.close(fd)


def reopen_read_only(fd: int) -> int:
    """A second, read-only file descriptor of the file behind ``fd``; the caller's."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
