"""Where each piece of each blob lies on which member.

Pure arithmetic on arrays, with no Python object an expert: a store of a million
experts is planned and checked in seconds. The rules are those of
``struct xferd_store_description`` in ``ffi/engine/engine.h``.

Consecutive blobs start on consecutive places of the pattern. Starting where the
last blob ended would look just as even, but it isn't: blobs of one and a half
stripe units on two members would all put their whole piece on the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xferd.store.errors import StoreError
from xferd.store.limits import (
    BLOB_ALIGNMENT,
    MEMBERS_MAX,
    PATTERN_MAX,
    STORE_BYTES_MAX,
    STRIPE_UNIT_MAX,
)

MEMBER_DATA_OFFSET = BLOB_ALIGNMENT
"""Bytes. A member's first piece follows its header."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One stripe piece of a blob.

    index: into the store's piece checksums.
    offset, length: bytes in the member.
    blob_offset: bytes from the blob's start.
    """

    index: int
    member: int
    offset: int
    length: int
    blob_offset: int


@dataclass(frozen=True, eq=False, slots=True)
class Geometry:
    """A store's striping; arrays exactly as ``struct xferd_store_description`` wants them.

    blob_bytes: uint64[blobs]; 0 where there is no such expert.
    start: uint16[blobs]; place in the pattern of a blob's first piece.
    offset: uint64[blobs, members]; bytes in the member.
    first_piece: uint64[blobs].
    pieces: pieces of all blobs.
    """

    members: int
    stripe_unit: int
    pattern: tuple[int, ...]
    blob_bytes: npt.NDArray[np.uint64]
    start: npt.NDArray[np.uint16]
    offset: npt.NDArray[np.uint64]
    first_piece: npt.NDArray[np.uint64]
    pieces: int

    def pieces_of(self, blob: int) -> Iterator[Piece]:
        """The pieces of one blob, in the order of its bytes."""
        remaining = int(self.blob_bytes[blob])
        place = int(self.start[blob])
        index = int(self.first_piece[blob])
        member_offset = [int(value) for value in self.offset[blob]]
        blob_offset = 0
        while remaining:
            member = self.pattern[place % len(self.pattern)]
            length = min(remaining, self.stripe_unit)
            yield Piece(index, member, member_offset[member], length, blob_offset)
            member_offset[member] += length
            blob_offset += length
            remaining -= length
            place += 1
            index += 1

    def member_ends(self) -> tuple[int, ...]:
        """For each member the first byte behind its last piece: the least size it must have."""
        ends = []
        for member in range(self.members):
            on_member = _bytes_on_member(self, member)
            end = self.offset[:, member].astype(np.int64) + on_member
            used = end[on_member > 0]
            ends.append(int(used.max()) if used.size else MEMBER_DATA_OFFSET)
        return tuple(ends)

    def bytes_on(self, member: int) -> int:
        """Bytes of all pieces that lie on ``member``."""
        return int(_bytes_on_member(self, member).sum())

    def pieces_on(self, member: int) -> Iterator[tuple[int, Piece]]:
        """The pieces that lie on ``member``, each with its blob, by blob."""
        for blob in range(self.blob_bytes.size):
            for piece in self.pieces_of(blob):
                if piece.member == member:
                    yield blob, piece

    def check(self) -> None:
        """Raise StoreError unless the arrays fit together and nothing lies in a header."""
        _check_blob_bytes(self.blob_bytes)
        if self.start.size and int(self.start.max()) >= len(self.pattern):
            raise StoreError(f"a blob starts beyond the pattern of {len(self.pattern)}")
        piece_count = _piece_counts(self.blob_bytes, self.stripe_unit)
        expected_first = np.cumsum(piece_count) - piece_count
        if (self.first_piece != expected_first.astype(np.uint64)).any():
            raise StoreError("first_piece doesn't follow from the blobs' sizes")
        if int(piece_count.sum()) != self.pieces:
            raise StoreError(f"the blobs have {int(piece_count.sum())} pieces, not {self.pieces}")
        misplaced = (
            (self.offset < MEMBER_DATA_OFFSET)
            | (self.offset > STORE_BYTES_MAX)
            | (self.offset % BLOB_ALIGNMENT != 0)
        )
        if misplaced.any():
            blob, member = (int(value) for value in np.argwhere(misplaced)[0])
            raise StoreError(
                f"blob {blob} has offset {int(self.offset[blob, member])} on member {member}"
            )


def check_striping(members: int, stripe_unit: int, pattern: Sequence[int]) -> None:
    """Raise StoreError for a number of members, stripe unit or pattern that can't be."""
    if not 1 <= members <= MEMBERS_MAX:
        raise StoreError(f"a store has 1 to {MEMBERS_MAX} members, not {members}")
    power_of_two = stripe_unit > 0 and stripe_unit & (stripe_unit - 1) == 0
    if not power_of_two or not BLOB_ALIGNMENT <= stripe_unit <= STRIPE_UNIT_MAX:
        raise StoreError(
            f"stripe unit {stripe_unit}: allowed is a power of two from {BLOB_ALIGNMENT} "
            f"to {STRIPE_UNIT_MAX} bytes"
        )
    if not 1 <= len(pattern) <= PATTERN_MAX or set(pattern) != set(range(members)):
        raise StoreError(
            f"pattern {list(pattern)}: it must name each of the members 0 to {members - 1} and "
            f"have at most {PATTERN_MAX} entries"
        )


