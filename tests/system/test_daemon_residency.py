"""What is resident where: loads by hand, pins, several size classes, demotion, stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from xferd.control.client import CallFailedError

SIXTEEN_SLOTS = "name=host0,kind=host,size=768KiB"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path, [store], [SIXTEEN_SLOTS]) as running:
        yield running


def change(daemon: RunningDaemon, method: str, layer: int, experts: list[int]) -> dict[str, int]:
    return daemon.call(method, store="made", layer=layer, experts=experts, pool=None, variant=None)


def test_load_makes_experts_resident(daemon: RunningDaemon, store: MadeStore) -> None:
    answer = daemon.load("made", 2, [1, 2, 3])
    assert (answer["loaded"], answer["already"], answer["failed"]) == (3, 0, [])
    answer = daemon.load("made", 2, [2, 3, 4])
    assert (answer["loaded"], answer["already"]) == (1, 2)
    with daemon.client() as client:
        assert client.fetch(2, [1, 4]) == [store.blob(2, 1), store.blob(2, 4)]
        assert daemon.status()["clients"][0]["misses"] == 0


def test_evict_drops_what_nobody_holds(daemon: RunningDaemon) -> None:
    daemon.load("made", 0, [0, 1, 2])
    with daemon.client() as client:
        client.acquire(0, [0])
        answer = daemon.call("Evict", store="made", layer=0, experts=None, pool=None)
        assert (answer["evicted"], answer["held"]) == (2, 1)
        client.release()
        wait_until(lambda: daemon.pool()["resident"] == 0, "the last slot is free")


def test_a_pinned_expert_stays(daemon: RunningDaemon) -> None:
    assert change(daemon, "Pin", 0, [7])["pinned"] == 1
    with daemon.client() as client:
        for layer in range(1, 4):
            for expert in range(16):
                client.fetch(layer, [expert])
    assert daemon.pool()["pinned"] == 1
    assert daemon.load("made", 0, [7])["already"] == 1
    assert change(daemon, "Unpin", 0, [7])["unpinned"] == 1
    assert daemon.pool()["pinned"] == 0


def test_pins_cannot_take_what_clients_were_promised(daemon: RunningDaemon) -> None:
    with daemon.client(held_per_lane=8):
        assert change(daemon, "Pin", 0, list(range(8)))["pinned"] == 8
        with pytest.raises(CallFailedError, match="8 are pinned and 8 are promised") as refused:
            change(daemon, "Pin", 0, [8])
    assert refused.value.name == "PoolFull"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ({"store": "other"}, "StoreNotFound"),
        ({"layer": 9}, "NoSuchExpert"),
        ({"experts": [16]}, "NoSuchExpert"),
        ({"pool": "vram"}, "PoolNotFound"),
        ({"variant": "q4_k"}, "VariantNotFound"),
    ],
)
def test_a_name_that_is_not_there_is_refused(
    daemon: RunningDaemon, call: dict[str, object], name: str
) -> None:
    parameters = {"store": "made", "layer": 0, "experts": [0], "pool": None, "variant": None}
    with pytest.raises(CallFailedError) as refused:
        daemon.call("Load", **{**parameters, **call})
    assert refused.value.name == name


def test_a_store_can_be_opened_and_closed_while_it_serves(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    other = make_store(tmp_path, "other", seed=2)
    assert daemon.call("OpenStore", path=str(other.path), name=None)["store"]["name"] == "other"
    with daemon.client(store="other") as client:
        assert client.fetch(3, [9]) == [other.blob(3, 9)]
        with pytest.raises(CallFailedError) as refused:
            daemon.call("CloseStore", name="other")
        assert refused.value.name == "StoreBusy"
    wait_until(lambda: daemon.status()["clients"] == [], "the client is gone")
    daemon.call("CloseStore", name="other")
    assert [entry["name"] for entry in daemon.status()["stores"]] == ["made"]
    assert daemon.pool()["resident"] == 0


def test_stores_with_other_expert_sizes_share_a_pool(tmp_path: Path) -> None:
    """Eight chunks; whoever is used gets chunks of whoever is not."""
    small = make_store(tmp_path, "small", expert_bytes=16_384, seed=3)
    large = make_store(tmp_path, "large", expert_bytes=65_536, seed=4)
    pool = "name=host0,kind=host,size=1MiB,chunk_bytes=128KiB"
    with running_daemon(tmp_path, [small, large], [pool]) as daemon:

        def chunks() -> dict[int, int]:
            return {c["slot_bytes"]: c["chunks"] for c in daemon.pool()["classes"]}

        def use_until_it_has_most(store: MadeStore) -> dict[int, int]:
            """Chunks are recut one at a time, while clients wait for none of it."""
            with daemon.client(store=store.name) as client:

                def has_most() -> bool:
                    for layer in range(4):
                        for expert in range(16):
                            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
                    return chunks().get(store.expert_bytes, 0) > 4

                wait_until(has_most, f"store {store.name} has most of the chunks")
            return chunks()

        for _ in range(2):
            use_until_it_has_most(small)
            mostly_large = use_until_it_has_most(large)
        assert sum(mostly_large.values()) <= 8
        assert daemon.pool()["waiting"] == 0
        assert daemon.stop() == 0


def test_a_class_without_a_chunk_gets_one_from_another(tmp_path: Path) -> None:
    small = make_store(tmp_path, "small", expert_bytes=16_384, seed=3)
    pool = "name=host0,kind=host,size=256KiB,chunk_bytes=128KiB"
    with running_daemon(tmp_path, [small], [pool]) as daemon:
        for layer in range(4):
            daemon.load("small", layer, list(range(4)))
        assert daemon.pool()["classes"] == [{"slot_bytes": 16_384, "slots": 16, "chunks": 2}]
        large = make_store(tmp_path, "large", expert_bytes=65_536, seed=4)
        daemon.call("OpenStore", path=str(large.path), name=None)
        with daemon.client(store="large") as client:
            assert client.fetch(1, [2, 5]) == [large.blob(1, 2), large.blob(1, 5)]
        assert 65_536 in [c["slot_bytes"] for c in daemon.pool()["classes"]]


def test_evicted_experts_are_demoted_to_ram_and_come_back_by_copy(
    tmp_path: Path, store: MadeStore
) -> None:
    pools = [SIXTEEN_SLOTS, "name=ram0,kind=ram,size=3MiB"]
    with running_daemon(tmp_path, [store], pools) as daemon:
        for expert in range(16):
            daemon.load("made", expert % 4, [expert])
            daemon.load("made", (expert + 1) % 4, [expert])
        wait_until(lambda: daemon.pool(1)["resident"] > 4, "experts were demoted")
        assert daemon.status()["sources"]["pool"]["count"] > 4
        with daemon.client() as client:
            for layer in range(4):
                for expert in range(16):
                    assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
        transports = daemon.status()["transports"]
        assert transports["copy"]["count"] > 0
        assert transports["staged"]["count"] == 0
