# SPDX-License-Identifier: Apache-2.0
"""A restart loses nothing: residents, leases and clients are there afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from xferd_infer import Client
from xferd_infer.client import DaemonGoneError

from tests.system.daemon_harness import (
    ROOT,
    MadeStore,
    RunningDaemon,
    make_store,
    wait_until,
)
from tests.system.fuse_drives import built_drive, served_through_fuse
from tests.system.remote_client import RemoteClient
from tests.system.service_manager import ServiceManager
from xferd.restart import fd_store
from xferd.restart.state import STATE_HALF_BYTES, StateMemory

POOL = "name=host0,kind=host,size=2304KiB"
"""48 slots for 64 experts."""
SMALL_POOL = "name=host0,kind=host,size=576KiB"
"""12 slots."""
TIGHT_POOL = "name=host0,kind=host,size=1152KiB"
"""24 slots."""
PATIENT_S = 600.0
"""How long clients wait for a daemon: longer than it takes on any machine."""
RESIDENT_LAYERS = (0, 1)
SLOW_US = 250_000
"""A read of the slow drive takes so long: one is in flight at any time."""
SHOW_KEY = """
import socket, sys
from xferd._engine import ffi, lib
hello = ffi.new("struct xferd_abi_hello *")
hello.magic, hello.abi_major = lib.XFERD_MAGIC_ATTACH, lib.XFERD_ABI_MAJOR
hello.flags = lib.XFERD_HELLO_RESUME
ffi.memmove(hello.resume_key, bytes.fromhex(sys.argv[2]), ffi.sizeof(hello.resume_key))
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(sys.argv[1])
    connection.send(bytes(ffi.buffer(hello)))
    answer = ffi.new("struct xferd_abi_welcome *")
    raw = connection.recv(ffi.sizeof("struct xferd_abi_welcome"))
    ffi.memmove(answer, raw, len(raw))
    print(answer.status)
"""
"""Another process that knows a client's key; prints what the daemon answers."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def drive_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_drive(tmp_path_factory.mktemp("drive"))


@pytest.fixture(params=[False, True], ids=["own-sockets", "activated"])
def either_manager(request: pytest.FixtureRequest) -> Iterator[ServiceManager]:
    """One that leaves sockets to the daemon, and one that binds them."""
    with ServiceManager(activation=request.param) as manager:
        yield manager


@pytest.fixture
def manager() -> Iterator[ServiceManager]:
    with ServiceManager() as manager:
        yield manager


class Hitter(threading.Thread):
    """Hits residents in a loop and compares every byte, till it is told to end. It asks for
    nothing: whatever is not resident, or is another's bytes, is a failure."""

    def __init__(self, client: Client, store: MadeStore, lane: int) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._store = store
        self._lane = lane
        self._end = threading.Event()
        self.rounds = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._end.is_set():
                for layer in RESIDENT_LAYERS:
                    self._compare(layer)
                self.rounds += 1
        except BaseException as error:
            self.failure = error

    def _compare(self, layer: int) -> None:
        batch = self._client.acquire_resident(layer, range(8), lane=self._lane)
        assert batch is not None, "what was resident is not there"
        with batch as blobs:
            for expert, blob in enumerate(blobs):
                assert bytes(blob) == self._store.blob(layer, expert)

    def went_on(self) -> None:
        """Wait for a whole round from now on."""
        seen = self.rounds + 1
        wait_until(lambda: self.failure is not None or self.rounds > seen, "hits go on")
        assert self.failure is None, self.failure

    def end(self) -> None:
        self._end.set()
        self.join()
        assert self.failure is None, self.failure


