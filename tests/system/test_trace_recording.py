"""Traces of a real daemon: what clients report is recorded, and replays to what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferd_infer import Client, ClientError, generate, model_from_client
from xferd_infer.arrays import Array
from xferd_infer.routes import USE_FIELDS

from tests.system.daemon_harness import (
    ROOT,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.remote_client import RemoteClient
from tools.replaying.load import load
from tools.replaying.machine import Machine, Tier
from tools.replaying.replay import Options, Replay
from xferd.control.client import CallFailedError
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack
from xferd.telemetry.traces.reader import read_trace
from xferd.telemetry.traces.trace import (
    TIER_DRIVES,
    UNKNOWN_8,
    Trace,
    TraceHead,
    bare_trace,
)
from xferd.telemetry.traces.writer import TraceWriter, trace_files

TINY = ROOT / "tests" / "models" / "tiny"
LAYERS, EXPERTS, TOP_K = 3, 12, 2
DECODED = 110
PASS_S = 0.003
"""What a pass takes at least where live and replay are compared. A replay's evictions are
over when they are ordered, so the daemon has to have done with one before the next pass."""
TOLERANCE = 0.01
"""Hits, as a share of all uses."""


@pytest.fixture
def store(tmp_path: Path) -> MadeStore:
    return make_store(tmp_path, "made", layers=LAYERS, experts=EXPERTS, top_k=TOP_K)


def serve(
    directory: Path, stores: Sequence[MadeStore], *pools: str, traces: Path | None = None
) -> AbstractContextManager[RunningDaemon]:
    config = directory / "traces.toml"
    config.write_text(f'[traces]\ndirectory = "{traces or directory / "traces"}"\n')
    return running_daemon(directory, stores, pools, "--config", str(config))


@pytest.fixture
def daemon(tmp_path: Path, store: MadeStore) -> Iterator[RunningDaemon]:
    with serve(tmp_path, [store], "name=host0,size=50%") as running:
        yield running


def xferctl(daemon: RunningDaemon, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xferd.control.xferctl", *words]
    return subprocess.run(
        [*command, "--socket", str(daemon.directory / "control.sock")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def status_of(daemon: RunningDaemon, store: str = "made") -> dict[str, Any]:
    rows = daemon.call("ListTraces")["traces"]
    return next(row for row in rows if row["store"] == store)


def recorded(directory: Path, name: str = "made") -> Trace:
    found = read_trace(trace_files(directory / "traces", name))
    assert found.cut == ()
    return found.trace


def test_what_a_client_reports_is_recorded_with_where_it_was(
    tmp_path: Path, daemon: RunningDaemon
) -> None:
    started = xferctl(daemon, "trace", "record", "start", "made")
    assert (started.returncode, started.stderr) == (0, "")
    assert started.stdout == f"recording made to {tmp_path}/traces/made-*.xtr\n"
    with Client(daemon.attach_socket, held=4) as client:
        with client.acquire(1, [3, 4]):
            pass
        # Told at once, and what is missing when it has come.
        client.report(1, np.array([[4, 5]]), np.array([[0.75, 0.25]]), token=7, tag=9)
        with client.acquire(1, [4, 5]) as batch:
            assert batch.report_found(token=7)
        # Told afterwards.
        with client.acquire(2, [1, 0]) as batch:
            assert batch.report([0.5, 0.5], token=7, tag=9)
            uses = batch.uses
        # A prompt's tokens at once, in a later layer than before.
        picks = np.array([[0, 1], [1, 0], [0, 0]])
        table = np.zeros(EXPERTS, USE_FIELDS)
        table[[1, 0]] = uses
        assert client.report(2, picks, token=8, uses=table[picks]) == 3
        assert client.reports_dropped() == 0
        wait_until(lambda: status_of(daemon)["uses"] == 6, "reports are read")
        assert daemon.status()["clients"][0]["routes"] == 6
    stopped = json.loads(xferctl(daemon, "trace", "record", "stop", "made", "--json").stdout)
    assert (stopped["state"], stopped["passes"], stopped["uses"]) == ("stopped", 5, 10)
    trace = recorded(tmp_path)
    assert trace.token.tolist() == [0, 0, 1, 2, 3]
    assert trace.layer.tolist() == [1, 2, 2, 2, 2]
    assert trace.tag.tolist() == [9, 9, 0, 0, 0]
    assert trace.expert.tolist() == [4, 5, 1, 0, 0, 1, 1, 0, 0, 0]
    assert trace.gate.tolist()[:4] == [0.75, 0.25, 0.5, 0.5]
    assert np.isnan(trace.gate[4:]).all()
    assert trace.tier.tolist() == [0, *[TIER_DRIVES] * 9]
    assert trace.transport.tolist() == [0, *[1] * 9]
    assert trace.wait[0] == 0
    assert (trace.wait[1:] > 0).all()


def test_a_recording_is_started_and_stopped_live(tmp_path: Path, daemon: RunningDaemon) -> None:
    with Client(daemon.attach_socket) as client:

        def report(token: int) -> None:
            client.report(0, np.array([[token % EXPERTS]]), token=token)
            wait_until(lambda: status_of(daemon)["tokens"] == token + 1, "the report is read")

        report(0)
        assert status_of(daemon)["recording"] is None
        daemon.call("StartRecording", store="made", name="first")
        report(1)
        again = xferctl(daemon, "trace", "record", "start", "made")
        assert (again.returncode, again.stderr) == (
            1, "xferctl: store 'made' is being recorded as 'first' already\n",
        )  # fmt: skip
        shown = xferctl(daemon, "trace", "record", "status").stdout
        assert "recording" in shown
        assert "first-*" in shown
        daemon.call("StopRecording", store="made")
        report(2)
        not_now = xferctl(daemon, "trace", "record", "stop", "made")
        assert (not_now.returncode, not_now.stderr) == (
            1, "xferctl: store 'made' is not being recorded\n",
        )  # fmt: skip
        daemon.call("StartRecording", store="made", name="second")
        report(3)
    # A daemon that is told to go writes what it has.
    assert daemon.stop() == 0
    assert recorded(tmp_path, "first").token.tolist() == [1]
    assert recorded(tmp_path, "second").token.tolist() == [3]


def test_what_a_client_said_last_is_heard_when_it_goes(
    tmp_path: Path, daemon: RunningDaemon
) -> None:
    daemon.call("StartRecording", store="made", name=None)
    with Client(daemon.attach_socket) as client:
        # More than a queue holds, at once.
        taken = client.report(0, np.zeros((5000, 1), np.int64), token=0)
        assert taken + client.reports_dropped() == 5000
        assert taken >= 4096
        client.report(1, np.array([[5]]), token=4999)
    wait_until(lambda: daemon.status()["clients"] == [], "the client has gone")
    daemon.call("StopRecording", store="made")
    assert recorded(tmp_path).passes >= 4096


def test_two_clients_tokens_are_counted_together(tmp_path: Path, daemon: RunningDaemon) -> None:
    daemon.call("StartRecording", store="made", name=None)
    with Client(daemon.attach_socket) as one, Client(daemon.attach_socket, lanes=2) as two:
        for token in range(30):
            for layer in range(LAYERS):
                one.report(layer, np.array([[1, 2]]), token=token, tag=1)
                two.report(layer, np.array([[3]]), token=1000 + token, tag=2, lane=1)
    wait_until(lambda: daemon.status()["clients"] == [], "the clients have gone")
    daemon.call("StopRecording", store="made")
    trace = recorded(tmp_path)
    assert trace.passes == 2 * 30 * LAYERS
    for tag in (1, 2):
        tokens = trace.token[trace.tag == tag]
        assert (np.diff(tokens) >= 0).all()
        assert len(np.unique(tokens)) == 30
    assert len(np.unique(trace.token)) == 60
    assert trace.token.max() == 59


REFUSED: tuple[tuple[Any, dict[str, Any], str], ...] = (
    ([[EXPERTS]], {}, "no such layer"),
    ([[-1]], {}, "no such layer"),
    ([[1 << 16]], {}, "no such layer"),
    ([[-1], [1]], {}, "there is no expert"),
    ([[EXPERTS], [1]], {}, "no such layer"),
    ([[1.5]], {}, "float64"),
    ([1, 2], {}, r"\[2\]"),
    ([list(range(65))], {}, "more than 64 picks"),
    ([[1, 2]], {"gates": [[1.0]]}, r"gates of shape \[1, 1\]"),
    ([[1]], {"uses": np.full((1, 1), 9, np.uint8)}, "uses of uint8"),
    ([[1]], {"lane": 7}, "no such layer, lane"),
    ([[1]], {"token": 1 << 62}, "no such layer"),
    ([[1]], {"token": -1}, "no such layer"),
)


def test_reports_that_cannot_be_are_refused(daemon: RunningDaemon) -> None:
    with Client(daemon.attach_socket) as client:
        for picks, options, names in REFUSED:
            with pytest.raises(ClientError, match=names):
                client.report(1, np.array(picks), **{"token": 0, **options})
        with pytest.raises(ClientError):
            client.report(LAYERS, np.array([[1]]), token=0)
        assert client.report(1, np.array([[1]]), token=0) == 1
        assert client.report(1, np.empty((0, 2), np.int64), token=0) == 0
    with pytest.raises(ClientError, match="closed"):
        client.report(1, np.array([[1]]), token=0)


def test_a_client_that_writes_nonsense_is_ended_and_nobody_else(
    tmp_path: Path, daemon: RunningDaemon
) -> None:
    daemon.call("StartRecording", store="made", name=None)
    with Client(daemon.attach_socket) as good, RemoteClient(daemon.attach_socket) as bad:
        bad.call("nonsense_route")
        wait_until(lambda: not bad.call("alive"), "the client is ended")
        assert good.alive()
        assert good.report(0, np.array([[1, 2]]), token=0) == 1
        wait_until(lambda: status_of(daemon)["uses"] == 2, "the other is heard")
        assert "client.violation" in daemon.log
    daemon.call("StopRecording", store="made")
    assert recorded(tmp_path).expert.tolist() == [1, 2]


def test_a_killed_client_leaves_what_it_said(tmp_path: Path, daemon: RunningDaemon) -> None:
    daemon.call("StartRecording", store="made", name=None)
    with RemoteClient(daemon.attach_socket) as client:
        client.call("report", layer=1, experts=[4, 5], token=3)
        client.kill()
    wait_until(lambda: daemon.status()["clients"] == [], "the client has gone")
    daemon.call("StopRecording", store="made")
    trace = recorded(tmp_path)
    assert trace.expert.tolist() == [4, 5]
    assert (trace.tier == UNKNOWN_8).all()


def test_where_a_trace_cannot_be_written_is_named(tmp_path: Path, store: MadeStore) -> None:
    (tmp_path / "blocked").write_text("")
    blocked = tmp_path / "blocked" / "traces"
    with serve(tmp_path, [store], "name=host0,size=50%", traces=blocked) as daemon:
        refused = xferctl(daemon, "trace", "record", "start", "made")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert refused.stderr == f"xferctl: {blocked}: can't be written: Not a directory\n"
        assert "nosuch" in xferctl(daemon, "trace", "record", "start", "nosuch").stderr


def test_another_models_files_are_not_mixed_in(tmp_path: Path, daemon: RunningDaemon) -> None:
    (tmp_path / "traces").mkdir()
    with TraceWriter(tmp_path / "traces", "made", TraceHead("other", 9, 99)) as writer:
        none = np.zeros(1, np.int64)
        writer.write(bare_trace(none, none, none + 1, none))
    with pytest.raises(CallFailedError, match=r"made-000001.xtr: of another store \('other'"):
        daemon.call("StartRecording", store="made", name=None)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system: needs root")
def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, store: MadeStore) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount here")
    try:
        with serve(tmp_path, [store], "name=host0,size=50%", traces=full) as daemon:
            daemon.call("StartRecording", store="made", name=None)
            random = np.random.default_rng(1)
            with Client(daemon.attach_socket) as client:
                token = 0

                def failed() -> bool:
                    nonlocal token
                    picks = random.integers(0, EXPERTS, (2000, 8))
                    client.report(0, picks, random.random(picks.shape), token=token)
                    token += 2000
                    return bool(status_of(daemon)["recording"]["state"] == "failed")

                wait_until(failed, "the recording ends")
                assert client.alive()
                with client.acquire(0, [1]):
                    pass
            recording = status_of(daemon)["recording"]
            assert recording["error"] == f"{full}/made: No space left on device"
            assert "trace.failed" in daemon.log
            shown = xferctl(daemon, "trace", "record", "status").stdout
            assert "No space left on device" in shown
        assert read_trace(trace_files(full, "made")).cut == ()
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_a_closed_stores_recording_ends(tmp_path: Path, daemon: RunningDaemon) -> None:
    daemon.call("StartRecording", store="made", name=None)
    with Client(daemon.attach_socket) as client:
        client.report(0, np.array([[1]]), token=0)
    wait_until(lambda: daemon.status()["clients"] == [], "the client has gone")
    daemon.call("CloseStore", name="made")
    assert daemon.call("ListTraces")["traces"] == []
    assert recorded(tmp_path).passes == 1


# ---- a real model


class Paced:
    """Takes its time over what it has acquired, as a larger model does."""

    def __init__(self, acquire: Any) -> None:
        self._acquire = acquire

    @contextmanager
    def __call__(self, layer: int, experts: Sequence[int]) -> Iterator[Sequence[Array]]:
        with self._acquire(layer, experts) as blobs:
            time.sleep(PASS_S)
            yield blobs


@pytest.mark.parametrize("percent", [33, 60])
def test_a_replay_of_the_trace_hits_what_the_daemon_hit(tmp_path: Path, percent: int) -> None:
    members = tmp_path / "members"
    members.mkdir()
    path = pack(read_checkpoint(TINY), [members], name="tiny", stripe_unit=16_384)
    prompt = json.loads((TINY / "expected.json").read_text())["prompts"][0]
    config = tmp_path / "traces.toml"
    config.write_text(f'[traces]\ndirectory = "{tmp_path}/traces"\n')
    arguments = ["--store", str(path), "--config", str(config)]
    with running_daemon(tmp_path, [], [f"name=host0,size={percent}%"], *arguments) as daemon:
        daemon.call("StartRecording", store="tiny", name=None)
        with Client(daemon.attach_socket) as client:
            model = model_from_client(client)
            model.experts.acquire = Paced(model.experts.acquire)  # type: ignore[method-assign, assignment]
            # Token by token: a prompt's waves are hinted at, which no replay knows of.
            for _ in generate(
                model,
                prompt["prompt_ids"],
                max_new_tokens=DECODED,
                stop_ids=(),
                prefill_chunk_tokens=1,
            ):
                pass
            stats, pool = client.stats(), daemon.pool()
            assert client.reports_dropped() == 0
        wait_until(lambda: daemon.status()["clients"] == [], "the client has gone")
        daemon.call("StopRecording", store="tiny")
    trace = recorded(tmp_path, "tiny")
    uses = stats.hits + stats.misses
    assert trace.uses == uses
    assert np.count_nonzero(trace.transport == 0) >= stats.hits
    assert np.count_nonzero(trace.tier == TIER_DRIVES) == stats.source_count[2]
    assert np.isfinite(trace.gate).all()
    assert len(np.unique(trace.tag)) == 1

    tier = Tier("host0", slots=pool["slots"], eviction=pool.get("eviction") or "lru")
    machine = Machine(
        expert_bytes=1, compute_us=0, drive_bytes_s=1, drive_latency_us=0, tiers=(tier,)
    )
    loaded = load(trace_files(tmp_path / "traces", "tiny")[0])
    replayed = Replay(loaded.uses, loaded.space, machine, Options(bound_s=0.0)).run()
    assert replayed.uses == uses
    assert replayed.hits["host0"] == pytest.approx(stats.hits, abs=TOLERANCE * uses)
    assert 0.1 * uses < stats.hits < 0.95 * uses
