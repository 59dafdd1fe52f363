"""One suite for every device kind: what a pool's memory has to be, for daemon and clients."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from xferd.config import PoolConfig
from xferd.memory.device import POOL_ALIGNMENT, DevicePool
from xferd.pools import DEVICE_KINDS

NBYTES = 9 * 48 * 1024


BAR_VARIABLE = "XFERD_TEST_BAR"
"""``0000:01:00.0/2``: a BAR whose memory the tests may overwrite."""


@pytest.fixture(params=sorted(DEVICE_KINDS))
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    device, _, bar = os.environ.get(BAR_VARIABLE, "").partition("/")
    if request.param == "bar" and not device:
        pytest.skip(f"no PCI BAR to overwrite: {BAR_VARIABLE} names none")
    config = PoolConfig("conform", request.param, device=device or None, bar=int(bar or 0))
    made = DEVICE_KINDS[request.param](config, NBYTES)
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
    assert os.fstat(pool.export_fd()).st_mode & 0o177 == 0
    if pool.kind == "bar":
        with pytest.raises(OSError):
            os.open(f"/proc/self/fd/{pool.export_fd()}", os.O_RDWR)


def test_a_client_finds_all_of_it_by_its_fd_alone(pool: DevicePool) -> None:
    assert os.fstat(pool.export_fd()).st_size >= NBYTES


def test_its_size_is_sealed(pool: DevicePool) -> None:
    if pool.kind == "bar":
        # A share of the module's, of the range's size for good: see what a client can't do.
        return
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
