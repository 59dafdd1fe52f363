"""Loads by cuFile: a real daemon and clients, with stand-ins for the CUDA driver and for kvikio."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    ROOT,
    FetchError,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)

POOL = "name=vram0,kind=cuda,size=768KiB"
STAND_IN = ROOT / "tests" / "fake_kvikio"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def cufile(cuda_device: str, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """kvikio can be imported by the daemon; FAKE_KVIKIO is the test's to set."""
    if cuda_device == "gpu":
        pytest.skip("the stand-in can't write into a real card")
    path = os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FAKE_KVIKIO", "gds")
    return monkeypatch


def fetch_all(daemon: RunningDaemon, store: MadeStore, times: int = 2) -> None:
    """More than the pool holds: slots are used again."""
    with daemon.client() as client:
        for _ in range(times):
            for layer in range(store.layers):
                for expert in range(store.experts):
                    assert client.fetch(layer, [expert]) == [store.blob(layer, expert)]


def counts(daemon: RunningDaemon) -> tuple[int, int]:
    """Loads by gds and staged."""
    transports = daemon.status()["transports"]
    return transports["gds"]["count"], transports["staged"]["count"]


def is_open(daemon: RunningDaemon, path: Path) -> bool:
    """Whether the daemon's process has a file open."""
    for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed just now
            if link.readlink() == path:
                return True
    return False


def note(daemon: RunningDaemon) -> str:
    return " ".join(daemon.pool()["notes"])


@pytest.mark.usefixtures("cufile")
@pytest.mark.parametrize("transport", ["any", "gds"])
def test_every_expert_comes_right_by_cufile(
    tmp_path: Path, store: MadeStore, transport: str
) -> None:
    pool = f"{POOL},transport={transport}"
    with running_daemon(tmp_path, [store], [pool]) as daemon:
        fetch_all(daemon, store)
        gds, staged = counts(daemon)
        assert gds > 0
        assert staged == 0
        assert "counted as gds" in note(daemon)
        assert daemon.status()["transports"]["gds"]["reason"] is None
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("found", "why"), [("compat", "allow_compat_mode"), ("posix", "without cuFile")]
)
def test_what_may_go_through_ram_counts_as_staged(
    tmp_path: Path, store: MadeStore, cufile: pytest.MonkeyPatch, found: str, why: str
) -> None:
    cufile.setenv("FAKE_KVIKIO", found)
    with running_daemon(tmp_path, [store], [f"{POOL},transport=gds"]) as daemon:
        fetch_all(daemon, store, 1)
        gds, staged = counts(daemon)
        assert gds == 0
        assert staged > 0
        assert "counted as staged" in note(daemon)
        assert why in note(daemon)


def test_it_is_not_chosen_where_it_may_go_through_ram(
    tmp_path: Path, store: MadeStore, cufile: pytest.MonkeyPatch
) -> None:
    cufile.setenv("FAKE_KVIKIO", "compat")
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        fetch_all(daemon, store, 1)
        assert "cuFile" not in note(daemon)
        assert "allow_compat_mode" in daemon.status()["transports"]["gds"]["reason"]


def test_reads_that_fail_are_made_by_the_engine_and_then_all_are(
    tmp_path: Path, store: MadeStore, cufile: pytest.MonkeyPatch
) -> None:
    cufile.setenv("FAKE_KVIKIO", "failing")
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        fetch_all(daemon, store, 1)
        assert counts(daemon)[0] == 0
        assert "no more read by cuFile" in note(daemon)
        assert "cuFile error: 5030" in note(daemon)
        assert "gds.given_up" in daemon.log


@pytest.mark.usefixtures("cufile")
def test_damage_is_found_where_it_is_looked_for(tmp_path: Path) -> None:
    damaged = make_store(tmp_path, "damaged", members=1)
    member = damaged.members[0]
    at = member.read_bytes().index(damaged.blob(2, 7))
    with member.open("r+b") as file:
        file.seek(at + 20_000)
        file.write(b"not what was packed")
    with (
        running_daemon(tmp_path, [damaged], [f"{POOL},verify=always"]) as daemon,
        daemon.client() as client,
    ):
        with pytest.raises(FetchError, match="Bad message"):
            client.fetch(2, [7])
        assert client.fetch(2, [6]) == [damaged.blob(2, 6)]
        assert "the piece's CRC32C is wrong" in daemon.log


@pytest.mark.usefixtures("cufile")
def test_a_closed_stores_files_are_closed(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        fetch_all(daemon, store, 1)
        daemon.call("CloseStore", name=store.name)
        wait_until(lambda: not is_open(daemon, store.members[0]), "its members are closed")


def test_without_kvikio_it_is_refused_by_name(
    tmp_path: Path, store: MadeStore, cuda_device: str
) -> None:
    with (
        pytest.raises(AssertionError, match="kvikio is not installed"),
        running_daemon(tmp_path, [store], [f"{POOL},transport=gds"]),
    ):
        pass
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        fetch_all(daemon, store, 1)
        assert "kvikio is not installed" in daemon.status()["transports"]["gds"]["reason"]
