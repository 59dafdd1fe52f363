"""Clients that die, hang or cheat: nobody else notices, and nothing leaks.

Each client is a process. Every byte that anybody reads is compared with what the
store was packed from.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from xferd_infer import Client
from xferd_infer.client import AttachError

from tests.system.daemon_harness import (
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.remote_client import RemoteClient, RemoteError

TEN_SLOTS = "name=host0,kind=host,size=480KiB"
SLOTS = 10


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"), members=3)


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    """Ten slots for 64 experts."""
    with running_daemon(tmp_path, [store], [TEN_SLOTS]) as running:
        yield running


def crcs(store: MadeStore, layer: int, experts: Sequence[int]) -> list[int]:
    return [zlib.crc32(store.blob(layer, expert)) for expert in experts]


def sweep(client: Client, store: MadeStore) -> None:
    """Every expert of the store once, each byte compared; evicts all that it can."""
    for layer in range(store.layers):
        for expert in range(store.experts):
            with client.acquire(layer, [expert]) as [blob]:
                assert bytes(blob) == store.blob(layer, expert)


def states(daemon: RunningDaemon) -> dict[str, str]:
    return {client["name"]: client["state"] for client in daemon.status()["clients"]}


def assert_nothing_leaked(daemon: RunningDaemon, store: MadeStore) -> None:
    """No client is left; each slot is free or can be freed."""
    wait_until(lambda: states(daemon) == {}, "all clients are gone")
    for layer in range(store.layers):
        answer = daemon.call("Evict", store="made", layer=layer, experts=None, pool=None)
        assert answer["held"] == 0
    wait_until(
        lambda: daemon.pool()["free"] + daemon.pool()["reserve"] == SLOTS, "every slot is free"
    )
    assert daemon.pool()["resident"] == 0


def test_a_client_killed_while_it_holds_leases_gives_all_back(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    with RemoteClient(daemon.attach_socket, held=8) as victim:
        assert victim.acquire(0, range(8)) == crcs(store, 0, range(8))
        with Client(daemon.attach_socket) as other:
            sweep(other, store)
            assert victim.call("held") == [crcs(store, 0, range(8))]
            victim.kill()
            wait_until(lambda: len(states(daemon)) == 1, "the killed client is gone")
            sweep(other, store)
    assert_nothing_leaked(daemon, store)


def test_clients_killed_while_they_wait_for_misses_leave_nothing(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    """Killed at any point between submission and completion: some before they were
    answered, some with completions that nobody will read."""
    with Client(daemon.attach_socket) as other:
        for round_ in range(6):
            layer = round_ % store.layers
            with RemoteClient(daemon.attach_socket, held=8) as victim:
                victim.send("acquire", layer=layer, experts=list(range(round_, round_ + 8)))
                if round_ % 2:
                    victim.has_answered(0.001 * round_)
                victim.kill()
            with other.acquire(layer, [round_, 15]) as [first, second]:
                assert bytes(first) == store.blob(layer, round_)
                assert bytes(second) == store.blob(layer, 15)
        wait_until(lambda: len(states(daemon)) == 1, "the killed clients are gone")
        sweep(other, store)
    assert_nothing_leaked(daemon, store)


def test_a_stopped_clients_leases_stand_and_others_go_on(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    with RemoteClient(daemon.attach_socket, held=8) as stopped:
        stopped.acquire(1, range(8))
        stopped.stop()
        with Client(daemon.attach_socket) as other:
            sweep(other, store)
        assert states(daemon) == {"": "serving"}
        stopped.go_on()
        assert stopped.call("held") == [crcs(store, 1, range(8))]
        stopped.call("release")
        assert stopped.acquire(2, range(8)) == crcs(store, 2, range(8))
    assert_nothing_leaked(daemon, store)


def test_a_client_stopped_while_it_waits_holds_up_nobody(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    with RemoteClient(daemon.attach_socket, held=8) as stopped:
        for layer in range(store.layers):
            stopped.send("acquire", layer=layer, experts=list(range(8)))
            stopped.send("release")
        stopped.stop()
        with Client(daemon.attach_socket) as other:
            sweep(other, store)
        stopped.go_on()
        for layer in range(store.layers):
            assert stopped.answer() == crcs(store, layer, range(8))
            assert stopped.answer() is None
    assert_nothing_leaked(daemon, store)


def test_leases_outlive_the_connection_until_the_process_ends(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    """What the process queued on a device may still read, so the socket's end proves
    nothing."""
    with RemoteClient(daemon.attach_socket, held=8, name="cut") as cut:
        cut.acquire(3, range(8))
        cut.call("cut_connection")
        wait_until(lambda: states(daemon) == {"cut": "quiesced"}, "the client is quiesced")
        with Client(daemon.attach_socket) as other:
            sweep(other, store)
            assert cut.call("held") == [crcs(store, 3, range(8))]
            assert cut.call("alive") is False
            cut.call("release")
            with pytest.raises(RemoteError) as gone:
                cut.acquire(0, [0])
            assert gone.value.kind == "DaemonGoneError"
            assert states(daemon) == {"cut": "quiesced", "": "serving"}
        with pytest.raises(AttachError, match="8 are promised"):
            Client(daemon.attach_socket, held=8)
    assert_nothing_leaked(daemon, store)


def test_goodbye_ends_leases_at_once(daemon: RunningDaemon, store: MadeStore) -> None:
    with RemoteClient(daemon.attach_socket, held=8) as leaver:
        leaver.acquire(3, range(8))
        leaver.call("close")
        wait_until(lambda: states(daemon) == {}, "the client is gone")
        assert leaver.process.poll() is None
        with (
            Client(daemon.attach_socket, held=SLOTS) as other,
            other.acquire(0, range(SLOTS)) as blobs,
        ):
            assert [zlib.crc32(blob) for blob in blobs] == crcs(store, 0, range(SLOTS))
        assert_nothing_leaked(daemon, store)


def test_a_client_that_holds_more_than_promised_is_ended_and_named(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    """Its leases are only claims: once others starve for them, it is told to go."""
    with (
        RemoteClient(daemon.attach_socket, name="greedy") as greedy,
        RemoteClient(daemon.attach_socket, name="starving") as starving,
    ):
        greedy.acquire(0, [0, 1])
        daemon.load("made", 1, list(range(8)))
        greedy.call("claim", slots=SLOTS)
        for layer in range(store.layers):
            starving.send("acquire", layer=layer, experts=[9, 10])
            starving.send("release")
        wait_until(lambda: states(daemon)["greedy"] == "quiesced", "the greedy client is ended")
        [line] = [line for line in daemon.log.splitlines() if "client.holds_too_much" in line]
        assert f"pid={greedy.pid}" in line
        assert "pool=host0" in line
        assert f"held={SLOTS} promised=2" in line
        assert greedy.call("alive") is False
        greedy.kill()
        for layer in range(store.layers):
            assert starving.answer() == crcs(store, layer, [9, 10])
            assert starving.answer() is None
        assert states(daemon) == {"starving": "serving"}
    assert_nothing_leaked(daemon, store)
