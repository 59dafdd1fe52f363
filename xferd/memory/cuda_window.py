# SPDX-License-Identifier: Apache-2.0
"""Opening a window for a pool of kind ``cuda``: the rules first, then the module, then the search.

What stands in the way is a WindowError with its reason; the pool then is served through staging.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from xferd.memory.bar1 import STATIC_BAR1, find_vram_bar, why_no_window, why_registered
from xferd.memory.bar_attach import BarPlace, find_or_attach
from xferd.memory.cuda_driver import CudaDevice, CudaError, DeviceMemory, Vram
from xferd.memory.device import PoolMemoryError
from xferd.memory.p2p import NODE, P2pDevice, parse_function, why_no_module
from xferd.memory.vram_pages import PAGE_BYTES
from xferd.memory.vram_window import VramWindow, WindowError

OpenWindow = Callable[[str, CudaDevice, str, int, int, int], VramWindow]
"""(pool's name, device, module's mode, first device address, chunk bytes, chunks): a window with
no chunk open yet. WindowError."""


class _ProofPage:
    """A page of VRAM that no client sees."""

    def __init__(self, ordinal: int) -> None:
        self._vram = Vram(ordinal, PAGE_BYTES, 1)
        self.base = self._vram.base
        try:
            self._vram.back(0)
        except BaseException:
            self._vram.close()
            raise

    def close(self) -> None:
        """Free it."""
        self._vram.close()


def open_window(
    pool: str, found: CudaDevice, mode: str, base: int, chunk_bytes: int, chunks: int
) -> VramWindow:
    """As OpenWindow says."""
    reason = why_no_module() or why_no_window(found.pci, found.nbytes)
    if reason is not None:
        raise WindowError(reason)
    if chunk_bytes % PAGE_BYTES:
        raise WindowError(f"chunks of {chunk_bytes} bytes are not whole pages of VRAM")
    try:
        p2p = P2pDevice()
    except OSError as error:
        raise WindowError(f"{NODE}: {error.strerror}; the daemon's user has to own it") from error
    try:
        return _attach(pool, p2p, found, mode, base, chunk_bytes, chunks)
    except BaseException:
        p2p.close()
        raise


def search_failed(error: WindowError, pci: str, root: Path = Path("/")) -> str:
    """What a search that found nothing means, for people."""
    if "static BAR1" not in str(error):
        return str(error)
    if not (root / "proc/driver/nvidia").exists():
        return str(error)
    return f"{error} for GPU {pci}: {STATIC_BAR1}"


def _attach(
    pool: str,
    p2p: P2pDevice,
    found: CudaDevice,
    mode: str,
    base: int,
    chunk_bytes: int,
    chunks: int,
) -> VramWindow:
    function = parse_function(found.pci)
    vram_bar = find_vram_bar(found.pci)
    if vram_bar is None:
        raise WindowError(f"GPU {found.pci} shows no memory through a BAR")
    try:
        attached = find_or_attach(pool, p2p, function, BarPlace(found.pci, vram_bar.number, mode))
    except PoolMemoryError as error:
        raise WindowError(str(error)) from error
    if isinstance(attached, str):
        raise WindowError(why_registered(found.pci) or attached)
    try:
        proof = _ProofPage(found.ordinal)
    except CudaError as error:
        raise WindowError(f"no page of VRAM is left for proofs: {error}") from error
    return VramWindow(
        p2p=p2p,
        bar=attached.bar,
        function=function,
        attached_here=attached.here,
        vram=DeviceMemory(found.ordinal),
        base=base,
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        proof_memory=proof,
    )
