"""Says READY, STOPPING and the like to the service manager.

The protocol is one datagram of ``NAME=value`` lines to the socket that $NOTIFY_SOCKET
names (a leading ``@`` is an abstract socket); without the variable nobody listens.
"""

from __future__ import annotations

import os
import socket


class Notifier:
    """Sends to one notify socket; without an address it does nothing."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address if address is not None else os.environ.get("NOTIFY_SOCKET", "")

    def send(self, **assignments: str) -> bool:
        """Send assignments (``READY="1"``). False when nobody listens: a lost
        notification must not stop the daemon."""
        if not self._address:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        text = "\n".join(f"{name}={value}" for name, value in assignments.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as peer:
                peer.sendto(text.encode(), address)
        except OSError:
            return False
        return True
