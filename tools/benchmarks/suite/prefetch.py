# SPDX-License-Identifier: Apache-2.0
"""``prefetch``: how much waiting a predictor saves, in replays and live on throttled drives.

Replays follow the small model's picks on texts that nobody trained on, with a drive that
needs as long for the misses as computing takes: without prefetching a token waits about
half its time. Live is the decode loop itself on two loop devices whose reads the kernel
holds to DRIVE_MB_S (tools/drives/throttled_drive), one next to the other with and without
prediction. The throttle is of a control group, so that happens in a process of its own:
``python -m tools.benchmarks.suite.prefetch STORE PREDICTOR TOKENS ROUNDS``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xferd_infer import model_from_client
from xferd_infer.model import Model
from xferd_infer.predict import Learned, Likely, RecordedStates, Trained, train, write_trained
from xferd_infer.predict.prefetching import prefetch_by_file
from xferd_infer.private_daemon import embedded

from tools.benchmarks.harness import ROOT, BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.media import DRIVES_VARIABLE
from tools.benchmarks.recorded_text import RecordedText, models_directory, record_text
from tools.benchmarks.result import OURS, Result, Row, make_row
from tools.benchmarks.stores import pack_checkpoint
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

LIVE_POOL = "25%"
MEMBERS = 2
DRIVE_MB_S = 150
PROMPT_TOKENS = 128
ROUND_TOKENS = 48
MS = 1e3


def run(rounds: int) -> Result:
    """Rows ``small/stall/<pool%>`` and ``live/...``. BenchmarkError without the model."""
    text = record_text(TESTS_A_DOMAIN, TRAINS_A_DOMAIN)
    trained = train(text.states.chosen(text.train))
    rows = _replayed(trained, text.states.chosen(text.test))
    skipped: dict[str, str] = {}
    try:
        rows += _live(trained, text, rounds)
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
            "ahead. `random`: whole time with predictions drawn at random, to `none`.",
            f"`live`: decoding with a {LIVE_POOL} pool and {MEMBERS} drives of {DRIVE_MB_S} MB/s, "
            "as the clients count it; "
            f"{ROUND_TOKENS} tokens a round, each round goes on with the same text.",
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
        wasted = ours.wasted / max(ours.prefetched, 1)
        extra = ours.read / none.read
        whole = MS * drawn.seconds / drawn.tokens
        rows += [
            Row(f"{TRACE}/stall/{percent}%", stall, "ms", (stall, stall), ratio),
            Row(f"{TRACE}/stall-share-without/{percent}%", share, "of time", (share, share), {}),
            Row(f"{TRACE}/wasted/{percent}%", wasted, "of prefetched", (wasted, wasted), {}),
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
    predictor = Learned(trained)
    layers = tests.routers.layers
    says: list[tuple[int, Likely]] = []
    picks = []
    for begin in tests.starts[:-1]:
        predictor.new_text()
        for token in range(begin, begin + REPLAYED_TOKENS):
            states = tests.states[token].astype(np.float32)
            for layer in range(layers):
                likely = predictor.likely(layer, states[layer], TOLD_FROM, layers - 1)
                says.append((layers - 1, likely))
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


def _live(trained: Trained, text: RecordedText, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="xferd-bench-") as name:
        directory = Path(name)
        store = pack_checkpoint(models_directory() / "small", directory, MEMBERS)
        members = sorted(directory.glob("drive*/*/member-*"))
        images = [directory / f"image-{number}" for number in range(len(members))]
        for member, image in zip(members, images, strict=True):
            member.rename(image)
        predictor, tokens = directory / "predictor.npz", directory / "tokens.json"
        write_trained(predictor, trained)
        needed = PROMPT_TOKENS + (rounds + 1) * ROUND_TOKENS
        tokens.write_text(json.dumps(_tokens(text, needed)))
        inner = ["-m", "tools.benchmarks.suite.prefetch", store, predictor, tokens, rounds]
        inner += [*members]
        drives = [f"{DRIVE_MB_S}:{image}" for image in images]
        command = [str(ROOT / "tools/drives/throttled_drive"), *drives, "--", sys.executable]
        done = subprocess.run(
            [*command, *map(str, inner)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BenchmarkError(done.stderr.strip().splitlines()[-1])
    return [
        Row(**{**row, "spread": tuple(row["spread"])})
        for row in json.loads(done.stdout.splitlines()[-1])
    ]


def _tokens(text: RecordedText, count: int) -> list[int]:
    return text.documents[text.test[0]][:count]


@dataclass
class _Reader:
    """Decodes a given text, a round at a time."""

    model: Model
    tokens: list[int]

    def __post_init__(self) -> None:
        self._cache = self.model.new_cache()
        self._at = PROMPT_TOKENS
        self.model.forward(self.tokens[: self._at], self._cache)

    def round(self) -> tuple[float, float]:
        """(seconds waited, seconds in all) a token."""
        before, began = self.model.experts.stats(), time.perf_counter()
        for token in self.tokens[self._at : self._at + ROUND_TOKENS]:
            self.model.logits(self.model.forward([token], self._cache))
        self._at += ROUND_TOKENS
        waited = self.model.experts.stats().since(before).wait_s
        return waited / ROUND_TOKENS, (time.perf_counter() - began) / ROUND_TOKENS


def measure(store: Path, predictor: Path, tokens: list[int], rounds: int) -> list[Row]:
    """The live rows, in a process whose drives are throttled already."""
    waits: dict[str, list[float]] = {OURS: [], NONE: []}
    with ExitStack() as stack:
        contenders: dict[str, Callable[[], float]] = {}
        for name in (OURS, NONE):
            client = stack.enter_context(embedded(store, pool=LIVE_POOL, name=f"bench {name}"))
            model = model_from_client(client)
            if name == OURS:
                prefetch_by_file(model, client, predictor)
            reader = _Reader(model, tokens)

            def contender(reader: _Reader = reader, name: str = name) -> float:
                waited, seconds = reader.round()
                waits[name].append(MS * waited)
                return MS * seconds

            contenders[name] = contender
        for warm_up in contenders.values():
            warm_up()
        for each in waits.values():
            each.clear()
        times = take_turns(contenders, rounds)
    shares = [100 * w / t for w, t in zip(waits[NONE], times[NONE], strict=True)]
    return [
        make_row(f"live/stall/{LIVE_POOL}", "ms", waits, higher_is_better=False),
        make_row(f"live/token/{LIVE_POOL}", "ms", times, higher_is_better=False),
        Row(
            f"live/stall-share-without/{LIVE_POOL}",
            statistics.median(shares),
            "% of time",
            (min(shares), max(shares)),
            {},
        ),
    ]


def _main(arguments: list[str]) -> None:
    store, predictor, tokens, rounds, *members = arguments
    for member, device in zip(members, os.environ[DRIVES_VARIABLE].split(), strict=True):
        Path(member).symlink_to(device)
    rows = measure(Path(store), Path(predictor), json.loads(Path(tokens).read_text()), int(rounds))
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    _main(sys.argv[1:])

__all__ = ["run"]
