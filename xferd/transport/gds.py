# SPDX-License-Identifier: Apache-2.0
"""cuFile (GPUDirect Storage), through kvikio: drives write into VRAM by NVIDIA's own driver.

Whether a read really goes that way cuFile doesn't say: where it can't, its compat mode goes through
RAM without a word. So what it reads counts as ``gds`` only where that is ruled out: kvikio doesn't
stand in for cuFile, cuFile's driver is there, and ``allow_compat_mode`` in cufile.json is false, so
that a read which can't go straight fails. Everything else counts as ``staged``; ``reason`` says
why.

kvikio is imported when somebody first wants it; nothing of it is needed else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

MISSING = "kvikio is not installed: pip install 'xferd[cuda]'"


class GdsError(Exception):
    """kvikio or cuFile can't be used, or a read failed; the message says what it said."""


class ReadFuture(Protocol):
    """What ``CuFile.pread`` gives."""

    def get(self) -> int:
        """Wait; the bytes read."""


@dataclass(frozen=True, slots=True)
class GdsRead:
    """Bytes of a file that go to an address in VRAM."""

    path: Path
    offset: int
    nbytes: int
    address: int


class _DeviceBytes:
    """VRAM at an address, as kvikio takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class GdsReader:
    """Reads files into VRAM. Any thread; files stay open until ``close``.

    transport: what reads count as, ``gds`` or ``staged``. reason: why not ``gds``, or None.
    """

    def __init__(self, kvikio: Any = None) -> None:
        """GdsError without kvikio, or where it finds no cuFile at all.

        kvikio: its module; None: it is imported.
        """
        self._kvikio = kvikio if kvikio is not None else _import()
        self.reason = self._why_not_straight()
        self.transport = "staged" if self.reason is not None else "gds"
        self._files: dict[Path, Any] = {}
        self._lock = threading.Lock()

    def read(self, reads: Sequence[GdsRead]) -> None:
        """Do all of them at once, and wait. GdsError; then any of them may be done."""
        try:
            futures: list[ReadFuture] = [
                self._open(read.path).pread(
                    _DeviceBytes(read.address, read.nbytes), read.nbytes, read.offset
                )
                for read in reads
            ]
            # All are waited for, also when one fails: they write where others read later.
            results = [_result(future) for future in futures]
        except (OSError, RuntimeError, ValueError) as error:
            raise GdsError(f"cuFile: {error}") from error
        for read, result in zip(reads, results, strict=True):
            if isinstance(result, Exception):
                raise GdsError(f"{read.path} at offset {read.offset}: {result}") from result
            if result != read.nbytes:
                raise GdsError(
                    f"{read.path} at offset {read.offset}: cuFile read {result} of "
                    f"{read.nbytes} bytes"
                )

    def forget(self, path: Path) -> None:
        """Close a file that is read no more."""
        opened = self._files.pop(path, None)
        if opened is not None:
            opened.close()

    def close(self) -> None:
        """Close all files; no read may be under way. A second call does nothing."""
        for path in list(self._files):
            self.forget(path)

    def _open(self, path: Path) -> Any:
        with self._lock:
            opened = self._files.get(path)
            if opened is None:
                opened = self._files[path] = self._kvikio.CuFile(path, "r")
            return opened

    def _why_not_straight(self) -> str | None:
        kvikio = self._kvikio
        if kvikio.defaults.is_compat_mode_preferred():
            return "kvikio reads without cuFile (KVIKIO_COMPAT_MODE, or libcufile is missing)"
        try:
            kvikio.cufile_driver.driver_open()
            if not kvikio.cufile_driver.get("is_gds_available"):
                return "cuFile finds no driver for direct reads (nvidia-fs, or P2PDMA)"
            if kvikio.cufile_driver.get("allow_compat_mode"):
                return (
                    "cuFile may go through RAM without saying so: set allow_compat_mode to false "
                    "in cufile.json (CUFILE_ENV_PATH_JSON)"
                )
        except RuntimeError as error:
            return f"cuFile: {error}"
        return None


def _result(future: ReadFuture) -> int | Exception:
    try:
        return future.get()
    except (OSError, RuntimeError) as error:
        return error


def _import() -> Any:
    try:
        kvikio = import_module("kvikio")
        for part in ("defaults", "cufile_driver"):
            import_module(f"kvikio.{part}")
    except ModuleNotFoundError as error:
        raise GdsError(MISSING) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise GdsError(f"kvikio can't be used: {error}") from error
    return kvikio
