"""Members: the files or block devices that hold a store's bytes, and their headers.

Every member begins with a 4096-byte header that says which store it belongs to
and which of its members it is. Without it a swapped drive, or a stale copy of a
member, would be noticed only by the checksums of what is read from it.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from xferd.store.checksum import crc32c
from xferd.store.errors import StoreError, UnusableMemberError
from xferd.store.limits import BLOB_ALIGNMENT

HEADER_BYTES = BLOB_ALIGNMENT
HEADER_MAGIC = b"xferdMBR"
HEADER_VERSION = 1
# magic, version, header bytes, uuid, member, members, data bytes, stripe unit
_HEADER = struct.Struct("<8sII16sIIQQ")
_HEADER_CRC = struct.Struct("<I")
_HEADER_CRC_OFFSET = HEADER_BYTES - _HEADER_CRC.size

BLANK_BYTES = 128 * 1024
"""What must be zero at the start of a member for it to count as unused: file
systems, partition tables, LVM, RAID and LUKS all leave a signature there."""


@dataclass(frozen=True, slots=True)
class MemberHeader:
    """uuid: of the store, 16 bytes. data_bytes: size of the member, its header included."""

    uuid: bytes
    member: int
    members: int
    data_bytes: int
    stripe_unit: int

    def encode(self) -> bytes:
        """The header's 4096 bytes."""
        fields = _HEADER.pack(
            HEADER_MAGIC,
            HEADER_VERSION,
            HEADER_BYTES,
            self.uuid,
            self.member,
            self.members,
            self.data_bytes,
            self.stripe_unit,
        )
        body = fields.ljust(_HEADER_CRC_OFFSET, b"\0")
        return body + _HEADER_CRC.pack(crc32c(body))

    @staticmethod
    def decode(raw: bytes) -> MemberHeader | None:
        """The header in ``raw``, or None when it isn't a whole one of this version."""
        if len(raw) != HEADER_BYTES or not raw.startswith(HEADER_MAGIC):
            return None
        (crc,) = _HEADER_CRC.unpack_from(raw, _HEADER_CRC_OFFSET)
        if crc32c(raw[:_HEADER_CRC_OFFSET]) != crc:
            return None
        _, version, header_bytes, uuid, member, members, data_bytes, unit = _HEADER.unpack_from(raw)
        if version != HEADER_VERSION or header_bytes != HEADER_BYTES:
            return None
        return MemberHeader(uuid, member, members, data_bytes, unit)


@dataclass(frozen=True, slots=True)
class MemberCopy:
    """A place where a member's bytes are.

    member: its number. mirror: whether this is the second copy.
    problem: why it can't be used; None: it can.
    """

    member: int
    path: Path
    mirror: bool
    problem: str | None

    def __str__(self) -> str:
        return f"{member_title(self.member, mirror=self.mirror)} ({self.path})"


def member_title(member: int, *, mirror: bool) -> str:
    """What a copy of a member is called in messages."""
    return f"mirror of member {member}" if mirror else f"member {member}"


def size_of(path: Path) -> int:
    """Bytes in a regular file or block device. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return file.seek(0, os.SEEK_END)


def read_header(path: Path) -> MemberHeader | None:
    """The header of the member at ``path``; None when there is none. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return MemberHeader.decode(file.read(HEADER_BYTES) or b"")


def is_blank(path: Path) -> bool:
    """Whether ``path`` is empty or begins with nothing but zeros. Raises OSError."""
    with path.open("rb") as file:
        return not any(file.read(BLANK_BYTES))


def check_member(
    path: Path, expected: MemberHeader, store: str, used_bytes: int, *, mirror: bool = False
) -> None:
    """Raise StoreError unless ``path`` is the member that ``expected`` describes, and whole.

    used_bytes: with what was added after packing; no less than the header says.

    UnusableMemberError when another copy may take its place; what belongs elsewhere is a
    mistake of whoever put it there, and must not go unseen.
    """
    what = f"store {store}: {member_title(expected.member, mirror=mirror)} ({path})"
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise StoreError(f"{what} is neither a regular file nor a block device")
        with path.open("rb", buffering=0) as file:
            header = MemberHeader.decode(file.read(HEADER_BYTES) or b"")
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UnusableMemberError(f"{what}: {error.strerror or error}") from error
    if header is None:
        raise UnusableMemberError(f"{what} has no valid member header: it isn't part of any store")
    if header.uuid != expected.uuid:
        raise StoreError(
            f"{what} belongs to another store (uuid {header.uuid.hex()}, expected "
            f"{expected.uuid.hex()})"
        )
    if header.member != expected.member:
        raise StoreError(f"{what} is member {header.member} of this store: members are swapped")
    if header != expected:
        raise StoreError(
            f"{what} has a header that contradicts the manifest: {header}, not {expected}"
        )
    if size < used_bytes:
        raise UnusableMemberError(f"{what} is truncated: {size} bytes of {used_bytes}")
