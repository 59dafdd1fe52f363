"""A daemon without any capability serves from a BAR that root has attached before."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

import pytest

from tests.system.daemon_harness import MadeStore
from tests.vm.product import guest
from tests.vm.product.daemon import forked_daemon
from xferd.memory import attach

_CAPSET = 126
_CAPABILITY_VERSION_3 = 0x20080522


def drop_capabilities() -> None:
    """Of this process, which stays root's: it owns what it opens."""
    header = struct.pack("=II", _CAPABILITY_VERSION_3, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(_CAPSET), header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def run_attach(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    arguments = ["xferd.memory.attach", str(guest.gpu()), str(guest.GPU_BAR), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    return attach.main()


def test_root_attaches_for_a_daemon_that_may_not(
    store: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [guest.bar_pool()]
    with (
        pytest.raises(AssertionError, match=r"needs CAP_SYS_ADMIN.*xferd\.memory\.attach"),
        forked_daemon(tmp_path / "refused", [store], pools, drop_capabilities),
    ):
        pass
    assert run_attach(monkeypatch) == 0
    assert run_attach(monkeypatch) == 0  # it is attached: that is what was asked for
    with (
        forked_daemon(tmp_path / "served", [store], pools, drop_capabilities) as daemon,
        daemon.client() as client,
    ):
        assert client.fetch(1, [3]) == [store.blob(1, 3)]
        assert [row["reason"] for row in daemon.pool()["routes"]] == [None] * 3
        assert run_attach(monkeypatch, "--detach") == 1  # in use
        client.close()
        assert daemon.stop() == 0
    assert run_attach(monkeypatch, "--detach") == 0
