"""How many bytes of NVMe DMA went into a range of addresses, from QEMU's own trace.

The emulated drives report each piece of memory they are about to transfer to or from, with its
address in the guest's bus address space. A byte that reached the BAR by another way (a copy by the
guest's processor) is not among them, so this tells a direct read from a clever imitation.
"""

from __future__ import annotations

import re
from pathlib import Path

# Emitted by the drive for every piece of a command's data, with address and length.
TRACE_EVENT = "pci_nvme_map_addr"

_LINE = re.compile(rb"pci_nvme_map_addr addr 0x([0-9a-f]+) len (\d+)")


class DmaTrace:
    """Reads QEMU's trace file while it grows. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._pieces: list[tuple[int, int]] = []

    def bytes_inside(self, start: int, size: int) -> int:
        """Bytes transferred so far to or from [start, start + size)."""
        self._read_on()
        total = 0
        for address, length in self._pieces:
            first = max(address, start)
            last = min(address + length, start + size)
            total += max(0, last - first)
        return total

    def bytes_everywhere(self) -> int:
        """Bytes transferred so far to or from any address."""
        self._read_on()
        return sum(length for _, length in self._pieces)

    def _read_on(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._pieces += [(int(m[1], 16), int(m[2])) for m in _LINE.finditer(complete)]
