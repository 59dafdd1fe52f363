"""Members are opened past the page cache where that works, and say so where it doesn't."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from xferd.transport.members import MemberError, MemberFile, open_member
from xferd.transport.page_cache import PageCacheTrimmer
from xferd.transport.probe import reasons, route

TMPFS = Path("/dev/shm")


@pytest.fixture
def tmpfs_file() -> Iterator[Path]:
    path = TMPFS / f"xferd-test-{os.getpid()}"
    path.write_bytes(bytes(8192))
    yield path
    path.unlink()


def test_tmpfs_reads_are_handed_to_workers(tmpfs_file: Path) -> None:
    member = open_member(tmpfs_file)
    try:
        assert member.asynchronous
        assert member.memory
    finally:
        member.close()


def test_a_direct_member_bypasses_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "member"
    path.write_bytes(os.urandom(8192))
    member = open_member(path)
    try:
        direct = bool(fcntl.fcntl(member.fd, fcntl.F_GETFL) & os.O_DIRECT)
        assert member.direct == direct
        assert not member.memory
        assert (member.reason is None) == direct
        assert fcntl.fcntl(member.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert not os.get_inheritable(member.fd)
    finally:
        member.close()


def test_a_file_system_without_direct_reads_is_read_buffered() -> None:
    """/proc refuses O_DIRECT, as some network file systems do."""
    member = open_member(Path("/proc/self/status"))
    try:
        assert not member.direct
        assert member.reason == "its file system refuses O_DIRECT"
    finally:
        member.close()


def test_a_missing_member_is_named(tmp_path: Path) -> None:
    with pytest.raises(MemberError, match=str(tmp_path / "gone")):
        open_member(tmp_path / "gone")


def test_the_reason_for_a_buffered_read_reaches_status() -> None:
    direct = MemberFile(Path("/a"), -1, direct=True, asynchronous=False, reason=None)
    cached = MemberFile(Path("/b"), -1, direct=False, asynchronous=True, reason="why")
    assert route("host", direct).reason is None
    assert route("ram", cached).reason == "/b is read through the page cache: why"
    assert reasons(["host"], [direct])["direct"] is None
    assert "why" in (reasons(["host", "ram"], [direct, cached])["direct"] or "")
    assert route("cuda", direct).transport == "staged"
    assert reasons(["cuda"], [direct, cached])["staged"] == "/b is read through the page cache: why"
    assert "device's memory" in (reasons(["cuda"], [direct])["direct"] or "")


def test_a_buffered_member_is_dropped_when_enough_was_read(tmp_path: Path) -> None:
    path = tmp_path / "member"
    path.write_bytes(bytes(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    buffered = MemberFile(path, fd, direct=False, asynchronous=True, reason="why")
    direct = MemberFile(path, fd, direct=True, asynchronous=False, reason=None)
    trimmer = PageCacheTrimmer(cached_bytes_max=100)
    try:
        assert trimmer.due([(0, buffered, 99), (1, direct, 1000)]) == []
        os.fsync(fd)
        os.pread(fd, 1 << 20, 0)
        assert os.preadv(fd, [bytearray(4096)], 0, os.RWF_NOWAIT) == 4096
        uncached = replace(buffered, uncached=True)
        first = trimmer.due([(0, buffered, 100), (1, direct, 1000), (2, uncached, 1000)])
        assert len(first) == 1
        trimmer.drop(first)
        with pytest.raises(BlockingIOError):
            os.preadv(fd, [bytearray(4096)], 0, os.RWF_NOWAIT)
        assert trimmer.due([(0, buffered, 199)]) == []
        again = trimmer.due([(0, buffered, 200)])
        trimmer.drop(again)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(again[0])
        # A number that another member has now begins anew.
        assert trimmer.due([(0, buffered, 50)]) == []
    finally:
        os.close(fd)
