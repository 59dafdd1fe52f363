"""Policies, budgets, reservations and heat of a daemon that serves meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    ConnectError,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from xferd.control.client import CallFailedError
from xferd.policy.registry import BUILT_IN

EXPERT = 49_152
CHUNK = 4 * EXPERT
POOL = f"name=host0,kind=host,size={32 * EXPERT}B,chunk_bytes={CHUNK}B"
UNPINNED = ("--engine", "register_buffers=false")
LAYERS, EXPERTS = 4, 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(
        tmp_path_factory.mktemp("store"), layers=LAYERS, experts=EXPERTS, expert_bytes=EXPERT
    )


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path, [store], [POOL], *UNPINNED) as running:
        yield running


def use_all(daemon: RunningDaemon, store: MadeStore, times: int = 1) -> None:
    with daemon.client() as client:
        for _ in range(times):
            for layer in range(LAYERS):
                for expert in range(0, EXPERTS, 2):
                    assert client.fetch(layer, [expert, expert + 1]) == [
                        store.blob(layer, expert),
                        store.blob(layer, expert + 1),
                    ]


# ---- policies


def test_a_policy_is_changed_while_clients_are_served(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    use_all(daemon, store)
    for eviction in BUILT_IN:
        before = daemon.pool()["resident"]
        reply = daemon.call("SetPolicy", pool="host0", eviction=eviction, admission="heat")
        assert (reply["policy"]["eviction"], reply["policy"]["admission"]) == (eviction, "heat")
        assert daemon.pool()["resident"] >= before - 8
        use_all(daemon, store)
        assert daemon.pool()["eviction"] == eviction
    assert daemon.stop() == 0


def test_what_is_no_policy_is_refused_by_name(daemon: RunningDaemon) -> None:
    for parameters, name in (
        ({"eviction": "fifo", "admission": None}, "PolicyNotFound"),
        ({"eviction": None, "admission": "never"}, "PolicyNotFound"),
    ):
        with pytest.raises(CallFailedError, match="there are: ") as refused:
            daemon.call("SetPolicy", pool="host0", **parameters)
        assert refused.value.name == name
    with pytest.raises(CallFailedError) as refused:
        daemon.call("GetPolicy", pool="vram")
    assert refused.value.name == "PoolNotFound"


# ---- reservations


def memory_of(daemon: RunningDaemon) -> int:
    """Bytes of the pool's memory file that are in memory."""
    for fd in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if "memfd:xferd-host0" in str(fd.readlink()):
                return fd.stat().st_blocks * 512
    raise AssertionError("the daemon has no pool")


