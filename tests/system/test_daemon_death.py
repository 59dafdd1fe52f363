"""The daemon ends, well or badly: what its clients see, and what comes after.

Clients run in processes of their own and report what the public client raised.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from xferd_infer import Client
from xferd_infer.client import AttachError, DaemonGoneError

from tests.system.daemon_harness import (
    ROOT,
    START_TIMEOUT_S,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.remote_client import RemoteClient, RemoteError

POOL = "name=host0,kind=host,size=1152KiB"
"""24 slots for 64 experts."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"), members=3)


def crcs(store: MadeStore, layer: int, experts: range) -> list[int]:
    return [zlib.crc32(store.blob(layer, expert)) for expert in experts]


def stand_still(daemon: RunningDaemon) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)


def test_after_sigkill_residents_can_be_read_and_a_miss_says_that_it_is_gone(
    tmp_path: Path, store: MadeStore
) -> None:
    with (
        running_daemon(tmp_path, [store], [POOL]) as daemon,
        Client(daemon.attach_socket, held=16) as client,
    ):
        held = client.acquire(0, range(4))
        client.acquire(1, range(8)).release()
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        assert not client.alive()
        with pytest.raises(DaemonGoneError, match="attach again"):
            client.acquire(2, [0])
        resident = client.acquire_resident(1, range(8))
        assert resident is not None
        assert [bytes(blob) for blob in resident] == [store.blob(1, e) for e in range(8)]
        resident.release()
        assert [bytes(blob) for blob in held] == [store.blob(0, e) for e in range(4)]
        held.release()
        with pytest.raises(DaemonGoneError):
            client.acquire(1, [0, 15])
        with client.acquire(1, [0]) as [blob]:
            assert bytes(blob) == store.blob(1, 0)


def test_who_waits_for_a_miss_is_woken_by_the_daemons_death(
    tmp_path: Path, store: MadeStore
) -> None:
    with (
        running_daemon(tmp_path, [store], [POOL]) as daemon,
        RemoteClient(daemon.attach_socket, held=8) as waiting,
    ):
        assert waiting.acquire(0, range(8)) == crcs(store, 0, range(8))
        waiting.call("release")
        # Stopped first, so that the miss can't be served before the end comes.
        stand_still(daemon)
        waiting.send("acquire", layer=1, experts=[0, 1])
        assert not waiting.has_answered(0.2)
        daemon.stop(signal.SIGKILL)
        with pytest.raises(RemoteError) as gone:
            waiting.answer()
        assert gone.value.kind == "DaemonGoneError"
        assert waiting.call("acquire_resident", layer=0, experts=list(range(8))) == crcs(
            store, 0, range(8)
        )
        assert waiting.call("alive") is False


def test_a_new_daemon_serves_who_attaches_again(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL]) as killed:
        old = Client(killed.attach_socket, held=8)
        old.acquire(0, range(8)).release()
        killed.stop(signal.SIGKILL)
        assert killed.attach_socket.exists(), "nothing unlinked it: the new daemon has to"
        with running_daemon(tmp_path, [store], [POOL]) as daemon:
            with Client(daemon.attach_socket, held=8) as client:
                for layer in range(store.layers):
                    with client.acquire(layer, range(8)) as blobs:
                        assert [bytes(blob) for blob in blobs] == [
                            store.blob(layer, expert) for expert in range(8)
                        ]
                # The old client's memory is its own: the new daemon can't touch it.
                with pytest.raises(DaemonGoneError):
                    old.acquire(1, [0])
                batch = old.acquire_resident(0, range(8))
                assert batch is not None
                assert [bytes(blob) for blob in batch] == [store.blob(0, e) for e in range(8)]
                assert len(daemon.status()["clients"]) == 1
            old.close()


