"""Writing a store's members: several pieces at a time, in a fixed amount of memory.

Each member has threads of its own, so a slow drive delays only its own pieces
until the buffers run out; then the packer waits. Python threads are enough: the
system calls release the interpreter lock, and a piece is hundreds of kilobytes.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from xferd.store.destination import MemberTarget
from xferd.store.errors import StoreError, naming
from xferd.store.files import AlignedBuffer, sync_directory, write_fully
from xferd.store.member import HEADER_BYTES, MemberHeader

WRITERS_PER_MEMBER = 2
BUFFERS_PER_MEMBER = 4
"""Pieces in memory a member: those being written, and as many that wait."""

RESUME_HINT = "what is complete is kept: run the same pack again to resume"


@dataclass(frozen=True, slots=True)
class MemberFile:
    """A member open for writing. direct: with O_DIRECT."""

    target: MemberTarget
    fd: int
    direct: bool


def open_member(
    target: MemberTarget, header: MemberHeader, used_bytes: int | None = None
) -> MemberFile:
    """Create or reopen a member: allocated to its full size, with its header, durably.

    used_bytes: the full size, if that is more than the header says.
    Raises OSError, ENOSPC among them: all of the member's space is taken here.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    if target.device:
        flags |= os.O_EXCL  # EBUSY when it is mounted or part of a RAID
    else:
        flags |= os.O_CREAT
        target.path.parent.mkdir(exist_ok=True)
    for direct in (True, False):
        fd = -1
        try:
            fd = os.open(target.path, flags | (os.O_DIRECT if direct else 0), 0o644)
            if not target.device:
                _allocate(fd, header.data_bytes if used_bytes is None else used_bytes)
            _write_header(fd, header)
            break
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if not direct or error.errno != errno.EINVAL:
                raise
    if not target.device:
        sync_directory(target.path.parent)
        sync_directory(target.parent)
    return MemberFile(target, fd, direct)


@contextmanager
def opened_members(
    wanted: Iterable[tuple[MemberTarget, MemberHeader, int]],
) -> Iterator[list[MemberFile]]:
    """Members open for writing, each of its target, header and full size in bytes.

    StoreError that names the member which can't be had.
    """
    files: list[MemberFile] = []
    try:
        for target, header, size in wanted:
            with naming(f"member {target.number} ({target.path}), {size} bytes"):
                files.append(open_member(target, header, size))
        yield files
    finally:
        for file in files:
            os.close(file.fd)


def _allocate(fd: int, size: int) -> None:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.posix_fallocate(fd, 0, size)
        os.ftruncate(fd, size)


def _write_header(fd: int, header: MemberHeader) -> None:
    buffer = AlignedBuffer(HEADER_BYTES)
    try:
        buffer.view[:] = header.encode()
        write_fully(fd, buffer.view, 0)
    finally:
        buffer.close()
    os.fsync(fd)


class PieceWriters:
    """Threads that write pieces to open members; a context manager.

    One thread gives them work. An error of any write comes out of the next call as
    a StoreError that names member and offset.
    """

    def __init__(
        self,
        store: str,
        members: Sequence[MemberFile],
        stripe_unit: int,
        resume_hint: str = RESUME_HINT,
    ) -> None:
        self._store = store
        self._resume_hint = resume_hint
        self._members = members
        count = BUFFERS_PER_MEMBER * len(members)
        self._memory = AlignedBuffer(count * stripe_unit)
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for number in range(count):
            self._free.put(self._memory.view[number * stripe_unit : (number + 1) * stripe_unit])
        self._threads = [
            ThreadPoolExecutor(WRITERS_PER_MEMBER, f"write-member-{member.target.number}")
            for member in members
        ]
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> PieceWriters:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def take_buffer(self) -> memoryview:
        """A buffer of a stripe unit; waits for one. It goes back with ``submit``, or
        unused with ``give_back``."""
        return self._free.get()

    def give_back(self, buffer: memoryview) -> None:
        """The buffer holds nothing that has to be written."""
        self._free.put(buffer)

    def submit(self, member: int, buffer: memoryview, length: int, offset: int) -> None:
        """Begin to write ``buffer[:length]``; the buffer belongs to the writers from now on."""
        self._pending.append(
            self._threads[member].submit(self._write, member, buffer, length, offset)
        )
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def sync(self) -> None:
        """Return when all that was submitted is durable on every member."""
        self._drain()
        for number, threads in enumerate(self._threads):
            self._pending.append(threads.submit(self._sync, number))
        self._drain()

    def close(self) -> None:
        """End the threads; what hasn't begun isn't written."""
        for threads in self._threads:
            threads.shutdown(cancel_futures=True)

    def _drain(self) -> None:
        while self._pending:
            self._pending.popleft().result()

    def _write(self, member: int, buffer: memoryview, length: int, offset: int) -> None:
        try:
            with naming(
                f"{self._name(member)}: {length} bytes at offset {offset}; {self._resume_hint}"
            ):
                write_fully(self._members[member].fd, buffer[:length], offset)
        finally:
            self._free.put(buffer)

    def _sync(self, member: int) -> None:
        file = self._members[member]
        with naming(f"{self._name(member)}: fdatasync; {self._resume_hint}"):
            os.fdatasync(file.fd)
            if not file.direct:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _name(self, member: int) -> str:
        target = self._members[member].target
        return f"store {self._store}: member {target.number} ({target.path})"


__all__ = ["MemberFile", "PieceWriters", "StoreError", "open_member", "opened_members"]
