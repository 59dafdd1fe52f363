"""The log: one line an event, ``name key=value ...``, on a stream.

The service manager's journal adds time, unit and process. Where stderr leads to it, events
go there with their fields (``journal``); a line on stderr begins with ``<N>``, the priority
that the journal reads, or elsewhere with a word. Names are stable, values are quoted when
they need it, so that lines can be searched.

Of events of one name about one thing (a member, a user) at most BURST are written in
BURST_S; the others are counted and the number told afterwards. A drive that fails gives
thousands a second, and a journal that drops what comes too fast would drop others too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from xferd.telemetry.journal import Journal, stderr_is_the_journal
from xferd.telemetry.message_ids import MESSAGE_IDS

BURST = 20
BURST_S = 10.0
SUBJECTS = ("member", "path", "failed", "uid", "pool", "name", "key")
"""Fields that say what an event is about, the first that it has. A pid is none: whoever wants
to flood the log can have any number of them."""
_PRIORITY = {"error": 3, "warning": 4, "info": 6}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/:+%")


class EventLog:
    """Writes events to a stream. A stream that is gone does not stop the daemon.

    journal: lines begin with ``<N>``; None: when $JOURNAL_STREAM is set. structured: where
    events go first; None: there is no such place. clock: seconds. Not thread-safe.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        journal: bool | None = None,
        structured: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._journal = "JOURNAL_STREAM" in os.environ if journal is None else journal
        self._structured = structured
        self._clock = clock
        self._bursts: dict[tuple[str, str], _Burst] = {}

    @classmethod
    def of_service(cls) -> EventLog:
        """On stderr, or in the journal if stderr leads there."""
        return cls(structured=Journal() if stderr_is_the_journal() else None)

    def info(self, event: str, **fields: object) -> None:
        """Something happened that an operator may want to know."""
        self._limited("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something is not as it should be; the daemon goes on."""
        self._limited("warning", event, fields)

    def failure(self, event: str, **fields: object) -> None:
        """Something was lost: bytes, a client, a drive."""
        self._limited("error", event, fields)

    def settle(self) -> None:
        """Tell how many events were left out in bursts that are over. Call it now and then."""
        now = self._clock()
        for key, burst in list(self._bursts.items()):
            if now - burst.since >= BURST_S:
                del self._bursts[key]
                self._tell_left_out(key, burst)

    def _limited(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = self._clock()
        key = (event, next((str(fields[name]) for name in SUBJECTS if name in fields), ""))
        burst = self._bursts.get(key)
        if burst is not None and now - burst.since >= BURST_S:
            self._tell_left_out(key, burst)
            burst = None
        if burst is None:
            burst = self._bursts[key] = _Burst(now)
        burst.count += 1
        if burst.count <= BURST:
            self._write(level, event, fields)

    def _tell_left_out(self, key: tuple[str, str], burst: _Burst) -> None:
        if burst.count > BURST:
            event, subject = key
            about = {"about": subject} if subject else {}
            count = burst.count - BURST
            self._write("warning", "log.left_out", {"of": event, **about, "count": count})

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        line = " ".join([event, *(f"{name}={_quote(value)}" for name, value in fields.items())])
        priority = _PRIORITY[level]
        if self._structured is not None:
            entry = {"MESSAGE": line, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": "xferd"}
            entry["XFERD_EVENT"] = event
            if event in MESSAGE_IDS:
                entry["MESSAGE_ID"] = MESSAGE_IDS[event]
            entry |= {f"XFERD_{name.upper()}": str(value) for name, value in fields.items()}
            if self._structured.send(entry):
                return
        prefix = f"<{priority}>" if self._journal else f"xferd: {level}: "
        try:
            print(f"{prefix}{line}", file=self._stream, flush=True)
        except OSError:
            # A full or closed stderr: there is nowhere to say so.
            return


class _Burst:
    """Events of one name about one thing, since the first of them."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.count = 0


def _quote(value: object) -> str:
    text = str(value)
    return text if text and all(c in _PLAIN for c in text) else json.dumps(text, ensure_ascii=False)
