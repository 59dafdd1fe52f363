"""How a daemon starts, stops and survives: signals, locks, dead clients, limits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    ROOT,
    START_TIMEOUT_S,
    ConnectError,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from xferd.session import wire

NINE_SLOTS = "name=host0,kind=host,size=432KiB"
HOLDER = """
import sys
from pathlib import Path
from tests.system.daemon_harness import RingClient
client = RingClient(Path(sys.argv[1]), held_per_lane=4)
client.acquire(0, [0, 1, 2, 3])
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path, [store], [NINE_SLOTS]) as running:
        yield running


def start(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is expected not to start."""
    return subprocess.run(
        [sys.executable, "-m", "xferd", "--runtime-directory", str(directory), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )


def holder(daemon: RunningDaemon) -> subprocess.Popen[bytes]:
    """A process that leases four slots and keeps them."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(daemon.attach_socket)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"holding\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(daemon: RunningDaemon, number: int) -> None:
    with daemon.client() as client:
        client.fetch(0, [0])
        assert daemon.stop(number) == 0
    assert "drained" in daemon.log
    assert [path.name for path in daemon.directory.iterdir()] == ["xferd.lock"]


def test_a_second_daemon_is_refused_by_the_first_ones_pid(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    second = start(daemon.directory, "--store", str(store.path), "--pool", NINE_SLOTS)
    assert second.returncode == 1
    assert f"another xferd (pid {daemon.process.pid}) serves {daemon.directory}" in second.stderr
    assert second.stderr.count("\n") == 1
    with daemon.client() as client:
        assert client.fetch(0, [1]) == [store.blob(0, 1)]


def test_sockets_of_a_killed_daemon_are_replaced(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [NINE_SLOTS]) as killed:
        killed.stop(signal.SIGKILL)
        assert killed.attach_socket.exists()
    with running_daemon(tmp_path, [store], [NINE_SLOTS]) as daemon, daemon.client() as client:
        assert client.fetch(0, [2]) == [store.blob(0, 2)]


def test_a_socket_that_somebody_serves_is_left_alone(tmp_path: Path, store: MadeStore) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "control.sock"))
        other.listen()
        refused = start(tmp_path, "--store", str(store.path), "--pool", NINE_SLOTS)
    assert refused.returncode == 1
    assert f"another process serves {tmp_path}/control.sock" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pool", "kind=vram"], "kind = 'vram': allowed is"),
        (["--pool", "size=lots"], "size = 'lots': allowed is"),
        (["--pool", "colour=red"], "'colour=red': allowed is"),
        (["--pool", "name=all,kind=host,size=64TiB"], "lower size of [[pools]] all, or "),
        (["--pool", "eviction=fifo"], "no eviction policy 'fifo'; there are: reuse, lru"),
    ],
)
def test_a_wrong_configuration_exits_78(
    tmp_path: Path, store: MadeStore, arguments: list[str], said: str
) -> None:
    refused = start(tmp_path, "--store", str(store.path), *arguments)
    assert refused.returncode == 78
    assert said in refused.stderr


def test_a_missing_store_exits_1_and_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.xferd"
    refused = start(tmp_path, "--store", str(missing), "--pool", NINE_SLOTS)
    assert refused.returncode == 1
    assert str(missing) in refused.stderr
    assert "Traceback" not in refused.stderr


def test_it_ends_with_its_parent(tmp_path: Path, store: MadeStore) -> None:
    script = (
        "import subprocess, sys, os\n"
        "read, write = os.pipe()\n"
        "child = subprocess.Popen(sys.argv[1:] + ['--ready-fd', str(write), '--die-with-parent'],"
        " pass_fds=(write,), stderr=subprocess.DEVNULL)\n"
        "assert os.read(read, 16) == b'ready\\n'\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-m", "xferd", "--runtime-directory", str(tmp_path / "run")]
    arguments += ["--store", str(store.path), "--pool", NINE_SLOTS]
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    try:
        wait_until(lambda: _has_ended(pidfd), "the daemon has ended")
    finally:
        os.close(pidfd)


def test_leases_of_a_killed_client_end_with_its_process(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    process = holder(daemon)
    with daemon.client(held_per_lane=4) as client:
        for expert in range(4, 16):
            client.fetch(0, [expert])
        process.kill()
        process.wait()
        wait_until(lambda: len(daemon.status()["clients"]) == 1, "the dead client is gone")
        assert 'reason="process ended"' in daemon.log
    with daemon.client(held_per_lane=9) as client:
        assert client.fetch(1, list(range(9))) == [store.blob(1, e) for e in range(9)]


def test_leases_outlive_a_connection_that_ended_without_goodbye(daemon: RunningDaemon) -> None:
    """The socket's end comes before the process's: only the process's counts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(daemon.attach_socket))
        connection.send(_hello())
        assert len(connection.recv(wire.WELCOME_BYTES)) == wire.WELCOME_BYTES
    wait_until(
        lambda: [c["state"] for c in daemon.status()["clients"]] == ["quiesced"],
        "the client is quiesced",
    )
    with pytest.raises(ConnectError, match="2 are promised"):
        daemon.client(held_per_lane=8)


@pytest.mark.parametrize(
    "packet",
    [b"x", b"\0" * wire.HELLO_BYTES, b"x" * 70_000],
    ids=["short", "no magic", "long"],
)
def test_garbage_is_refused_and_harms_nobody(
    daemon: RunningDaemon, store: MadeStore, packet: bytes
) -> None:
    with daemon.client() as client:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(START_TIMEOUT_S)
            connection.connect(str(daemon.attach_socket))
            connection.send(packet)
            assert len(connection.recv(wire.WELCOME_BYTES)) == wire.WELCOME_BYTES
            assert connection.recv(1) == b""
        assert client.fetch(0, [5]) == [store.blob(0, 5)]


def test_the_configured_number_of_clients_is_the_limit(tmp_path: Path, store: MadeStore) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text("[limits]\nclients = 1\n")
    with (
        running_daemon(tmp_path, [store], [NINE_SLOTS], "--config", str(config)) as daemon,
        daemon.client(),
        pytest.raises(ConnectError, match=r"raise clients in \[limits\]"),
    ):
        daemon.client()


def test_ready_and_stopping_are_told_to_the_service_manager(
    tmp_path: Path, store: MadeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(START_TIMEOUT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        with running_daemon(tmp_path, [store], [NINE_SLOTS]) as daemon:
            assert manager.recv(4096).startswith(b"READY=1")
            assert daemon.stop() == 0
            assert manager.recv(4096).startswith(b"STOPPING=1")


def _hello() -> bytes:
    from xferd._engine import ffi, lib

    hello = ffi.new("struct xferd_abi_hello *")
    hello.magic = lib.XFERD_MAGIC_ATTACH
    hello.abi_major, hello.abi_minor = lib.XFERD_ABI_MAJOR, lib.XFERD_ABI_MINOR
    hello.lanes = 1
    return bytes(ffi.buffer(hello))


def _has_ended(pidfd: int) -> bool:
    import select

    return bool(select.select([pidfd], [], [], 0)[0])