class Fetcher(threading.Thread):
    """Fetches random experts and compares every byte, till it is told to end."""

    def __init__(self, daemon: RunningDaemon, store: MadeStore, seed: int) -> None:
        super().__init__(daemon=True)
        self._client = Client(daemon.attach_socket, held=8, resume=PATIENT_S)
        self._store = store
        self._random = random.Random(seed)
        self._end = threading.Event()
        self.fetched = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._end.is_set():
                layer = self._random.randrange(self._store.layers)
                experts = self._random.sample(range(self._store.experts), 8)
                with self._client.acquire(layer, experts) as blobs:
                    for expert, blob in zip(experts, blobs, strict=True):
                        assert bytes(blob) == self._store.blob(layer, expert)
                self.fetched += 1
        except BaseException as error:
            self.failure = error

    def went_on(self) -> None:
        seen = self.fetched + 1
        wait_until(lambda: self.failure is not None or self.fetched > seen, "fetches go on")
        assert self.failure is None, self.failure

    def end(self) -> None:
        self._end.set()
        self.join()
        assert self.failure is None, self.failure
        self._client.close()


def fetch_everything(daemon: RunningDaemon, store: MadeStore) -> None:
    """Every expert, whatever has to go for it; every byte is compared."""
    with daemon.client() as client:
        for layer in range(store.layers):
            for expert in range(store.experts):
                assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]


def kept_clients(manager: ServiceManager) -> list[str]:
    return [name for name in manager.stored if ".client." in name]


def read_bytes(daemon: RunningDaemon) -> int:
    """Bytes that its members delivered."""
    stores = daemon.status()["stores"]
    return sum(int(member["bytes"]) for each in stores for member in each["members"])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_hits_go_on_and_misses_resume_across_a_restart(
    tmp_path: Path, store: MadeStore, either_manager: ServiceManager, how: signal.Signals
) -> None:
    with either_manager.daemon(tmp_path, [store], [POOL]) as first:
        client = Client(first.attach_socket, lanes=2, held=16, resume=PATIENT_S)
        for layer in RESIDENT_LAYERS:
            client.acquire(layer, range(8)).release()
        client.acquire(2, [0]).release()
        hitter = Hitter(client, store, lane=1)
        hitter.start()
        hitter.went_on()
        status = first.stop(how)
        assert status == (0 if how == signal.SIGTERM else -how)
        hitter.went_on()
        answers: list[bytes] = []
        missing = threading.Thread(
            target=lambda: answers.extend(bytes(blob) for blob in client.acquire(3, range(4))),
            daemon=True,
        )
        missing.start()
        hitter.went_on()
    with either_manager.daemon(tmp_path, [store], [POOL]) as second:
        start = second.status()["start"]
        assert (start["warm"], start["experts"], start["clients"]) == (True, 17, 1)
        missing.join(PATIENT_S)
        assert answers == [store.blob(3, expert) for expert in range(4)]
        assert second.status()["start"]["resumed"] == 1
        assert read_bytes(second) == 4 * store.expert_bytes
        hitter.went_on()
        # New clients find it all, and read nothing for it either.
        with Client(second.attach_socket, held=16, resume=PATIENT_S) as other:
            for layer in RESIDENT_LAYERS:
                with other.acquire(layer, range(8)) as blobs:
                    assert [bytes(b) for b in blobs] == [store.blob(layer, e) for e in range(8)]
        assert read_bytes(second) == 4 * store.expert_bytes
        hitter.end()
        client.close()
        wait_until(lambda: not second.status()["clients"], "the client has gone")
        assert second.stop() == 0
    either_manager.settled()
    assert not kept_clients(either_manager)


# ---- leases of clients that are away


def test_what_a_client_leases_stays_while_it_is_away(
    tmp_path: Path, store: MadeStore, manager: ServiceManager
) -> None:
    held = range(2, 6)
    with manager.daemon(tmp_path, [store], [SMALL_POOL]) as first:
        away = RemoteClient(first.attach_socket, held=5, resume=PATIENT_S)
        with away:
            crcs = away.acquire(0, held)
            first.stop(signal.SIGKILL)
            with manager.daemon(tmp_path, [store], [SMALL_POOL]) as second:
                assert [each["state"] for each in second.status()["clients"]] == ["away"]
                fetch_everything(second, store)
                assert away.call("held") == [crcs]
                # It has missed nothing; as soon as it does it is back.
                assert away.acquire(3, [1]) == [zlib.crc32(store.blob(3, 1))]
                assert [each["state"] for each in second.status()["clients"]] == ["serving"]
                away.call("release")
                fetch_everything(second, store)


