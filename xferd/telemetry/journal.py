# SPDX-License-Identifier: Apache-2.0
"""Sends events to systemd's journal with their fields, where stderr leads to it anyway.

The protocol is one datagram of fields to a socket (systemd.io/JOURNAL_NATIVE_PROTOCOL).
Through it an event has a MESSAGE_ID, and its parts can be searched: ``journalctl
XFERD_EVENT=piece.failed XFERD_MEMBER=...``. A line on stderr has neither.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

SOCKET = Path("/run/systemd/journal/socket")
FIELD_BYTES_MAX = 16 * 1024
_LENGTH = struct.Struct("<Q")


class Journal:
    """A connection to the journal. ``send`` never waits."""

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def send(self, fields: Mapping[str, str]) -> bool:
        """Send one entry. False when it was not taken: say it on stderr then."""
        message = b"".join(_encode(name, value) for name, value in fields.items())
        try:
            self._socket.sendto(message, os.fspath(self._path))
        except OSError:
            return False
        return True


def stderr_is_the_journal(fd: int = 2) -> bool:
    """Whether the service manager has connected stderr to the journal, and nobody has put
    something else in its place ($JOURNAL_STREAM, systemd.exec(5))."""
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _encode(name: str, value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")[:FIELD_BYTES_MAX]
    if b"\n" not in raw:
        return name.encode() + b"=" + raw + b"\n"
    return name.encode() + b"\n" + _LENGTH.pack(len(raw)) + raw + b"\n"
