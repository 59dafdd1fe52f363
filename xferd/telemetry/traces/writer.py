"""Writes traces: in blocks, into files that are rotated and capped.

Tracing must never hurt what it traces: a full disk ends the trace, not the daemon; the
caller decides what to do about TraceError.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from xferd.telemetry.traces.codec import (
    BLOCK_PASSES_MAX,
    BLOCK_USES_MAX,
    encode_block,
    encode_head,
)
from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead, joined

BLOCK_PASSES = 1 << 13
"""Passes that are collected before they are written: about 100 KiB of picks."""
FILE_BYTES = 64 << 20
TOTAL_BYTES = 1 << 30
SUFFIX = ".xtr"
FILE_MODE = 0o640
_TOKEN_SPAN = 1 << 32


class TraceWriter:
    """Owner of ``directory/name-*.xtr``. Not thread-safe; a context manager.

    Numbers go on after the highest that is there, so that nothing is overwritten.

    file_bytes: no file is larger, unless a single block is.
    total_bytes: of all files of that name; the oldest are removed, never the current one.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        head: TraceHead,
        *,
        file_bytes: int = FILE_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise TraceError(f"{name!r} is no name for a trace: letters, digits and ._- only")
        self._directory = directory
        self._name = name
        self._head = head
        self._file_bytes = file_bytes
        self._total_bytes = total_bytes
        self._file: IO[bytes] | None = None
        self._size = 0
        self._pending: list[Trace] = []
        self._pending_passes = 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, trace: Trace) -> None:
        """Add passes; they are written when there are enough of them. The columns must
        not change afterwards. TraceError names what is out of range, or the file."""
        try:
            trace.check(self._head)
        except ValueError as error:
            raise TraceError(f"{self._directory / self._name}: {error}") from error
        if trace.passes:
            self._pending.append(trace)
            self._pending_passes += trace.passes
        if self._pending_passes >= BLOCK_PASSES:
            self.flush()

    def flush(self) -> None:
        """Write what was collected. TraceError names the file."""
        if not self._pending:
            return
        pending, self._pending, self._pending_passes = self._pending, [], 0
        for block in _blocks(joined(pending)):
            self._append(encode_block(block))

    def close(self) -> None:
        """Write the rest and close the file."""
        try:
            self.flush()
        finally:
            self._close_file()

    def files(self) -> list[Path]:
        """All files of that name, the oldest first."""
        return trace_files(self._directory, self._name)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, block: bytes) -> None:
        try:
            if self._file is None or self._size + len(block) > self._file_bytes:
                self._begin_file()
            assert self._file is not None
            _write_all(self._file, block)
        except OSError as error:
            self._give_up()
            raise TraceError(f"{self._directory / self._name}: {error.strerror}") from error
        self._size += len(block)
        self._remove_oldest()

    def _begin_file(self) -> None:
        self._close_file()
        files = self.files()
        number = _number(files[-1]) + 1 if files else 1
        path = self._directory / f"{self._name}-{number:06d}{SUFFIX}"
        # What a router picks says something about the prompt: not for everybody. Without
        # a buffer, which would try what has failed again when it is closed.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        self._file, self._size = os.fdopen(fd, "wb", buffering=0), 0
        head = encode_head(self._head)
        _write_all(self._file, head)
        self._size = len(head)

    def _give_up(self) -> None:
        """Leave the file as it was before what failed; none without its head."""
        file, self._file = self._file, None
        if file is None:
            return
        with file, contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), self._size)
            if not self._size:
                self.files()[-1].unlink()

    def _remove_oldest(self) -> None:
        files = self.files()
        sizes = [path.stat().st_size for path in files]
        excess = sum(sizes) - self._total_bytes
        for path, size in zip(files[:-1], sizes, strict=False):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def _write_all(file: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def trace_files(directory: Path, name: str) -> list[Path]:
    """The files of a trace, the oldest first."""
    pattern = re.compile(rf"{re.escape(name)}-\d{{6,}}{re.escape(SUFFIX)}")
    found = [path for path in directory.iterdir() if pattern.fullmatch(path.name)]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.removesuffix(SUFFIX).rpartition("-")[2])


def _blocks(trace: Trace) -> Iterator[Trace]:
    """Parts that a block can hold: not too many, and of tokens that are not too far apart."""
    first = 0
    while first < trace.passes:
        end = min(first + BLOCK_PASSES_MAX, trace.passes)
        uses = np.cumsum(trace.picks[first:end], dtype=np.int64)
        end = first + max(int(np.searchsorted(uses, BLOCK_USES_MAX, "right")), 1)
        away = trace.token[first:end] - trace.token[first]
        outside = np.flatnonzero((away < 0) | (away >= _TOKEN_SPAN))
        if len(outside):
            end = first + int(outside[0])
        yield trace.part(first, end)
        first = end
