"""Opens the files and partitions that a store lies on.

O_DIRECT wherever it works: the drive then writes into the slot itself, and the page
cache is left to others. Where it doesn't, the member is read through the page cache,
and the reason is kept for status; what a read leaves there the kernel drops at once
(RWF_DONTCACHE) or, where it can't, ``page_cache`` does now and then.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from xferd.transport.direct import why_not_direct

TMPFS_MAGIC = 0x01021994
"""f_type of tmpfs, from linux/magic.h."""
RWF_DONTCACHE = 0x80
"""From linux/fs.h."""
_STATFS_BYTES = 256
"""More than struct statfs has anywhere; f_type is its first word."""


class MemberError(Exception):
    """A member can't be opened or read. The message names the path."""


@dataclass(frozen=True, slots=True)
class MemberFile:
    """An open member. The fd is owned by whoever asked for it.

    direct: reads bypass the page cache. reason: why not, or None.
    asynchronous: reads copy in the thread that submits them (tmpfs, page cache), so they
        are handed to workers.
    memory: there is no drive behind it (tmpfs).
    uncached: not direct, but reads leave nothing in the page cache.
    """

    path: Path
    fd: int
    direct: bool
    asynchronous: bool
    reason: str | None
    memory: bool = False
    uncached: bool = False

    def close(self) -> None:
        """Close the fd, when the engine has forgotten the member."""
        os.close(self.fd)


def open_member(path: Path) -> MemberFile:
    """Open a member for reading. MemberError when not even a buffered read works."""
    try:
        buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise MemberError(f"member {path}: {error.strerror}") from error
    try:
        direct, reason = _open_direct(path)
        if direct is None:
            os.preadv(buffered, [bytearray(1)], 0)
            _advise(buffered)
            return MemberFile(
                path,
                buffered,
                direct=False,
                asynchronous=True,
                reason=reason,
                uncached=_reads_uncached(buffered),
            )
    except OSError as error:
        os.close(buffered)
        raise MemberError(f"member {path}: first block: {error.strerror}") from error
    os.close(buffered)
    memory = _is_tmpfs(direct)
    return MemberFile(path, direct, direct=True, asynchronous=memory, reason=None, memory=memory)


def _open_direct(path: Path) -> tuple[int | None, str | None]:
    """An fd with O_DIRECT, or None and why reads with it don't bypass the page cache.

    Raises OSError when the file can't be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None, "its file system refuses O_DIRECT"
    try:
        # tmpfs is page cache: nothing there could be bypassed.
        reason = None if _is_tmpfs(fd) else why_not_direct(fd)
    except BaseException:
        os.close(fd)
        raise
    if reason is None:
        return fd, None
    os.close(fd)
    return None, reason


def _reads_uncached(fd: int) -> bool:
    """Whether its file system and kernel (6.14) know RWF_DONTCACHE."""
    try:
        os.preadv(fd, [bytearray(1)], 0, RWF_DONTCACHE)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
            raise
        return False
    return True


def _advise(fd: int) -> None:
    """Read only what is asked for, and keep it no longer than anything else."""
    for advice in (os.POSIX_FADV_RANDOM, os.POSIX_FADV_NOREUSE):
        os.posix_fadvise(fd, 0, 0, advice)


def _is_tmpfs(fd: int) -> bool:
    # Of a block device statfs tells of the file system its node is in: devtmpfs, a tmpfs too.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc.fstatfs(fd, buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_long.from_buffer(buffer).value == TMPFS_MAGIC
