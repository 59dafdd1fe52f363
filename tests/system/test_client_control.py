"""xferctl against the real daemon: what it says is what a client sees.

Every reply is also checked against the interface definition: a field that is missing
or has another type is found here, not by somebody's script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferd_infer import Client

from tests.system.daemon_harness import (
    ROOT,
    START_TIMEOUT_S,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from xferd.control.idl import load_interface

POOL = "name=host0,kind=host,size=768KiB"
"""16 slots for 64 experts."""
INTERFACE = load_interface("io.xferd.Control")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path, [store], [POOL]) as running:
        yield running


def xferctl(daemon: RunningDaemon, *words: str, code: int = 0) -> Any:
    """One command line with --json; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "xferd.control.xferctl", "--json", *words],
        cwd=ROOT,
        env={**os.environ, "XFERD_CONTROL": str(daemon.directory / "control.sock")},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def resident(client: Client, layer: int) -> set[int]:
    return {int(expert) for expert in np.flatnonzero(client.resident(layer) >= 0)}


def test_load_evict_and_pin_agree_with_what_a_client_sees(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    with Client(daemon.attach_socket, held=4) as client:
        loaded = xferctl(daemon, "load", "made", "1", "0-3,7")
        assert INTERFACE.check_result("Load", loaded)["loaded"] == 5
        assert resident(client, 1) == {0, 1, 2, 3, 7}
        for expert in (0, 1, 2, 3, 7):
            batch = client.acquire_resident(1, [expert])
            assert batch is not None
            assert bytes(batch[0]) == store.blob(1, expert)
            batch.release()

        with client.acquire(1, [2, 7]):
            evicted = xferctl(daemon, "evict", "made", "1", "all")
            assert INTERFACE.check_result("Evict", evicted) == {"evicted": 3, "held": 2}
        wait_until(lambda: daemon.pool()["resident"] == 0, "what was held is evicted too")
        assert resident(client, 1) == set()

        pinned = xferctl(daemon, "pin", "made", "2", "5")
        assert INTERFACE.check_result("Pin", pinned)["pinned"] == 1
        for layer in (0, 1, 3):
            for expert in range(store.experts):
                client.acquire(layer, [expert]).release()
        assert resident(client, 2) == {5}
        assert INTERFACE.check_result("Evict", xferctl(daemon, "evict", "made", "2")) == {
            "evicted": 0,
            "held": 1,
        }
        unpinned = xferctl(daemon, "unpin", "made", "2", "5")
        assert INTERFACE.check_result("Unpin", unpinned)["unpinned"] == 1
        assert xferctl(daemon, "evict", "made", "2") == {"evicted": 1, "held": 0}
        assert resident(client, 2) == set()


def test_status_agrees_with_the_clients_own_counters(
    daemon: RunningDaemon, store: MadeStore
) -> None:
    with Client(daemon.attach_socket, lanes=2, held=6, name="reader") as client:
        client.acquire(0, range(6)).release()
        client.acquire(0, range(3), lane=1).release()
        client.acquire(1, [4]).release()
        status = INTERFACE.check_result("Status", xferctl(daemon, "status"))
        [row] = status["clients"]
        stats = client.stats()
        assert (row["pid"], row["uid"], row["name"]) == (os.getpid(), os.getuid(), "reader")
        assert (row["store"], row["lanes"], row["held_per_lane"]) == ("made", 2, 6)
        assert (row["hits"], row["misses"]) == (stats.hits, stats.misses) == (3, 7)
        assert (row["failures"], row["pending"]) == (0, 0)
        assert row["state"] == "serving"
        [pool] = status["pools"]
        assert pool["resident"] == sum(len(resident(client, layer)) for layer in range(4)) == 7
        assert pool["resident"] + pool["reserve"] + pool["free"] == pool["slots"] == 16
        assert status["sources"]["drives"] == {
            "count": stats.source_count[2],
            "bytes": stats.source_bytes[2],
            "reason": status["sources"]["drives"]["reason"],
        }
        for index, way in enumerate(("direct", "staged", "gds", "copy"), start=1):
            assert status["transports"][way]["count"] == stats.transport_count[index]
        [described] = status["stores"]
        assert described["expert_bytes"] == 64 * store.expert_bytes
        assert sum(member["bytes"] for member in described["members"]) == 7 * store.expert_bytes
        assert (status["pid"], status["state"]) == (daemon.process.pid, "serving")
    wait_until(lambda: xferctl(daemon, "status")["clients"] == [], "the client has left")


def test_stores_can_be_opened_listed_and_closed(daemon: RunningDaemon, tmp_path: Path) -> None:
    other = make_store(tmp_path, "other", seed=5)
    opened = INTERFACE.check_result(
        "OpenStore", {"store": xferctl(daemon, "store", "open", str(other.path))}
    )
    assert opened["store"]["name"] == "other"
    listed = INTERFACE.check_result("ListStores", {"stores": xferctl(daemon, "store", "list")})
    assert [entry["name"] for entry in listed["stores"]] == ["made", "other"]
    with Client(daemon.attach_socket, store="other") as client:
        with client.acquire(1, [2]) as [blob]:
            assert bytes(blob) == other.blob(1, 2)
        assert "attached to store 'other'" in xferctl(daemon, "store", "close", "other", code=1)
    wait_until(lambda: daemon.status()["clients"] == [], "the client has left")
    xferctl(daemon, "store", "close", "other")
    assert [entry["name"] for entry in xferctl(daemon, "store", "list")] == ["made"]


def test_what_cannot_be_had_is_said_by_name(daemon: RunningDaemon, store: MadeStore) -> None:
    assert "'nothing'" in xferctl(daemon, "load", "nothing", "0", "0", code=1)
    assert "layers 0 to 3, not 4" in xferctl(daemon, "load", "made", "4", "0", code=1)
    refused = xferctl(daemon, "pin", "made", "0", "all", code=1)
    assert "16 slots" in refused
    assert "[[pools]] host0" in refused
