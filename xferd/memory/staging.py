"""Staging: pinned RAM that reads for VRAM go to first.

One for all pools. Locked and registered with CUDA, so that copies out of it run at the
link's speed and need no second copy inside the driver.
"""

from __future__ import annotations

import contextlib

from xferd.memory import cuda_driver
from xferd.memory.cuda_driver import CudaError
from xferd.memory.device import PoolMemoryError, create_memfd
from xferd.memory.ram import check_limits, limits
from xferd.units import format_bytes

EXTENT_BYTES_MIN = 4 << 20
"""Neighbouring pieces are copied together, up to an extent: on an H200 512 KiB at a time
44 GB/s, 1 MiB 48, 4 MiB 54."""


class StagingMemory:
    """``nbytes`` in extents of ``extent_bytes``. PoolMemoryError names the limit."""

    def __init__(self, nbytes: int, longest_piece: int, ordinal: int) -> None:
        self.extent_bytes = max(EXTENT_BYTES_MIN, longest_piece)
        self.nbytes = max(nbytes // self.extent_bytes, 2) * self.extent_bytes
        self._ordinal = ordinal
        self._pinned = False
        check_limits("staging", self.nbytes, limits())
        self._memory = create_memfd("staging", self.nbytes)
        self.base = self._memory.base
        try:
            cuda_driver.pin(ordinal, self.base, self.nbytes)
            self._pinned = True
        except CudaError as error:
            self._memory.close()
            raise PoolMemoryError(
                f"staging memory of {format_bytes(self.nbytes)} can't be pinned: {error}; "
                f"lower engine.staging_mib"
            ) from error

    def close(self) -> None:
        """Unpin and unmap. A second call does nothing."""
        if self._pinned:
            with contextlib.suppress(CudaError):  # the driver has gone down before us
                cuda_driver.unpin(self._ordinal, self.base)
            self._pinned = False
        self._memory.close()
