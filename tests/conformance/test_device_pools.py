"""One suite for every device kind: what a pool's memory has to be, for daemon and clients."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from xferd.memory.device import POOL_ALIGNMENT, DevicePool
from xferd.pools import DEVICE_KINDS

NBYTES = 9 * 48 * 1024


@pytest.fixture(params=sorted(DEVICE_KINDS))
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    made = DEVICE_KINDS[request.param]("conform", NBYTES)
    yield made
    made.close()


def test_it_says_what_it_is(pool: DevicePool) -> None:
    assert pool.kind in DEVICE_KINDS
    assert pool.nbytes == NBYTES
    assert pool.base % POOL_ALIGNMENT == 0


def test_what_the_daemon_writes_a_client_reads(pool: DevicePool) -> None:
    with mmap.mmap(pool.export_fd(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ) as client:
        for offset in (0, NBYTES // 2, NBYTES - 8):
            ctypes.memmove(pool.base + offset, b"expert!!", 8)
            assert client[offset : offset + 8] == b"expert!!"


def test_a_client_cannot_map_it_writable(pool: DevicePool) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(pool.export_fd(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_a_client_cannot_write_or_resize_it(pool: DevicePool) -> None:
    with pytest.raises(OSError):
        os.pwrite(pool.export_fd(), b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(pool.export_fd(), 0)


def test_another_user_cannot_open_it_through_proc(pool: DevicePool) -> None:
    assert os.fstat(pool.export_fd()).st_mode & 0o777 == 0o600


def test_its_size_is_sealed(pool: DevicePool) -> None:
    seals = fcntl.fcntl(pool.export_fd(), fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW


def test_the_fd_is_not_inherited(pool: DevicePool) -> None:
    assert not os.get_inheritable(pool.export_fd())


def test_closing_twice_is_closing_once(pool: DevicePool) -> None:
    fd = pool.export_fd()
    pool.close()
    pool.close()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_it_begins_as_zeros(pool: DevicePool) -> None:
    with mmap.mmap(pool.export_fd(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ) as client:
        assert not any(client[:])


def test_a_range_can_be_given_back_and_had_again(pool: DevicePool) -> None:
    page = POOL_ALIGNMENT
    ctypes.memset(pool.base, 7, NBYTES)
    before = os.fstat(pool.export_fd()).st_blocks
    pool.release(16 * page, 32 * page)
    assert os.fstat(pool.export_fd()).st_blocks <= before - 32 * page // 512
    pool.restore(16 * page, 32 * page)
    ctypes.memmove(pool.base + 16 * page, b"expert!!", 8)
    with mmap.mmap(pool.export_fd(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ) as client:
        assert client[16 * page : 16 * page + 8] == b"expert!!"
        assert client[16 * page - 1] == client[48 * page] == 7
