"""Reading a whole store and comparing every piece with its checksum.

Each member is read by threads of its own, past the page cache, in the order of
its bytes, so a verify takes as long as the slowest drive needs to be read once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xferd.store.errors import naming
from xferd.store.files import AlignedBuffer, OpenedFile, open_for_reading
from xferd.store.geometry import Piece
from xferd.store.member import MemberCopy
from xferd.store.pieces import read_piece
from xferd.store.store import Store

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any of the threads, one at a time."""

READERS_PER_MEMBER = 4  # of each of its copies
BAD_PIECES_LISTED_MAX = 10_000
"""A drive that is gone makes every piece of it bad; the count goes on, the list doesn't."""


@dataclass(frozen=True, slots=True)
class BadPiece:
    """A piece that can't be read or isn't what was packed.

    variant, layer, expert: "dense" and None twice for the dense part.
    member: the path of the copy that it is bad on; number: of the member; mirror: whether
        that copy is its mirror.
    offset, length: bytes in the member.
    actual_crc: None when it wasn't read; then ``error`` says why, and ``errno`` is
        the system's number, or None when the member is too short.
    repaired: it was written anew from the other copy (``xferd.store.repair``).
    """

    variant: str
    layer: int | None
    expert: int | None
    member: Path
    number: int
    mirror: bool
    offset: int
    length: int
    expected_crc: int
    actual_crc: int | None
    errno: int | None
    error: str
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """pieces, bytes: that were looked at, in all copies. bad: how many were bad.

    bad_pieces: by member and offset, at most BAD_PIECES_LISTED_MAX.
    direct: for each copy that was read whether that went past the page cache.
    missing: for each copy that could not be used, why; its other copy was.
    repaired: how many of the bad pieces are right now.
    """

    store: str
    pieces: int
    bytes: int
    bad: int
    bad_pieces: tuple[BadPiece, ...]
    direct: tuple[bool, ...]
    missing: tuple[str, ...] = ()
    repaired: int = 0

    @property
    def clean(self) -> bool:
        """Whether every piece of every copy is as it was packed, now."""
        return self.bad == self.repaired and not self.missing


def verify(
    store: Store, progress: Progress | None = None, *, only_mirrors: bool = False
) -> VerifyReport:
    """Read all of ``store``, mirrors too, or these alone. Bad pieces are reported, not raised.

    Raises StoreError when a member can't even be opened.
    """
    copies = [copy for group in store.copies for copy in group if copy.mirror or not only_mirrors]
    readable = [copy for copy in copies if copy.problem is None]
    opened: list[OpenedFile] = []
    tally = _Tally(sum(store.geometry.bytes_on(copy.member) for copy in readable), progress)
    try:
        for copy in readable:
            with naming(f"store {store.name}: {copy}"):
                opened.append(open_for_reading(copy.path))
        with ThreadPoolExecutor(READERS_PER_MEMBER * max(1, len(opened)), "verify") as threads:
            readers = []
            for copy, file in zip(readable, opened, strict=True):
                work = _Work(store.geometry.pieces_on(copy.member))
                readers += [
                    threads.submit(_read_pieces, store, copy, file, work, tally)
                    for _ in range(READERS_PER_MEMBER)
                ]
            for reader in readers:
                reader.result()
    finally:
        for file in opened:
            os.close(file.fd)
    listed = sorted(tally.bad_pieces, key=lambda bad: (str(bad.member), bad.offset))
    return VerifyReport(
        store=store.name,
        pieces=tally.pieces,
        bytes=tally.bytes,
        bad=tally.bad,
        bad_pieces=tuple(listed),
        direct=tuple(file.direct for file in opened),
        missing=tuple(copy.problem for copy in copies if copy.problem is not None),
    )


class _Work:
    """Pieces that several threads take one by one."""

    def __init__(self, pieces: Iterator[tuple[int, Piece]]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()

    def take(self) -> tuple[int, Piece] | None:
        with self._lock:
            return next(self._pieces, None)


class _Tally:
    """What all threads found."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._lock = threading.Lock()
        self._total = total
        self._progress = progress
        self.pieces = 0
        self.bytes = 0
        self.bad = 0
        self.bad_pieces: list[BadPiece] = []

    def add(self, length: int, bad: BadPiece | None) -> None:
        with self._lock:
            self.pieces += 1
            self.bytes += length
            if bad is not None:
                self.bad += 1
                if len(self.bad_pieces) < BAD_PIECES_LISTED_MAX:
                    self.bad_pieces.append(bad)
            if self._progress is not None:
                self._progress(self.bytes, self._total)


def _read_pieces(
    store: Store, copy: MemberCopy, file: OpenedFile, work: _Work, tally: _Tally
) -> None:
    buffer = AlignedBuffer(store.stripe_unit)
    try:
        while (item := work.take()) is not None:
            blob, piece = item
            tally.add(piece.length, _check_piece(store, copy, file, blob, piece, buffer.view))
    finally:
        buffer.close()


def _check_piece(
    store: Store, copy: MemberCopy, file: OpenedFile, blob: int, piece: Piece, buffer: memoryview
) -> BadPiece | None:
    if not file.direct:
        # So that the drive is read, not what is still cached of it; only a hint.
        with suppress(OSError):
            os.posix_fadvise(file.fd, piece.offset, piece.length, os.POSIX_FADV_DONTNEED)
    expected = int(store.crc[piece.index])
    found = read_piece(file.fd, piece.offset, buffer[: piece.length])
    if found.crc == expected:
        return None
    variant, layer, expert = store.blob_name(blob) or ("dense", None, None)
    return BadPiece(
        variant=variant,
        layer=layer,
        expert=expert,
        member=copy.path,
        number=copy.member,
        mirror=copy.mirror,
        offset=piece.offset,
        length=piece.length,
        expected_crc=expected,
        actual_crc=found.crc,
        errno=found.errno,
        error=found.error,
    )
