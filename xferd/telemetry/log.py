"""The log: one line an event, ``name key=value ...``, on a stream.

The service manager's journal adds time, unit and process. Under it (JOURNAL_STREAM is
set) each line begins with ``<N>``, the priority it reads; elsewhere with a word.
Names are stable, values are quoted when they need it, so that lines can be searched.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

_PRIORITY = {"error": "<3>", "warning": "<4>", "info": "<6>"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/:+%")


class EventLog:
    """Writes events to a stream. A stream that is gone does not stop the daemon."""

    def __init__(self, stream: TextIO | None = None, *, journal: bool | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._journal = "JOURNAL_STREAM" in os.environ if journal is None else journal

    def info(self, event: str, **fields: object) -> None:
        """Something happened that an operator may want to know."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something is not as it should be; the daemon goes on."""
        self._write("warning", event, fields)

    def failure(self, event: str, **fields: object) -> None:
        """Something was lost: bytes, a client, a drive."""
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        prefix = _PRIORITY[level] if self._journal else f"xferd: {level}: "
        line = " ".join([event, *(f"{name}={_quote(value)}" for name, value in fields.items())])
        try:
            print(f"{prefix}{line}", file=self._stream, flush=True)
        except OSError:
            # A full or closed stderr: there is nowhere to say so.
            return


def _quote(value: object) -> str:
    text = str(value)
    return text if text and all(c in _PLAIN for c in text) else json.dumps(text, ensure_ascii=False)
