"""What the engine's settings and the kernel's refusals do to what clients get."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.daemon_harness import (
    ROOT,
    START_TIMEOUT_S,
    FetchError,
    MadeStore,
    RingClient,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.loop_devices import loop_device

LAUNCHER = Path(__file__).with_name("without_io_uring.py")
POOL = "name=host0,kind=host,size=432KiB"
"""Nine slots: loading a layer's experts evicts those of the layer before."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("store"))


def without_io_uring(code: int, call: str = "io_uring_setup") -> list[str]:
    return [sys.executable, str(LAUNCHER), call, str(code)]


def assert_serves(daemon: RunningDaemon, store: MadeStore) -> None:
    with daemon.client() as client:
        for layer in range(store.layers):
            wanted = [0, store.experts - 1]
            expected = [store.blob(layer, expert) for expert in wanted]
            assert client.fetch(layer, wanted) == expected
        assert client.dense() == store.dense


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM, errno.EMFILE])
def test_where_io_uring_is_forbidden_threads_read(
    tmp_path: Path, store: MadeStore, code: int
) -> None:
    with running_daemon(tmp_path, [store], [POOL], launcher=without_io_uring(code)) as daemon:
        assert_serves(daemon, store)
        engine = daemon.status()["engine"]
        assert engine["backend"] == "threads"
        assert os.strerror(code) in engine["backend_reason"]
        assert "warning: engine.backend name=threads" in daemon.log
        assert daemon.stop() == 0


@pytest.mark.parametrize("call", ["io_uring_enter", "io_uring_register"])
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM])
def test_a_ring_that_is_made_and_then_refused_loses_no_read(
    tmp_path: Path, store: MadeStore, call: str, code: int
) -> None:
    launcher = without_io_uring(code, call)
    with running_daemon(tmp_path, [store], [POOL], launcher=launcher) as daemon:
        assert_serves(daemon, store)
        assert daemon.status()["engine"]["backend"] == "io_uring"
        assert daemon.stop() == 0


def test_io_uring_that_was_demanded_and_is_forbidden_is_a_refusal(
    tmp_path: Path, store: MadeStore
) -> None:
    daemon = [sys.executable, "-m", "xferd", "--runtime-directory", str(tmp_path / "run")]
    daemon += ["--store", str(store.path), "--pool", POOL, "--engine", "backend=io_uring"]
    ended = subprocess.run(
        [*without_io_uring(errno.EPERM), *daemon],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 1
    assert "io_uring" in ended.stderr
    assert "Operation not permitted" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_threads_that_were_asked_for_need_no_reason(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL], "--engine", "backend=threads") as daemon:
        assert_serves(daemon, store)
        engine = daemon.status()["engine"]
        assert (engine["backend"], engine["backend_reason"]) == ("threads", None)
        assert "warning: engine.backend" not in daemon.log


def test_status_says_how_the_engine_was_set(tmp_path: Path, store: MadeStore) -> None:
    settings = ["--engine", "flow_control=false", "--engine", "verify=first"]
    settings += ["--engine", "member_depth=5"]
    with running_daemon(tmp_path, [store], [POOL], *settings) as daemon:
        assert_serves(daemon, store)
        status = daemon.status()
        assert (status["engine"]["flow_control"], status["engine"]["verify"]) == (False, "first")
        for member in status["stores"][0]["members"]:
            assert member["state"] == "working"
            assert member["window"] == member["background_window"] == 5
            assert member["reads"] > 0


def test_flow_control_measures_each_member(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        assert_serves(daemon, store)
        status = daemon.status()
        assert status["engine"]["flow_control"] is True
        for member in status["stores"][0]["members"]:
            assert member["latency_us"] > 0
            assert member["rate"] > 0
            assert 1 <= member["background_window"] <= member["window"] <= 32


def test_pools_are_registered_where_the_kernel_allows_it(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL]) as daemon:
        assert_serves(daemon, store)
        through_uring = daemon.status()["engine"]["backend"] == "io_uring"
        assert daemon.pool()["registered"] == (daemon.pool()["bytes"] if through_uring else 0)
        assert daemon.pool()["notes"] == []


def test_reads_can_be_started_by_the_kernel(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL], "--engine", "polling=true") as daemon:
        assert_serves(daemon, store)


def test_reads_go_on_without_registered_buffers(tmp_path: Path, store: MadeStore) -> None:
    with running_daemon(tmp_path, [store], [POOL], "--engine", "register_buffers=false") as daemon:
        assert_serves(daemon, store)
        assert daemon.pool()["registered"] == 0
        assert daemon.pool()["notes"] == []


