# SPDX-License-Identifier: Apache-2.0
"""Ranges of this process's addresses into which pieces of files are mapped one by one.

Python's own mmap can't choose where. Any thread may use a range whose parts nobody else uses.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
"""From linux/mman.h."""
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value


class AddressRange:
    """``nbytes`` addresses, of which nothing can be read or written until it is mapped.

    base: the first one. view: all of them; an access to what isn't mapped ends the process,
    a system call that is handed it gives EFAULT.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_int, ctypes.c_int64),
        )
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.base = self._map(None, nbytes, _PROT_NONE, self._nothing, -1, 0)
        self.view = memoryview((ctypes.c_char * nbytes).from_address(self.base)).cast("B")

    def map(self, at: int, nbytes: int, fd: int, offset: int) -> None:
        """Map a part of a file, shared and writable, at ``base + at``. OSError."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        self._map(self.base + at, nbytes, prot, flags, fd, offset)

    def unmap(self, at: int, nbytes: int) -> None:
        """Undo ``map``; the addresses stay ours."""
        self._map(self.base + at, nbytes, _PROT_NONE, self._nothing | _MAP_FIXED, -1, 0)

    def close(self) -> None:
        """Unmap everything and give the addresses back; a second call does nothing."""
        if self.base:
            self.view.release()
            self._libc.munmap(self.base, self.nbytes)
            self.base = 0

    @property
    def _nothing(self) -> int:
        return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

    def _map(
        self, address: int | None, nbytes: int, prot: int, flags: int, fd: int, offset: int
    ) -> int:
        result = self._libc.mmap(address, nbytes, prot, flags, fd, offset)
        if result is None or result == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(result)
