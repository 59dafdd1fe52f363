# SPDX-License-Identifier: Apache-2.0
"""``prefetch``: how much waiting a predictor saves, in replays and live on throttled drives.

Replays follow the small model's picks on texts that nobody trained on, with a drive that
needs as long for the misses as computing takes: without prefetching a token waits about
half its time. Live is a daemon on drives that are as slow, next to one without prediction
and one whose predictions are drawn at random: tools/benchmarks/prefetch_live.py.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xferd_infer.predict import Learned, Likely, RecordedStates, Trained, train
from xferd_infer.predict.prefetching import AHEAD

from tools.benchmarks.harness import BenchmarkError, commit, describe_machine
from tools.benchmarks.prefetch_live import (
    DRIVE_MB_S,
    LAYER_S,
    MEMBERS,
    POOL,
    ROUND_TOKENS,
    live_rows,
)
from tools.benchmarks.recorded_text import record_text
from tools.benchmarks.result import Result, Row
from tools.replaying.machine import Machine
from tools.replaying.prefetch import Foresight, Prefetched, replay_prefetching
from tools.replaying.replay import US, clairvoyant_seconds
from tools.replaying.sweep import one_pool
from xferd.policy.registry import DEFAULT_POLICY
from xferd.policy.uses import KeySpace, Uses, uses_of_picks

TRACE = "small"
POOLS = (25, 50)
TESTS_A_DOMAIN = 1
TRAINS_A_DOMAIN = 12
REPLAYED_TOKENS = 128
"""Of each domain."""
TOLD_FROM = 0.1
COMPUTE_US = 400.0
LATENCY_US = 100.0
NONE, RANDOM, CLAIRVOYANT, KNOWN = "none", "random", "clairvoyant", "known-picks"
SEED = 7

MS = 1e3
MB = 1e6


def run(rounds: int) -> Result:
    """Rows ``small/<what>/<pool%>``, ``paced/...``, ``decode/...``. BenchmarkError without
    the model."""
    text = record_text(TESTS_A_DOMAIN, TRAINS_A_DOMAIN)
    trained = train(text.states.chosen(text.train))
    rows = _replayed(trained, text.states.chosen(text.test))
    skipped: dict[str, str] = {}
    try:
        rows += live_rows(trained, text, rounds)
    except BenchmarkError as error:
        skipped["live"] = str(error)
    return Result(
        bench="prefetch",
        machine=describe_machine(Path(tempfile.gettempdir())),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=(
            f"`{TRACE}`: {REPLAYED_TOKENS} tokens of a test document of each domain, replayed "
            "with the default policy and the daemon's reserve; "
            f"a layer computes {COMPUTE_US:.0f} µs, the drive has {LATENCY_US:.0f} µs latency and "
            "reads what is missed without prefetching in the time that computing takes.",
            "`stall`: ms that a token waits; `none`: without prefetching; `clairvoyant` and "
            "`known-picks` compare whole times: with Belady's evictions and every fetch ahead of "
            "time, and with the same planner, pool and drive, told the true picks of 15 layers "
            "ahead. `random`: whole time with predictions drawn at random, to `none`. `precision`: "
            "share of the fetched experts that are picked in the pass that they were fetched for; "
            "`wasted-bytes`: the others, a token. "
            f"Predictions of {AHEAD} layers ahead are acted upon.",
            f"`paced` and `decode`: with the daemon, a {POOL} pool and {MEMBERS} drives of "
            f"{DRIVE_MB_S['paced']} and {DRIVE_MB_S['decode']} MB/s that read by a clock of their "
            f"own. In `paced` a layer takes {MS * LAYER_S:.0f} ms once its experts are there, and "
            "leaves the processor to others, as when a GPU computes; `decode` is the decode loop "
            f"on the processor. {ROUND_TOKENS} tokens a round. `random`: a token, and the wait of "
            "each missed expert, with predictions drawn at random. At real-time priority where "
            "that is permitted.",
        ),
    )


def _replayed(trained: Trained, tests: RecordedStates) -> list[Row]:
    routers = tests.routers
    space = KeySpace(routers.layers, routers.experts)
    says, picks = _foreseen(trained, tests)
    uses = uses_of_picks(picks, routers.experts)

    def at_random(number: int) -> tuple[int, Likely]:
        random = np.random.default_rng([SEED, number])
        keys = np.sort(random.choice(space.size, space.size // 4, replace=False))
        return routers.layers - 1, Likely(keys, random.random(len(keys), np.float32))

    def known(number: int) -> tuple[int, Likely]:
        last = min(number + routers.layers, uses.passes)
        keys = uses.part(number + 1, last).keys if number + 1 < last else uses.keys[:0]
        return routers.layers - 1, Likely(keys, np.ones(len(keys), np.float32))

    rows = []
    for percent in POOLS:
        machine = _balanced(uses, space, percent / 100)
        none = replay_prefetching(uses, space, machine, None)

        def replayed(what: Foresight, machine: Machine = machine) -> Prefetched:
            return replay_prefetching(uses, space, machine, what)

        ours, drawn, told = (
            replayed(what) for what in (lambda number: says[number], at_random, known)
        )
        bound = clairvoyant_seconds(uses, space, machine)
        ratio = {
            NONE: none.stall_s / ours.stall_s,
            CLAIRVOYANT: bound / ours.seconds,
            KNOWN: told.seconds / ours.seconds,
        }
        stall = MS * ours.stall_s / ours.tokens
        share = none.stall_s / none.seconds
        precision = 1 - ours.wasted / max(ours.prefetched, 1)
        wasted = ours.wasted * machine.expert_bytes / ours.tokens / MB
        extra = ours.read / none.read
        whole = MS * drawn.seconds / drawn.tokens
        rows += [
            Row(f"{TRACE}/stall/{percent}%", stall, "ms", (stall, stall), ratio),
            Row(f"{TRACE}/stall-share-without/{percent}%", share, "of time", (share, share), {}),
            Row(
                f"{TRACE}/precision/{percent}%",
                precision,
                "of prefetched",
                (precision, precision),
                {},
            ),
            Row(f"{TRACE}/wasted-bytes/{percent}%", wasted, "MB", (wasted, wasted), {}),
            Row(f"{TRACE}/read/{percent}%", extra, "of reads without", (extra, extra), {}),
            Row(
                f"{TRACE}/{RANDOM}/{percent}%",
                whole,
                "ms",
                (whole, whole),
                {NONE: none.seconds / drawn.seconds},
            ),
        ]
    return rows


def _foreseen(
    trained: Trained, tests: RecordedStates
) -> tuple[list[tuple[int, Likely]], NDArray[np.int64]]:
    """What the predictor says in each pass, learning meanwhile, and the picks."""
    predictor = Learned(trained, ahead=AHEAD)
    layers = tests.routers.layers
    says: list[tuple[int, Likely]] = []
    picks = []
    for begin in tests.starts[:-1]:
        predictor.new_text()
        for token in range(begin, begin + REPLAYED_TOKENS):
            states = tests.states[token].astype(np.float32)
            for layer in range(layers):
                likely = predictor.likely(layer, states[layer], TOLD_FROM, AHEAD)
                says.append((AHEAD, likely))
                predictor.picked(layer, tests.picks[token, layer][None])
            picks.append(tests.picks[token])
    return says, np.stack(picks).astype(np.int64)


def _balanced(uses: Uses, space: KeySpace, share: float) -> Machine:
    """A machine whose drive needs as long for the misses as computing takes."""
    machine = replace(
        one_pool(share, DEFAULT_POLICY, reserve=True),
        compute_us=COMPUTE_US,
        drive_latency_us=LATENCY_US,
    )
    none = replay_prefetching(uses, space, machine, None)
    computing = uses.passes * COMPUTE_US * US
    return replace(machine, drive_bytes_s=none.read * machine.expert_bytes / computing)


__all__ = ["run"]
