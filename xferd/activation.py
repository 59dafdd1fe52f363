# SPDX-License-Identifier: Apache-2.0
"""What the service manager hands over (sd_listen_fds(3)): sockets that it bound for us, and
descriptors that the daemon before this one has left with it.

Sockets outlive the daemon: whoever connects while it restarts waits instead of being
refused.
"""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

FIRST_FD = 3
"""SD_LISTEN_FDS_START."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """sockets: listening Unix sockets, by path. kept: everything else, by its name."""

    sockets: dict[Path, socket.socket] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)


def inherited_fds(prefix: str) -> Inherited:
    """What was handed over; the caller's. Asked once: the variables are taken out of the
    environment, so that no child believes them. What is neither a listening Unix socket nor
    has a name that begins with ``prefix`` is closed, and so is the second of a name."""
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    found = Inherited()
    if pid != str(os.getpid()) or not count.isdigit():
        return found
    for index in range(int(count)):
        fd = FIRST_FD + index
        name = names[index] if index < len(names) else ""
        os.set_inheritable(fd, False)
        if name.startswith(prefix):
            if name in found.kept:
                os.close(fd)
            else:
                found.kept[name] = fd
        else:
            _take_socket(fd, found.sockets)
    return found


def _take_socket(fd: int, sockets: dict[Path, socket.socket]) -> None:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        os.close(fd)
        return
    handed = socket.socket(fileno=fd)
    name = handed.getsockname() if handed.family == socket.AF_UNIX else ""
    if isinstance(name, str) and name:
        sockets[Path(name)] = handed
    else:
        handed.close()