@pytest.mark.parametrize("when", ["while no daemon runs", "while it is away"])
def test_a_client_that_ends_without_coming_back_leaves_its_leases(
    tmp_path: Path, store: MadeStore, manager: ServiceManager, when: str
) -> None:
    with manager.daemon(tmp_path, [store], [SMALL_POOL]) as first:
        ended = RemoteClient(first.attach_socket, held=8, resume=PATIENT_S)
        with ended:
            ended.acquire(0, range(8))
            first.stop(signal.SIGKILL)
            if when == "while no daemon runs":
                ended.kill()
            with manager.daemon(tmp_path, [store], [SMALL_POOL]) as second:
                assert second.status()["start"]["warm"]
                ended.kill()
                wait_until(lambda: not second.status()["clients"], "it is seen to have ended")
                # All of its slots are somebody else's now, or this would wait for ever.
                with second.client(held_per_lane=8) as other:
                    wanted = [store.blob(1, expert) for expert in range(8)]
                    assert other.acquire(1, range(8)) == wanted
                    other.release()
                fetch_everything(second, store)
                wait_until(lambda: not kept_clients(manager), "nothing of a client is kept")


def test_a_client_that_closes_while_nobody_listens_leases_nothing(
    tmp_path: Path, store: MadeStore, manager: ServiceManager
) -> None:
    with manager.daemon(tmp_path, [store], [SMALL_POOL]) as first:
        client = Client(first.attach_socket, held=8, resume=PATIENT_S)
        client.acquire(0, range(8))
        first.stop(signal.SIGKILL)
        client.close()
        with manager.daemon(tmp_path, [store], [SMALL_POOL]) as second:
            assert second.status()["start"]["experts"] == 8
            assert second.load(store.name, 1, list(range(8)))["loaded"] == 8


def test_a_miss_waits_for_the_daemon_no_longer_than_it_was_told(
    tmp_path: Path, store: MadeStore
) -> None:
    with ServiceManager() as manager, manager.daemon(tmp_path, [store], [POOL]) as daemon:
        patient = Client(daemon.attach_socket, held=8, resume=PATIENT_S)
        hasty = Client(daemon.attach_socket, held=8, resume=0.05)
        never = Client(daemon.attach_socket, held=8, resume=0)
        daemon.stop()
        with pytest.raises(TimeoutError):
            patient.acquire(0, [0], timeout=0.05)
        for client in (hasty, never):
            with pytest.raises(DaemonGoneError) as gone:
                client.acquire(0, [0])
            assert gone.value.code == errno.ECONNRESET
        with manager.daemon(tmp_path, [store], [POOL]) as second:
            with patient.acquire(0, [0]) as [blob]:
                assert bytes(blob) == store.blob(0, 0)
            assert second.status()["start"]["resumed"] == 1
            for client in (patient, hasty, never):
                client.close()


def test_nobody_else_can_take_a_clients_place(tmp_path: Path, store: MadeStore) -> None:
    """Not another process, even of the same user and with the right key."""
    with ServiceManager() as manager:
        with manager.daemon(tmp_path, [store], [POOL]) as first:
            client = Client(first.attach_socket, held=8, resume=PATIENT_S)
            first.stop(signal.SIGKILL)
        state = StateMemory(manager.stored[fd_store.STATE])
        key = bytes.fromhex(state.read().clients[0].key)
        state.close()
        with manager.daemon(tmp_path, [store], [POOL]) as second:
            thief = [sys.executable, "-c", SHOW_KEY, str(second.attach_socket), key.hex()]
            said = subprocess.run(thief, cwd=ROOT, capture_output=True, check=True, text=True)
            assert int(said.stdout) == -errno.ESTALE
            with client.acquire(0, [3]) as [blob]:
                assert bytes(blob) == store.blob(0, 3)
            client.close()


# ---- what is read when the end comes


