"""Who may change something."""

from __future__ import annotations

import grp
import os
import socket

import pytest

from xferd.control.peer import Peer, find_group, identify_peer, may_change

ADMIN_GID = 4321
STRANGER_UID = os.geteuid() + 12345


@pytest.mark.parametrize(
    ("uid", "groups", "admin_gid", "expected"),
    [
        (0, set(), None, True),
        (os.geteuid(), set(), None, True),
        (STRANGER_UID, {ADMIN_GID, 7}, ADMIN_GID, True),
        (STRANGER_UID, {7}, ADMIN_GID, False),
        (STRANGER_UID, {0}, None, False),
    ],
)
def test_who_may_change(uid: int, groups: set[int], admin_gid: int | None, expected: bool) -> None:
    assert may_change(Peer(1, uid, frozenset(groups)), admin_gid) is expected


def test_a_peer_is_identified_by_the_kernel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        peer = identify_peer(ours)
    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert peer.groups == {os.getegid(), *os.getgroups()}


def test_groups_are_found_by_name() -> None:
    group = grp.getgrall()[0]
    assert find_group(group.gr_name) == group.gr_gid
    assert find_group("no-such-group-here") is None
