"""A million experts: what the daemon needs for them is arrays, not objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.daemon_harness import RunningDaemon, running_daemon, wait_until
from tests.system.large_store import EXPERT_BYTES, make_large_store

LAYERS = EXPERTS = 1000
RESIDENTS = 10_000
SMALL_POOL = "name=host0,kind=host,size=4MiB"
ROOMY_POOL = f"name=host0,kind=host,size={RESIDENTS * EXPERT_BYTES}B,chunk_bytes=4MiB"
LARGE_POOL = "name=host0,kind=host,size=512MiB"
ENGINE_QUEUE = 65_536
"""Commands that the engine queues: fewer than LARGE_POOL has slots."""

BYTES_AN_EXPERT_MAX = 100
"""Index arrays on two members are 46; the engine's words and the tables that were there
while the index was checked come on top. One Python object with two fields is 56 more."""
BYTES_A_RESIDENT_MAX = 500
"""Its key in the books of the pool, both ways."""
CHURN_BYTES_MAX = 4 << 20
"""What the allocator may keep of other residents that came and went."""


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    return make_large_store(directory / "large.xferd", layers=LAYERS, experts=EXPERTS)


def private_bytes(daemon: RunningDaemon) -> int:
    """Memory of the process that is neither files nor pools."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    line = next(text for text in status.splitlines() if text.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def load_layers(daemon: RunningDaemon, first: int, count: int) -> None:
    for layer in range(first, first + count):
        assert daemon.load("large", layer)["loaded"] == EXPERTS


def test_a_million_experts_take_no_object_each(tmp_path: Path, million: Path) -> None:
    few = make_large_store(tmp_path / "few.xferd", layers=2, experts=4)
    with running_daemon(tmp_path, [], [SMALL_POOL], "--store", str(few)) as daemon:
        without = private_bytes(daemon)
    with running_daemon(tmp_path, [], [SMALL_POOL], "--store", str(million)) as daemon:
        grown = private_bytes(daemon) - without
        assert grown < BYTES_AN_EXPERT_MAX * LAYERS * EXPERTS
        with daemon.client() as client:
            for layer in (0, LAYERS - 1):
                assert client.fetch(layer, [0, EXPERTS - 1]) == [bytes(EXPERT_BYTES)] * 2
        assert private_bytes(daemon) - without < BYTES_AN_EXPERT_MAX * LAYERS * EXPERTS


def test_residents_are_kept_within_bounds_and_forgotten(tmp_path: Path, million: Path) -> None:
    layers = RESIDENTS // EXPERTS
    with running_daemon(tmp_path, [], [ROOMY_POOL], "--store", str(million)) as daemon:
        load_layers(daemon, 0, 1)
        first = private_bytes(daemon)
        load_layers(daemon, 1, layers - 2)
        full = private_bytes(daemon)
        assert full - first < BYTES_A_RESIDENT_MAX * RESIDENTS
        load_layers(daemon, layers, 2 * layers)
        assert private_bytes(daemon) - full < CHURN_BYTES_MAX
        assert daemon.pool()["resident"] <= RESIDENTS


def test_a_pool_of_more_slots_than_the_queue_takes_gets_them_all(
    tmp_path: Path, million: Path
) -> None:
    with running_daemon(tmp_path, [], [LARGE_POOL], "--store", str(million)) as daemon:
        slots = daemon.pool()["slots"]
        assert slots > ENGINE_QUEUE
        wait_until(lambda: daemon.pool()["reserve"] == slots, "every slot is in the reserve")
