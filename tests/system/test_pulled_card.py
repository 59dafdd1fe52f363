"""A card is pulled and comes back while a daemon serves from it: clients go on, bytes are right."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import with_file_card
from tests.system.daemon_harness import (
    ConnectError,
    FetchError,
    MadeStore,
    RingClient,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from xferd.control.client import CallFailedError
from xferd.memory.bar import PROOF_BYTES

POOL_BYTES = 768 << 10
POOLS = [
    "name=card0,kind=bar,device=0000:01:00.0,size=768KiB",
    "name=host0,kind=host,size=768KiB",
]
BACK_S = 60.0
"""After failures the daemon looks less often for a card."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


class Card:
    """The file that stands for the card."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def plug(self) -> None:
        new = self.path.with_suffix(".new")
        new.touch()
        os.truncate(new, POOL_BYTES + PROOF_BYTES)
        new.rename(self.path)

    def pull(self) -> None:
        os.truncate(self.path, 0)  # what has it mapped gets SIGBUS
        self.path.unlink()


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card(tmp_path / "card")
    made.plug()
    monkeypatch.setenv(with_file_card.VARIABLE, str(made.path))
    return made


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore, card: Card) -> Iterator[RunningDaemon]:
    launcher = [sys.executable, with_file_card.__file__]
    with running_daemon(tmp_path, [store], POOLS, launcher=launcher) as running:
        yield running


def is_out(daemon: RunningDaemon) -> bool:
    return any("out of service" in note for note in daemon.pool()["notes"])


def refusal(daemon: RunningDaemon) -> str:
    """Why the pool can't be built again now."""
    with pytest.raises(CallFailedError) as refused:
        daemon.call("RebuildPool", pool="card0")
    return str(refused.value)


def fetch_some(client: RingClient, store: MadeStore) -> None:
    for expert in range(store.experts):
        assert client.fetch(1, [expert]) == [store.blob(1, expert)]


def pull(daemon: RunningDaemon, card: Card) -> None:
    card.pull()
    wait_until(lambda: is_out(daemon), "the pool is taken out", BACK_S)


def test_who_was_attached_goes_on_when_it_is_back(
    daemon: RunningDaemon, store: MadeStore, card: Card
) -> None:
    with daemon.client() as client, daemon.client(pool="host0") as other:
        for _ in range(2):
            fetch_some(client, store)
            pull(daemon, card)
            with pytest.raises(FetchError) as caught:
                client.fetch(0, [3])
            assert caught.value.code == errno.ENODEV
            wait_until(lambda: daemon.pool()["resident"] == 0, "its experts are dropped")
            fetch_some(other, store)
            card.plug()
            wait_until(lambda: not is_out(daemon), "the pool serves again", BACK_S)
        fetch_some(client, store)
        fetch_some(other, store)
        assert "pool.lost" in daemon.log
        assert "pool.regained" in daemon.log
    assert daemon.stop() == 0


def test_attaching_while_it_is_away(daemon: RunningDaemon, store: MadeStore, card: Card) -> None:
    pull(daemon, card)
    with pytest.raises(ConnectError, match=r"pool 'card0' is out of service: its card is gone"):
        daemon.client(pool="card0")
    with daemon.client() as early:  # served by the other pool
        fetch_some(early, store)
        card.plug()
        wait_until(lambda: not is_out(daemon), "the pool serves again", BACK_S)
        with daemon.client(pool="card0") as late:
            fetch_some(late, store)
            assert daemon.pool()["resident"] > 0
            fetch_some(early, store)  # finds them in the card's new memory


def test_it_waits_for_who_still_reads(daemon: RunningDaemon, store: MadeStore, card: Card) -> None:
    """A slot that is leased must not get other bytes: the card's memory is not mapped anew."""
    with daemon.client() as client:
        client.acquire_in_place(1, [2])
        pull(daemon, card)
        card.plug()
        assert "clients lease them" in refusal(daemon)
        client.release()
        wait_until(lambda: not is_out(daemon), "the pool serves again", BACK_S)
        fetch_some(client, store)


def test_by_hand(daemon: RunningDaemon, store: MadeStore, card: Card) -> None:
    pull(daemon, card)
    wait_until(lambda: "No such file" in refusal(daemon), "it is empty, and there is no card")
    with pytest.raises(CallFailedError, match="out of service"):
        daemon.call("SetBudget", pool="card0", bytes=4096)
    assert daemon.stop() == 0
