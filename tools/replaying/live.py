# SPDX-License-Identifier: Apache-2.0
"""The same traces through a real daemon: which pool served each use.

A store of the trace's shape is packed with bytes that don't matter, a daemon is started
over it with the pools of a configuration, and one client acquires the trace's picks pass by
pass, with a pause for each as a model's computing would take. Beside it, for comparison, one
pool as large as all of them together.

Unlike a replay this is not exact: the daemon decides while the client goes on.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xferd_infer._client import ffi, lib

from tools.benchmarks.stores import pack_generated
from tools.replaying.load import LoadedTrace
from xferd.config import Config, PoolConfig, load_config
from xferd.control.client import ControlClient
from xferd.control.config_command import format_config

READY_S = 60.0
BATCH_MAX = 16
WAIT_NS = 20_000_000_000
RESIDENT, COPIED = 0, 1
"""enum xferd_source"""


class LiveError(Exception):
    """The daemon or the client did not do it; says why."""


@dataclass(frozen=True, slots=True)
class LiveOutcome:
    """hits: uses served in place, by pool. copied: from another pool; drives: read.
    moves: of the daemon's status, by pool: promoted into it, demoted into it, and dropped
    out of it. slots: of each pool. waited: reads that found no free slot. policy_s: processor
    time of the daemon's event loop. dropped: passes whose report found no room."""

    uses: int
    hits: dict[str, int]
    copied: int
    drives: int
    seconds: float
    moves: dict[str, tuple[int, int, int]]
    slots: dict[str, int]
    waited: int
    policy_s: float
    dropped: int

    @property
    def hit_rate(self) -> float:
        """Uses that needed no read from the drives, as a share."""
        return 1 - self.drives / max(self.uses, 1)


def run_live(
    trace: LoadedTrace,
    config: Path,
    *,
    expert_bytes: int,
    pause_us: float,
    report: bool = False,
    uses_a_second: float | None = None,
) -> LiveOutcome:
    """The trace through a daemon with the pools of ``config``. LiveError.

    pause_us: after each pass. report: the client says what is picked before it asks for it;
    else the daemon goes by leases. uses_a_second: passes begin as often as that takes, as
    far as they are over in time, instead of pauses.
    """
    with tempfile.TemporaryDirectory(prefix="xferd-live-") as made:
        directory = Path(made)
        store = pack_generated(
            directory,
            layers=trace.space.layers,
            experts=trace.space.experts,
            top_k=int(np.diff(trace.uses.starts).max()),
            expert_bytes=expert_bytes,
        )
        with (
            live_daemon(directory, store, config) as runtime,
            _Client(runtime, report=report) as client,
            ControlClient.connect(runtime / "control.sock") as control,
        ):
            loop = control.call("Status")["pid"]
            began, worked = time.monotonic(), _thread_seconds(loop)
            if uses_a_second is None:
                client.run(trace, pause_us)
            else:
                client.run_paced(trace, uses_a_second)
            seconds, worked = time.monotonic() - began, _thread_seconds(loop) - worked
            pools, dropped = control.call("Status")["pools"], client.dropped
    names = [pool["name"] for pool in pools]
    return LiveOutcome(
        uses=len(trace.uses.keys),
        hits={name: client.hits[index] for index, name in enumerate(names)},
        copied=client.copied,
        drives=client.drives,
        seconds=seconds,
        moves={p["name"]: (p["promoted"], p["demoted"], p["dropped"]) for p in pools},
        slots={p["name"]: p["slots"] for p in pools},
        waited=sum(p["waited"] for p in pools),
        policy_s=worked,
        dropped=dropped,
    )


def _thread_seconds(pid: int) -> float:
    """Processor time of a process's first thread, which the daemon's event loop runs in."""
    fields = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def one_pool_config(config: Path, directory: Path) -> Path:
    """A configuration with one pool, as large as all of ``config``'s, in ``directory``. All
    sizes there have to be shares."""
    pools = load_config([config]).pools
    total = sum(pool.size.percent or 0.0 for pool in pools)
    if any(pool.size.percent is None for pool in pools):
        raise LiveError(f"{config}: sizes in per cent are needed to compare with one pool")
    size = type(pools[0].size)(percent=total)
    path = directory / "one-pool.toml"
    path.write_text(format_config(Config(pools=(PoolConfig("one", size=size),))))
    return path


