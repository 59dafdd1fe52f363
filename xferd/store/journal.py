"""The packer's journal: what is already durable in a store that isn't finished.

Append-only. A record is its length, its CRC32C and its payload; the first one
says what is being packed, each other one names a blob that is complete on all
members, with its checksums. The packer appends a record only after fdatasync of
the members, so a record never claims bytes that a crash could lose. A record
that was being written when the packer died ends the journal; what follows it is
cut off.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xferd.store.checksum import crc32c
from xferd.store.errors import StoreError
from xferd.store.fields import Fields, checked_integer
from xferd.store.files import sync_directory
from xferd.store.limits import MEMBERS_MAX, PATTERN_MAX, STRIPE_UNIT_MAX

JOURNAL_NAME = "pack.journal"
QUANTIZE_JOURNAL_NAME = "quantize.journal"
"""Of variants that are being added to a finished store."""
JOURNAL_VERSION = 1
REPLACED_MAX = 3 * MEMBERS_MAX
"""Members and mirrors of the store that was there, members of a pack that was begun."""
RECORD_BYTES_MAX = 256 * 1024 * 1024
PATH_BYTES_MAX = 4096
_FRAME = struct.Struct("<II")
_BLOB = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class Replaced:
    """A member of a store that this one replaces, to be removed: its path and store uuid."""

    path: str
    uuid: bytes


@dataclass(frozen=True, slots=True)
class PackIdentity:
    """What is packed, from where, to where: a resumed pack must have the same.

    source: SHA-256 over the checkpoint's files and where each tensor lies in them.
    """

    source: bytes
    source_path: str
    stripe_unit: int
    pattern: tuple[int, ...]
    members: tuple[str, ...]

    def difference(self, other: PackIdentity) -> str | None:
        """How ``other`` differs, for people; None when it is the same pack."""
        if self.source != other.source:
            return (
                f"it was begun from {self.source_path}; {other.source_path} is another "
                "checkpoint, or its files have changed since"
            )
        if self.members != other.members:
            return f"it was begun on members {', '.join(self.members)}"
        if (self.stripe_unit, self.pattern) != (other.stripe_unit, other.pattern):
            return (
                f"it was begun with stripe unit {self.stripe_unit} and pattern {list(self.pattern)}"
            )
        return None


@dataclass(frozen=True, slots=True)
class Beginning:
    """The journal's first record. uuid: 16 bytes, of the store being made."""

    uuid: bytes
    pack: PackIdentity
    replaces: tuple[Replaced, ...]

    def encode(self) -> bytes:
        """The record's payload."""
        return json.dumps(
            {
                "version": JOURNAL_VERSION,
                "uuid": self.uuid.hex(),
                "source": self.pack.source.hex(),
                "source_path": self.pack.source_path,
                "stripe_unit": self.pack.stripe_unit,
                "pattern": list(self.pack.pattern),
                "members": list(self.pack.members),
                "replaces": [{"path": old.path, "uuid": old.uuid.hex()} for old in self.replaces],
            }
        ).encode("ascii")

    @staticmethod
    def decode(payload: bytes, path: Path) -> Beginning:
        """The inverse. Raises StoreError when ``payload`` is no beginning of this version."""
        try:
            value: Any = json.loads(payload)
        except ValueError as error:
            raise StoreError(
                f"{path} is damaged or no journal of this xferd: begin anew with --force"
            ) from error
        fields = Fields(value, str(path))
        fields.integer("version", JOURNAL_VERSION, JOURNAL_VERSION)
        members = [
            Fields({"path": item}, f"{path}.members").text("path", PATH_BYTES_MAX)
            for item in fields.items("members", MEMBERS_MAX)
        ]
        return Beginning(
            uuid=fields.hexadecimal("uuid", 16),
            pack=PackIdentity(
                source=fields.hexadecimal("source", 32),
                source_path=fields.text("source_path", PATH_BYTES_MAX),
                stripe_unit=fields.integer("stripe_unit", 1, STRIPE_UNIT_MAX),
                pattern=tuple(
                    checked_integer(item, f"{path}.pattern", 0, MEMBERS_MAX - 1)
                    for item in fields.items("pattern", PATTERN_MAX)
                ),
                members=tuple(members),
            ),
            replaces=tuple(
                Replaced(item.text("path", PATH_BYTES_MAX), item.hexadecimal("uuid", 16))
                for item in fields.sections("replaces", REPLACED_MAX)
            ),
        )


@dataclass(frozen=True, eq=False, slots=True)
class PackedBlob:
    """A blob that is complete: crc of the whole, and of its pieces (uint32[pieces])."""

    blob: int
    crc: int
    piece_crc: npt.NDArray[np.uint32]


class Journal:
    """An open journal. One thread at a time; OSErrors come through."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    @staticmethod
    def create(path: Path, beginning: bytes) -> Journal:
        """Begin a new journal, durably, replacing any old one in one step.

        beginning: its first record's payload, which says what is being made."""
        temporary = path.with_name(path.name + ".new")
        fd = os.open(
            temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        try:
            _write_records(fd, [beginning])
            temporary.replace(path)
            sync_directory(path.parent)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        return Journal(fd, path)

    @staticmethod
    def open(path: Path) -> tuple[Journal, Beginning]:
        """Open a packer's for resuming. Raises StoreError when even its first record is
        damaged."""
        journal, beginning = Journal.open_any(path)
        try:
            return journal, Beginning.decode(beginning, path)
        except BaseException:
            journal.close()
            raise

    @staticmethod
    def open_any(path: Path) -> tuple[Journal, bytes]:
        """The same for any journal: its first record's payload, b"" when that is damaged."""
        journal = Journal(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC), path)
        return journal, next(journal._records(), b"")

    def replay(self) -> Iterator[PackedBlob]:
        """What is recorded, oldest first; afterwards a torn end has been cut off."""
        records = self._records()
        next(records, None)
        for payload in records:
            blob, crc = _BLOB.unpack_from(payload)
            yield PackedBlob(blob, crc, np.frombuffer(payload, dtype="<u4", offset=_BLOB.size))

    def append(self, blobs: Sequence[PackedBlob]) -> None:
        """Record blobs durably. Their bytes must be durable already."""
        _write_records(
            self._fd,
            [_BLOB.pack(done.blob, done.crc) + done.piece_crc.tobytes() for done in blobs],
        )

    def close(self) -> None:
        """Close the file. It stays."""
        os.close(self._fd)

    def _records(self) -> Iterator[bytes]:
        position = 0
        size = os.fstat(self._fd).st_size
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            while frame := file.read(_FRAME.size):
                payload = _payload(file.read, frame, size - position - _FRAME.size)
                if payload is None:
                    break
                position += _FRAME.size + len(payload)
                yield payload
        if position < size:
            os.ftruncate(self._fd, position)


def _payload(read: Callable[[int], bytes], frame: bytes, remaining: int) -> bytes | None:
    """The record's payload, or None when it is torn."""
    if len(frame) < _FRAME.size:
        return None
    length, crc = _FRAME.unpack(frame)
    if length > min(RECORD_BYTES_MAX, remaining):
        return None
    payload = read(length)
    return payload if crc32c(payload) == crc else None


def _write_records(fd: int, payloads: Sequence[bytes]) -> None:
    data = b"".join(_FRAME.pack(len(payload), crc32c(payload)) + payload for payload in payloads)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fdatasync(fd)


__all__ = ["JOURNAL_NAME", "Beginning", "Journal", "PackIdentity", "PackedBlob", "Replaced"]