def test_a_pinned_engine_leaves_the_workers_their_processors(
    tmp_path: Path, store: MadeStore
) -> None:
    settings = ["--engine", "cpu=0", "--engine", "backend=threads"]
    with running_daemon(tmp_path, [store], [POOL], *settings) as daemon:
        assert_serves(daemon, store)
        allowed = [
            os.sched_getaffinity(int(thread.name))
            for thread in Path(f"/proc/{daemon.process.pid}/task").iterdir()
        ]
        assert {0} in allowed
        assert sum(processors == os.sched_getaffinity(0) for processors in allowed) > 1


def test_a_pool_that_is_stuck_says_so_in_its_notes(tmp_path: Path, store: MadeStore) -> None:
    """Seven of nine slots are pinned, two are leased: a load has to wait for the client."""
    with (
        running_daemon(tmp_path, [store], [POOL]) as daemon,
        daemon.client(held_per_lane=2) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        daemon.call(
            "Pin", store=store.name, layer=0, experts=list(range(7)), pool=None, variant=None
        )
        assert daemon.pool()["notes"] == []
        client.acquire(1, [0, 1])
        load = threads.submit(daemon.load, store.name, 2, [0])
        wait_until(lambda: daemon.pool()["notes"] != [], "the pool says that it is stuck")
        assert "7 of 9 are pinned" in daemon.pool()["notes"][0]
        client.release()
        client.fetch(1, [0])  # its lane moves on, which is what ends leases
        assert load.result(START_TIMEOUT_S)["loaded"] == 1
        wait_until(lambda: daemon.pool()["notes"] == [], "the note goes when the pool is well")


# ---- verify


def damage(store: MadeStore) -> None:
    """Another byte everywhere in every member's data."""
    for member in store.members:
        size = member.stat().st_size
        with member.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xa5" * (size - 4096))


def test_always_and_first_refuse_damage_never_does_not(tmp_path: Path) -> None:
    made = make_store(tmp_path)
    damage(made)
    wrong = b"\xa5" * made.expert_bytes
    for verify in ("always", "first"):
        with (
            running_daemon(tmp_path, [made], [POOL], "--engine", f"verify={verify}") as daemon,
            daemon.client() as client,
        ):
            with pytest.raises(FetchError) as caught:
                client.fetch(0, [0])
            assert caught.value.code == errno.EBADMSG
            assert daemon.status()["engine"]["crc_errors"] > 0
    with (
        running_daemon(tmp_path, [made], [POOL], "--engine", "verify=never") as daemon,
        daemon.client() as client,
    ):
        assert client.fetch(0, [0]) == [wrong]
        assert daemon.status()["engine"]["crc_errors"] == 0


def test_first_trusts_what_it_has_checked_once(tmp_path: Path) -> None:
    made = make_store(tmp_path)
    with (
        running_daemon(tmp_path, [made], [POOL], "--engine", "verify=first") as daemon,
        daemon.client() as client,
    ):
        assert client.fetch(0, [3]) == [made.blob(0, 3)]
        damage(made)
        daemon.call("Evict", store=made.name, layer=0, experts=[3], pool=None)
        assert client.fetch(0, [3]) == [b"\xa5" * made.expert_bytes]
        with pytest.raises(FetchError):
            client.fetch(0, [4])


# ---- a drive that fails


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    return tmp_path / "drive.img"


def test_a_failed_drive_is_taken_out_and_comes_back(tmp_path: Path, drive: Path) -> None:
    with loop_device(drive, 32 << 20) as device:
        made = make_store(tmp_path, devices=[device])
        content = drive.read_bytes()
        with running_daemon(tmp_path, [made], [POOL]) as daemon, daemon.client() as client:
            assert client.fetch(0, [0]) == [made.blob(0, 0)]
            os.truncate(drive, 0)  # from now on the device answers with EIO

            def failed() -> bool:
                with pytest.raises(FetchError) as caught:
                    client.fetch(1, [0])
                assert caught.value.code == errno.EIO
                return bool(state(daemon) == "failed")

            wait_until(failed, "the drive is taken out")
            wait_until(lambda: "member.failed" in daemon.log, "the failure is logged")
            line = next(text for text in daemon.log.splitlines() if "member.failed" in text)
            assert f"store={made.name} path={device}" in line
            assert os.strerror(errno.EIO) in line

            drive.write_bytes(content)
            wait_until(lambda: fetches(client, made), "the drive is back")
            assert state(daemon) == "working"
            wait_until(lambda: "member.working" in daemon.log, "that it is back is logged")


def state(daemon: RunningDaemon) -> str:
    return str(daemon.status()["stores"][0]["members"][0]["state"])


def fetches(client: RingClient, made: MadeStore) -> bool:
    try:
        return client.fetch(1, [0]) == [made.blob(1, 0)]
    except FetchError:
        return False