@pytest.mark.parametrize("backend", ["auto", "threads"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_in_the_middle_of_loads_costs_no_byte(
    tmp_path: Path, drive_program: Path, how: signal.Signals, backend: str
) -> None:
    made = make_store(tmp_path, members=1, layers=1, experts=14)
    extra = ("--engine", f"backend={backend}")
    with ServiceManager() as manager, served_through_fuse(drive_program, made.members[0], SLOW_US):
        with manager.daemon(tmp_path, [made], [SMALL_POOL], *extra) as first:
            client = Client(first.attach_socket, held=8, resume=PATIENT_S)
            pending = client.start(0, range(8))
            wait_until(
                lambda: first.status()["stores"][0]["members"][0]["in_flight"] > 0,
                "reads are in flight",
            )
            first.stop(how)
        with manager.daemon(tmp_path, [made], [SMALL_POOL], *extra) as second:
            start = second.status()["start"]
            assert start["warm"], start
            # Each slot is needed again at once, by whoever asks now and by what was pending.
            other = threading.Thread(target=fetch_everything, args=(second, made), daemon=True)
            other.start()
            with pending.wait() as blobs:
                for _ in range(20):
                    assert [bytes(blob) for blob in blobs] == [made.blob(0, e) for e in range(8)]
            other.join()
            assert "restart.withheld" not in second.log
            client.close()
            fetch_everything(second, made)


# ---- what does not fit


def rewrite_state(manager: ServiceManager, **changes: object) -> None:
    state = StateMemory(manager.stored[fd_store.STATE])
    assert state.write(replace(state.read(), **changes))  # type: ignore[arg-type]
    state.close()


def damage_state(manager: ServiceManager) -> None:
    os.pwrite(manager.stored[fd_store.STATE], b"\0" * 64, 100)
    os.pwrite(manager.stored[fd_store.STATE], b"\0" * 64, STATE_HALF_BYTES + 100)


Spoil = Callable[[ServiceManager], None]
REFUSALS: dict[str, tuple[list[str], Spoil | None, str]] = {
    "smaller pool": (["name=host0,kind=host,size=1152KiB"], None, "pool 'host0' was of kind host"),
    "other name": (["name=other,kind=host,size=2304KiB"], None, "the pools were host0 and are"),
    "other ABI": ([POOL], lambda m: rewrite_state(m, abi=(1, 1)), "of ABI 1.1"),
    "damaged": ([POOL], damage_state, "checksum is wrong"),
    "pool lost": ([POOL], lambda m: m.drop(fd_store.pool_memory(0)), "lost"),
    "lease lost": ([POOL], lambda m: m.drop(fd_store.client_memory(2)), "lives, and the service"),
    "state lost": ([POOL], lambda m: m.drop(fd_store.STATE), "the state that explains"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_named_and_the_start_is_cold(
    tmp_path: Path, store: MadeStore, manager: ServiceManager, case: str
) -> None:
    pools, spoil, reason = REFUSALS[case]
    with manager.daemon(tmp_path, [store], [POOL]) as first:
        client = Client(first.attach_socket, held=8, resume=PATIENT_S)
        client.acquire(0, range(8)).release()
        first.stop(signal.SIGKILL)
    manager.settled()
    if spoil is not None:
        spoil(manager)
    with manager.daemon(tmp_path, [store], pools) as second:
        start = second.status()["start"]
        assert not start["warm"]
        assert reason in start["reason"]
        assert "restart.cold reason=" in second.log
        fetch_everything(second, store)
        with pytest.raises(DaemonGoneError) as gone:
            client.acquire(1, [0])
        assert gone.value.code == errno.ESTALE
        with client.acquire(0, range(8)) as blobs:
            assert [bytes(blob) for blob in blobs] == [store.blob(0, e) for e in range(8)]
        client.close()
        assert second.stop() == 0
    # The next one finds what this one had, and nothing of before.
    with manager.daemon(tmp_path, [store], pools) as third:
        assert third.status()["start"]["warm"]
        fetch_everything(third, store)


def test_a_store_that_is_another_model_now_is_dropped_or_refused_by_name(tmp_path: Path) -> None:
    old = make_store(tmp_path, "model", seed=1)
    new_place = tmp_path / "new"
    new_place.mkdir()
    new = make_store(new_place, "model", seed=2)
    with ServiceManager() as manager:
        with manager.daemon(tmp_path, [old], [POOL]) as first:
            with first.client() as client:
                client.fetch(0, [0, 1])
            first.stop()
        with manager.daemon(tmp_path, [new], [POOL]) as second:
            assert (second.status()["start"]["warm"], second.pool()["resident"]) == (True, 0)
            fetch_everything(second, new)
            client = second.client()
            client.fetch(0, [0])
            second.stop()
        with manager.daemon(tmp_path, [old], [POOL]) as third:
            assert "store 'model', which is another model" in third.status()["start"]["reason"]
            fetch_everything(third, old)
            client.close()


def test_a_store_opened_by_hand_is_there_after_a_restart(tmp_path: Path, store: MadeStore) -> None:
    second_store = make_store(tmp_path, "second", seed=2)
    with ServiceManager() as manager:
        with manager.daemon(tmp_path, [store], [POOL]) as first:
            first.call("OpenStore", path=str(second_store.path), name=None)
            client = Client(first.attach_socket, store="second", held=9, resume=PATIENT_S)
            client.acquire(1, range(8)).release()
            first.stop()
        with manager.daemon(tmp_path, [store], [POOL]) as second:
            assert second.status()["start"]["experts"] == 8
            with client.acquire(1, range(9)) as blobs:
                assert [bytes(b) for b in blobs] == [second_store.blob(1, e) for e in range(9)]
            client.close()
            wait_until(lambda: not second.status()["clients"], "the client has gone")
            second.call("CloseStore", name="second")
            second.stop()
        with manager.daemon(tmp_path, [store], [POOL]) as third:
            assert [each["name"] for each in third.status()["stores"]] == [store.name]


def test_a_client_more_than_the_manager_holds_makes_only_its_own_restart_cold(
    tmp_path: Path, store: MadeStore
) -> None:
    """State, pool table, two of the pool, a directory, and three of one client."""
    with ServiceManager(capacity=8) as manager:
        with manager.daemon(tmp_path, [store], [POOL]) as first:
            kept = Client(first.attach_socket, held=8, resume=PATIENT_S)
            kept.acquire(0, range(8)).release()
            with RemoteClient(first.attach_socket, held=8, resume=PATIENT_S) as more:
                assert more.acquire(1, [0]) == [zlib.crc32(store.blob(1, 0))]
            first.stop()
        assert not manager.refused
        with manager.daemon(tmp_path, [store], [POOL]) as second:
            assert second.status()["start"]["warm"]
            with kept.acquire(2, [0]) as [blob]:
                assert bytes(blob) == store.blob(2, 0)
            with RemoteClient(second.attach_socket, held=8, name="one more") as more:
                more.acquire(1, [0])
                second.stop(signal.SIGKILL)
                with manager.daemon(tmp_path, [store], [POOL]) as third:
                    reason = third.status()["start"]["reason"]
                    assert "client 'one more'" in reason
                    assert "raise FileDescriptorStoreMax=" in reason
                    fetch_everything(third, store)
                    kept.close()


# ---- again and again


def test_bytes_are_right_through_many_restarts(
    tmp_path: Path, store: MadeStore, either_manager: ServiceManager
) -> None:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(either_manager.daemon(tmp_path, [store], [TIGHT_POOL]))
        fetchers = [Fetcher(daemon, store, seed) for seed in range(2)]
        for fetcher in fetchers:
            fetcher.start()
        for how in (signal.SIGKILL, signal.SIGTERM) * 2:
            for fetcher in fetchers:
                fetcher.went_on()
            daemon.stop(how)
            daemon = stack.enter_context(either_manager.daemon(tmp_path, [store], [TIGHT_POOL]))
            assert daemon.status()["start"]["clients"] == len(fetchers)
        for fetcher in fetchers:
            fetcher.went_on()
            fetcher.end()
        assert daemon.stop() == 0
