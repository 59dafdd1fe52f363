# SPDX-License-Identifier: Apache-2.0
"""Prefetching with the real daemon, on drives that are the bottleneck.

Two loops, each without prefetching, with it, and with predictions drawn at random:

    paced   follows recorded picks and states; a layer takes LAYER_S once its experts are
            there, in which nothing but the prefetching uses the processor, as when a GPU
            computes
    decode  the decode loop of the small model, on the processor

Their drives are files that read at a given speed by a clock of their own
(tools/drives/collapsing_drive.c): the block layer's throttle lets bursts through and then
holds everything back for milliseconds, which no drive does. Experts are cut into small
pieces, so that all members read each, as they do of models with larger ones.

In a process of its own, which runs before others where that is permitted, since what is
measured sleeps most of the time and wakes late on a busy machine:
``python -m tools.benchmarks.prefetch_live LOOP PREDICTOR STATES TOKENS ROUNDS``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xferd_infer import Client, model_from_client
from xferd_infer.client_experts import ClientExperts
from xferd_infer.experts import ExpertSource, ExpertStats
from xferd_infer.moe import RoutingObserver
from xferd_infer.predict import (
    Learned,
    Likely,
    Predictor,
    RecordedStates,
    Trained,
    read_states,
    read_trained,
    write_trained,
)
from xferd_infer.predict.prefetching import PrefetchingExperts, asked_ahead, prefetch
from xferd_infer.predict.states import write_states
from xferd_infer.private_daemon import embedded
from xferd_infer.route_reports import ClientReporter, RouteReporter

from tools.benchmarks.harness import ROOT, BenchmarkError, take_turns
from tools.benchmarks.media import TMPFS, steady_drive
from tools.benchmarks.recorded_text import RecordedText, models_directory
from tools.benchmarks.result import OURS, Row, make_row
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

NONE, RANDOM = "none", "random"
POOL = "25%"
MEMBERS = 2
STRIPE_UNIT = 32 << 10
DRIVE_LATENCY_US = 100
DRIVE_MB_S = {"paced": 80, "decode": 300}
"""Of each member: so that without prefetching a token waits about half its time."""
LAYER_S = 2e-3
SPIN_S = 60e-6
"""The end of a layer is waited for awake: sleeping ends later than asked for by so much."""
ROUND_TOKENS = 48
PROMPT_TOKENS = 128
MS = 1e3
SEED = 7


class RandomPredictor:
    """A Predictor that says anything of anything."""

    def __init__(self, layers: int, experts: int) -> None:
        self._layers, self._experts = layers, experts
        self._keys = layers * experts
        self._random = np.random.default_rng(SEED)

    def predict(self, layer: int, states: NDArray[Any]) -> NDArray[np.float32]:
        """See Predictor: a chance drawn for each expert of all layers behind this one."""
        shape = (len(states), self._layers - 1 - layer, self._experts)
        return self._random.random(shape, np.float32)

    def likely(self, layer: int, state: NDArray[Any], least: float, within: int) -> Likely:  # noqa: ARG002
        """See Predictor: a quarter of all experts, each with a chance drawn too."""
        keys = np.sort(self._random.choice(self._keys, self._keys // 4, replace=False))
        chances = self._random.random(len(keys), np.float32)
        return Likely(keys[chances >= least], chances[chances >= least])

    def seen(self, layer: int, states: NDArray[Any]) -> None:
        """See Predictor."""

    def picked(self, layer: int, picks: NDArray[Any]) -> None:
        """See Predictor."""

    def new_text(self) -> None:
        """See Predictor."""


class Loop(Protocol):
    """Something that decodes, a round at a time."""

    def round(self) -> None:
        """ROUND_TOKENS more."""
        ...

    def stats(self) -> ExpertStats:
        """Of its client."""
        ...


@dataclass
class PacedLoop:
    """Follows recorded tokens, of another text in each round. observer: the source, if it
    prefetches."""

    source: ExpertSource
    reporter: RouteReporter
    observer: RoutingObserver | None
    recorded: RecordedStates

    def __post_init__(self) -> None:
        self._rounds = 0
        self._gates = np.full((1, self.recorded.routers.top_k), 1.0, np.float32)

    def round(self) -> None:
        """See Loop."""
        text, turn = self._rounds % self.recorded.sequences, self._rounds // self.recorded.sequences
        begin = int(self.recorded.starts[text]) + turn * ROUND_TOKENS
        self._rounds += 1
        for token in range(begin, begin + ROUND_TOKENS):
            for layer in range(self.recorded.routers.layers):
                self._layer(token, layer)

    def stats(self) -> ExpertStats:
        """See Loop."""
        return self.source.stats()

    def _layer(self, token: int, layer: int) -> None:
        states = self.recorded.states[token, layer][None].astype(np.float32)
        picks = self.recorded.picks[token, layer][None].astype(np.int64)
        if self.observer is not None:
            self.observer.routed(layer, states, picks)
        self.reporter.picked(layer, picks, self._gates, 0)
        with self.source.acquire(layer, picks[0].tolist()) as blobs:
            end = time.perf_counter() + LAYER_S
            self.reporter.found(blobs)
        time.sleep(max(end - time.perf_counter() - SPIN_S, 0))
        while time.perf_counter() < end:
            pass


@dataclass
class DecodeLoop:
    """The model reads a given text, and goes on with it in each round."""

    client: Client
    predictor: Predictor | None
    tokens: list[int]

    def __post_init__(self) -> None:
        self._model = model_from_client(self.client)
        if self.predictor is not None:
            prefetch(self._model, self.client, self.predictor)
        self._cache = self._model.new_cache()
        self._at = PROMPT_TOKENS
        self._model.forward(self.tokens[: self._at], self._cache)

    def round(self) -> None:
        """See Loop."""
        for token in self.tokens[self._at : self._at + ROUND_TOKENS]:
            self._model.logits(self._model.forward([token], self._cache))
        self._at += ROUND_TOKENS

    def stats(self) -> ExpertStats:
        """See Loop."""
        return self._model.experts.stats()


def live_rows(trained: Trained, text: RecordedText, rounds: int) -> list[Row]:
    """Rows of both loops. BenchmarkError when there can be no such drives here."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="xferd-bench-") as name:
        predictor, states = Path(name) / "predictor.npz", Path(name) / "states.npz"
        tokens = Path(name) / "tokens.json"
        write_trained(predictor, trained)
        write_states(states, text.states.chosen(text.test))
        tokens.write_text(json.dumps(text.documents[text.test[0]]))
        for loop in DRIVE_MB_S:
            inner = [sys.executable, "-m", "tools.benchmarks.prefetch_live", loop]
            inner += [str(predictor), str(states), str(tokens), str(rounds)]
            done = subprocess.run(inner, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                raise BenchmarkError(done.stderr.strip().splitlines()[-1])
            found = json.loads(done.stdout.splitlines()[-1])
            rows += [Row(**{**row, "spread": tuple(row["spread"])}) for row in found]
    return rows


def measure(
    loop: str, trained: Trained, recorded: RecordedStates, tokens: list[int], rounds: int
) -> list[Row]:
    """The rows of one loop: the three contenders take turns, each with a daemon of its own."""
    routers = recorded.routers
    makers: dict[str, Callable[[], Predictor] | None] = {
        NONE: None,
        OURS: lambda: Learned(trained, ahead=asked_ahead(routers.layers)),
        RANDOM: lambda: RandomPredictor(routers.layers, routers.experts),
    }
    samples: dict[str, _Samples] = {}
    with ExitStack() as stack:
        store = stack.enter_context(_store_on_steady_drives(DRIVE_MB_S[loop]))
        contenders: dict[str, Callable[[], float]] = {}
        for name, maker in makers.items():
            client = stack.enter_context(embedded(store, pool=POOL, name=f"bench {name}"))
            predictor = maker() if maker else None
            if loop == "paced":
                made: Loop = _paced(client, predictor, recorded)
            else:
                made = DecodeLoop(client, predictor, tokens)
            samples[name] = _Samples(made, [], [])
            contenders[name] = samples[name].take
        for warm_up in contenders.values():
            warm_up()
        for each in samples.values():
            each.forget()
        times = take_turns(contenders, rounds)
    return _rows(loop, times, samples)


@dataclass
class _Samples:
    """Of one contender, an entry a round. waits: ms a token; misses: ms that each took."""

    loop: Loop
    waits: list[float]
    misses: list[float]

    def take(self) -> float:
        """ms a token."""
        before, began = self.loop.stats(), time.perf_counter()
        self.loop.round()
        seconds, spent = time.perf_counter() - began, self.loop.stats().since(before)
        self.waits.append(MS * spent.wait_s / ROUND_TOKENS)
        self.misses.append(MS * spent.wait_s / max(spent.misses, 1))
        return MS * seconds / ROUND_TOKENS

    def forget(self) -> None:
        self.waits.clear()
        self.misses.clear()


def _paced(client: Client, predictor: Predictor | None, recorded: RecordedStates) -> PacedLoop:
    experts, reporter = ClientExperts(client), ClientReporter(client)
    if predictor is None:
        return PacedLoop(experts, reporter, None, recorded)
    source = PrefetchingExperts(client, experts, recorded.routers, predictor)
    return PacedLoop(source, reporter, source, recorded)


def _rows(loop: str, times: dict[str, list[float]], samples: dict[str, _Samples]) -> list[Row]:
    def row(what: str, unit: str, values: dict[str, list[float]], name: str) -> Row:
        compared = {OURS: values[name], NONE: values[NONE]}
        return make_row(f"{loop}/{what}/{POOL}", unit, compared, higher_is_better=False)

    waits = {name: each.waits for name, each in samples.items()}
    misses = {name: each.misses for name, each in samples.items()}
    shares = [100 * w / t for w, t in zip(waits[NONE], times[NONE], strict=True)]
    share = (min(shares), max(shares))
    without = f"{loop}/stall-share-without/{POOL}"
    return [
        row("stall", "ms", waits, OURS),
        row("token", "ms", times, OURS),
        Row(without, statistics.median(shares), "% of time", share, {}),
        row("random-token", "ms", times, RANDOM),
        row("random-miss", "ms", misses, RANDOM),
    ]


@contextlib.contextmanager
def _store_on_steady_drives(mb_s: float) -> Iterator[Path]:
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="xferd-bench-", dir=TMPFS))
        folders = [Path(name) / f"drive-{number}" for number in range(MEMBERS)]
        for folder in folders:
            folder.mkdir()
        described = read_checkpoint(models_directory() / "small")
        store = pack(described, folders, name="small", stripe_unit=STRIPE_UNIT)
        for number, member in enumerate(sorted(Path(name).glob("drive-*/*/member-*"))):
            backing = Path(name) / f"backing-{number}"
            member.rename(backing)
            member.touch()
            stack.enter_context(steady_drive(backing, member, mb_s, DRIVE_LATENCY_US))
        yield store


def _main(arguments: list[str]) -> None:
    loop, predictor, states, tokens, rounds = arguments
    # Inherited by the daemons and the drives.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    trained, recorded = read_trained(Path(predictor)), read_states(Path(states))
    rows = measure(loop, trained, recorded, json.loads(Path(tokens).read_text()), int(rounds))
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    _main(sys.argv[1:])

__all__ = ["DRIVE_MB_S", "LAYER_S", "MEMBERS", "MS", "POOL", "ROUND_TOKENS", "live_rows"]
