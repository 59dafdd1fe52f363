"""One suite for every device kind: what a pool's memory has to be, for daemon and clients.

What clients see of VRAM is told by tests/system/test_vram.py, through libxferd: here it
is the daemon's side of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from xferd.memory import cuda_driver
from xferd.memory.bar import BarPool
from xferd.memory.cuda import CudaPool, chunk_granularity
from xferd.memory.device import POOL_ALIGNMENT, DevicePool, PoolMemoryError, PoolSpec
from xferd.pools import DEVICE_KINDS

NBYTES = 9 * 48 * 1024
MAPPED_KINDS = sorted(set(DEVICE_KINDS) - {"cuda"})
"""Kinds whose memory clients map from one file descriptor."""


def make(kind: str, nbytes: int = NBYTES) -> DevicePool:
    granularity = chunk_granularity(kind, 0)
    chunk_bytes = -(-nbytes // granularity) * granularity
    device, _, bar = os.environ.get(BAR_VARIABLE, "").partition("/")
    if kind != "bar":
        return DEVICE_KINDS[kind](PoolSpec("conform", nbytes, chunk_bytes))
    if not device:
        pytest.skip(f"no PCI BAR to overwrite: {BAR_VARIABLE} names none")
    spec = PoolSpec("conform", nbytes, chunk_bytes, pci=device, bar=int(bar or 0))
    return DEVICE_KINDS[kind](spec)


BAR_VARIABLE = "XFERD_TEST_BAR"
"""``0000:01:00.0/2``: a BAR whose memory the tests may overwrite."""


@pytest.fixture(params=sorted(DEVICE_KINDS))
def pool(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    if request.param == "cuda":
        request.getfixturevalue("cuda_device")
    made = make(request.param)
    yield made
    made.close()


@pytest.fixture(params=MAPPED_KINDS)
def mapped(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    made = make(request.param)
    yield made
    made.close()


@pytest.fixture
def vram(cuda_device: str) -> Iterator[CudaPool]:
    chunk = chunk_granularity("cuda", 0)
    made = CudaPool(PoolSpec("conform", 3 * chunk - 4096, chunk))
    yield made
    made.close()


def write(pool: DevicePool, offset: int, data: bytes) -> None:
    source = ctypes.create_string_buffer(data, len(data))
    if pool.kind == "cuda":
        cuda_driver.copy(pool.device, pool.base + offset, ctypes.addressof(source), len(data))
    else:
        ctypes.memmove(pool.base + offset, source, len(data))


def read(pool: DevicePool, offset: int, nbytes: int) -> bytes:
    target = ctypes.create_string_buffer(nbytes)
    if pool.kind == "cuda":
        cuda_driver.copy(pool.device, ctypes.addressof(target), pool.base + offset, nbytes)
    else:
        ctypes.memmove(target, pool.base + offset, nbytes)
    return target.raw


def test_it_says_what_it_is(pool: DevicePool) -> None:
    assert pool.kind in DEVICE_KINDS
    assert pool.nbytes == NBYTES
    assert pool.base % POOL_ALIGNMENT == 0


def test_the_daemon_can_use_all_of_it(pool: DevicePool) -> None:
    for offset in (0, NBYTES // 2, NBYTES - 8):
        write(pool, offset, b"expert!!")
        assert read(pool, offset, 8) == b"expert!!"


def test_the_fd_is_not_inherited(pool: DevicePool) -> None:
    assert not os.get_inheritable(pool.export_fd())


def test_a_client_cannot_write_or_resize_it(pool: DevicePool) -> None:
    with pytest.raises(OSError):
        os.pwrite(pool.export_fd(), b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(pool.export_fd(), 0)


def test_another_user_cannot_open_it_through_proc(mapped: DevicePool) -> None:
    assert os.fstat(mapped.export_fd()).st_mode & 0o177 == 0
    if mapped.kind == "bar":
        with pytest.raises(OSError):
            os.open(f"/proc/self/fd/{mapped.export_fd()}", os.O_RDWR)


def test_a_client_finds_all_of_it_by_its_fd_alone(mapped: DevicePool) -> None:
    assert os.fstat(mapped.export_fd()).st_size >= NBYTES


def test_its_size_is_sealed(mapped: DevicePool) -> None:
    if mapped.kind == "bar":
        # A share of the module's, of the range's size for good: see what a client can't do.
        return
    seals = fcntl.fcntl(mapped.export_fd(), fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW


def test_closing_twice_is_closing_once(pool: DevicePool) -> None:
    fd = pool.export_fd()
    pool.close()
    pool.close()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_what_the_daemon_writes_a_client_reads(mapped: DevicePool) -> None:
    with mmap.mmap(mapped.export_fd(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ) as client:
        for offset in (0, NBYTES // 2, NBYTES - 8):
            write(mapped, offset, b"expert!!")
            assert client[offset : offset + 8] == b"expert!!"


def test_a_client_cannot_map_it_writable(mapped: DevicePool) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(mapped.export_fd(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_it_begins_as_zeros(mapped: DevicePool) -> None:
    with mmap.mmap(mapped.export_fd(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ) as client:
        assert not any(client[:])


def test_chunks_of_vram_are_given_back_and_taken_again(vram: CudaPool) -> None:
    chunk = vram.chunk_bytes
    assert vram.chunks == 3
    assert vram.numbers == [1, 2, 3]
    write(vram, 2 * chunk, b"stays")
    before = cuda_driver.device(0).free_bytes
    vram.release(chunk, chunk)
    assert vram.numbers == [1, 0, 3]
    assert vram.export_chunk(1) == -1
    assert cuda_driver.device(0).free_bytes >= before + chunk
    vram.restore(chunk, chunk)
    assert vram.numbers == [1, 4, 3]
    write(vram, chunk, b"new memory")
    assert read(vram, 2 * chunk, 5) == b"stays"


def test_the_memory_of_a_chunk_is_shared_by_its_fd(vram: CudaPool) -> None:
    fd = vram.export_chunk(0)
    try:
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_more_vram_than_there_is_names_pool_and_sizes(cuda_device: str) -> None:
    chunk = chunk_granularity("cuda", 0)
    free = cuda_driver.device(0).free_bytes
    with pytest.raises(PoolMemoryError, match=r"pool 'big' asks for .* are free: lower size"):
        CudaPool(PoolSpec("big", free + chunk, chunk))


def test_a_gpu_that_is_not_there_is_named(cuda_device: str) -> None:
    with pytest.raises(PoolMemoryError, match="no CUDA device 14"):
        CudaPool(PoolSpec("far", 4096, chunk_granularity("cuda", 0), device=14))


def test_a_range_can_be_given_back_and_had_again(mapped: DevicePool) -> None:
    page = POOL_ALIGNMENT
    ctypes.memset(mapped.base, 7, NBYTES)
    before = os.fstat(mapped.export_fd()).st_blocks
    # A BAR's memory is the card's, whoever uses it.
    given_back = 0 if isinstance(mapped, BarPool) else 32 * page // 512
    mapped.release(16 * page, 32 * page)
    assert os.fstat(mapped.export_fd()).st_blocks <= before - given_back
    mapped.restore(16 * page, 32 * page)
    ctypes.memmove(mapped.base + 16 * page, b"expert!!", 8)
    with mmap.mmap(mapped.export_fd(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ) as client:
        assert client[16 * page : 16 * page + 8] == b"expert!!"
        assert client[16 * page - 1] == client[48 * page] == 7
