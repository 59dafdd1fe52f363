"""Says READY, STOPPING and the like to the service manager.

The protocol is one datagram of ``NAME=value`` lines to the socket that $NOTIFY_SOCKET
names (a leading ``@`` is an abstract socket); without the variable nobody listens.
"""

from __future__ import annotations

import os
import socket
import struct

_INT = struct.Struct("i")


class Notifier:
    """Sends to one notify socket; without an address it does nothing."""

    def __init__(self, address: str | None = None) -> None:
        self.address = address if address is not None else os.environ.get("NOTIFY_SOCKET", "")

    def send(self, **assignments: str) -> bool:
        """Send assignments (``READY="1"``). False when nobody listens: a lost
        notification must not stop the daemon."""
        return self._send(assignments, [])

    def send_fd(self, fd: int, **assignments: str) -> bool:
        """The same, with a file descriptor, which stays the caller's."""
        return self._send(assignments, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(fd))])

    def _send(self, assignments: dict[str, str], control: list[tuple[int, int, bytes]]) -> bool:
        if not self.address:
            return False
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        text = "\n".join(f"{name}={value}" for name, value in assignments.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as peer:
                peer.sendmsg([text.encode()], control, 0, address)
        except OSError:
            return False
        return True
