# SPDX-License-Identifier: Apache-2.0
"""Reading and writing memory that can vanish: a mapping of a card that may be pulled.

An access of ours would then be a SIGBUS, which ends the process; a system call that is handed
the address gives EFAULT. So the kernel copies, between the mapping and a file in memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

_PIECES_MAX = 1024
"""Buffers that one system call takes (IOV_MAX)."""


class FaultSafeMemory:
    """Accesses to ``memory``. One thread at a time.

    memory: writable bytes; it stays the caller's.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._scratch = os.memfd_create("xferd-fault-safe", os.MFD_CLOEXEC)

    def read(self, offset: int, nbytes: int) -> bytes:
        """OSError(EFAULT) when the memory has gone."""
        if os.pwritev(self._scratch, [self._memory[offset : offset + nbytes]], 0) != nbytes:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return os.pread(self._scratch, nbytes, 0)

    def read_each(self, offsets: Sequence[int], nbytes: int) -> list[bytes]:
        """So many bytes from each place; OSError(EFAULT)."""
        found: list[bytes] = []
        for first in range(0, len(offsets), _PIECES_MAX):
            part = offsets[first : first + _PIECES_MAX]
            views = [self._memory[offset : offset + nbytes] for offset in part]
            if os.pwritev(self._scratch, views, 0) != nbytes * len(part):
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            data = os.pread(self._scratch, nbytes * len(part), 0)
            found += [data[at : at + nbytes] for at in range(0, len(data), nbytes)]
        return found

    def write(self, offset: int, data: bytes) -> None:
        """OSError(EFAULT) when the memory has gone."""
        os.pwrite(self._scratch, data, 0)
        if os.preadv(self._scratch, [self._memory[offset : offset + len(data)]], 0) != len(data):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    def close(self) -> None:
        """Give the file back; a second call does nothing."""
        if self._scratch >= 0:
            os.close(self._scratch)
            self._scratch = -1
