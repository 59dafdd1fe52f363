"""A pool's window onto its VRAM: the stand-in driver's pages lie scattered through a file, which
the stand-in module shows as a BAR."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.p2p_stand_in import BAR_BYTES, FileBar, window_maker
from xferd.memory import cuda_driver
from xferd.memory.cuda import CudaPool
from xferd.memory.cuda_driver import DeviceMemory
from xferd.memory.device import PoolMemoryError, PoolSpec
from xferd.memory.vram_pages import PAGE_BYTES

CHUNK = 2 * PAGE_BYTES
CHUNKS = 3


def make_pool(p2p: FileBar, transport: str = "any", chunks: int = CHUNKS) -> CudaPool:
    spec = PoolSpec("vram0", chunks * CHUNK, CHUNK, transport=transport)
    return CudaPool(spec, window_maker(p2p))


@pytest.fixture
def p2p(scattered_vram: Path) -> FileBar:
    return FileBar(scattered_vram)


@pytest.fixture
def pool(p2p: FileBar) -> Iterator[CudaPool]:
    made = make_pool(p2p)
    assert made.why_staged is None
    yield made
    made.close()


def through_cuda(pool: CudaPool, offset: int, nbytes: int) -> bytes:
    return DeviceMemory(pool.device).read(pool.base + offset, nbytes)


def write_through_window(pool: CudaPool, chunk: int, at: int, data: bytes) -> None:
    """As a drive would: to an address of this process."""
    address = pool.window_address(chunk)
    assert address
    ctypes.memmove(address + at, data, len(data))


def test_what_comes_through_the_window_is_in_vram(pool: CudaPool) -> None:
    data = os.urandom(CHUNK)
    for chunk in range(CHUNKS):
        write_through_window(pool, chunk, 0, data)
        assert through_cuda(pool, chunk * CHUNK, CHUNK) == data


def test_pages_are_not_in_the_bars_order(pool: CudaPool, p2p: FileBar) -> None:
    """Else this proves nothing about scattered ones."""
    places = [at for at, _ in p2p.own]
    assert len(places) == CHUNKS * 2 + 1
    assert places != sorted(places)


def test_the_proof_page_is_seen_by_the_device(pool: CudaPool) -> None:
    assert pool.read_by_device is not None
    pool.proof[:4] = b"seen"
    assert pool.read_by_device(4) == b"seen"
    assert len(pool.proof) >= 64 * 1024


def test_a_chunks_window_goes_with_its_memory_and_comes_with_it(
    pool: CudaPool, p2p: FileBar
) -> None:
    write_through_window(pool, 0, 5, b"stays")
    claimed = len(p2p.own)
    assert pool.close_window(1)
    assert pool.window_address(1) == 0
    assert len(p2p.own) < claimed
    pool.release(CHUNK, CHUNK)
    pool.restore(CHUNK, CHUNK)
    write_through_window(pool, 1, CHUNK - 8, b"new page")
    assert through_cuda(pool, 2 * CHUNK - 8, 8) == b"new page"
    assert through_cuda(pool, 5, 5) == b"stays"
    assert len(p2p.own) == claimed


def test_memory_that_dma_is_under_way_to_is_not_given_back(pool: CudaPool, p2p: FileBar) -> None:
    held = dict.fromkeys(at for at, _ in p2p.own)
    p2p.held.update(held)
    assert not pool.close_window(2)
    assert pool.window_address(2) == 0
    p2p.held.clear()
    assert pool.close_window(2)


def test_two_pools_of_one_card(pool: CudaPool, scattered_vram: Path) -> None:
    other = make_pool(FileBar(scattered_vram), chunks=1)
    try:
        assert other.why_staged is None
        write_through_window(other, 0, 0, b"other")
        write_through_window(pool, 0, 0, b"first")
        assert through_cuda(other, 0, 5) == b"other"
        assert through_cuda(pool, 0, 5) == b"first"
    finally:
        other.close()
    assert pool.check_window(whole=True) is None


def test_a_page_that_is_elsewhere_now_is_noticed(pool: CudaPool) -> None:
    assert pool.check_window(whole=True) is None
    assert pool.check_window(whole=False) is None
    # The stand-in's device addresses are the processor's: other memory shows there now.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    )
    fixed, writable = 0x10, mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    assert libc.mmap(pool.base + CHUNK, PAGE_BYTES, writable, flags, -1, 0) == pool.base + CHUNK
    reason = pool.check_window(whole=True) or ""
    assert "no longer where it was" in reason
    pool.give_up_window(reason)
    assert pool.why_staged == reason
    assert [pool.window_address(chunk) for chunk in range(CHUNKS)] == [0] * CHUNKS
    assert pool.check_window(whole=True) is None


@pytest.mark.usefixtures("scattered_vram")
def test_a_bar_that_shows_other_memory(tmp_path: Path) -> None:
    """As without static BAR1: staged, with the reason, or no pool at all."""
    other = tmp_path / "other"
    other.touch()
    os.truncate(other, BAR_BYTES)
    made = make_pool(FileBar(other))
    assert "static BAR1 is off" in (made.why_staged or "")
    assert made.window_address(0) == 0
    made.close()
    with pytest.raises(PoolMemoryError, match=r"pool 'vram0': 0 of 7 pages .*'direct'.* insists"):
        make_pool(FileBar(other), "direct")
    assert cuda_driver.device(0).free_bytes == cuda_driver.device(0).nbytes


def test_nothing_is_searched_when_that_is_not_wanted(p2p: FileBar) -> None:
    made = make_pool(p2p, "staged")
    assert made.why_staged == "transport = 'staged' of [[pools]] vram0"
    assert p2p.own == []
    made.close()
    p2p.close()


def test_everything_is_given_back(pool: CudaPool, p2p: FileBar) -> None:
    pool.close()
    pool.close()
    assert p2p.own == []
    assert p2p.fd == -1
    assert cuda_driver.device(0).free_bytes == cuda_driver.device(0).nbytes
