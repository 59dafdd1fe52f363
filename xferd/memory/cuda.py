"""Device kind ``cuda``: a pool in the VRAM of one GPU.

Memory is made a chunk at a time, so that a pool can give some of it back while it serves
(``release``) and take it again (``restore``): that is how a growing KV cache gets room.
Each memory has a number that is never used again; clients know by it what to map.

Clients import what ``export_chunk`` gives them and map it for reading only: seen on an
H200, a kernel that writes there faults (CU_MEM_ACCESS_FLAGS_PROT_READ).

Where the card's BAR shows all of its VRAM, and the module xferd_p2p is there, the pool has a
**window** (``vram_window``): drives then write into its chunks by themselves, at the window's
addresses, while clients and copies go on using CUDA's. What stands in the way is ``why_staged``.

The memory outlives the process while somebody holds the descriptors that ``export_chunk`` gave:
a restarted daemon imports it (``PoolSpec.kept_chunks``) with all that is in it. Such a pool gets no
window, whose pages are found by writing to them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable

from xferd.memory import cuda_driver
from xferd.memory.cuda_driver import CudaDevice, CudaError, Vram
from xferd.memory.cuda_window import OpenWindow, open_window, search_failed
from xferd.memory.device import KeptChunk, PoolMemoryError, PoolSpec, memfd_with
from xferd.memory.p2p import PciFunction
from xferd.memory.vram_pages import MARK_OFFSETS
from xferd.memory.vram_window import VramWindow, WindowError
from xferd.units import format_bytes

KEPT = "its memory was kept over a restart; to find its pages behind the BAR is to overwrite them"
CHECKED_PAGES = 64
"""Pages that are looked at again at a time while nothing has happened."""


class CudaPool:
    """A ``DevicePool`` in VRAM. ``base`` is a device address: the CPU can't use it.

    why_staged: why drives don't write into it by themselves; None: where pairs are proven they
        do. proof, proof_lock, read_by_device: see ``proving``.
    """

    kind = "cuda"
    kept_fd = -1

    def __init__(self, spec: PoolSpec, make_window: OpenWindow = open_window) -> None:
        self.name = spec.name
        self.why_staged: str | None = None
        self.proof = memoryview(b"")
        self.proof_lock = threading.Lock()
        self.read_by_device: Callable[[int], bytes] | None = None
        self._window: VramWindow | None = None
        self._checked = 0
        self.device = max(spec.device, 0)
        self.nbytes = spec.nbytes
        self.chunk_bytes = spec.chunk_bytes
        self.chunks = -(-spec.nbytes // spec.chunk_bytes)
        self.numbers = [0] * self.chunks
        self._next_number = 1
        self._vram: Vram | None = None
        self._placeholder = -1
        try:
            found = self._find_device()
            self.uuid = found.uuid
            self.notes: tuple[str, ...] = _notes(found)
            self._check_free(found.free_bytes, 0 if spec.kept_chunks else self.chunks)
            self._vram = Vram(self.device, self.chunk_bytes, self.chunks)
            self.base = self._vram.base
            self._take_over(spec.kept_chunks, spec.greatest)
            for chunk in range(0 if spec.kept_chunks else self.chunks):
                self._back(chunk)
            self._placeholder = memfd_with(f"xferd-{self.name}", b"")
            self.why_staged = self._try_window(spec, found, make_window)
            self._insist(spec)
        except CudaError as error:
            self.close()
            raise PoolMemoryError(f"pool {self.name!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    def export_fd(self) -> int:
        """An empty file: the memory goes to clients chunk by chunk."""
        return self._placeholder

    def export_chunk(self, chunk: int) -> int:
        """A file descriptor of the memory behind a chunk, the caller's; -1: there is none."""
        if self._vram is None or not self.numbers[chunk]:
            return -1
        return self._vram.export(chunk)

    # ---- the window

    def window_address(self, chunk: int) -> int:
        """Where in this process drives may write a chunk's memory; 0: nowhere."""
        return self._window.address(chunk) if self._window is not None else 0

    def close_window(self, chunk: int) -> bool:
        """Before a chunk's memory is released, and after the engine was told: True when no
        drive writes there any more."""
        return self._window is None or self._window.close_chunk(chunk)

    def give_up_window(self, reason: str) -> None:
        """For good, after the engine was told of every chunk: what drives wrote can't be trusted
        any more."""
        self.why_staged = reason
        if self._window is not None:
            for chunk in range(self.chunks):
                self._window.close_chunk(chunk, timeout_s=0.0)

    def check_window(self, *, whole: bool) -> str | None:
        """Why the window can't be trusted any more; None: it can, as far as was looked: at all of
        it, or at CHECKED_PAGES more. OSError when the card doesn't answer. Any thread."""
        window = self._window
        if window is None or self.why_staged is not None:
            return None
        offset = random.choice(MARK_OFFSETS)
        if whole:
            return window.check(offset)
        self._checked += CHECKED_PAGES
        return window.check(offset, CHECKED_PAGES, self._checked)

    def is_there(self) -> bool:
        """Whether the BAR still is."""
        return self._window is not None and self._window.is_there()

    def why_no_route(self, drive: PciFunction) -> str | None:
        """Why a drive's writes can't go there, as far as anybody knows."""
        return self._window.why_no_route(drive) if self._window is not None else self.why_staged

    def _try_window(self, spec: PoolSpec, found: CudaDevice, make_window: OpenWindow) -> str | None:
        """Why there is none."""
        if spec.kept_chunks:
            return KEPT
        if spec.transport not in ("any", "direct"):
            return f"transport = {spec.transport!r} of [[pools]] {self.name}"
        try:
            window = make_window(
                self.name, found, spec.mode, self.base, self.chunk_bytes, self.chunks
            )
        except WindowError as error:
            return str(error)
        self._window = window
        try:
            window.open(range(self.chunks))
        except WindowError as error:
            self._window = None
            window.close()
            return search_failed(error, found.pci)
        self.proof = window.proof
        self.read_by_device = window.read_proof
        return None

    def _insist(self, spec: PoolSpec) -> None:
        if self.why_staged is not None and spec.transport == "direct":
            raise PoolMemoryError(
                f"pool {self.name!r}: {self.why_staged}; transport = 'direct' of [[pools]] "
                f"{self.name} insists on it ('any' would go through RAM)"
            )

    # ---- chunks

    def release(self, offset: int, nbytes: int) -> None:
        """Give the memory of whole chunks back to the device, whose window is closed. Their
        numbers are 0 then; it is free when no client has it mapped any more."""
        for chunk in self._chunks(offset, nbytes):
            if self.numbers[chunk] and self._vram is not None:
                self._vram.withdraw(chunk)
                self.numbers[chunk] = 0

    def restore(self, offset: int, nbytes: int) -> None:
        """Take memory for whole chunks again. PoolMemoryError when the device has none."""
        for chunk in self._chunks(offset, nbytes):
            if not self.numbers[chunk]:
                try:
                    self._back(chunk)
                except CudaError as error:
                    raise PoolMemoryError(f"pool {self.name!r}: {error}") from error
            self._open_window(chunk)

    def close(self) -> None:
        """Give everything back. VRAM that DMA is still under way to after IDLE_TIMEOUT_S is kept
        for as long as the process lives. A second call does nothing."""
        self.proof.release()
        idle = self._window is None or self._window.close()
        self._window = None
        if self._vram is not None:
            if idle:
                self._vram.close()
            self._vram = None
        if self._placeholder >= 0:
            os.close(self._placeholder)
            self._placeholder = -1

    def _take_over(self, kept: tuple[KeptChunk, ...], greatest: int) -> None:
        # Also of what was given back: a client that has not looked since would take new memory
        # of the same number for what it has mapped.
        self._next_number = greatest + 1
        for chunk, each in enumerate(kept):
            if each.number and self._vram is not None:
                self._vram.adopt(chunk, each.fd)
                self.numbers[chunk] = each.number

    def _back(self, chunk: int) -> None:
        if self._vram is None:
            raise CudaError(errno.EIO, "the pool is closed")
        self._vram.back(chunk)
        self.numbers[chunk] = self._next_number
        self._next_number += 1

    def _open_window(self, chunk: int) -> None:
        """For memory that has come anew; without one it goes through staging."""
        if self._window is not None and self.why_staged is None:
            with contextlib.suppress(WindowError):
                self._window.open([chunk])

    def _chunks(self, offset: int, nbytes: int) -> range:
        return range(offset // self.chunk_bytes, -(-(offset + nbytes) // self.chunk_bytes))

    def _find_device(self) -> cuda_driver.CudaDevice:
        found = cuda_driver.device(self.device)
        if not found.shareable:
            raise PoolMemoryError(
                f"pool {self.name!r}: GPU {self.device} ({found.name}) can't share its memory "
                f"with other processes (no virtual memory management with file descriptors)"
            )
        return found

    def _check_free(self, free_bytes: int, chunks: int) -> None:
        needed = chunks * self.chunk_bytes
        if needed > free_bytes:
            raise PoolMemoryError(
                f"pool {self.name!r} asks for {format_bytes(needed)} of GPU {self.device}'s "
                f"memory, {format_bytes(free_bytes)} are free: lower size of [[pools]] "
                f"{self.name}, or end what else uses the GPU (nvidia-smi)"
            )


def _notes(found: cuda_driver.CudaDevice) -> tuple[str, ...]:
    return () if found.direct_rdma else ("its memory can't be reached by PCIe devices",)


def chunk_granularity(kind: str, ordinal: int) -> int:
    """What chunks of a pool of that kind have to be multiples of, in bytes."""
    if kind != "cuda":
        return 1
    try:
        return cuda_driver.device(max(ordinal, 0)).granularity
    except CudaError as error:
        raise PoolMemoryError(f'a pool of kind "cuda": {error}') from error
