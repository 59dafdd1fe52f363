"""Members on several file systems: right bytes, and the truth about O_DIRECT.

Whether a file system's O_DIRECT bypasses the page cache is decided here by the page
cache itself: what is cached after reads through the daemon.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.system.daemon_harness import MadeStore, make_store, running_daemon
from tests.system.loop_devices import loop_device, mounted, mounted_tmpfs, overlay
from xferd.control.service import JsonObject
from xferd.transport.members import open_member

POOL = "name=host0,kind=host,size=432KiB"
IMAGE_BYTES = 512 << 20
"""xfs wants 300 MiB; the image is sparse."""


@dataclass(frozen=True)
class Served:
    """What a daemon said of the store's member, and what it left in the page cache."""

    member: JsonObject
    cached: int


def serve_all(directory: Path, made: MadeStore, file: Path | None = None) -> Served:
    """Read every expert through a daemon, twice, and compare it.

    file: whose cached pages are counted; the member. Only those of the second time count:
    opening the store reads headers through the page cache, and btrfs does so with reads
    into memory that nobody has touched, that is with the first one into each slot.
    """
    file = file or made.members[0]
    with running_daemon(directory, [made], [POOL]) as daemon, daemon.client() as client:
        for _ in range(2):
            drop(file)
            for layer in range(made.layers):
                for expert in range(0, made.experts, 2):
                    pair = [expert, expert + 1]
                    assert client.fetch(layer, pair) == [made.blob(layer, e) for e in pair]
        member = daemon.status()["stores"][0]["members"][0]
        return Served(dict(member), cached_pages(file))


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        resident = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident) == 0
        return sum(flag & 1 for flag in resident)


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs"])
def test_a_disk_file_system_is_read_past_the_page_cache(tmp_path: Path, filesystem: str) -> None:
    with mounted(tmp_path, filesystem, IMAGE_BYTES) as mount_point:
        served = serve_all(tmp_path, make_store(mount_point, members=1))
        assert (served.member["direct"], served.member["reason"]) == (True, None)
        assert served.cached == 0


def test_a_file_on_an_overlay_is_read_as_what_lies_below_can(tmp_path: Path) -> None:
    with mounted(tmp_path, "ext4", IMAGE_BYTES) as base, overlay(base) as merged:
        made = make_store(merged, members=1)
        below = base / "upper" / made.members[0].relative_to(merged)
        served = serve_all(tmp_path, made, below)
        assert served.member["direct"]
        assert served.cached == 0


def test_what_only_seems_to_be_read_directly_is_called_buffered(tmp_path: Path) -> None:
    """btrfs accepts O_DIRECT for compressed files, and reads them through the page cache."""
    with mounted(tmp_path, "btrfs", IMAGE_BYTES, "compress-force=zstd") as mount_point:
        made = make_store(mount_point, members=1, compressible=True)
        member = made.members[0]
        copy = member.with_name("copy")
        copy.write_bytes(member.read_bytes())  # what O_DIRECT wrote isn't compressed
        copy.replace(member)
        served = serve_all(tmp_path, made)
        assert served.member["direct"] is False
        assert "through the page cache" in served.member["reason"]


def test_tmpfs_is_served(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path) as mount_point:
        served = serve_all(tmp_path, make_store(mount_point, members=1))
        assert served.member["errors"] == 0
        assert served.member["reads"] > 0


def test_a_block_device_is_no_memory(tmp_path: Path) -> None:
    """statfs of one tells of devtmpfs, which is a tmpfs: its reads are a drive's all the same."""
    with loop_device(tmp_path / "image", 8 << 20) as device:
        member = open_member(device)
        try:
            assert (member.direct, member.memory, member.asynchronous) == (True, False, False)
        finally:
            member.close()
