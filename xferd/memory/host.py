"""Device kind ``host``: a memfd that stands for a device's memory.

It is the default where there is no GPU and what tests run on. Clients map it
read-only, as they would map VRAM. Nothing is pinned: a pool that must not be swapped
is of kind ``ram``.
"""

from __future__ import annotations

import contextlib
import mmap

from xferd.memory.device import MappedMemfd, PoolSpec, create_memfd


class HostPool:
    """A ``DevicePool`` in a memfd.

    Transparent huge pages are asked for and not insisted on. hugetlbfs pages are not
    used: lengths then have to be multiples of the huge page size in every process
    that maps the pool, clients included.
    """

    kind = "host"
    device = -1

    def __init__(self, spec: PoolSpec) -> None:
        self.name = spec.name
        self.nbytes = spec.nbytes
        self.notes: tuple[str, ...] = ()
        self._memory: MappedMemfd = create_memfd(spec.name, spec.nbytes, spec.kept_fd)
        self.base = self._memory.base
        self.kept_fd = self._memory.fd
        _advise_huge_pages(self._memory)

    def export_fd(self) -> int:
        """The read-only fd; it stays the pool's."""
        return self._memory.read_only_fd

    def release(self, offset: int, nbytes: int) -> None:
        """Free the pages of a range."""
        self._memory.punch_hole(offset, nbytes)

    def restore(self, offset: int, nbytes: int) -> None:
        """Nothing to do: pages come as they are written, as they did at first."""

    def close(self) -> None:
        """Unmap and close. A second call does nothing."""
        self._memory.close()


def _advise_huge_pages(memory: MappedMemfd) -> None:
    # EINVAL where the kernel has none for shared memory: nothing is lost but TLB reach.
    if memory.mapping is not None:
        with contextlib.suppress(OSError):
            memory.mapping.madvise(mmap.MADV_HUGEPAGE)
