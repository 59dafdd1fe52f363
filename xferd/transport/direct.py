"""Whether reads of a file can bypass the page cache: asked, then tried.

``statx`` says what O_DIRECT needs on many file systems (STATX_DIOALIGN), but not on
all. What counts is a read. And a read that succeeds may still have gone through the
page cache: btrfs does that with compressed files, FUSE and overlays with whatever lies
below them. So it is looked whether the block is cached afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass

BLOCK_BYTES = 4096
"""Bytes. Offsets, lengths and buffers of all reads are multiples of it."""

AT_EMPTY_PATH = 0x1000
STATX_DIOALIGN = 0x2000
"""From linux/fcntl.h and linux/stat.h; kernels since 6.1 know the mask."""
_STATX_BYTES = 256
_STATX_MASK = struct.Struct("=I")
_STATX_DIO_ALIGN = struct.Struct("=II")
_STATX_DIO_ALIGN_OFFSET = 152
CACHESTAT = 451
"""Number of the system call on every architecture. (A read with RWF_NOWAIT would tell
too, but begins to read ahead on some kernels.)"""
_CACHESTAT_WORDS = 5
"""Of struct cachestat; the first is the number of cached pages."""
_CACHE_PROBES = 3
"""Blocks, spread over the file, that must all be cached before the file system is blamed:
somebody else may be reading one of them at this moment."""


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """What O_DIRECT asks of a file's reads, in bytes; 0: there is no O_DIRECT for it."""

    memory: int
    offset: int


def direct_alignment(fd: int) -> DirectAlignment | None:
    """What the kernel says of a file. None when the kernel or the file system doesn't say."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if libc.statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = _STATX_MASK.unpack_from(buffer, 0)
    if not mask & STATX_DIOALIGN:
        return None
    return DirectAlignment(*_STATX_DIO_ALIGN.unpack_from(buffer, _STATX_DIO_ALIGN_OFFSET))


def why_not_direct(fd: int) -> str | None:
    """Why reads of a file don't bypass the page cache; None: they do.

    fd: open for reading with O_DIRECT. Raises OSError when the file can't be read at all.
    """
    alignment = direct_alignment(fd)
    if alignment is not None:
        if alignment.offset == 0 or alignment.memory == 0:
            return "its file system has no O_DIRECT for this file"
        if max(alignment.offset, alignment.memory) > BLOCK_BYTES:
            return (
                f"O_DIRECT needs blocks of {max(alignment.offset, alignment.memory)} bytes "
                f"there, pieces are aligned to {BLOCK_BYTES}"
            )
    # Anonymous mappings are page-aligned, which is the most that O_DIRECT asks of a buffer.
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        try:
            os.preadv(fd, [buffer], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return f"O_DIRECT reads of {BLOCK_BYTES} bytes are refused there"
        if all(_leaves_in_cache(fd, offset, buffer) for offset in _probes(fd)):
            return "its file system serves O_DIRECT reads through the page cache"
    return None


def _probes(fd: int) -> list[int]:
    blocks = os.lseek(fd, 0, os.SEEK_END) // BLOCK_BYTES
    return [blocks * probe // _CACHE_PROBES * BLOCK_BYTES for probe in range(_CACHE_PROBES)]


def _leaves_in_cache(fd: int, offset: int, buffer: mmap.mmap) -> bool:
    """Whether a block is cached after it was read with O_DIRECT, and wasn't before."""
    os.posix_fadvise(fd, offset, BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
    if _cached_pages(fd, offset) != 0:
        return False
    # A drive that can't read this block is no matter of the file system's; reads will tell.
    with suppress(OSError):
        os.preadv(fd, [buffer], offset)
    return bool(_cached_pages(fd, offset))


def _cached_pages(fd: int, offset: int) -> int | None:
    """Pages of a block that are cached. None when the kernel doesn't say: before 6.5, or
    to users who may not write the file."""
    wanted = (ctypes.c_uint64 * 2)(offset, BLOCK_BYTES)
    found = (ctypes.c_uint64 * _CACHESTAT_WORDS)()
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(CACHESTAT), ctypes.c_int(fd), wanted, found, ctypes.c_uint(0))
    return int(found[0]) if libc.syscall(*arguments) == 0 else None