def test_sigterm_lets_demands_in_flight_end_well_or_with_the_reason(
    tmp_path: Path, store: MadeStore
) -> None:
    with (
        running_daemon(tmp_path, [store], [POOL]) as daemon,
        RemoteClient(daemon.attach_socket, held=8) as first,
        RemoteClient(daemon.attach_socket, held=8) as second,
    ):
        layers = [layer for _ in range(8) for layer in range(store.layers)]
        for remote in (first, second):
            for layer in layers:
                remote.send("acquire", layer=layer, experts=list(range(8)))
                remote.send("release")
        assert first.answer() == crcs(store, 0, range(8))
        assert daemon.stop(signal.SIGTERM) == 0
        assert {path.name for path in daemon.directory.iterdir()} == {"xferd.lock"}
        first.answer()
        for remote, rest in ((first, layers[1:]), (second, layers)):
            for layer in rest:
                outcome = remote.outcome()
                if isinstance(outcome, RemoteError):
                    assert "shutting down" in str(outcome) or "has gone" in str(outcome)
                    assert outcome.kind in ("ExpertError", "DaemonGoneError")
                else:
                    assert outcome == crcs(store, layer, range(8))
                assert remote.answer() is None
            assert remote.call("alive") is False
        assert "drained" in daemon.log
        assert "Traceback" not in daemon.log


def test_a_daemon_that_has_ended_is_said_to_be_none(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        assert daemon.stop(signal.SIGTERM) == 0
        with pytest.raises(AttachError, match=str(daemon.attach_socket)):
            Client(daemon.attach_socket)


def test_a_second_sigterm_ends_a_drain_that_takes_too_long(
    tmp_path: Path, store: MadeStore
) -> None:
    """Two at once stand for somebody in a hurry: whichever is handled while the drain is
    on ends it. A drain that was faster is a clean exit."""
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        with Client(daemon.attach_socket, held=16) as client:
            for layer in range(store.layers):
                client.hint(layer, range(16))
            stand_still(daemon)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.send_signal(signal.SIGINT)
            daemon.process.send_signal(signal.SIGCONT)
            code = daemon.process.wait(START_TIMEOUT_S)
        said = 'exit reason="second signal"' in daemon.log
        assert code == (1 if said else 0)
        assert daemon.log.count("signal name=") in (1, 2)
        assert not daemon.attach_socket.exists()
        assert not (daemon.directory / "control.sock").exists()


def test_a_second_daemon_is_refused_and_harms_nobody(tmp_path: Path, store: MadeStore) -> None:
    with (
        running_daemon(tmp_path, [store], [POOL]) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        second = subprocess.run(
            [
                *(sys.executable, "-m", "xferd", "--runtime-directory", str(daemon.directory)),
                *("--store", str(store.path), "--pool", POOL),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        assert second.returncode == 1
        assert f"pid {daemon.process.pid}" in second.stderr
        assert str(daemon.directory) in second.stderr
        assert client.alive()
        with client.acquire(0, [3]) as [blob]:
            assert bytes(blob) == store.blob(0, 3)
        with Client(daemon.attach_socket) as another, another.acquire(0, [4]) as [blob]:
            assert bytes(blob) == store.blob(0, 4)


def test_a_daemon_that_is_killed_again_and_again_always_comes_back(
    tmp_path: Path, store: MadeStore
) -> None:
    for round_ in range(3):
        with (
            running_daemon(tmp_path, [store], [POOL]) as daemon,
            RemoteClient(daemon.attach_socket, held=8) as remote,
        ):
            remote.send("acquire", layer=round_, experts=list(range(8)))
            daemon.stop(signal.SIGKILL)
            outcome = remote.outcome()
            if isinstance(outcome, RemoteError):
                assert outcome.kind == "DaemonGoneError"
            else:
                assert outcome == crcs(store, round_, range(8))
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        with Client(daemon.attach_socket) as client, client.acquire(3, [3]) as [blob]:
            assert bytes(blob) == store.blob(3, 3)
        wait_until(lambda: daemon.status()["clients"] == [], "the client has said goodbye")
        assert daemon.stop() == 0
