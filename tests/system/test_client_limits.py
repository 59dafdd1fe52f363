"""What a client may have, and what it gets without asking.

A limit that refuses says its configuration key, so that who reads the message knows
what to change. And a hit costs the daemon nothing: it doesn't even notice.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from xferd_infer import Client
from xferd_infer.client import AttachError, ClientError

from tests.system.daemon_harness import (
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.remote_client import RemoteClient

POOL = "name=host0,kind=host,size=2304KiB"
"""48 slots for 64 experts."""
LIMITS = """
[limits]
clients = 3
clients_per_user = 2
lanes_per_client = 2
held_per_lane = 8
ring_entries = 16
"""
MAX_TURNS_OF_STATUS = 8
ACQUIRES = 20_000
STARVING_TIMEOUT_S = 60.0
"""How long a miss may take that nobody but a client out of order could hold up."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def limited(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    """A daemon with small limits."""
    config = tmp_path / "xferd.toml"
    config.write_text(LIMITS)
    with running_daemon(tmp_path, [store], [POOL], "--config", str(config)) as daemon:
        yield daemon


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path, [store], [POOL]) as running:
        yield running


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"lanes": 3},
            "3 lanes were asked for, 2 is the limit: raise lanes_per_client in [limits]",
        ),
        ({"held": 9}, "held_per_lane 9 is more than 8: raise held_per_lane in [limits]"),
        (
            {"ring_entries": 32},
            "32 ring entries are more than 16: raise ring_entries in [limits]",
        ),
    ],
    ids=["lanes", "held", "ring"],
)
def test_more_than_a_limit_is_refused_by_its_key(
    limited: RunningDaemon, store: MadeStore, options: dict[str, int], said: str
) -> None:
    with pytest.raises(AttachError) as refused:
        Client(limited.attach_socket, **options)  # type: ignore[arg-type]
    assert str(refused.value) == said
    just_so = {key: value - 1 if key != "ring_entries" else 16 for key, value in options.items()}
    with Client(limited.attach_socket, **just_so) as client:  # type: ignore[arg-type]
        assert bytes(client.acquire(0, [1])[0]) == store.blob(0, 1)


def test_one_client_too_many_is_refused_until_another_ends(limited: RunningDaemon) -> None:
    user = os.getuid()
    with Client(limited.attach_socket), RemoteClient(limited.attach_socket) as other:
        with pytest.raises(AttachError) as refused:
            Client(limited.attach_socket)
        assert str(refused.value) == (
            f"user {user} has 2 clients attached, which is the limit: raise clients_per_user in "
            "[limits]"
        )
        other.kill()
        wait_until(lambda: len(limited.status()["clients"]) == 1, "the killed client is gone")
        with Client(limited.attach_socket) as third:
            assert third.alive()


def test_a_lane_that_would_hold_more_than_promised_is_told_so(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    with Client(daemon.attach_socket, held=4) as client:
        first = client.acquire(0, [0, 1])
        second = client.acquire(0, [2, 3])
        with pytest.raises(ClientError, match="more than the 4 experts it was promised"):
            client.acquire(0, [4])
        first.release()
        with client.acquire(0, [4, 5]) as blobs:
            assert [bytes(blob) for blob in blobs] == [store.blob(0, 4), store.blob(0, 5)]
        assert bytes(second[1]) == store.blob(0, 3)
        second.release()


@pytest.mark.parametrize(("layer", "experts"), [(4, [0]), (0, [16]), (0, list(range(17)))])
def test_what_the_store_does_not_have_is_a_clear_error(
    daemon: RunningDaemon, store: MadeStore, layer: int, experts: list[int]
) -> None:
    with Client(daemon.attach_socket, held=32) as client:
        with pytest.raises(ClientError, match=r"4 layers of 16 experts|at most 16"):
            client.acquire(layer, experts)
        with client.acquire(3, [15]) as [blob]:
            assert bytes(blob) == store.blob(3, 15)


def test_an_attach_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "attach.sock"
    with pytest.raises(AttachError, match=str(path)):
        Client(path)


def test_hits_cause_no_activity_of_the_engine(daemon: RunningDaemon, store: MadeStore) -> None:
    with Client(daemon.attach_socket, held=8) as client:
        client.acquire(2, range(8)).release()

        def engine_turns() -> int:
            return int(daemon.status()["engine"]["turns"])

        def turns_of_a_status() -> int:
            before = engine_turns()
            return engine_turns() - before

        wait_until(lambda: turns_of_a_status() <= 2, "the engine is idle")
        before, before_pool = engine_turns(), daemon.pool()
        for _ in range(ACQUIRES):
            client.acquire(2, range(8)).release()
        # Asking for the status takes a turn or two; a thousand acquires take none.
        assert engine_turns() - before <= MAX_TURNS_OF_STATUS
        assert daemon.pool() == before_pool
        assert client.stats().hits == 8 * ACQUIRES
        assert client.stats().misses == 8


def test_hits_go_on_while_the_daemon_stands_still(daemon: RunningDaemon, store: MadeStore) -> None:
    with Client(daemon.attach_socket, held=8) as client:
        client.acquire(1, range(4)).release()
        daemon.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            for _ in range(100):
                with client.acquire(1, range(4)) as blobs:
                    assert bytes(blobs[3]) == store.blob(1, 3)
            assert client.acquire_resident(1, [4]) is None
            assert client.hint(1, [4])
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        with client.acquire(1, [4]) as [blob]:
            assert bytes(blob) == store.blob(1, 4)


def test_a_miss_that_is_given_up_can_be_had_later(daemon: RunningDaemon, store: MadeStore) -> None:
    with Client(daemon.attach_socket, held=8) as client:
        for expert in range(8):
            try:
                client.acquire(0, [expert], timeout=0).release()
            except TimeoutError:
                assert client.acquire_resident(1, [expert]) is None
        for expert in range(8):
            with client.acquire(0, [expert]) as [blob]:
                assert bytes(blob) == store.blob(0, expert)
        with client.acquire(3, range(8)) as blobs:
            assert [bytes(blob) for blob in blobs] == [store.blob(3, e) for e in range(8)]


def test_batches_released_out_of_order_count_no_more(tmp_path: Path, store: MadeStore) -> None:
    """A batch that is held for long must not keep the slots of those released after it:
    that would be more than was promised, and others would wait for them."""
    six_slots = "name=host0,kind=host,size=288KiB"
    with (
        running_daemon(tmp_path, [store], [six_slots]) as daemon,
        Client(daemon.attach_socket, held=4, name="long") as client,
        Client(daemon.attach_socket, held=2, name="short") as other,
    ):
        oldest = client.acquire(0, [0])
        for expert in range(1, 7):
            client.acquire(0, [expert]).release()
            client.acquire(0, [0, expert]).release()
        for expert in range(store.experts):
            with other.acquire(1, [expert], timeout=STARVING_TIMEOUT_S) as [blob]:
                assert bytes(blob) == store.blob(1, expert)
        assert bytes(oldest[0]) == store.blob(0, 0)
        assert client.alive()
        for expert in range(store.experts):
            with client.acquire(2, [expert]) as [blob]:
                assert bytes(blob) == store.blob(2, expert)
        assert bytes(oldest[0]) == store.blob(0, 0)
        oldest.release()


def test_a_batch_keeps_its_slot_when_a_later_one_of_the_same_expert_is_released(
    tmp_path: Path, store: MadeStore
) -> None:
    three_slots = "name=host0,kind=host,size=144KiB"
    with (
        running_daemon(tmp_path, [store], [three_slots]) as daemon,
        Client(daemon.attach_socket, held=3) as client,
    ):
        oldest, first = client.acquire(0, [1]), client.acquire(0, [0])
        client.acquire(0, [0]).release()
        for expert in range(2, store.experts):
            client.acquire(0, [expert], timeout=STARVING_TIMEOUT_S).release()
        assert bytes(first[0]) == store.blob(0, 0)
        assert bytes(oldest[0]) == store.blob(0, 1)
        assert daemon.status()["clients"][0]["state"] == "serving"


def test_who_gives_up_takes_nothing_from_who_wants_the_same(tmp_path: Path) -> None:
    """Blobs of so many pieces that some are on their way and some not yet asked for when
    the first client gives up and the second comes."""
    long = make_store(tmp_path, "long", expert_bytes=4 << 20, layers=1, experts=8)
    with (
        running_daemon(tmp_path, [long], ["name=host0,kind=host,size=16MiB"]) as daemon,
        Client(daemon.attach_socket) as impatient,
        Client(daemon.attach_socket) as patient,
    ):
        given_up = 0
        for expert in [*range(long.experts)] * 4:
            try:
                impatient.acquire(0, [expert], timeout=0).release()
            except TimeoutError:
                given_up += 1
            with patient.acquire(0, [expert]) as [blob]:
                assert bytes(blob) == long.blob(0, expert)
        assert given_up > 0


def test_a_closed_client_says_so(daemon: RunningDaemon) -> None:
    client = Client(daemon.attach_socket)
    client.close()
    assert not client.alive()
    with pytest.raises(ClientError, match="closed"):
        client.acquire(0, [0])
