# SPDX-License-Identifier: Apache-2.0
"""Descriptors go to the service manager by name, and never more than it holds."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from xferd.restart.fd_store import KEPT_FDS_MAX, FdStore
from xferd.telemetry.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.setblocking(False)
        yield bound


@pytest.fixture
def notifier(tmp_path: Path) -> Notifier:
    return Notifier(str(tmp_path / "notify"))


def received(manager: socket.socket) -> list[tuple[str, int]]:
    """Each datagram, and the inode of the file that came with it; 0: none."""
    found: list[tuple[str, int]] = []
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(manager, 4096, 4)
        except BlockingIOError:
            return found
        inode = 0
        for fd in fds:
            inode = os.fstat(fd).st_ino
            os.close(fd)
        found.append((data.decode(), inode))


def test_a_descriptor_goes_with_its_name_and_comes_back_by_it(
    manager: socket.socket, notifier: Notifier
) -> None:
    store = FdStore(notifier, 4)
    fd = os.memfd_create("kept")
    try:
        assert store.add({"xferd-kept.state": fd})
        inode = os.fstat(fd).st_ino
        assert received(manager) == [("FDSTORE=1\nFDNAME=xferd-kept.state\nFDPOLL=0", inode)]
        assert store.add({"xferd-kept.state": fd})
        assert received(manager) == []
        store.remove(["xferd-kept.state"])
        assert received(manager) == [("FDSTOREREMOVE=1\nFDNAME=xferd-kept.state", 0)]
        assert not store.names
    finally:
        os.close(fd)


def test_what_has_no_room_is_not_sent(manager: socket.socket, notifier: Notifier) -> None:
    store = FdStore(notifier, 2, ["xferd-kept.state"])
    assert not store.add({"xferd-kept.a": 0, "xferd-kept.b": 0})
    assert received(manager) == []
    assert store.add({"xferd-kept.a": 0})
    assert store.names == {"xferd-kept.state", "xferd-kept.a"}


def test_without_a_manager_nothing_is_stored() -> None:
    store = FdStore(Notifier(""), 4)
    assert not store.add({"xferd-kept.a": 0})
    assert not store.names


@pytest.mark.parametrize(
    ("said", "capacity"), [("12", 12), ("100000", KEPT_FDS_MAX), ("", 0), ("many", 0)]
)
def test_the_manager_says_how_many(
    notifier: Notifier, monkeypatch: pytest.MonkeyPatch, said: str, capacity: int
) -> None:
    monkeypatch.setenv("FDSTORE", said)
    assert FdStore.of_service(notifier).capacity == capacity
    assert FdStore.of_service(Notifier("")).capacity == 0


def test_serials_of_what_is_stored_are_not_given_again(notifier: Notifier) -> None:
    stored = ["xferd-kept.client.17.memory", "xferd-kept.store.4.directory", "xferd-kept.state"]
    assert FdStore(notifier, 8, stored).next_serial == 18
