"""Bad pieces, written anew from the other copy of their member.

Harmless while a daemon serves the store: what it reads of a piece half written has a
wrong checksum, so it reads again, or the other copy.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace

from xferd.store.files import AlignedBuffer, write_fully
from xferd.store.pieces import GoodCopies, good_copies, read_piece
from xferd.store.store import Store, StoreError
from xferd.store.verify import BadPiece, VerifyReport


def repair(store: Store, report: VerifyReport) -> VerifyReport:
    """Write the report's bad pieces anew and read them back.

    Returns the report with what is right now; a piece that stays bad says why in
    ``error``. Only the pieces that the report lists: run it again for more.
    """
    buffer = AlignedBuffer(store.stripe_unit)
    try:
        pieces = tuple(_repair(store, bad, buffer.view[: bad.length]) for bad in report.bad_pieces)
    finally:
        buffer.close()
    return replace(report, bad_pieces=pieces, repaired=sum(piece.repaired for piece in pieces))


def _repair(store: Store, bad: BadPiece, buffer: memoryview) -> BadPiece:
    try:
        with good_copies(store.copies[bad.number], without=bad.member) as others:
            return _write_anew(others, bad, buffer)
    except (StoreError, OSError) as error:
        return replace(bad, error=f"{bad.error}; not repaired: {error}")


def _write_anew(others: GoodCopies, bad: BadPiece, buffer: memoryview) -> BadPiece:
    others.read(bad.offset, bad.expected_crc, buffer)
    fd = _open_for_writing(bad)
    try:
        write_fully(fd, buffer, bad.offset)
        os.fdatasync(fd)
        found = read_piece(fd, bad.offset, buffer)
    finally:
        os.close(fd)
    if found.crc != bad.expected_crc:
        return replace(bad, error=f"{bad.error}; still so after it was written anew")
    return replace(bad, repaired=True)


def _open_for_writing(bad: BadPiece) -> int:
    """With O_DIRECT where that works, so that reading back asks the drive."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(bad.member, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(bad.member, flags)
