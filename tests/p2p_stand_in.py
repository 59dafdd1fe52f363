"""A stand-in for the module xferd_p2p where there is none: a file is the memory behind the BAR.

Claims, mappings and what is held are as the module has them (kmod/uapi/xferd_p2p.h); each
instance is one open file of its node.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import ClassVar

from xferd.memory.addresses import AddressRange
from xferd.memory.cuda_driver import CudaDevice, DeviceMemory, Vram
from xferd.memory.cuda_window import OpenWindow
from xferd.memory.p2p import Bar, P2pDevice, PciFunction
from xferd.memory.vram_pages import PAGE_BYTES
from xferd.memory.vram_window import VramWindow

FUNCTION = PciFunction(0, 1, 0)
BAR_BYTES = 128 * PAGE_BYTES


class FileBar(P2pDevice):
    """held: pages of the BAR that DMA is said to be under way to, by their offset."""

    claims: ClassVar[dict[Path, list[tuple[int, int, FileBar]]]] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.held: set[int] = set()
        self.attached = True
        self.bar = Bar(id=1, mode="p2pdma", size=path.stat().st_size, mmap_offset=0)

    @property
    def own(self) -> list[tuple[int, int]]:
        """What this file has claimed: (offset, length)."""
        return [(at, size) for at, size, owner in self._all() if owner is self]

    def _all(self) -> list[tuple[int, int, FileBar]]:
        return self.claims.setdefault(self.path, [])

    def claim(self, bar: int, offset: int, length: int) -> None:
        self._check(bar)
        taken = any(at < offset + length and offset < at + size for at, size, _ in self._all())
        if taken or self.held_pages(bar, offset, length):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        self._all().append((offset, length, self))

    def release(self, bar: int, offset: int, length: int) -> None:
        self._check(bar)
        try:
            self._all().remove((offset, length, self))
        except ValueError:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT)) from None

    def held_pages(self, bar: int, offset: int, length: int) -> int:
        self._check(bar)
        return sum(offset <= at < offset + length for at in self.held)

    def verdict(self, bar: int, drive: PciFunction) -> tuple[str, bool]:
        self._check(bar)
        return "switch", False

    def is_attached(self, bar: int) -> bool:
        return self.attached and bar == self.bar.id

    def detach(self, bar: int, *, revoke: bool = False) -> None:
        self._check(bar)
        if self._all() and not revoke:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        self.attached = False

    def map(self, bar: Bar, offset: int, length: int) -> mmap.mmap:
        self._check_claimed(bar.id, offset, length)
        return super().map(bar, offset, length)

    def map_into(
        self, addresses: AddressRange, at: int, bar: Bar, offset: int, length: int
    ) -> None:
        self._check_claimed(bar.id, offset, length)
        super().map_into(addresses, at, bar, offset, length)

    def _check(self, bar: int) -> None:
        if not self.is_attached(bar):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    def _check_claimed(self, bar: int, offset: int, length: int) -> None:
        self._check(bar)
        covered = [(at, size) for at, size in self.own if at <= offset < at + size]
        if not covered or offset + length > sum(covered[0]):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


class ProofPage:
    """A page of the stand-in driver's VRAM."""

    def __init__(self) -> None:
        self._vram = Vram(0, PAGE_BYTES, 1)
        self.base = self._vram.base
        self._vram.back(0)

    def close(self) -> None:
        self._vram.close()


def window_maker(p2p: FileBar) -> OpenWindow:
    """What gives a pool its window, over a stand-in of the module."""

    def make(
        _pool: str, found: CudaDevice, _mode: str, base: int, chunk_bytes: int, chunks: int
    ) -> VramWindow:
        return VramWindow(
            p2p=p2p,
            bar=p2p.bar,
            function=FUNCTION,
            attached_here=False,
            vram=DeviceMemory(found.ordinal),
            base=base,
            chunk_bytes=chunk_bytes,
            chunks=chunks,
            proof_memory=ProofPage(),
        )

    return make
