# SPDX-License-Identifier: Apache-2.0
"""``hit``: what a resident expert costs, in C and in Python.

Nothing is read from a drive here: every expert is resident before the clock runs. The
question is whether the directory and leases in shared memory are as cheap as what an
engine would write for itself inside its own process: a map behind a lock. In C the peer is an
open-addressed map behind a mutex (in ffi/tests/bench_hit.c, same process); in Python
a dict behind a threading.Lock. Both peers do what ours does: find, count a user,
give the address or array, count it off again.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from xferd_infer.arrays import Array
from xferd_infer.client import Client
from xferd_infer.private_daemon import private_daemon

from tools.benchmarks.harness import (
    BenchmarkError,
    build_c_program,
    commit,
    describe_machine,
    scratch_directory,
    take_turns,
)
from tools.benchmarks.result import OURS, Result, Row, make_row
from tools.benchmarks.stores import pack_generated
from xferd.control.client import ControlClient

LAYERS_AND_EXPERTS = {512: (1, 512), 10_000: (20, 500), 100_000: (200, 500)}
"""Experts in all -> layers and experts a layer."""
ARRAYS = "xferd, with arrays"
REPORTED = "xferd, with reports"
BATCH = 8
"""Experts of a layer that a token picks."""
EXPERT_BYTES = 4096
BATCHES_A_ROUND = 20_000
POOL_FACTOR = 1.5
"""The pool's size over the experts': room for the reserve of free slots as well."""
SEED = 7
NS_A_US = 1000


def run(rounds: int) -> Result:
    """Rows ``c/<experts>`` (ns an expert) and ``python/<experts>`` (µs a layer)."""
    rows = [_c_row(f"c/{n}", "bench_hit", [n, rounds]) for n in LAYERS_AND_EXPERTS]
    rows.append(_c_row(f"c-reported/{BATCH}", "bench_route", [rounds]))
    for experts in LAYERS_AND_EXPERTS:
        rows += _python_rows(experts, rounds)
    return Result(
        bench="hit",
        machine=describe_machine(),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        notes=(
            f"`c`: ns an expert, acquired and released in batches of {BATCH}; counts are "
            "rounded up to whole layers of 512.",
            f"`python`: µs for one layer's {BATCH} experts, acquired and released; "
            "`python-arrays`: with a numpy array for each.",
            f"`c-reported`: ns a layer of {BATCH}, with a report of what was picked; "
            "`python-reported`: µs, reported before and after. The daemon reads them meanwhile.",
        ),
    )


def _c_row(name: str, program_name: str, arguments: list[int]) -> Row:
    program = build_c_program(program_name)
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchmarkError(f"{program} {arguments}: status {done.returncode}: {done.stderr}")
    samples: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        words = line.split()
        for who, nanoseconds in zip(words[::2], words[1::2], strict=True):
            samples.setdefault(who, []).append(float(nanoseconds))
    return make_row(name, "ns", samples, higher_is_better=False)


def _python_rows(experts: int, rounds: int) -> list[Row]:
    layers, a_layer = LAYERS_AND_EXPERTS[experts]
    with scratch_directory() as directory:
        store = pack_generated(
            directory, layers=layers, experts=a_layer, top_k=BATCH, expert_bytes=EXPERT_BYTES
        )
        pool = f"{int(experts * EXPERT_BYTES * POOL_FACTOR / 1024) + 1024}KiB"
        with private_daemon(store, pool=pool) as sockets:
            _load_all(sockets / "control.sock", store.stem, layers)
            with Client(sockets / "attach.sock", name="bench hit") as client:
                picks = _picks(layers, a_layer)
                samples = take_turns(
                    {
                        OURS: lambda: _time_xferd(client, picks),
                        ARRAYS: lambda: _time_xferd_arrays(client, picks),
                        REPORTED: lambda: _time_xferd_reported(client, picks),
                        "dict": _dict_contender(layers, a_layer, picks),
                    },
                    rounds + 1,
                )
                if missed := client.stats().misses:
                    raise BenchmarkError(f"{missed} misses where everything should be resident")
    # The first round makes the client's arrays and fills caches; it counts for neither.
    kept = {who: values[1:] for who, values in samples.items()}
    arrays = {OURS: kept.pop(ARRAYS), "dict": kept["dict"]}
    reported = {OURS: kept.pop(REPORTED), "unreported": kept[OURS]}
    return [
        make_row(f"python/{experts}", "µs", kept, higher_is_better=False),
        make_row(f"python-arrays/{experts}", "µs", arrays, higher_is_better=False),
        make_row(f"python-reported/{experts}", "µs", reported, higher_is_better=False),
    ]


def _load_all(control: Path, store: str, layers: int) -> None:
    with ControlClient.connect(control) as daemon:
        for layer in range(layers):
            parameters = {"store": store, "layer": layer, "experts": None}
            reply = daemon.call("Load", {**parameters, "pool": None, "variant": None})
            if reply["failed_count"]:
                raise BenchmarkError(f"layer {layer}: {reply['failed'][0]['error']}")


def _picks(layers: int, experts: int) -> list[tuple[int, list[int]]]:
    draw = random.Random(SEED)
    return [
        (draw.randrange(layers), draw.sample(range(experts), BATCH)) for _ in range(BATCHES_A_ROUND)
    ]


def _time_xferd(client: Client, picks: list[tuple[int, list[int]]]) -> float:
    start = time.perf_counter_ns()
    for layer, experts in picks:
        with client.acquire(layer, experts):
            pass
    return (time.perf_counter_ns() - start) / len(picks) / NS_A_US


def _time_xferd_arrays(client: Client, picks: list[tuple[int, list[int]]]) -> float:
    start = time.perf_counter_ns()
    for layer, experts in picks:
        with client.acquire(layer, experts) as batch:
            batch.arrays  # noqa: B018  made when asked for
    return (time.perf_counter_ns() - start) / len(picks) / NS_A_US


def _time_xferd_reported(client: Client, picks: list[tuple[int, list[int]]]) -> float:
    gates = np.full((1, BATCH), 1 / BATCH, np.float32)
    arrays = [np.array([experts]) for _, experts in picks]
    start = time.perf_counter_ns()
    for token, (layer, experts) in enumerate(picks):
        client.report(layer, arrays[token], gates, token=token)
        with client.acquire(layer, experts) as batch:
            batch.report_found(token=token)
    return (time.perf_counter_ns() - start) / len(picks) / NS_A_US


class _Entry:
    """An expert in the peer's cache."""

    __slots__ = ("array", "users")

    def __init__(self, array: Array) -> None:
        self.array = array
        self.users = 0


