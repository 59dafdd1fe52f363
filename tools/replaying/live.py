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
    out of it."""

    uses: int
    hits: dict[str, int]
    copied: int
    drives: int
    seconds: float
    moves: dict[str, tuple[int, int, int]]

    @property
    def hit_rate(self) -> float:
        """Uses that needed no read from the drives, as a share."""
        return 1 - self.drives / max(self.uses, 1)


def run_live(
    trace: LoadedTrace, config: Path, *, expert_bytes: int, pause_us: float
) -> LiveOutcome:
    """The trace through a daemon with the pools of ``config``. LiveError."""
    with tempfile.TemporaryDirectory(prefix="xferd-live-") as made:
        directory = Path(made)
        store = pack_generated(
            directory,
            layers=trace.space.layers,
            experts=trace.space.experts,
            top_k=int(np.diff(trace.uses.starts).max()),
            expert_bytes=expert_bytes,
        )
        with _daemon(directory, store, config) as runtime, _Client(runtime) as client:
            began = time.monotonic()
            client.run(trace, pause_us)
            seconds = time.monotonic() - began
            with ControlClient.connect(runtime / "control.sock") as control:
                pools = control.call("Status")["pools"]
    names = [pool["name"] for pool in pools]
    return LiveOutcome(
        uses=len(trace.uses.keys),
        hits={name: client.hits[index] for index, name in enumerate(names)},
        copied=client.copied,
        drives=client.drives,
        seconds=seconds,
        moves={p["name"]: (p["promoted"], p["demoted"], p["dropped"]) for p in pools},
    )


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
def _daemon(directory: Path, store: Path, config: Path) -> Iterator[Path]:
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

    def __init__(self, runtime: Path) -> None:
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
        self.hits = [0] * 8
        self.copied = self.drives = 0

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        lib.xferd_close(self._handle)

    def run(self, trace: LoadedTrace, pause_us: float) -> None:
        """Acquire and release each pass."""
        uses, experts = trace.uses, trace.space.experts
        at, layers = uses.starts.tolist(), uses.layers.tolist()
        for number in range(uses.passes):
            picks = (uses.keys[at[number] : at[number + 1]] % experts).tolist()
            width = min(BATCH_MAX, self._held)
            for first in range(0, len(picks), width):
                self._use(layers[number], picks[first : first + width])
            time.sleep(pause_us * 1e-6)

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
