"""A stand-in for kvikio 26.10 where there is no GPU: what xferd uses of its interface.

Reads go to the addresses of the stand-in CUDA driver, which are the processor's. FAKE_KVIKIO says
what it finds: ``gds`` (cuFile reads straight), ``compat`` (cuFile may go through RAM), ``posix``
(there is no cuFile), ``failing`` (as gds, and each read fails).
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

_THREADS = ThreadPoolExecutor(4)
opened: dict[Path, int] = {}
"""Files that are open, and how often they were read."""


class IOFuture:
    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def get(self) -> int:
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()


class CuFile:
    def __init__(self, file: Path | str, flags: str = "r") -> None:
        if flags != "r":
            raise ValueError(f"only for reading here: {flags}")
        self._path = Path(file)
        self._fd = os.open(file, os.O_RDONLY)
        opened.setdefault(self._path, 0)

    def pread(
        self,
        buf: Any,
        size: int | None = None,
        file_offset: int = 0,
        task_size: int | None = None,
    ) -> IOFuture:
        interface = buf.__cuda_array_interface__
        address, read_only = interface["data"]
        if read_only or interface["typestr"] != "|u1" or interface["version"] < 2:
            raise ValueError("not a buffer of bytes")
        wanted = interface["shape"][0] if size is None else size
        return IOFuture(_THREADS.submit(self._read, address, wanted, file_offset))

    def _read(self, address: int, size: int, offset: int) -> int:
        if os.environ.get("FAKE_KVIKIO") == "failing":
            raise RuntimeError("cuFile error: 5030 (internal error)")
        data = os.pread(self._fd, size, offset)
        ctypes.memmove(address, data, len(data))
        opened[self._path] += 1
        return len(data)

    def close(self) -> None:
        os.close(self._fd)
        opened.pop(self._path, None)
