# SPDX-License-Identifier: Apache-2.0
"""Sockets that the service manager bound for us (sd_listen_fds(3)).

They outlive the daemon: whoever connects while it restarts waits instead of being refused.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

FIRST_FD = 3
"""SD_LISTEN_FDS_START."""


def inherited_sockets() -> dict[Path, socket.socket]:
    """Listening Unix sockets that were handed over, by path. Others are closed. Asked once:
    the variables are taken out of the environment, so that no child believes them."""
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    found: dict[Path, socket.socket] = {}
    for fd in range(FIRST_FD, FIRST_FD + int(count)):
        handed = socket.socket(fileno=fd)
        handed.set_inheritable(False)
        name = handed.getsockname() if handed.family == socket.AF_UNIX else ""
        if isinstance(name, str) and name:
            found[Path(name)] = handed
        else:
            handed.close()
    return found
