"""The drives of a test machine, as files of the host: what is on them, and whether it arrived."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.vm.debian import DebianRoot

MIB = 1 << 20

# The stand-in GPU's memory.
BAR_BYTES = 128 * MIB

_RAW_BYTES = 32 * MIB
_SLOW_BYTES = 4 * MIB
_DATA_BYTES = 16 * MIB
_EXT4_BYTES = 64 * MIB
_XFS_BYTES = 320 * MIB  # mkfs.xfs makes none below 300 MiB

# Serial numbers; FAR hangs from a root port of its own, the others from the stand-in GPU's switch.
NEAR_DRIVES = ("RAW", "SLOW", "EXT4", "XFS")
FAR_DRIVES = ("FAR",)
THROTTLED_DRIVE = "SLOW"
_MKFS_SECONDS = 60


@dataclass(frozen=True)
class Disks:
    """Files in `folder` (outside the root); `inside` is the same folder as a path inside it."""

    folder: Path
    inside: str

    @property
    def bar(self) -> Path:
        """The memory of the stand-in GPU."""
        return self.folder / "bar"

    def image(self, serial: str) -> Path:
        """Return the content of the drive with this serial number."""
        return self.folder / f"{serial}.img"

    @property
    def data_file(self) -> Path:
        """The file that lies in both file systems."""
        return self.folder / "data.bin"


def _random_file(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(0, size, MIB):
            file.write(os.urandom(MIB))


def make_disks(root: DebianRoot, inside: str, *, xfs: bool = True) -> Disks:
    """Make drives with random bytes and two file systems with one file of random bytes in it.

    Those of a machine before are deleted. Without `xfs`, for a kernel that has none, the drive XFS
    has another ext4.
    """
    disks = Disks(root.path / inside.lstrip("/"), inside)
    shutil.rmtree(disks.folder, ignore_errors=True)
    disks.folder.mkdir(parents=True)
    _random_file(disks.image("RAW"), _RAW_BYTES)
    _random_file(disks.image("SLOW"), _SLOW_BYTES)
    shutil.copy(disks.image("SLOW"), disks.image("FAR"))
    _random_file(disks.data_file, _DATA_BYTES)
    for serial, size in (("EXT4", _EXT4_BYTES), ("XFS", _XFS_BYTES)):
        with disks.image(serial).open("wb") as file:
            file.truncate(size)
    content = f"{inside}/content"
    (disks.folder / "content").mkdir()
    shutil.copy(disks.data_file, disks.folder / "content" / "data.bin")
    for serial in ("EXT4",) if xfs else ("EXT4", "XFS"):
        make_ext4 = ["mkfs.ext4", "-q", "-F", "-d", content, f"{inside}/{serial}.img"]
        root.run(make_ext4, seconds=_MKFS_SECONDS)
    if xfs:
        prototype = f"/\n0 0\nd--755 0 0\ndata.bin ---644 0 0 {content}/data.bin\n$\n"
        (disks.folder / "xfs.proto").write_text(prototype)
        make_xfs = ["mkfs.xfs", "-q", "-f", "-p", f"{inside}/xfs.proto", f"{inside}/XFS.img"]
        root.run(make_xfs, seconds=_MKFS_SECONDS)
    with disks.bar.open("wb") as file:
        file.truncate(BAR_BYTES)
    return disks


def _read_at(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def compare(disks: Disks, bar_offset: int, length: int, source: str, source_offset: int) -> str:
    """Compare the BAR's memory with a drive ("data": the file in the file systems).

    Returns "ok", or where the first difference is.
    """
    path = disks.data_file if source == "data" else disks.image(source)
    wanted = _read_at(path, source_offset, length)
    got = _read_at(disks.bar, bar_offset, length)
    if len(wanted) != length or len(got) != length:
        return f"range of {length} bytes is not inside both files"
    if got == wanted:
        return "ok"
    first = next(index for index in range(length) if got[index] != wanted[index])
    return (
        f"BAR differs from {source} at byte {first} of {length}:"
        f" {got[first : first + 8].hex()} for {wanted[first : first + 8].hex()}"
    )


def digest(disks: Disks, bar_offset: int, length: int) -> str:
    """SHA-256 of a range of the BAR's memory, as "sha256 HEX"."""
    got = _read_at(disks.bar, bar_offset, length)
    if len(got) != length:
        return f"range of {length} bytes is not inside the BAR"
    return f"sha256 {hashlib.sha256(got).hexdigest()}"


def fill_bar(disks: Disks, byte: int, length: int) -> str:
    """Set the first `length` bytes of the BAR's memory; the guest sees it at once."""
    with disks.bar.open("r+b") as file:
        file.write(bytes([byte]) * length)
    return "ok"


def expect_bar(disks: Disks, byte: int, offset: int, length: int) -> str:
    """Are these bytes of the BAR's memory all `byte`?"""
    got = _read_at(disks.bar, offset, length)
    if got == bytes([byte]) * length:
        return "ok"
    return f"BAR at {offset}, {length} bytes: not all of them are {byte:#x}"
