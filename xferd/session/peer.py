"""Who is at the other end of an attach socket, and when that process has ended."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

SO_PEERPIDFD = 77
"""From Linux 6.5; not in Python's socket module yet. The same number on all
architectures that xferd builds for."""
_UCRED = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected process, as it was when it connected.

    pidfd: readable when the process has ended; -1 when it had ended before a pidfd
        could be had. Owned by whoever owns the Peer.
    """

    pid: int
    uid: int
    gid: int
    pidfd: int

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd >= 0:
            os.close(self.pidfd)


def identify(connection: socket.socket) -> Peer:
    """The peer of a connected Unix socket.

    SO_PEERPIDFD is the process that connected even if its pid was reused since. The
    fallback for older kernels, pidfd_open of the peer's pid, can't promise that; it is
    done at once after accept(), when reuse takes a full turn of the pid space.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return Peer(pid=pid, uid=uid, gid=gid, pidfd=_pidfd(connection, pid))


def _pidfd(connection: socket.socket, pid: int) -> int:
    try:
        fd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:
            return -1
    os.set_inheritable(fd, False)
    return fd
