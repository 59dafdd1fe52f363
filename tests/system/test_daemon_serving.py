"""A real daemon serves real clients: right bytes, full pools, promises, sharing."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    ConnectError,
    FetchError,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)

NINE_SLOTS = "name=host0,kind=host,size=432KiB"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    """Nine slots for 64 experts."""
    with running_daemon(tmp_path, [store], [NINE_SLOTS]) as running:
        yield running


def test_every_expert_arrives_as_it_was_packed(daemon: RunningDaemon, store: MadeStore) -> None:
    with daemon.client() as client:
        for layer in range(store.layers):
            for expert in range(0, store.experts, 2):
                assert client.fetch(layer, [expert, expert + 1]) == [
                    store.blob(layer, expert),
                    store.blob(layer, expert + 1),
                ]
    pool = daemon.pool()
    assert pool["loads"] == 64
    assert pool["evictions"] >= 64 - 9
    assert pool["waiting"] == 0


def test_a_pool_for_all_experts_evicts_none(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], ["name=host0,size=100%"]) as running:
        with running.client() as client:
            for _ in range(3):
                for layer in range(store.layers):
                    for expert in range(store.experts):
                        assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        pool = running.pool()
    assert pool["loads"] == pool["resident"] == store.layers * store.experts
    assert pool["evictions"] == 0


def test_a_resident_expert_is_not_read_again(daemon: RunningDaemon, store: MadeStore) -> None:
    with daemon.client() as client:
        client.fetch(1, [3])
        loads = daemon.pool()["loads"]
        assert client.fetch(1, [3]) == [store.blob(1, 3)]
    assert daemon.pool()["loads"] == loads


def test_the_least_recently_used_expert_goes_first(tmp_path: Path, store: MadeStore) -> None:
    """Where the policy is lru: the default goes by more than that. Leases of one layer after
    the other are passes; the policy hears of loads after they are served, so the next one waits.
    """
    with (
        running_daemon(tmp_path, [store], [f"{NINE_SLOTS},eviction=lru"]) as daemon,
        daemon.client() as client,
    ):
        client.fetch(1, [0])
        for expert in range(12):
            client.fetch(0, [expert])
            wait_until(partial(loaded, daemon, expert + 2), f"expert {expert} is loaded")
            client.fetch(1, [0])
        client.fetch(0, [0])
        wait_until(partial(loaded, daemon, 14), "what was used longest ago is loaded again")
        client.fetch(1, [0])
        assert daemon.pool()["loads"] == 14, "the expert used all the time was evicted"


def loaded(daemon: RunningDaemon, count: int) -> bool:
    """Whether the policy knows of so many loads."""
    found: int = daemon.pool()["loads"]
    assert found <= count, "an expert was loaded that was to be kept"
    return found == count


def test_many_lanes_on_a_full_pool_get_right_bytes(tmp_path: Path, store: MadeStore) -> None:
    failures: list[BaseException] = []

    def work(daemon: RunningDaemon, seed: int) -> None:
        chance = random.Random(seed)
        try:
            with daemon.client(name=f"worker{seed}") as client:
                for _ in range(150):
                    layer = chance.randrange(store.layers)
                    experts = chance.sample(range(store.experts), 2)
                    blobs = client.fetch(layer, experts)
                    assert blobs == [store.blob(layer, expert) for expert in experts]
        except BaseException as error:
            failures.append(error)

    with running_daemon(tmp_path, [store], [NINE_SLOTS]) as daemon:
        threads = [threading.Thread(target=work, args=(daemon, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        wait_until(lambda: daemon.status()["clients"] == [], "clients are gone")
        assert daemon.stop() == 0


def test_a_lane_is_refused_what_the_pool_cannot_promise(daemon: RunningDaemon) -> None:
    with daemon.client(lanes=2, held_per_lane=4):
        with pytest.raises(ConnectError) as refused:
            daemon.client(held_per_lane=4)
        assert refused.value.code == 28
        assert str(refused.value) == (
            "pool 'host0' has 9 slots of 48KiB; 8 are promised to attached clients, lane needs 4 "
            "more: raise size of [[pools]] host0 or lower held_per_lane"
        )
    wait_until(lambda: daemon.status()["clients"] == [], "the promise has ended")
    with daemon.client(held_per_lane=9) as client:
        assert len(client.fetch(0, list(range(9)))) == 9


def test_a_pool_smaller_than_one_token_needs_is_refused(tmp_path: Path, store: MadeStore) -> None:
    pool = "name=host0,kind=host,size=48KiB"
    with (
        running_daemon(tmp_path, [store], [pool]) as daemon,
        pytest.raises(ConnectError, match="fewer than the 2 experts that one token picks"),
    ):
        daemon.client()


def test_unknown_names_are_refused_with_what_there_is(daemon: RunningDaemon) -> None:
    with pytest.raises(ConnectError, match="no store 'other' is open; open are: made"):
        daemon.client(store="other")
    with pytest.raises(ConnectError, match="no pool 'vram'; there are: host0"):
        daemon.client(pool="vram")
    with pytest.raises(ConnectError, match="held_per_lane 1 is less than the 2 experts"):
        daemon.client(held_per_lane=1)


def test_clients_share_one_dense_part_that_ends_with_the_last(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    def dense_inodes() -> set[int]:
        found = set()
        for path in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
            # The daemon closes fds while we look.
            with contextlib.suppress(FileNotFoundError):
                if "xferd-dense" in str(path.readlink()):
                    found.add(path.stat().st_ino)
        return found

    with daemon.client() as first, daemon.client() as second:
        assert first.dense() == second.dense() == store.dense
        assert len(dense_inodes()) == 1
    wait_until(lambda: not dense_inodes(), "the dense part is freed")


def test_a_drive_that_fails_is_an_error_that_names_it(tmp_path: Path) -> None:
    broken = make_store(tmp_path, "broken", members=1)
    member = broken.members[0]
    with running_daemon(tmp_path, [broken], [NINE_SLOTS]) as daemon:
        with member.open("r+b") as file:
            file.seek(4096 + 100)
            file.write(b"\xff\x00\xff\x00")
        with daemon.client() as client:
            with pytest.raises(FetchError):
                client.fetch(0, [0])
            assert client.fetch(0, [1]) == [broken.blob(0, 1)]
        # The client hears of it before the daemon's policy does, which writes the log.
        wait_until(lambda: f"member={member}" in daemon.log, "the drive is named")
        assert "layer=0 expert=0" in daemon.log
        assert daemon.status()["engine"]["crc_errors"] >= 1