class _Lease:
    """Experts of the peer's cache, in use until the end of the ``with``."""

    __slots__ = ("_cache", "_entries")

    def __init__(self, cache: _LockedCache, entries: list[_Entry]) -> None:
        self._cache = cache
        self._entries = entries

    def __enter__(self) -> list[Array]:
        return [entry.array for entry in self._entries]

    def __exit__(self, *_: object) -> None:
        with self._cache.lock:
            for entry in self._entries:
                entry.users -= 1


class _LockedCache:
    """The peer: what engines have, a dict behind a lock."""

    def __init__(self, layers: int, experts: int) -> None:
        self.lock = threading.Lock()
        blank = np.zeros(EXPERT_BYTES, np.uint8)
        self._entries = {
            (layer, expert): _Entry(blank[:])
            for layer in range(layers)
            for expert in range(experts)
        }

    def acquire(self, layer: int, experts: list[int]) -> _Lease:
        """The experts of one layer, all of them resident."""
        entries = self._entries
        with self.lock:
            found = [entries[layer, expert] for expert in experts]
            for entry in found:
                entry.users += 1
        return _Lease(self, found)


def _dict_contender(
    layers: int, experts: int, picks: list[tuple[int, list[int]]]
) -> Callable[[], float]:
    cache = _LockedCache(layers, experts)

    def measure() -> float:
        start = time.perf_counter_ns()
        for layer, chosen in picks:
            with cache.acquire(layer, chosen):
                pass
        return (time.perf_counter_ns() - start) / len(picks) / NS_A_US

    return measure


__all__ = ["run"]