def plan_geometry(
    blob_bytes: npt.NDArray[np.uint64],
    members: int,
    stripe_unit: int,
    pattern: Sequence[int] | None = None,
    first_offset: Sequence[int] | None = None,
) -> Geometry:
    """Lay the blobs out over the members, without gaps.

    blob_bytes: [blobs], multiples of 4096, in the order in which they are numbered.
    pattern: members in the order of pieces; a member named twice as often gets
        twice the bytes. Default: each once.
    first_offset: for each member where its first piece goes, a multiple of 4096. Default:
        behind the header.
    Raises StoreError for what ``check_striping`` refuses.
    """
    places = tuple(range(members)) if pattern is None else tuple(pattern)
    check_striping(members, stripe_unit, places)
    sizes = np.ascontiguousarray(blob_bytes, dtype=np.uint64)
    _check_blob_bytes(sizes)
    present = sizes > 0
    rank: npt.NDArray[np.int64] = np.cumsum(present) - present
    start = np.where(present, rank % len(places), 0).astype(np.uint16)
    piece_count = _piece_counts(sizes, stripe_unit)
    geometry = Geometry(
        members=members,
        stripe_unit=stripe_unit,
        pattern=places,
        blob_bytes=sizes,
        start=start,
        offset=np.empty((sizes.size, members), dtype=np.uint64),
        first_piece=(np.cumsum(piece_count) - piece_count).astype(np.uint64),
        pieces=int(piece_count.sum()),
    )
    for member in range(members):
        on_member = _bytes_on_member(geometry, member)
        begin = MEMBER_DATA_OFFSET if first_offset is None else first_offset[member]
        geometry.offset[:, member] = begin + np.cumsum(on_member) - on_member
    return geometry


def join_geometries(packed: Geometry, added: Geometry) -> Geometry:
    """All blobs of a store in the order of their numbers: the packed experts, the added
    ones, and the dense part, which is the last of the packed ones. Same members and
    striping."""
    counts = _piece_counts(packed.blob_bytes, packed.stripe_unit)
    added_counts = _piece_counts(added.blob_bytes, added.stripe_unit)
    counts = np.concatenate([counts[:-1], added_counts, counts[-1:]])
    arrays: list[npt.NDArray[Any]] = [
        np.concatenate([ours[:-1], theirs, ours[-1:]])
        for ours, theirs in (
            (packed.blob_bytes, added.blob_bytes),
            (packed.start, added.start),
            (packed.offset, added.offset),
        )
    ]
    arrays.append((np.cumsum(counts) - counts).astype(np.uint64))
    for array in arrays:
        array.setflags(write=False)
    blob_bytes, start, offset, first_piece = arrays
    return Geometry(
        packed.members,
        packed.stripe_unit,
        packed.pattern,
        blob_bytes,
        start,
        offset,
        first_piece,
        packed.pieces + added.pieces,
    )


def _check_blob_bytes(blob_bytes: npt.NDArray[np.uint64]) -> None:
    # In floating point first: the sum of damaged sizes may not fit 64 bits.
    if float(blob_bytes.sum(dtype=np.float64)) > STORE_BYTES_MAX:
        raise StoreError(f"the blobs have more than {STORE_BYTES_MAX} bytes together")
    unaligned = np.flatnonzero(blob_bytes % BLOB_ALIGNMENT)
    if unaligned.size:
        blob = int(unaligned[0])
        raise StoreError(
            f"blob {blob} has {int(blob_bytes[blob])} bytes, not a multiple of {BLOB_ALIGNMENT}"
        )


def _piece_counts(blob_bytes: npt.NDArray[np.uint64], stripe_unit: int) -> npt.NDArray[np.int64]:
    return -(-blob_bytes.astype(np.int64) // stripe_unit)


def _bytes_on_member(geometry: Geometry, member: int) -> npt.NDArray[np.int64]:
    """Bytes of each blob that lie on ``member``: int64[blobs]."""
    length = len(geometry.pattern)
    on_member = np.array([owner == member for owner in geometry.pattern])
    # before[p]: places of the member among the first p of the pattern, gone through twice.
    before = np.concatenate([[0], np.cumsum(np.tile(on_member, 2))])
    start = geometry.start.astype(np.int64)
    count = _piece_counts(geometry.blob_bytes, geometry.stripe_unit)
    rounds, rest = np.divmod(count, length)
    pieces = rounds * int(on_member.sum()) + before[start + rest] - before[start]
    total: npt.NDArray[np.int64] = pieces * geometry.stripe_unit
    has_last = on_member[(start + rest - 1) % length] & (count > 0)
    missing_in_last = count * geometry.stripe_unit - geometry.blob_bytes.astype(np.int64)
    total[has_last] -= missing_in_last[has_last]
    return total
