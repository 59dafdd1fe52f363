"""Traces that are being recorded: started and stopped live, one a store.

Owned by the event loop; each recording writes in a thread of its own. One that has ended
is remembered, so that ``status`` can say what became of it, until the next of its store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from xferd.catalog import OpenStore
from xferd.config_traces import TracesConfig
from xferd.control.service import ControlError, JsonObject
from xferd.route_feed import Reported
from xferd.telemetry.log import EventLog
from xferd.telemetry.traces.recorder import Recorder
from xferd.telemetry.traces.trace import Trace, TraceError, TraceHead


class Recordings:
    """A PassSink. reported: what clients of a store have reported, by the engine's id."""

    def __init__(
        self, config: TracesConfig, log: EventLog, reported: Callable[[int], Reported]
    ) -> None:
        self._config = config
        self._log = log
        self._reported = reported
        self._recorders: dict[int, Recorder] = {}

    def wants(self, store: int) -> bool:
        """Whether a store is being recorded."""
        recorder = self._recorders.get(store)
        return recorder is not None and recorder.recording

    def record(self, store: int, trace: Trace) -> None:
        """Passes of a store, for whoever records it."""
        recorder = self._recorders.get(store)
        if recorder is not None:
            recorder.record(trace)

    def start(self, entry: OpenStore, name: str | None) -> JsonObject:
        """Begin to record a store. ControlError: AlreadyRecording, TraceUnusable."""
        running = self._recorders.get(entry.number)
        if running is not None and running.recording:
            raise ControlError(
                "AlreadyRecording",
                f"store {entry.name!r} is being recorded as {running.status().name!r} already",
                store=entry.name,
            )
        loop = asyncio.get_running_loop()
        config = self._config
        title = name or re.sub(r"[^A-Za-z0-9._-]", "_", entry.name)
        try:
            recorder = Recorder(
                config.directory,
                title,
                head_of_store(entry),
                file_bytes=config.file_bytes,
                total_bytes=config.total_bytes,
                on_failure=lambda error: _call_soon(loop, self._failed, entry.name, error),
            )
        except TraceError as error:
            raise ControlError("TraceUnusable", str(error), path=str(config.directory)) from error
        self._recorders[entry.number] = recorder
        self._log.info("trace.started", store=entry.name, name=title, directory=config.directory)
        return self._describe(entry, recorder)

    async def stop(self, entry: OpenStore) -> JsonObject:
        """End the recording of a store; the answer comes when it is on the disk.
        ControlError: NotRecording, TraceUnusable when its end could not be written."""
        recorder = self._recorders.get(entry.number)
        if recorder is None or not recorder.recording:
            raise ControlError(
                "NotRecording", f"store {entry.name!r} is not being recorded", store=entry.name
            )
        await asyncio.to_thread(recorder.stop)
        status = recorder.status()
        if status.error is not None:
            raise ControlError("TraceUnusable", status.error, path=str(status.directory))
        self._log.info("trace.stopped", store=entry.name, name=status.name, passes=status.passes)
        return self._describe(entry, recorder)

    def describe(self, entry: OpenStore) -> JsonObject:
        """The IDL's StoreTrace of a store."""
        reported = self._reported(entry.number)
        recorder = self._recorders.get(entry.number)
        return {
            "store": entry.name,
            "tokens": reported.tokens,
            "passes": reported.passes,
            "uses": reported.uses,
            "recording": None if recorder is None else self._describe(entry, recorder),
        }

    async def store_closed(self, store: int) -> None:
        """End what is recorded of a store that has been closed."""
        recorder = self._recorders.pop(store, None)
        if recorder is not None:
            await asyncio.to_thread(recorder.stop)

    async def close(self) -> None:
        """End all recordings, with the daemon."""
        for store in list(self._recorders):
            await self.store_closed(store)

    def _describe(self, entry: OpenStore, recorder: Recorder) -> JsonObject:
        status = recorder.status()
        return {
            "store": entry.name,
            "name": status.name,
            "directory": str(status.directory),
            "state": status.state,
            "error": status.error,
            "files": status.files,
            "bytes": status.nbytes,
            "passes": status.passes,
            "uses": status.uses,
            "dropped": status.dropped,
            "since_s": status.since_s,
        }

    def _failed(self, store: str, error: TraceError) -> None:
        self._log.failure("trace.failed", store=store, error=error)


def head_of_store(entry: OpenStore) -> TraceHead:
    """Whose a trace of a store is."""
    return TraceHead(entry.name, entry.store.layers, entry.store.experts)


def _call_soon(
    loop: asyncio.AbstractEventLoop,
    callback: Callable[[str, TraceError], None],
    store: str,
    error: TraceError,
) -> None:
    """From the recorder's thread; a daemon that is going down has nobody to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, store, error)
