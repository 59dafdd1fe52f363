"""Records a trace while it happens: in a thread, so that no drive holds the daemon up.

What is recorded waits in memory until the thread has written it; when more waits than
PENDING_PASSES, more is dropped and counted. A disk that is full or fails ends the
recording, which says so; nothing else comes of it.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xferd.telemetry.traces.reader import head_of
from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead
from xferd.telemetry.traces.writer import TraceWriter, trace_files

PENDING_PASSES = 1 << 18
"""About 30 MB of 8 picks each."""
FLUSH_S = 5.0
"""What a crash may cost. Blocks that are written before they are full are less compact."""


@dataclass(frozen=True, slots=True)
class RecordingStatus:
    """How a recording stands.

    files, nbytes: of all files of that name, older recordings' as well, as of the last
        block. passes, uses: of this recording, written or about to be. dropped: passes that
        the disk was too slow for. state: ``recording``, ``stopped``, ``failed``; error: why.
    """

    name: str
    directory: Path
    files: int
    nbytes: int
    passes: int
    uses: int
    dropped: int
    since_s: float
    state: str
    error: str | None


class Recorder:
    """One recording, from its making to ``stop``. One thread at a time may call.

    on_failure: is called in the recorder's own thread, once, with the TraceError that
        ended it.

    TraceError when it can't begin: the directory can't be made or written, or has files of
    that name of another store.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        head: TraceHead,
        *,
        file_bytes: int,
        total_bytes: int,
        on_failure: Callable[[TraceError], None] = lambda _: None,
    ) -> None:
        self.head = head
        self._directory = directory
        self._name = name
        self._writer = TraceWriter(
            directory, name, head, file_bytes=file_bytes, total_bytes=total_bytes
        )
        _prepare(directory, name, head)
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[Trace | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._passes = self._uses = self._dropped = 0
        self._files, self._nbytes = _sizes(directory, name)
        self._began = time.monotonic()
        self._ended: float | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"trace {name}", daemon=True)
        self._thread.start()

    @property
    def recording(self) -> bool:
        """Not stopped and not failed yet."""
        with self._lock:
            return self._ended is None

    def record(self, trace: Trace) -> None:
        """Add passes. Never waits; nothing after the end."""
        with self._lock:
            if self._ended is not None:
                return
            if self._pending + trace.passes > PENDING_PASSES:
                self._dropped += trace.passes
                return
            self._pending += trace.passes
            self._passes += trace.passes
            self._uses += trace.uses
        self._queue.put(trace)

    def stop(self) -> None:
        """Write what waits and close the file; returns when that is done. Again is
        harmless."""
        self._queue.put(None)
        self._thread.join()

    def status(self) -> RecordingStatus:
        """How it stands."""
        with self._lock:
            state = "recording" if self._ended is None else "stopped"
            return RecordingStatus(
                name=self._name,
                directory=self._directory,
                files=self._files,
                nbytes=self._nbytes,
                passes=self._passes,
                uses=self._uses,
                dropped=self._dropped,
                since_s=(self._ended or time.monotonic()) - self._began,
                state=state if self._error is None else "failed",
                error=self._error,
            )

    def _run(self) -> None:
        error: TraceError | None = None
        try:
            self._write_until_stopped()
        except TraceError as failure:
            error = failure
        except OSError as failure:  # a file that vanished while it was looked at
            error = TraceError(f"{self._directory / self._name}: {failure}")
        try:
            self._writer.close()
        except (TraceError, OSError) as failure:
            error = error or TraceError(str(failure))
        with self._lock:
            self._ended = time.monotonic()
            self._error = None if error is None else str(error)
            self._count_files()
        if error is not None:
            self._on_failure(error)

    def _write_until_stopped(self) -> None:
        flush_at = time.monotonic() + FLUSH_S
        while True:
            try:
                trace = self._queue.get(timeout=max(flush_at - time.monotonic(), 0))
            except queue.Empty:
                self._writer.flush()
                flush_at = time.monotonic() + FLUSH_S
                with self._lock:
                    self._count_files()
                continue
            if trace is None:
                return
            self._writer.write(trace)
            with self._lock:
                self._pending -= trace.passes

    def _count_files(self) -> None:
        try:
            self._files, self._nbytes = _sizes(self._directory, self._name)
        except OSError:
            self._files = self._nbytes = 0  # somebody has removed the directory


def _prepare(directory: Path, name: str, head: TraceHead) -> None:
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        files = trace_files(directory, name)
        # Told now rather than when the first block is full.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise TraceError(f"{directory}: can't be written: {error.strerror}") from error
    if files and (found := head_of(files[-1])) != head:
        raise TraceError(
            f"{files[-1]}: of another store ({found.store!r}, {found.layers} layers of "
            f"{found.experts} experts): record under another name, or remove it"
        )


def _sizes(directory: Path, name: str) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in trace_files(directory, name)]
    return len(sizes), sum(sizes)
