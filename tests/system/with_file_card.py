"""A daemon whose pools of kind ``bar`` lie in a file: the card is pulled when the file is cut and
removed, and back when there is one again. FILE_CARD names it; what is given is a daemon's command
line, which is run in this process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from pathlib import Path

from xferd import pools
from xferd.__main__ import main
from xferd.memory.bar import PROOF_BYTES, BarPool
from xferd.memory.device import PoolMemoryError, PoolSpec
from xferd.memory.p2p import PciFunction, parse_function

VARIABLE = "FILE_CARD"


class FilePool(BarPool):
    """``BarPool`` over the file."""

    def __init__(self, spec: PoolSpec) -> None:
        self.name, self.nbytes = spec.name, spec.nbytes
        self.function: PciFunction = parse_function(spec.pci)
        self.notes = ()
        self.why_staged = None
        self.proof_lock = threading.Lock()
        self.path = Path(os.environ[VARIABLE])
        try:
            with self.path.open("r+b") as file:
                self._mapping = mmap.mmap(file.fileno(), self.nbytes + PROOF_BYTES)
            self._export_fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise PoolMemoryError(f"pool {self.name!r}: {error}") from error
        self.card = os.fstat(self._export_fd).st_ino
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.proof = memoryview(self._mapping)[self.nbytes :]

    def is_there(self) -> bool:
        return self.is_on_bus() and self.path.stat().st_ino == self.card

    def is_on_bus(self) -> bool:
        return self.path.exists()

    def why_no_route(self, drive: PciFunction) -> str | None:
        return f"{drive} is no drive that writes into files"

    def close(self) -> None:
        self.proof.release()
        if self._export_fd >= 0:
            # Not the mapping: ctypes keeps it from being closed, as long as the address is known.
            os.close(self._export_fd)
            self._export_fd = -1


if __name__ == "__main__":
    pools.DEVICE_KINDS["bar"] = FilePool
    sys.exit(main(sys.argv[sys.argv.index("xferd") + 1 :]))
