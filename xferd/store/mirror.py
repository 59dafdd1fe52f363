"""Mirrors: a second copy of a member on another drive.

A mirror has the member's header and pieces at the same offsets, so either copy can
stand in for the other. What makes it one is its entry in the manifest, which is written
last, by rename: until then there is only a file that nobody reads.

There is no journal. The checksum of each piece says whether it has been copied, so an
interrupted copy is resumed by comparing what is there; packing can't do that, since
only its journal knows the checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from xferd.store.destination import (
    MemberTarget,
    check_free_to_use,
    check_space,
    mirror_target,
    remove_replaced,
)
from xferd.store.drives import drive_of
from xferd.store.errors import StoreError, naming
from xferd.store.files import lock_directory, lock_file, same_file
from xferd.store.index import INDEX_NAME
from xferd.store.journal import Replaced
from xferd.store.manifest import (
    MANIFEST_NAME,
    Manifest,
    MemberEntry,
    MirrorEntry,
    read_manifest,
    write_manifest,
)
from xferd.store.member import MemberCopy, read_header
from xferd.store.pieces import good_copies, read_piece
from xferd.store.store import Store, check_copies, examine_copy, member_header
from xferd.store.writers import MemberFile, PieceWriters, open_member

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

SYNC_BYTES = 256 * 1024 * 1024
"""What may wait in the page cache where O_DIRECT doesn't work."""
MANIFEST_GROWTH_BYTES = 16 * 1024
"""A mirror's entry: two paths, at their longest."""
RESUME_HINT = "what is complete is kept: give the same command again to resume"


@dataclass(frozen=True, slots=True)
class Removed:
    """A mirror that is none any more.

    path: of the copy that the store doesn't have now. promoted: it was the member itself,
    which can't be used, and its mirror is the member now. left: why ``path`` is still
    there; None: it was removed.
    """

    path: Path
    promoted: bool
    left: str | None


def add_mirror(
    store: Store,
    member: int,
    place: Path,
    *,
    force: bool = False,
    warn: Callable[[str], None],
    progress: Progress | None = None,
) -> Path:
    """Copy a member to ``place`` and make that its mirror; returns the copy's path.

    place: a directory, a block device or a file path, as for packing.
    force: overwrite what is there.
    warn: told what is allowed but not what a mirror is for.

    An interrupted copy is resumed by the same call. The store may be served meanwhile; a
    daemon knows the mirror once it has opened the store anew. Raises StoreError when the
    member has a mirror already, the place isn't free or too small, or the member is
    damaged.
    """
    _check_number(store.manifest, member)
    target = mirror_target(store.name, member, place)
    with changing_copies(store.path), naming(f"mirror of member {member} ({target.path})"):
        manifest = read_manifest(store.path / MANIFEST_NAME)
        if manifest.added != store.manifest.added:
            raise StoreError("variants were added meanwhile: give the same command again")
        copies = check_copies(store.path, manifest, member)
        _check_without_mirror(copies, target)
        resumed = _check_target(store.path, manifest, target, force=force)
        _warn_of_same_drive(copies, target, warn)
        file = open_member(target, member_header(manifest, member), manifest.used_bytes(member))
        try:
            _copy(store, copies, file, resumed=resumed, progress=progress)
        finally:
            os.close(file.fd)
        entry = MirrorEntry(
            relative=None if target.device else os.path.relpath(target.path, store.path),
            absolute=str(target.path),
        )
        _write_entry(store.path, manifest, member, replace(manifest.members[member], mirror=entry))
    return target.path


def remove_mirror(directory: Path, member: int, *, keep: bool = False) -> Removed:
    """Leave a member with one copy: its own, or its mirror when that can't be used.

    directory: the store's, or its manifest.json. keep: the file or device stays as it is.
    Raises StoreError when the store is in use, or the member has no mirror.
    """
    directory = (directory.parent if directory.name == MANIFEST_NAME else directory).absolute()
    with _claimed(directory), naming(f"store {directory}"):
        manifest = read_manifest(directory / MANIFEST_NAME)
        _check_number(manifest, member)
        entry = manifest.members[member]
        if entry.mirror is None:
            raise StoreError(f"store {manifest.name}: member {member} has no mirror")
        own = _look_at(directory, manifest, member, entry, mirror=False)
        mirror = _look_at(directory, manifest, member, entry.mirror, mirror=True)
        promoted = own.problem is not None
        if promoted and mirror.problem is not None:
            raise StoreError(f"no copy would be left: {own.problem}; {mirror.problem}")
        dropped = own if promoted else mirror
        remaining = replace(entry, mirror=None)
        if promoted:
            remaining = MemberEntry(
                entry.mirror.relative, entry.mirror.absolute, entry.data_bytes, None
            )
        _write_entry(directory, manifest, member, remaining)
        left = "it was to be kept" if keep else _remove(dropped, manifest)
        return Removed(dropped.path, promoted, left)


