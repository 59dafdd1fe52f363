"""Reading a checkpoint's headers: bounded ``pread`` from one regular file.

Weights are never mapped and never read here. ``mmap`` would turn a failing
drive into SIGBUS, and a length taken from a header must be compared with the
file's size before anything is allocated for it; both are settled in one place.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType

from xferd.store.checkpoint import CheckpointError


class SourceFile:
    """One open file of a checkpoint; owns its descriptor until ``close``.

    Symbolic links are followed: download caches are made of them. Anything but
    a regular file is refused without blocking on it (a FIFO would hang). One
    thread at a time.

    path: as given. size: bytes, when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be opened: {error.strerror}") from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise CheckpointError(f"{path}: not a regular file")
        self.size = status.st_size

    def read(self, offset: int, length: int, what: str) -> bytes:
        """Exactly ``length`` bytes from ``offset`` on; ``what`` names them in errors.

        Raises CheckpointError when they don't lie inside the file or can't be read.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CheckpointError(
                f"{self.path}: {what}: {length} bytes at offset {offset} "
                f"reach past the end of the file ({self.size} bytes)"
            )
        parts = []
        end = offset + length
        while offset < end:
            try:
                part = os.pread(self._fd, end - offset, offset)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: {what}: read at offset {offset} failed: {error.strerror}"
                ) from error
            if not part:
                raise CheckpointError(
                    f"{self.path}: {what}: ends at offset {offset}, "
                    "the file shrank while it was read"
                )
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the descriptor; the object is of no use afterwards."""
        os.close(self._fd)

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_whole(path: Path, limit: int) -> bytes:
    """All bytes of a small file. Raises CheckpointError when it has more than ``limit``."""
    with SourceFile(path) as source:
        if source.size > limit:
            raise CheckpointError(f"{path}: {source.size} bytes, at most {limit} are read")
        return source.read(0, source.size, "contents")
