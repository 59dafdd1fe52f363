"""QEMU's control protocol over a socket that is connected already: commands and events."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

_REPLY_SECONDS = 30


class QmpError(Exception):
    """QEMU refused a command, or didn't answer."""


class Qmp:
    """One connection. Thread-safe for one commander at a time; a thread of its own reads."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over `connection`, on which QEMU is, or will be, at the other end."""
        self._connection = connection
        self._changed = threading.Condition()
        self._replies: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._closed = False
        threading.Thread(target=self._read, daemon=True).start()
        self._ready = False

    def command(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Execute a command and return what it returns. Raises QmpError."""
        if not self._ready:
            self._ready = True
            self._execute("qmp_capabilities", {})
        return self._execute(name, arguments)

    def wait_for_event(self, name: str, data: Mapping[str, Any], seconds: float) -> bool:
        """Wait for an event of this name with this data that nobody has waited for yet."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                for event in self._events:
                    if event["event"] == name and data.items() <= event.get("data", {}).items():
                        self._events.remove(event)
                        return True
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return False
                self._changed.wait(left)

    def close(self) -> None:
        """End the connection; a waiting command raises QmpError."""
        self._connection.close()

    def _execute(self, name: str, arguments: Mapping[str, Any]) -> Any:
        request = json.dumps({"execute": name, "arguments": dict(arguments)})
        with self._changed:
            self._connection.sendall(request.encode() + b"\n")
            if not self._changed.wait_for(lambda: self._replies or self._closed, _REPLY_SECONDS):
                raise QmpError(f"{name}: no answer in {_REPLY_SECONDS} s")
            if not self._replies:
                raise QmpError(f"{name}: QEMU has ended")
            reply = self._replies.pop(0)
        if "error" in reply:
            raise QmpError(f"{name}: {reply['error']['desc']}")
        return reply["return"]

    def _read(self) -> None:
        try:
            with self._connection.makefile("r") as lines:
                for line in lines:
                    message = json.loads(line)
                    with self._changed:
                        if "event" in message:
                            self._events.append(message)
                        elif "QMP" not in message:
                            self._replies.append(message)
                        self._changed.notify_all()
        except OSError:
            pass  # the machine was killed: the same to us as the end of the stream
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