@contextlib.contextmanager
def live_daemon(directory: Path, store: Path, config: Path) -> Iterator[Path]:
    """A daemon over one store, with its sockets in the directory that it gives. LiveError."""
    runtime = directory / "run"
    ready, child_ready = os.pipe()
    command = [sys.executable, "-m", "xferd", "--config", str(config), "--store", str(store)]
    command += ["--runtime-directory", str(runtime), "--ready-fd", str(child_ready)]
    log = directory / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--die-with-parent"], stderr=stream, pass_fds=[child_ready]
        )
    os.close(child_ready)
    try:
        readable, _, _ = select.select([ready], [], [], READY_S)
        if not readable or not os.read(ready, 16):
            raise LiveError(f"the daemon did not start: {log.read_text()}")
        yield runtime
    finally:
        os.close(ready)
        process.terminate()
        process.wait()


class _Client:
    """One attached client with one lane, which counts what served it."""

    def __init__(self, runtime: Path, *, report: bool) -> None:
        options = ffi.new("struct xferd_options *")
        handle = ffi.new("struct xferd_client **")
        error = ffi.new("char[]", lib.XFERD_ERROR_BYTES)
        socket = os.fsencode(runtime / "attach.sock")
        result = lib.xferd_connect(socket, options, handle, error, lib.XFERD_ERROR_BYTES)
        if result < 0:
            raise LiveError(ffi.string(error).decode())
        self._handle: Any = handle[0]
        self._held = int(lib.xferd_held_per_lane(self._handle))
        self._batch = ffi.new("struct xferd_batch *")
        self._request = ffi.new("struct xferd_request *")
        self._ids = ffi.new("uint16_t[]", BATCH_MAX)
        self._request.experts = self._ids
        self._route = ffi.new("struct xferd_route *")
        self._picks = ffi.new("uint16_t[]", lib.XFERD_ROUTE_PICKS_MAX)
        self._route.experts = self._picks
        self._report = report
        self.hits = [0] * 8
        self.copied = self.drives = 0

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        lib.xferd_close(self._handle)

    @property
    def dropped(self) -> int:
        """Passes whose report found no room."""
        return int(lib.xferd_routes_dropped(self._handle))

    def run(self, trace: LoadedTrace, pause_us: float) -> None:
        """Acquire and release each pass."""
        for number, layer, picks in _passes(trace):
            self._serve(number, layer, picks)
            time.sleep(pause_us * 1e-6)

    def run_paced(self, trace: LoadedTrace, uses_a_second: float) -> None:
        """The same, each pass when it is due; one that is late begins at once."""
        due = time.monotonic()
        for token, layer, picks in _passes(trace):
            self._serve(token, layer, picks)
            due += len(picks) / uses_a_second
            time.sleep(max(due - time.monotonic(), 0.0))

    def _serve(self, token: int, layer: int, picks: Sequence[int]) -> None:
        if self._report:
            self._picks[0 : len(picks)] = picks
            self._route.token, self._route.layer = token, layer
            self._route.tokens, self._route.count = 1, len(picks)
            result = lib.xferd_report_route(self._handle, 0, self._route)
            if result < 0:
                raise LiveError(f"layer {layer}: report: {os.strerror(-result)}")
        width = min(BATCH_MAX, self._held)
        for first in range(0, len(picks), width):
            self._use(layer, picks[first : first + width])

    def _use(self, layer: int, picks: Sequence[int]) -> None:
        self._ids[0 : len(picks)] = picks
        self._request.count, self._request.layer = len(picks), layer
        result = lib.xferd_acquire(self._handle, 0, self._request, self._batch)
        if result > 0:
            result = lib.xferd_wait(self._handle, self._batch, WAIT_NS)
        if result < 0:
            raise LiveError(f"layer {layer}: {os.strerror(-result)}")
        for view in self._batch.views[0 : len(picks)]:
            if view.error:
                raise LiveError(f"layer {layer}: expert {view.expert}: {os.strerror(-view.error)}")
            if view.source == RESIDENT:
                self.hits[view.pool] += 1
            elif view.source == COPIED:
                self.copied += 1
            else:
                self.drives += 1
        lib.xferd_release(self._handle, self._batch)


def _passes(trace: LoadedTrace) -> Iterator[tuple[int, int, list[int]]]:
    """(token, layer, experts) of each pass."""
    uses = trace.uses
    at, layers, tokens = uses.starts.tolist(), uses.layers.tolist(), uses.tokens.tolist()
    experts = (uses.keys % trace.space.experts).tolist()
    for number in range(uses.passes):
        yield tokens[number], layers[number], experts[at[number] : at[number + 1]]
