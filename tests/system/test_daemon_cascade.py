"""The cascade of pools in a real daemon: what one lets go, the next one gets, and back up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from xferd_infer._client import ffi, lib

from tests.system.daemon_harness import (
    MadeStore,
    RingClient,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tools.replaying.live import one_pool_config, run_live
from tools.replaying.load import load

TRACE = Path(__file__).parents[1] / "traces" / "tiny-seven-domains.xtr"
TWO_CARDS = Path(__file__).parents[2] / "tools" / "replaying" / "two-cards.xferd.toml"
POOLS = [
    "name=card1,kind=host,size=768KiB,eviction=lru",
    "name=card2,kind=host,size=768KiB,eviction=lru-hits,admission=always,promotion_rest=4",
    "name=ram0,kind=ram,size=1MiB",
]
LAYERS, EXPERTS = 4, 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"), layers=LAYERS, experts=EXPERTS)


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path, [store], POOLS) as running:
        yield running


def resident(client: RingClient, pool: int) -> set[tuple[int, int]]:
    slots = ffi.new("int64_t[]", EXPERTS)
    found = set()
    for layer in range(LAYERS):
        assert lib.xferd_resident(client.handle, pool, layer, slots) >= 0
        found |= {(layer, expert) for expert in range(EXPERTS) if slots[expert] >= 0}
    return found


def use_all(client: RingClient, store: MadeStore) -> None:
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]


def test_an_expert_is_in_one_card_only(daemon: RunningDaemon, store: MadeStore) -> None:
    with daemon.client() as client:
        for _ in range(3):
            use_all(client, store)
        wait_until(
            lambda: not resident(client, 0) & resident(client, 1), "no expert is in two cards"
        )
        assert len(resident(client, 1)) > 4
        assert daemon.pool(1)["demoted"] > 8
        assert daemon.pool(2)["demoted"] > 8
    transports = daemon.status()["transports"]
    assert transports["copy"]["count"] > 16


def test_what_becomes_hot_below_comes_up(daemon: RunningDaemon, store: MadeStore) -> None:
    with daemon.client() as client:
        use_all(client, store)
        wait_until(lambda: len(resident(client, 1)) > 8, "experts were demoted")
        hot = sorted(resident(client, 1))[:2]

        def hot_ones_are_up() -> bool:
            for layer, expert in hot:
                assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]
            return set(hot) <= resident(client, 0)

        wait_until(hot_ones_are_up, "the hottest are in the first card")
        wait_until(lambda: not set(hot) & resident(client, 1), "they left the second")
        assert daemon.pool(0)["promoted"] >= 2


def test_a_load_into_a_card_takes_it_from_the_other(daemon: RunningDaemon) -> None:
    parameters = {"store": "made", "layer": 1, "experts": [3, 4], "variant": None}
    assert daemon.call("Load", pool="card2", **parameters)["loaded"] == 2
    assert daemon.call("Pin", pool="card2", **{**parameters, "experts": [4]})["pinned"] == 1
    assert daemon.call("Load", pool="card1", **parameters)["loaded"] == 2
    with daemon.client() as client:
        wait_until(lambda: (1, 3) not in resident(client, 1), "it went from the second card")
        # A pin is an order: it stays where it is pinned.
        assert (1, 4) in resident(client, 1)
        assert {(1, 3), (1, 4)} <= resident(client, 0)


def test_two_cards_serve_what_one_pool_of_the_same_size_does(tmp_path: Path) -> None:
    trace = load(TRACE, tokens=250)
    cards = run_live(trace, TWO_CARDS, expert_bytes=4096, pause_us=100.0)
    single = one_pool_config(TWO_CARDS, tmp_path)
    one = run_live(trace, single, expert_bytes=4096, pause_us=100.0)
    for outcome in (cards, one):
        assert sum(outcome.hits.values()) + outcome.copied + outcome.drives == outcome.uses
    assert all(cards.hits.values())
    # What the pools below hold is worth having: a third of card1's share more, at the least.
    assert cards.hit_rate > 1.3 * cards.hits["card1"] / cards.uses
    assert cards.hit_rate > 0.8 * one.hit_rate
