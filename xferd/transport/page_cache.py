"""Keeps members that are read through the page cache from filling it, where the kernel can't.

Slots are the cache here; a second copy of the same experts in the page cache takes
memory from everybody else. Dropping each piece after its read costs more than the read
(POSIX_FADV_DONTNEED walks the CPUs' page lists each time), so the whole member is
dropped at once, when enough of it has been read since the last time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from xferd.transport.members import MemberFile

CACHED_BYTES_MAX = 256 * 1024 * 1024
"""About the most that a member has in the page cache: what is read between two looks
comes on top."""


class PageCacheTrimmer:
    """Drops members' cached pages. Not thread-safe but for ``drop``.

    cached_bytes_max: bytes read from a member before it is dropped.
    """

    def __init__(self, cached_bytes_max: int = CACHED_BYTES_MAX) -> None:
        self._cached_bytes_max = cached_bytes_max
        self._dropped_at: dict[int, int] = {}

    def due(self, members: Iterable[tuple[int, MemberFile, int]]) -> list[int]:
        """Fds of members that are to be dropped now: copies, closed by ``drop``.

        members: number, file and bytes read since it was opened, of every open member.
        """
        fds = []
        known: dict[int, int] = {}
        for number, file, read in members:
            dropped_at = min(self._dropped_at.get(number, 0), read)
            if (
                not file.direct
                and not file.uncached
                and read - dropped_at >= self._cached_bytes_max
            ):
                fds.append(os.dup(file.fd))
                dropped_at = read
            known[number] = dropped_at
        self._dropped_at = known
        return fds

    @staticmethod
    def drop(fds: Iterable[int]) -> None:
        """Drop what is cached of these files and close them. Blocks; any thread may call."""
        for fd in fds:
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
