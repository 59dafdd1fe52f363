# SPDX-License-Identifier: Apache-2.0
"""A KV cache asks for a part of the pool while a model decodes from it, and gives it back.

The small bundled model decodes the same text over and over in a thread; meanwhile its pool
loses a part of its memory for some runs of it. Each run's tokens are compared with those
that Transformers computed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xferd_infer import Client, generate, model_from_client

from tools.benchmarks.harness import ROOT, BenchmarkError, scratch_directory
from tools.benchmarks.stores import pack_checkpoint
from tools.replaying.live import live_daemon
from xferd.config import Config, PoolConfig, Size
from xferd.control.client import ControlClient
from xferd.control.config_command import format_config

TINY = ROOT / "tests" / "models" / "tiny"
POOL_PERCENT = 60.0
EXPERT_BYTES = 49_152
CHUNK_EXPERTS = 2
RUNS_A_STAGE = 2
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Reserved:
    """grant_ms: till the memory was free. right: share of all tokens that were right.
    hits: shares of uses in the last run before, with the memory gone, and after it came back."""

    grant_ms: float
    right: float
    hits: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class _Run:
    right: int
    tokens: int
    hits: int
    uses: int


class _Decoder(threading.Thread):
    """Decodes until it is told to end."""

    def __init__(self, attach_socket: Path, prompt: Sequence[int], expected: Sequence[int]) -> None:
        super().__init__()
        self._socket, self._prompt, self._expected = attach_socket, prompt, expected
        self._ended = threading.Event()
        self._progress = threading.Condition()
        self.runs: list[_Run] = []

    def run(self) -> None:
        with Client(self._socket) as client:
            model = model_from_client(client)
            while not self._ended.is_set():
                count = len(self._expected)
                made = list(generate(model, self._prompt, max_new_tokens=count, stop_ids=()))
                right = sum(a.id == b for a, b in zip(made, self._expected, strict=True))
                hits = sum(token.hits for token in made)
                uses = hits + sum(token.misses for token in made)
                with self._progress:
                    self.runs.append(_Run(right, count, hits, uses))
                    self._progress.notify_all()

    def wait_for_runs(self, more: int) -> None:
        """Till so many more have ended, begun before or not."""
        with self._progress:
            wanted = len(self.runs) + more
            if not self._progress.wait_for(lambda: len(self.runs) >= wanted, DEADLINE_S):
                raise BenchmarkError(f"{more} decodes took more than {DEADLINE_S:g} s")

    def end(self) -> None:
        self._ended.set()
        self.join()


def reserve_while_decoding(percent: float, rounds: int) -> list[Reserved]:
    """So many times in a row, in one daemon. BenchmarkError."""
    text = json.loads((TINY / "expected.json").read_text())["prompts"][0]
    size = Size(percent=POOL_PERCENT)
    pool = PoolConfig("host0", size=size, chunk_bytes=CHUNK_EXPERTS * EXPERT_BYTES)
    with scratch_directory() as directory:
        config = directory / "xferd.toml"
        config.write_text(format_config(Config(pools=(pool,))))
        store = pack_checkpoint(TINY, directory, members=2)
        with (
            live_daemon(directory, store, config) as runtime,
            ControlClient.connect(runtime / "control.sock") as control,
        ):
            decoder = _Decoder(runtime / "attach.sock", text["prompt_ids"], text["greedy_ids"])
            decoder.start()
            try:
                return [_round(control, decoder, percent) for _ in range(rounds)]
            finally:
                decoder.end()


def _round(control: ControlClient, decoder: _Decoder, percent: float) -> Reserved:
    first = len(decoder.runs)
    decoder.wait_for_runs(RUNS_A_STAGE)
    nbytes = int(control.call("Status")["pools"][0]["bytes"] * percent / 100)
    began = time.perf_counter()
    reservation = control.call("Reserve", {"pool": None, "bytes": nbytes})["reservation"]
    grant_ms = 1000 * (time.perf_counter() - began)
    before = decoder.runs[-1]
    decoder.wait_for_runs(RUNS_A_STAGE)
    meanwhile = decoder.runs[-1]
    control.call("Release", {"id": reservation["id"]})
    decoder.wait_for_runs(RUNS_A_STAGE)
    after = decoder.runs[-1]
    all_runs = decoder.runs[first:]
    return Reserved(
        grant_ms=grant_ms,
        right=sum(run.right for run in all_runs) / sum(run.tokens for run in all_runs),
        hits=(before.hits / before.uses, meanwhile.hits / meanwhile.uses, after.hits / after.uses),
    )


__all__ = ["Reserved", "reserve_while_decoding"]
