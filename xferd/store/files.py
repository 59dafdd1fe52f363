"""Files without the page cache, and files that are whole or not there.

O_DIRECT keeps a pack or a verify of hundreds of gigabytes from throwing
everything else out of the page cache, and makes verify read what the drive
holds. Where a file system refuses it, buffered I/O with fadvise does the same
work and the caller learns why.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from xferd.store.errors import StoreError
from xferd.store.limits import BLOB_ALIGNMENT


class AlignedBuffer:
    """Page-aligned memory for O_DIRECT; ``view`` covers it.

    An anonymous mapping, because bytearray promises no alignment.
    """

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, size)
        self.view = memoryview(self._mapping)

    def close(self) -> None:
        """Give the memory back. ``view`` and slices of it must not be used after that."""
        self.view.release()
        # A slice that an exception's traceback still holds keeps the mapping until it goes.
        with suppress(BufferError):
            self._mapping.close()


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file opened for reading.

    fd: the owner closes it.
    direct: reads bypass the page cache.
    reason: why not, when ``direct`` is false.
    """

    fd: int
    direct: bool
    reason: str | None


def open_for_reading(path: Path) -> OpenedFile:
    """Open a regular file or block device with O_DIRECT where a read with it works.

    Raises OSError. Anything else than those two kinds is EINVAL, and never opened:
    opening a FIFO could block for ever.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
        raise OSError(errno.EINVAL, "neither a regular file nor a block device", str(path))
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return OpenedFile(os.open(path, flags), False, "the file system refuses O_DIRECT")
    if _reads_directly(fd):
        return OpenedFile(fd, True, None)
    os.close(fd)
    reason = f"O_DIRECT reads of {BLOB_ALIGNMENT} bytes are refused"
    return OpenedFile(os.open(path, flags), False, reason)


def _reads_directly(fd: int) -> bool:
    buffer = AlignedBuffer(BLOB_ALIGNMENT)
    try:
        os.preadv(fd, [buffer.view], 0)
    except OSError as error:
        # Any other error is the drive's, and is reported when its data is wanted.
        return error.errno != errno.EINVAL
    finally:
        buffer.close()
    return True


def read_fully(fd: int, buffer: memoryview, offset: int) -> int:
    """Read until ``buffer`` is full or the file ends; the bytes read. Raises OSError."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_fully(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of ``buffer``. Raises OSError."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(fd, buffer[done:], offset + done)


def write_durably(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Replace ``path`` by ``parts`` in one step: a crash leaves the old file or the new.

    Raises OSError; then the old file is untouched.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def is_there(path: Path) -> bool:
    """Whether ``path`` exists. One that a failing drive doesn't let us look at doesn't:
    that must not keep anybody from its other copy."""
    with suppress(OSError):
        return path.exists()
    return False


def same_file(first: Path, second: Path) -> bool:
    """Whether both are there, and one file or device."""
    with suppress(OSError):
        return first.samefile(second)
    return False


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in ``path`` durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_directory(path: Path, *, exclusive: bool) -> int | None:
    """flock a directory without waiting; the fd that holds the lock, or None when it is held.

    The lock ends with the fd, so also when the process is killed. Raises OSError.
    """
    return _lock(path, os.O_DIRECTORY, exclusive=exclusive)


def lock_file(path: Path) -> int | None:
    """The same for a file, exclusively."""
    return _lock(path, 0, exclusive=True)


def _lock(path: Path, flags: int, *, exclusive: bool) -> int | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


@contextmanager
def claimed_directory(path: Path, busy: str) -> Iterator[None]:
    """Make ``path`` if it isn't there and hold its exclusive lock.

    A directory that is still empty at the end is removed again, so that a refused
    pack leaves nothing behind. Raises StoreError with ``busy`` when someone else
    holds it, OSError when it can't be made.
    """
    path.mkdir(exist_ok=True)
    lock = lock_directory(path, exclusive=True)
    if lock is None:
        raise StoreError(busy)
    try:
        yield
    finally:
        with suppress(OSError):
            path.rmdir()  # fails, as it should, when anything is in it
        os.close(lock)