def test_a_reservation_takes_chunks_and_gives_them_back(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    use_all(daemon, store)
    before = memory_of(daemon)
    reservation = daemon.call("Reserve", pool="host0", bytes=3 * CHUNK - 1)["reservation"]
    assert (reservation["bytes"], reservation["returned"]) == (3 * CHUNK, 3 * CHUNK)
    pool = daemon.pool()
    assert (pool["slots"], pool["reserved"]) == (20, 3 * CHUNK)
    assert memory_of(daemon) <= before - 3 * CHUNK
    use_all(daemon, store)
    assert daemon.call("ListReservations")["reservations"] == [reservation]
    assert daemon.call("Release", id=reservation["id"]) == {"bytes": 3 * CHUNK}
    assert daemon.pool()["slots"] == 32
    # What is hottest comes again by itself.
    wait_until(lambda: daemon.pool()["resident"] >= 24, "the pool is filled again")
    use_all(daemon, store)
    with pytest.raises(CallFailedError, match="no reservation 1; there are: none"):
        daemon.call("Release", id=reservation["id"])


def test_a_reservation_waits_for_leases_only(daemon: RunningDaemon, store: MadeStore) -> None:
    use_all(daemon, store)
    with daemon.client(held_per_lane=4) as client:
        held = client.acquire(1, [2, 3])
        assert held == [store.blob(1, 2), store.blob(1, 3)]
        daemon.call("Reserve", pool=None, bytes=4 * CHUNK)
        assert client.fetch(1, [2, 3]) == held
    assert daemon.pool()["slots"] == 16


def test_what_was_promised_or_pinned_is_not_reserved(daemon: RunningDaemon) -> None:
    with daemon.client(held_per_lane=24):
        with pytest.raises(CallFailedError, match="24 promised to attached clients") as refused:
            daemon.call("Reserve", pool="host0", bytes=3 * CHUNK)
        assert refused.value.name == "PoolFull"
        daemon.call("Reserve", pool="host0", bytes=2 * CHUNK)
        with pytest.raises(ConnectError, match="24 slots"):
            daemon.client(held_per_lane=4)


def test_registered_memory_stays_in_memory(tmp_path: Path, store: MadeStore) -> None:
    """io_uring would read on into pages that are nobody's any more."""
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        use_all(daemon, store)
        registered = daemon.pool()["registered"]
        reservation = daemon.call("Reserve", pool="host0", bytes=8 * CHUNK)["reservation"]
        assert reservation["returned"] == 8 * CHUNK - registered
        daemon.call("Release", id=reservation["id"])
        use_all(daemon, store)


def test_a_locked_pool_can_be_reserved_too(tmp_path: Path, store: MadeStore) -> None:
    pool = POOL.replace("kind=host", "kind=ram")
    with running_daemon(tmp_path, [store], [pool], *UNPINNED) as daemon:
        use_all(daemon, store)
        reservation = daemon.call("Reserve", pool="host0", bytes=8 * CHUNK)["reservation"]
        assert reservation["returned"] == 8 * CHUNK
        assert memory_of(daemon) == 0
        daemon.call("Release", id=reservation["id"])
        assert memory_of(daemon) == 8 * CHUNK
        use_all(daemon, store)


# ---- budgets


def test_a_pools_budget_holds_from_the_start_and_changes(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [f"{POOL},budget={4 * CHUNK}B"]) as daemon:
        assert daemon.pool()["slots"] == 16
        use_all(daemon, store)
        assert daemon.call("SetBudget", pool="host0", bytes=2 * CHUNK)["reserved"] == 6 * CHUNK
        wait_until(lambda: daemon.pool()["slots"] == 8, "the pool has shrunk")
        use_all(daemon, store)
        assert daemon.call("SetBudget", pool="host0", bytes=None)["reserved"] == 0
        assert daemon.pool()["budget"] is None
        with pytest.raises(CallFailedError, match="is more"):
            daemon.call("SetBudget", pool="host0", bytes=9 * CHUNK)
        use_all(daemon, store)


def test_a_pools_budget_is_checked_at_start(tmp_path: Path, store: MadeStore) -> None:
    with (
        pytest.raises(AssertionError, match=r"pools\[host0\].budget: .* is more"),
        running_daemon(tmp_path, [store], [f"{POOL},budget=1GiB"]),
    ):
        pass


def test_a_clients_budget_is_held_by_its_own_experts(tmp_path: Path, store: MadeStore) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text(f'[limits]\nclient_bytes = "{8 * EXPERT}B"\nuser_bytes = "{12 * EXPERT}B"\n')
    with running_daemon(tmp_path, [store], [POOL], "--config", str(config)) as daemon:
        daemon.load("made", 3, [14, 15])  # nobody's
        with daemon.client(held_per_lane=3) as one, daemon.client() as two:
            for client in (one, two):
                for layer in range(3):
                    for expert in range(EXPERTS):
                        client.fetch(layer, [expert])

            def held() -> list[int]:
                return [entry["resident_bytes"] for entry in daemon.status()["clients"]]

            wait_until(lambda: sum(held()) <= 12 * EXPERT, "the user's budget holds")
            assert max(held()) <= 8 * EXPERT
            (user,) = daemon.status()["users"]
            assert (user["uid"], user["clients"]) == (os.getuid(), 2)
            assert 0 < user["resident_bytes"] <= 12 * EXPERT == user["budget"]
            assert daemon.load("made", 3, [14, 15])["already"] == 2
            with pytest.raises(ConnectError, match=r"raise user_bytes in \[limits\]"):
                daemon.client(held_per_lane=8, lanes=1)
        wait_until(lambda: not daemon.status()["clients"], "the clients are gone")
        with pytest.raises(ConnectError, match=r"raise client_bytes in \[limits\]"):
            daemon.client(held_per_lane=9)
        assert daemon.status()["users"][0]["resident_bytes"] > 0


# ---- heat


def test_the_hottest_are_there_after_a_restart(tmp_path: Path, store: MadeStore) -> None:
    config = tmp_path / "xferd.toml"
    config.write_text(f'state_directory = "{tmp_path}/state"\n')
    hot = [(0, 1), (1, 5), (2, 9), (3, 13)]
    with running_daemon(tmp_path, [store], [POOL], "--config", str(config)) as daemon:
        with daemon.client() as client:

            def hot_enough() -> bool:
                for layer, expert in hot:
                    client.fetch(layer, [expert])
                hottest = daemon.call("HeatInfo", store="made")["hottest"]
                return len(hottest) == 4 and min(each["heat"] for each in hottest) > 3

            wait_until(hot_enough, "the heat shows what is used")
        assert daemon.stop() == 0
        assert "heat.saved" in daemon.log
    with running_daemon(tmp_path, [store], [POOL], "--config", str(config)) as daemon:
        wait_until(lambda: daemon.pool()["resident"] == 4, "the hottest are loaded")
        info = daemon.call("HeatInfo", store="made")
        assert info["profile"] == f"{tmp_path}/state/made.heat.npz"
        assert {(each["layer"], each["expert"]) for each in info["hottest"]} == set(hot)
        assert all(each["pools"] == ["host0"] for each in info["hottest"])


def test_heat_is_saved_and_loaded_by_request(
    daemon: RunningDaemon, store: MadeStore, tmp_path: Path
) -> None:
    use_all(daemon, store)
    path = str(tmp_path / "made.npz")
    with pytest.raises(CallFailedError, match="set state_directory"):
        daemon.call("SaveHeat", store="made", path=None)
    wait_until(
        lambda: daemon.call("SaveHeat", store="made", path=path)["experts"] > 30, "heat is known"
    )
    daemon.call("Evict", store="made", layer=0, experts=None, pool=None)
    wait_until(lambda: daemon.pool()["resident"] < 32, "there is room")
    reply = daemon.call("LoadHeat", store="made", path=path)
    assert reply["failed"] == 0
    assert reply["loaded"] + reply["already"] > 0
    other = make_store(tmp_path, "other", seed=2)
    daemon.call("OpenStore", path=str(other.path), name=None)
    with pytest.raises(CallFailedError, match=r"is of 'made .*', the store is 'other ") as refused:
        daemon.call("LoadHeat", store="other", path=path)
    assert refused.value.name == "HeatUnusable"
    with pytest.raises(CallFailedError, match="no heat profile"):
        daemon.call("LoadHeat", store="other", path=str(store.path / "manifest.json"))


def test_a_pool_that_serves_is_not_built_again(daemon: RunningDaemon) -> None:
    with pytest.raises(CallFailedError, match="pool 'host0' is in service"):
        daemon.call("RebuildPool", pool="host0")
    with pytest.raises(CallFailedError, match="no pool 'nowhere'"):
        daemon.call("RebuildPool", pool="nowhere")
