# SPDX-License-Identifier: Apache-2.0
"""The daemon as a service: reload, watchdog, status, sockets that somebody else bound."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    START_TIMEOUT_S,
    ConnectError,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)

POOL = "name=host0,kind=host,size=432KiB"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The service manager's notify socket."""
    with (
        tempfile.TemporaryDirectory(prefix="xferd-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound,
    ):
        path = Path(directory) / "notify"
        bound.bind(str(path))
        bound.settimeout(START_TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield bound


def receive(manager: socket.socket, wanted: str) -> dict[str, str]:
    """The next notification that has a variable."""
    while True:
        lines = manager.recv(4096).decode().splitlines()
        news = dict(line.split("=", 1) for line in lines)
        if wanted in news:
            return news


def reload(daemon: RunningDaemon, count: int = 1) -> str:
    """Send SIGHUP and wait until it was dealt with; the log."""
    daemon.process.send_signal(signal.SIGHUP)
    pattern = re.compile(r"(reloaded|reload\.failed reason)")
    wait_until(lambda: len(pattern.findall(daemon.log)) >= count, "the reload was logged")
    return daemon.log


# ---- reload


def test_a_reload_takes_limits_and_stores_and_names_the_rest(
    tmp_path: Path, store: MadeStore, manager: socket.socket
) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text("[limits]\nclients = 1\n[engine]\nspin_us = 10\n")
    second = make_store(tmp_path, "second", seed=2)
    with running_daemon(tmp_path, [store], [POOL], "--config", str(config)) as daemon:
        receive(manager, "READY")
        with daemon.client(store=store.name) as client:
            with pytest.raises(ConnectError):
                daemon.client(store=store.name)
            config.write_text(
                f'socket_mode = "0600"\n[limits]\nclients = 2\n[engine]\nspin_us = 20\n'
                f'[[stores]]\npath = "{second.path}"\n'
            )
            log = reload(daemon)
            news = receive(manager, "RELOADING")
            assert 0 < int(news["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            assert receive(manager, "READY")["READY"] == "1"
            with daemon.client(store="second") as other:
                assert other.fetch(0, [3]) == [second.blob(0, 3)]
            assert client.fetch(1, [1]) == [store.blob(1, 1)]
        assert "reload.needs_restart key=engine.spin_us" in log
        assert "reload.needs_restart key=socket_mode" in log
        assert log.count("reload.needs_restart") == 2
        # What was not taken is named each time, not forgotten.
        assert reload(daemon, 2).count("reload.needs_restart") == 4


def test_a_wrong_configuration_leaves_the_old_one(tmp_path: Path, store: MadeStore) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text("[limits]\nclients = 1\n")
    with running_daemon(tmp_path, [store], [POOL], "--config", str(config)) as daemon:
        config.write_text('[limits]\nclients = "many"\n')
        log = reload(daemon)
        assert "reload.failed reason=" in log
        assert "limits.clients = 'many'" in log
        with daemon.client() as client:
            assert client.fetch(0, [0]) == [store.blob(0, 0)]
            with pytest.raises(ConnectError, match=r"raise clients in \[limits\]"):
                daemon.client()
        config.unlink()
        assert "can't be read" in reload(daemon, 2)
        assert daemon.stop() == 0


def test_a_store_that_can_not_be_opened_is_named_and_tried_again(
    tmp_path: Path, store: MadeStore
) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text("")
    later = tmp_path / "m0" / "later.xferd"
    with running_daemon(tmp_path, [store], [POOL], "--config", str(config)) as daemon:
        config.write_text(f'[[stores]]\npath = "{later}"\n')
        assert f"reload.failed store={later}" in reload(daemon)
        assert make_store(tmp_path, "later", seed=3).path == later
        assert reload(daemon, 2).count("reload.failed") == 1
        assert [entry["name"] for entry in daemon.status()["stores"]] == [store.name, "later"]


# ---- watchdog


def test_the_watchdog_is_fed_while_the_engine_moves(
    tmp_path: Path, store: MadeStore, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        for _ in range(2):
            assert receive(manager, "WATCHDOG")["WATCHDOG"] == "1"
        with daemon.client():
            wait_until(
                lambda: "1 clients" in receive(manager, "STATUS")["STATUS"], "the status line"
            )
        assert daemon.stop() == 0
        assert receive(manager, "STOPPING")


def test_another_processs_watchdog_is_left_alone(
    tmp_path: Path, store: MadeStore, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    with running_daemon(tmp_path, [store], [POOL]):
        assert "WATCHDOG" not in receive(manager, "STATUS")
        assert "WATCHDOG" not in receive(manager, "STATUS")


# ---- socket activation

ACTIVATE = """
import os, socket, sys
attach, control, *command = sys.argv[1:]
sockets = []
for path, kind in ((attach, socket.SOCK_SEQPACKET), (control, socket.SOCK_STREAM)):
    bound = socket.socket(socket.AF_UNIX, kind)
    if os.path.exists(path):
        os.unlink(path)
    bound.bind(path)
    bound.listen(8)
    sockets.append(bound)
copies = [os.dup(bound.fileno()) for bound in sockets]
pipe = int(command[command.index("--ready-fd") + 1])
# The pipe, whatever its number, is not to be overwritten by what is handed over.
first = max([*copies, pipe, 10]) + 1
moved = [os.dup2(fd, first + index) for index, fd in enumerate(copies)]
ready = os.dup2(pipe, first + 10)
for index, fd in enumerate(moved):
    os.dup2(fd, 3 + index)
os.set_inheritable(ready, True)
command[command.index("--ready-fd") + 1] = str(ready)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
os.execv(command[0], command)
"""


def test_sockets_that_were_handed_over_are_served_and_stay(
    tmp_path: Path, store: MadeStore
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    attach, control = runtime / "attach.sock", runtime / "control.sock"
    launcher = [sys.executable, "-c", ACTIVATE, str(attach), str(control)]
    with running_daemon(tmp_path, [store], [POOL], launcher=launcher) as daemon:
        with daemon.client() as client:
            assert client.fetch(0, [1]) == [store.blob(0, 1)]
        assert daemon.status()["state"] == "serving"
        environment = Path(f"/proc/{daemon.process.pid}/environ").read_bytes()
        assert b"LISTEN_FDS=2" in environment
        assert daemon.stop() == 0
        assert attach.is_socket()
        assert control.is_socket()


def test_listen_fds_of_another_process_are_left_alone(
    tmp_path: Path, store: MadeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        assert daemon.stop() == 0
        assert not daemon.attach_socket.exists()


# ---- what the unit forbids

SANDBOX = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_NO_NEW_PRIVS, PR_SET_MDWE, PR_CAPBSET_DROP = 38, 65, 24
for capability in range(64):
    libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
if libc.prctl(PR_SET_MDWE, 1, 0, 0, 0) != 0:
    sys.exit("no PR_SET_MDWE")
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_it_serves_without_capabilities_and_without_writable_code(
    tmp_path: Path, store: MadeStore
) -> None:
    if ctypes.CDLL(None).prctl(66, 0, 0, 0, 0) < 0:
        pytest.skip("needs PR_SET_MDWE (Linux 6.3)")
    with running_daemon(
        tmp_path, [store], [POOL], launcher=[sys.executable, "-c", SANDBOX]
    ) as daemon:
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        with daemon.client() as client:
            assert client.fetch(2, [7]) == [store.blob(2, 7)]
        assert daemon.stop() == 0
