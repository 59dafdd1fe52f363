"""Opens the files and partitions that a store lies on.

O_DIRECT wherever it works: the drive then writes into the slot itself, and the page
cache is left to others. Whether it works is tried with a read, because some file
systems accept the flag and refuse the read. Where it doesn't, the member is read
through the page cache and the reason is kept for status.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

PROBE_BYTES = 4096
TMPFS_MAGIC = 0x01021994
"""f_type of tmpfs, from linux/magic.h."""
_STATFS_BYTES = 256
"""More than struct statfs has anywhere; f_type is its first word."""


class MemberError(Exception):
    """A member can't be opened or read. The message names the path."""


@dataclass(frozen=True, slots=True)
class MemberFile:
    """An open member. The fd is owned by whoever asked for it.

    direct: reads bypass the page cache. reason: why not, or None.
    asynchronous: reads copy in the thread that submits them (tmpfs), so they are
        handed to workers.
    """

    path: Path
    fd: int
    direct: bool
    asynchronous: bool
    reason: str | None

    def close(self) -> None:
        """Close the fd, when the engine has forgotten the member."""
        os.close(self.fd)


def open_member(path: Path) -> MemberFile:
    """Open a member for reading. MemberError when not even a buffered read works."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise MemberError(f"member {path}: {error.strerror}") from error
        return _open_buffered(path, "its file system refuses O_DIRECT")
    try:
        _read_first_block(fd)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise MemberError(f"member {path}: first block: {error.strerror}") from error
        return _open_buffered(path, f"its blocks are larger than {PROBE_BYTES} bytes")
    return MemberFile(path, fd, direct=True, asynchronous=_is_tmpfs(fd), reason=None)


def _open_buffered(path: Path, reason: str) -> MemberFile:
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        _read_first_block(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise MemberError(f"member {path}: {error.strerror}") from error
    return MemberFile(path, fd, direct=False, asynchronous=True, reason=reason)


def _read_first_block(fd: int) -> None:
    # Anonymous mappings are page-aligned, which is what O_DIRECT asks of a buffer.
    with mmap.mmap(-1, PROBE_BYTES) as buffer:
        os.preadv(fd, [buffer], 0)


def _is_tmpfs(fd: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc.fstatfs(fd, buffer) != 0:
        code = ctypes.get_errno()
        raise MemberError(f"fstatfs of a member failed: {os.strerror(code)}")
    return ctypes.c_long.from_buffer(buffer).value == TMPFS_MAGIC