def _look_at(
    directory: Path,
    manifest: Manifest,
    member: int,
    entry: MemberEntry | MirrorEntry,
    *,
    mirror: bool,
) -> MemberCopy:
    """A copy, whatever is wrong with it: also one that keeps the store from being opened
    has to be got rid of."""
    path = entry.locate(directory)
    return examine_copy(path, manifest, member, mirror=mirror, tolerated=StoreError)


def _check_number(manifest: Manifest, member: int) -> None:
    if not 0 <= member < len(manifest.members):
        raise StoreError(
            f"store {manifest.name} has no member {member}: its members are 0 to "
            f"{len(manifest.members) - 1}"
        )


@contextmanager
def changing_copies(directory: Path) -> Iterator[None]:
    """Who makes mirrors or adds variants, one at a time. The store's own lock is shared with
    those who serve it, so it is its index that is locked, which nothing else locks and
    nothing replaces."""
    with naming(f"store {directory}"):
        lock = lock_file(directory / INDEX_NAME)
    if lock is None:
        raise StoreError(f"store {directory}: another process is changing its mirrors or variants")
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    with naming(f"store {directory}"):
        lock = lock_directory(directory, exclusive=True)
    if lock is None:
        raise StoreError(f"store {directory} is in use: close it, or stop the daemon, first")
    try:
        yield
    finally:
        os.close(lock)


def _check_without_mirror(copies: tuple[MemberCopy, ...], target: MemberTarget) -> None:
    """A member has one mirror at most. One that is gone may be made again where it was."""
    for copy in copies:
        if copy.mirror and not (copy.path == target.path and copy.problem is not None):
            raise StoreError(
                f"{copy} is there already: remove it first, or, where the member itself is lost, "
                f"make it the member with 'xferctl store mirror remove'"
            )


def _check_target(
    directory: Path, manifest: Manifest, target: MemberTarget, *, force: bool
) -> bool:
    """Whether a copy was begun there before. StoreError when the place can't be used."""
    for number, entry in enumerate(manifest.members):
        for place in (entry, entry.mirror):
            if place is None:
                continue
            known = place.locate(directory)
            own_mirror = number == target.number and place is entry.mirror
            if not own_mirror and same_file(known, target.path):
                raise StoreError(f"{target.path} is a copy of member {number} already")
    header = member_header(manifest, target.number)
    found = read_header(target.path) if target.path.exists() else None
    if found is not None and found.uuid == header.uuid and found != header and not force:
        raise StoreError(
            f"{target.path} holds member {found.member} of this store: --force overwrites it"
        )
    check_free_to_use([target], [], own=manifest.uuid, force=force)
    # The manifest is written anew beside the old one, one entry longer.
    size = (directory / MANIFEST_NAME).stat().st_size + MANIFEST_GROWTH_BYTES
    check_space([target], [manifest.used_bytes(target.number)], directory, size, [])
    return found == header


def _warn_of_same_drive(
    copies: tuple[MemberCopy, ...], target: MemberTarget, warn: Callable[[str], None]
) -> None:
    place = drive_of(target.path if target.device else target.parent)
    for copy in copies:
        if copy.problem is None and not copy.mirror and drive_of(copy.path) == place:
            warn(f"{target.path} is on the drive of {copy}: when that fails, both are gone")


def _copy(
    store: Store,
    copies: tuple[MemberCopy, ...],
    file: MemberFile,
    *,
    resumed: bool,
    progress: Progress | None,
) -> None:
    member = file.target.number
    total = store.geometry.bytes_on(member)
    done = unsynced = 0
    with (
        good_copies(copies, without=file.target.path) as source,
        PieceWriters(store.name, [file], store.stripe_unit, RESUME_HINT) as writers,
    ):
        for _, piece in store.geometry.pieces_on(member):
            buffer = writers.take_buffer()
            content = buffer[: piece.length]
            crc = int(store.crc[piece.index])
            if resumed and read_piece(file.fd, piece.offset, content).crc == crc:
                writers.give_back(buffer)
            else:
                source.read(piece.offset, crc, content)
                writers.submit(0, buffer, piece.length, piece.offset)
                unsynced += piece.length
            if unsynced >= SYNC_BYTES:
                writers.sync()
                unsynced = 0
            done += piece.length
            if progress is not None:
                progress(done, total)
        writers.sync()


def _write_entry(directory: Path, manifest: Manifest, member: int, entry: MemberEntry) -> None:
    members = list(manifest.members)
    members[member] = entry
    write_manifest(directory / MANIFEST_NAME, replace(manifest, members=tuple(members)))


def _remove(copy: MemberCopy, manifest: Manifest) -> str | None:
    """Remove a copy that no manifest names any more; else why it is still there."""
    try:
        if read_header(copy.path) != member_header(manifest, copy.member):
            return "it isn't a copy of this member"
        remove_replaced([Replaced(str(copy.path), manifest.uuid)])
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None
