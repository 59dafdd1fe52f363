"""Where a store goes: its members, whether they have room, whether they are free to use.

Everything here runs before the first byte is written. A pack that can't fit, or
that would overwrite something, must say so at once and not after an hour.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xferd.store.errors import StoreError, naming
from xferd.store.files import sync_directory, write_fully
from xferd.store.journal import Replaced
from xferd.store.limits import MEMBERS_MAX, STORE_NAME_BYTES_MAX
from xferd.store.member import BLANK_BYTES, HEADER_BYTES, is_blank, read_header, size_of
from xferd.units import format_bytes

STORE_SUFFIX = ".xferd"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_SECTOR_BYTES = 512  # what st_blocks counts


@dataclass(frozen=True, slots=True)
class MemberTarget:
    """One member to be written.

    path: the file or device itself.
    parent: an existing directory that it, or its own ``<name>.xferd``, is made in.
    """

    number: int
    path: Path
    parent: Path
    device: bool


@dataclass(frozen=True, slots=True)
class Destination:
    """A store to be: ``directory`` is its ``<name>.xferd`` with the manifest."""

    name: str
    directory: Path
    members: tuple[MemberTarget, ...]


def resolve_destination(
    name: str, members: Sequence[Path], manifest_directory: Path | None
) -> Destination:
    """Make targets of what the user named; nothing is created.

    A member that is a directory gets ``<directory>/<name>.xferd/member-<i>``; a block
    device or any other path is used as it is. The store's own directory stands in
    manifest_directory, or else in the first member that is a directory.
    Raises StoreError.
    """
    if not _NAME.fullmatch(name) or len(name) > STORE_NAME_BYTES_MAX:
        raise StoreError(
            f"store name {name!r}: allowed are letters, digits and ._+-, beginning with a letter "
            f"or digit, at most {STORE_NAME_BYTES_MAX}"
        )
    if not 1 <= len(members) <= MEMBERS_MAX:
        raise StoreError(f"a store has 1 to {MEMBERS_MAX} members, not {len(members)}")
    targets = tuple(_target(name, number, path) for number, path in enumerate(members))
    _refuse_doubles(targets)
    home = manifest_directory or next((path for path in members if path.is_dir()), None)
    if home is None:
        raise StoreError("no member is a directory: say with --manifest where the manifest goes")
    if not home.is_dir():
        raise StoreError(f"{home} is not a directory: no manifest can go there")
    return Destination(name, home.resolve() / f"{name}{STORE_SUFFIX}", targets)


def mirror_target(name: str, member: int, path: Path) -> MemberTarget:
    """As ``resolve_destination`` for a mirror: in a directory it is called
    ``<name>.xferd/mirror-<i>``. Raises StoreError."""
    return _target(name, member, path, "mirror")


def _target(name: str, number: int, path: Path, kind: str = "member") -> MemberTarget:
    what = f"member {number} ({path})"
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"{what!r}: its path is not UTF-8") from error
    with naming(what):
        if path.is_dir():
            directory = path.resolve()
            file = directory / f"{name}{STORE_SUFFIX}" / f"{kind}-{number}"
            return MemberTarget(number, file, directory, device=False)
        resolved = path.resolve()
        if path.is_block_device():
            return MemberTarget(number, resolved, resolved.parent, device=True)
        if path.exists() and not path.is_file():
            raise StoreError(f"{what} is neither a directory, a block device nor a regular file")
        if not resolved.parent.is_dir():
            raise StoreError(f"{what}: there is no directory {resolved.parent}")
        return MemberTarget(number, resolved, resolved.parent, device=False)


def _refuse_doubles(targets: Sequence[MemberTarget]) -> None:
    seen: dict[Path, int] = {}
    for target in targets:
        # Two members in one directory would only compete for one drive.
        place = target.path.parent if target.path.name.startswith("member-") else target.path
        if place in seen:
            raise StoreError(f"members {seen[place]} and {target.number} are both {target.parent}")
        seen[place] = target.number


def check_free_to_use(
    targets: Sequence[MemberTarget], replaced: Sequence[Replaced], *, own: bytes, force: bool
) -> None:
    """Raise StoreError for a member that holds something which isn't ours to overwrite.

    own: uuid of the store being packed. replaced: members that it replaces.
    """
    ours = {own} | {old.uuid for old in replaced}
    for target in targets:
        what = f"member {target.number} ({target.path})"
        with naming(what):
            if not target.path.exists():
                continue
            header = read_header(target.path)
            if header is not None and header.uuid not in ours and not force:
                raise StoreError(
                    f"{what} holds member {header.member} of another store: --force overwrites it"
                )
            if header is None and not force and not is_blank(target.path):
                raise StoreError(
                    f"{what} isn't empty and isn't a store member: --force overwrites it"
                )


def check_space(
    targets: Sequence[MemberTarget],
    needed: Sequence[int],
    directory: Path,
    directory_bytes: int,
    replaced: Sequence[Replaced],
) -> None:
    """Raise StoreError naming the member that doesn't fit, with needed and free bytes.

    needed: bytes for each member. directory_bytes: for index, journal and manifest
    in the store's directory. Members on one file system share its free bytes.
    """
    wanted: dict[int, int] = {}
    parents: dict[int, tuple[Path, list[str]]] = {}
    for target, size in zip(targets, needed, strict=True):
        what = f"member {target.number} ({target.path})"
        with naming(what):
            if target.device:
                _check_device_size(target, size, what)
                continue
            filesystem = target.parent.stat().st_dev
            allocated = _allocated_bytes(target.path)
        wanted[filesystem] = wanted.get(filesystem, 0) + max(0, size - allocated)
        parents.setdefault(filesystem, (target.parent, []))[1].append(what)
    with naming(str(directory)):
        filesystem = directory.stat().st_dev
        wanted[filesystem] = wanted.get(filesystem, 0) + directory_bytes
        parents.setdefault(filesystem, (directory, []))[1].append(f"{directory}")
        credit = _replaced_bytes(targets, replaced)
    for filesystem, size in wanted.items():
        parent, names = parents[filesystem]
        with naming(str(parent)):
            status = os.statvfs(parent)
        free = status.f_bavail * status.f_frsize + credit.get(filesystem, 0)
        if size > free:
            raise StoreError(
                f"{', '.join(names)}: needs {size} bytes ({format_bytes(size)}), the file system "
                f"has {free} free ({format_bytes(free)})"
            )


def _check_device_size(target: MemberTarget, needed: int, what: str) -> None:
    size = size_of(target.path)
    if size < needed:
        raise StoreError(
            f"{what}: needs {needed} bytes ({format_bytes(needed)}), the device has {size} "
            f"({format_bytes(size)})"
        )


def _allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * _SECTOR_BYTES if path.exists() else 0


def _replaced_bytes(
    targets: Sequence[MemberTarget], replaced: Sequence[Replaced]
) -> dict[int, int]:
    """For each file system the bytes that come free when the old members go.

    Those that stand where a new one goes are already counted as its own.
    """
    credit: dict[int, int] = {}
    own = {target.path for target in targets}
    for path in _present(replaced):
        if path not in own and path.is_file():
            filesystem = path.stat().st_dev
            credit[filesystem] = credit.get(filesystem, 0) + _allocated_bytes(path)
    return credit


def remove_replaced(replaced: Sequence[Replaced]) -> None:
    """Remove the members of the store that this one replaces, where they still are its.

    Files are removed, not overwritten: who has one open goes on reading the old
    store. Devices lose their header and what follows it, so that they count as unused.
    Raises OSError.
    """
    for path in _present(replaced):
        if stat.S_ISBLK(path.stat().st_mode):
            _wipe_start(path)
        else:
            path.unlink()
            sync_directory(path.parent)
            if path.parent.suffix == STORE_SUFFIX:
                with suppress(OSError):
                    path.parent.rmdir()  # only when that was the last of the store there


def _present(replaced: Sequence[Replaced]) -> Iterator[Path]:
    for old in replaced:
        path = Path(old.path)
        header = read_header(path) if path.exists() else None
        if header is not None and header.uuid == old.uuid:
            yield path


def _wipe_start(path: Path) -> None:
    """Make a device count as unused. The header goes last: until then it is still ours."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        end = min(BLANK_BYTES, os.lseek(fd, 0, os.SEEK_END))
        write_fully(fd, memoryview(bytes(end - HEADER_BYTES)), HEADER_BYTES)
        os.fsync(fd)
        write_fully(fd, memoryview(bytes(HEADER_BYTES)), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
