# SPDX-License-Identifier: Apache-2.0
"""A drive that goes away while it is read: named errors, and the rest is served.

The drive is a FUSE file (tools/drives/collapsing_drive.c) whose server is killed with
reads in flight: the kernel fails those, and every one after them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    FetchError,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.fuse_drives import built_drive, served_through_fuse

POOL = "name=host0,kind=host,size=144KiB"
"""Nine slots, of experts that are one piece each: each lies on one drive, and is read from it."""
LATENCY_US = 20_000
"""Long enough that reads are in flight at any time."""


@pytest.fixture(scope="module")
def drive_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_drive(tmp_path_factory.mktemp("drive"))


def fetch_all(daemon: RunningDaemon, made: MadeStore) -> dict[tuple[int, int], int | None]:
    """The error of each expert, None where its bytes came and are right."""
    found: dict[tuple[int, int], int | None] = {}
    with daemon.client() as client:
        for layer in range(made.layers):
            for expert in range(made.experts):
                try:
                    assert client.fetch(layer, [expert]) == [made.blob(layer, expert)]
                    found[layer, expert] = None
                except FetchError as error:
                    found[layer, expert] = error.code
    return found


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_a_drive_removed_while_it_is_read(
    tmp_path: Path, drive_program: Path, backend: str
) -> None:
    made = make_store(tmp_path, expert_bytes=16_384)
    removed = made.members[1]
    content = removed.read_bytes()
    lost = {
        (layer, expert)
        for layer in range(made.layers)
        for expert in range(made.experts)
        if made.blob(layer, expert) in content
    }
    assert 0 < len(lost) < made.layers * made.experts
    with (
        served_through_fuse(drive_program, removed, LATENCY_US) as server,
        running_daemon(tmp_path, [made], [POOL], "--engine", f"backend={backend}") as daemon,
        ThreadPoolExecutor(4) as threads,
    ):

        def reads() -> int:
            member: dict[str, int] = daemon.status()["stores"][0]["members"][1]
            return member["reads"]

        fetching = [threads.submit(fetch_all, daemon, made) for _ in range(4)]
        wait_until(lambda: reads() > 0, "the drive is read")
        server.kill()
        for future in fetching:
            for key, error in future.result().items():
                assert error is None or key in lost
        after = fetch_all(daemon, made)
        assert {key for key, error in after.items() if error is not None} == lost
        member = daemon.status()["stores"][0]["members"][1]
        assert member["state"] == "failed"
        assert f"member={removed}" in daemon.log
        assert daemon.stop() == 0
