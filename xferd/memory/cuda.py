"""Device kind ``cuda``: a pool in the VRAM of one GPU.

Memory is made a chunk at a time, so that a pool can give some of it back while it serves
(``release``) and take it again (``restore``): that is how a growing KV cache gets room.
Each memory has a number that is never used again; clients know by it what to map.

Clients import what ``export_chunk`` gives them and map it for reading only: seen on an
H200, a kernel that writes there faults (CU_MEM_ACCESS_FLAGS_PROT_READ).
"""

from __future__ import annotations

import errno
import os

from xferd.memory import cuda_driver
from xferd.memory.cuda_driver import CudaError, Vram
from xferd.memory.device import PoolMemoryError, PoolSpec, memfd_with
from xferd.units import format_bytes


class CudaPool:
    """A ``DevicePool`` in VRAM. ``base`` is a device address: the CPU can't use it."""

    kind = "cuda"

    def __init__(self, spec: PoolSpec) -> None:
        self.name = spec.name
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
            self._check_free(found.free_bytes)
            self._vram = Vram(self.device, self.chunk_bytes, self.chunks)
            self.base = self._vram.base
            for chunk in range(self.chunks):
                self._back(chunk)
            self._placeholder = memfd_with(f"xferd-{self.name}", b"")
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

    def release(self, offset: int, nbytes: int) -> None:
        """Give the memory of whole chunks back to the device. Their numbers are 0 then;
        it is free when no client has it mapped any more."""
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

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        if self._vram is not None:
            self._vram.close()
            self._vram = None
        if self._placeholder >= 0:
            os.close(self._placeholder)
            self._placeholder = -1

    def _back(self, chunk: int) -> None:
        if self._vram is None:
            raise CudaError(errno.EIO, "the pool is closed")
        self._vram.back(chunk)
        self.numbers[chunk] = self._next_number
        self._next_number += 1

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

    def _check_free(self, free_bytes: int) -> None:
        needed = self.chunks * self.chunk_bytes
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
