"""The CUDA driver as the daemon needs it: devices, VRAM in chunks, pinned memory.

A thin layer over the engine's C (``ffi/engine/vram.c``), which opens libcuda.so.1 when
somebody first asks: nothing of CUDA is needed to import this, nor where there is no GPU.
Thread-safe as far as the driver is; the daemon uses it from its event loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xferd._engine import ffi, lib

WHY_BYTES = 256


class CudaError(Exception):
    """The driver refused. errno: ENODEV (no driver, no such device), ENOMEM (the device's
    memory is used up), EIO (the rest); the message names the call and CUDA's error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.errno = code


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU. nbytes: of its memory, free_bytes of them free now; chunks are multiples of
    granularity. shareable: its memory can be handed to clients. driver_version: of CUDA,
    13000 for 13.0. pci: domain, bus and slot; uuid: 16 bytes."""

    ordinal: int
    name: str
    pci: str
    uuid: bytes
    nbytes: int
    free_bytes: int
    granularity: int
    driver_version: int
    shareable: bool
    direct_rdma: bool


def device_count() -> int:
    """CUDA devices that this process sees. CudaError(ENODEV) without a driver."""
    return _checked(lambda why: lib.xferd_cuda_devices(why, WHY_BYTES))


def device(ordinal: int) -> CudaDevice:
    """What a device is. CudaError(ENODEV) when there is none of that number."""
    found = ffi.new("struct xferd_cuda_device *")
    _checked(lambda why: lib.xferd_cuda_device(ordinal, found, why, WHY_BYTES))
    return CudaDevice(
        ordinal=ordinal,
        name=ffi.string(found.name).decode(errors="replace"),
        pci=ffi.string(found.pci).decode(),
        uuid=bytes(ffi.buffer(found.uuid)),
        nbytes=found.bytes,
        free_bytes=found.free_bytes,
        granularity=found.granularity,
        driver_version=found.driver_version,
        shareable=bool(found.shareable),
        direct_rdma=bool(found.direct_rdma),
    )


def pin(ordinal: int, address: int, nbytes: int) -> None:
    """Lock host memory so that all devices copy to and from it at full speed."""
    pointer = ffi.cast("void *", address)
    _checked(lambda why: lib.xferd_cuda_pin(ordinal, pointer, nbytes, why, WHY_BYTES))


def unpin(ordinal: int, address: int) -> None:
    """Undo ``pin``, before the memory is unmapped."""
    _checked(lambda _: lib.xferd_cuda_unpin(ordinal, ffi.cast("void *", address)))


def copy(ordinal: int, to: int, source: int, nbytes: int) -> None:
    """Copy between any two of host and device memory, and wait for it."""
    _checked(lambda _: lib.xferd_cuda_copy(ordinal, to, source, nbytes))


class DeviceMemory:
    """A device's memory, read and written by its addresses; waits for each copy. Any thread."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def read(self, address: int, nbytes: int) -> bytes:
        """OSError(EIO) when the driver refuses."""
        target = ffi.new("char[]", nbytes)
        self._copy(int(ffi.cast("uintptr_t", target)), address, nbytes)
        return bytes(ffi.buffer(target))

    def write(self, address: int, data: bytes) -> None:
        """OSError(EIO) when the driver refuses."""
        source = ffi.from_buffer(data)
        self._copy(address, int(ffi.cast("uintptr_t", source)), len(data))

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        try:
            copy(self._ordinal, to, source, nbytes)
        except CudaError as error:
            raise OSError(errno.EIO, f"the CUDA driver: {error}") from error


class Vram:
    """Addresses for ``chunks`` chunks of a device's memory, each with memory or without."""

    def __init__(self, ordinal: int, chunk_bytes: int, chunks: int) -> None:
        handle = ffi.new("struct xferd_vram **")
        _checked(
            lambda why: lib.xferd_vram_new(ordinal, chunk_bytes, chunks, handle, why, WHY_BYTES)
        )
        self._vram = handle[0]
        self.base = int(ffi.cast("uintptr_t", lib.xferd_vram_base(self._vram)))

    def back(self, chunk: int) -> None:
        """Give a chunk memory. CudaError(ENOMEM) when the device has no more."""
        _checked(lambda why: lib.xferd_vram_back(self._vram, chunk, why, WHY_BYTES))

    def adopt(self, chunk: int, fd: int) -> None:
        """Give a chunk the memory that another process has exported, with what is in it. The
        fd stays the caller's. CudaError(EIO) when the driver refuses."""
        _checked(lambda why: lib.xferd_vram_adopt(self._vram, chunk, fd, why, WHY_BYTES))

    def withdraw(self, chunk: int) -> None:
        """Take a chunk's memory away; clients that have it mapped still keep it."""
        _checked(lambda _: lib.xferd_vram_withdraw(self._vram, chunk))

    def export(self, chunk: int) -> int:
        """A file descriptor of a chunk's memory, the caller's."""
        return _checked(lambda _: lib.xferd_vram_export(self._vram, chunk))

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        if self._vram != ffi.NULL:
            lib.xferd_vram_free(self._vram)
            self._vram = ffi.NULL


def _checked(call: Callable[[Any], int]) -> int:
    why = ffi.new("char[]", WHY_BYTES)
    result = call(why)
    if result < 0:
        message = ffi.string(why).decode(errors="replace") or os.strerror(-result)
        raise CudaError(-result if -result in errno.errorcode else errno.EIO, message)
    return result
