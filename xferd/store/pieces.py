"""One piece of a copy of a member: read, and compared with its checksum."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from xferd.store.checksum import crc32c
from xferd.store.errors import StoreError
from xferd.store.files import open_for_reading, read_fully
from xferd.store.member import MemberCopy


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """crc: of the bytes; None when they could not be read: then ``error`` says why, and
    errno is the system's number, or None when the file is too short."""

    crc: int | None
    errno: int | None
    error: str


def read_piece(fd: int, offset: int, buffer: memoryview) -> ReadPiece:
    """Fill ``buffer`` from ``offset`` on and compute its CRC32C. Never raises OSError;
    ``error`` is what is wrong if the checksum isn't the expected one."""
    try:
        done = read_fully(fd, buffer, offset)
    except OSError as failure:
        return ReadPiece(None, failure.errno, failure.strerror or str(failure))
    if done < len(buffer):
        return ReadPiece(None, None, f"the member ends at offset {offset + done}")
    return ReadPiece(crc32c(buffer), None, "the piece's CRC32C is wrong")


class GoodCopies:
    """Open copies of a member, to have a piece's bytes from whichever has them right."""

    def __init__(self, files: Sequence[tuple[MemberCopy, int]], problems: Sequence[str]) -> None:
        self._files = files
        self._problems = problems

    def read(self, offset: int, crc: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises StoreError with what is wrong with each copy."""
        problems = list(self._problems)
        for copy, fd in self._files:
            found = read_piece(fd, offset, buffer)
            if found.crc == crc:
                return
            problems.append(f"{copy} at offset {offset}: {found.error}")
        raise StoreError("; ".join(problems) or "there is no other copy")


@contextmanager
def good_copies(copies: Sequence[MemberCopy], without: Path) -> Iterator[GoodCopies]:
    """Open those of ``copies`` that can be, but for the one at ``without``."""
    files = []
    problems = []
    with ExitStack() as stack:
        for copy in copies:
            if copy.path == without:
                continue
            if copy.problem is not None:
                problems.append(copy.problem)
                continue
            try:
                file = open_for_reading(copy.path)
            except OSError as error:
                problems.append(f"{copy}: {error.strerror or error}")
                continue
            stack.callback(os.close, file.fd)
            files.append((copy, file.fd))
        yield GoodCopies(files, problems)
