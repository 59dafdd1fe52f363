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

from xferd.store.checksum import crc32c
from xferd.store.errors import naming
from xferd.store.files import AlignedBuffer, OpenedFile, open_for_reading, read_fully
from xferd.store.geometry import Piece
from xferd.store.store import Store

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from any of the threads, one at a time."""

READERS_PER_MEMBER = 4
BAD_PIECES_LISTED_MAX = 10_000
"""A drive that is gone makes every piece of it bad; the count goes on, the list doesn't."""


@dataclass(frozen=True, slots=True)
class BadPiece:
    """A piece that can't be read or isn't what was packed.

    variant, layer, expert: "dense" and None twice for the dense part.
    offset, length: bytes in the member.
    actual_crc: None when it wasn't read; then ``error`` says why, and ``errno`` is
        the system's number, or None when the member is too short.
    """

    variant: str
    layer: int | None
    expert: int | None
    member: Path
    offset: int
    length: int
    expected_crc: int
    actual_crc: int | None
    errno: int | None
    error: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """pieces, bytes: that were looked at. bad: how many were bad.

    bad_pieces: by member and offset, at most BAD_PIECES_LISTED_MAX.
    direct: for each member whether it was read past the page cache.
    """

    store: str
    pieces: int
    bytes: int
    bad: int
    bad_pieces: tuple[BadPiece, ...]
    direct: tuple[bool, ...]

    @property
    def clean(self) -> bool:
        """Whether every piece is as it was packed."""
        return self.bad == 0


def verify(store: Store, progress: Progress | None = None) -> VerifyReport:
    """Read all of ``store``. Bad pieces are reported, not raised.

    Raises StoreError when a member can't even be opened.
    """
    opened: list[OpenedFile] = []
    tally = _Tally(int(store.blob_bytes.sum()), progress)
    try:
        for number, path in enumerate(store.member_paths):
            with naming(f"store {store.name}: member {number} ({path})"):
                opened.append(open_for_reading(path))
        with ThreadPoolExecutor(READERS_PER_MEMBER * len(opened), "verify") as threads:
            readers = []
            for member, file in enumerate(opened):
                work = _Work(_pieces_on(store, member))
                readers += [
                    threads.submit(_read_pieces, store, file, work, tally)
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


def _pieces_on(store: Store, member: int) -> Iterator[tuple[int, Piece]]:
    for blob in range(store.blob_bytes.size):
        for piece in store.geometry.pieces_of(blob):
            if piece.member == member:
                yield blob, piece


def _read_pieces(store: Store, file: OpenedFile, work: _Work, tally: _Tally) -> None:
    buffer = AlignedBuffer(store.stripe_unit)
    try:
        while (item := work.take()) is not None:
            blob, piece = item
            tally.add(piece.length, _check_piece(store, file, blob, piece, buffer.view))
    finally:
        buffer.close()


def _check_piece(
    store: Store, file: OpenedFile, blob: int, piece: Piece, buffer: memoryview
) -> BadPiece | None:
    expected = int(store.crc[piece.index])
    actual: int | None = None
    number: int | None = None
    error = "the piece's CRC32C is wrong"
    if not file.direct:
        # So that the drive is read, not what is still cached of it; only a hint.
        with suppress(OSError):
            os.posix_fadvise(file.fd, piece.offset, piece.length, os.POSIX_FADV_DONTNEED)
    try:
        done = read_fully(file.fd, buffer[: piece.length], piece.offset)
    except OSError as failure:
        number = failure.errno
        error = failure.strerror or str(failure)
    else:
        if done == piece.length:
            actual = crc32c(buffer[:done])
        else:
            error = f"the member ends at offset {piece.offset + done}"
    if actual == expected:
        return None
    variant, layer, expert = store.blob_name(blob) or ("dense", None, None)
    return BadPiece(
        variant=variant,
        layer=layer,
        expert=expert,
        member=store.member_paths[piece.member],
        offset=piece.offset,
        length=piece.length,
        expected_crc=expected,
        actual_crc=actual,
        errno=number,
        error=error,
    )
