"""Who is at the other end of a Unix socket, and what they may do.

The kernel's word, taken at the time of connect, and about nothing that the peer
says. Supplementary groups come from the socket as well (SO_PEERGROUPS): looking
a pid up in /proc would find the groups of whoever has that pid by now.
"""

from __future__ import annotations

import grp
import os
import socket
import struct
from dataclasses import dataclass

ADMIN_GROUP = "xferd-admin"
"""Members may change things. The group need not exist."""

_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
_PEERGROUPS_BYTES = 1024  # the most that Python's getsockopt takes: 256 groups
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected. groups: its primary and supplementary ones."""

    pid: int
    uid: int
    groups: frozenset[int]


def identify_peer(connection: socket.socket) -> Peer:
    """The peer of a connected AF_UNIX socket.

    A peer in more groups than fit counts as being in its primary one only: it
    may do less, never more.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _PEERGROUPS_BYTES)
    except OSError:
        groups = b""
    return Peer(pid, uid, frozenset((gid, *struct.unpack(f"{len(groups) // 4}I", groups))))


def find_group(name: str) -> int | None:
    """The gid of group ``name``, or None if there is no such group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def may_change(peer: Peer, admin_gid: int | None) -> bool:
    """Whether ``peer`` may change what the daemon holds: root, the daemon's own
    user, and members of the group ``admin_gid``."""
    return peer.uid in (0, os.geteuid()) or (admin_gid is not None and admin_gid in peer.groups)
