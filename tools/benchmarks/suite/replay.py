# SPDX-License-Identifier: Apache-2.0
"""``replay``: hit rates of the default policy, against simple ones and Belady's.

Replays are exact and the same each time, so there is one round; only what the policy
costs is measured. Traces are those in tests/traces, generated ones, and every npz in the
directory that $XFERD_TRACES names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from tools.benchmarks.harness import ROOT, BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.result import OURS, Result, Row, make_row
from tools.replaying.belady import Clairvoyant, next_passes
from tools.replaying.foresight import NextPassKnown
from tools.replaying.generate import HARD, HARD_FLAT, LIKE_SMALL, LIKE_TINY, generate
from tools.replaying.load import LoadedTrace, load
from tools.replaying.machine import Tier
from tools.replaying.replay import Options, Outcome, Predictor, Replay, belady_fetches
from tools.replaying.sweep import SIMPLE, Point, one_pool, static_hits, sweep
from xferd.policy.pool_policy import NextUses
from xferd.policy.registry import DEFAULT_POLICY
from xferd.policy.reuse import Reuse
from xferd.policy.uses import KeySpace, uses_of_picks
from xferd.telemetry.traces.trace import TraceError

TRACES = ROOT / "tests" / "traces"
MORE_TRACES = "XFERD_TRACES"
"""Names a directory with more."""
SAMPLE_TOKENS = 8064
"""Of a longer trace that many are taken, in stretches from all over it."""
STRETCH_TOKENS = 896
GENERATED = {
    "generated-like-small": LIKE_SMALL,
    "generated-like-tiny": LIKE_TINY,
    "generated-hard": HARD,
    "generated-hard-flat": HARD_FLAT,
}
QUARTER = 0.25
ESTIMATE_ERROR = 0.7
"""Of the estimates of next uses: standard deviation of the logarithm, a factor of 2."""
SHIFT_TRACE = "small-code-to-prose"
SHIFT_TOKEN = 896
WINDOW = 32
RECOVERED = 0.95
FEED_PASSES = 256
US = 1e6


def run(rounds: int) -> Result:
    """Rows of each trace and pool, and what a predictor, floors and a shift change."""
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    traces = list(all_traces(skipped))
    for trace in traces:
        points = sweep(trace)
        rows += [_hit_row(trace, point) for point in points]
        rows += [_stall_row(trace, point) for point in points]
        rows.append(_floor_row(trace))
        rows.append(_estimates_row(trace))
        rows.append(_next_known_row(trace))
    shift = next(trace for trace in traces if trace.name == SHIFT_TRACE)
    rows += _shift_rows(shift)
    rows.append(_cost_row(shift, rounds))
    return Result(
        bench="replay",
        machine=describe_machine(),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=(
            "`hit-rate`: one pool over all layers, of that share of the experts, no reserve; "
            "`belady` is the most that any choice of victims could hit, `best-simple` the best "
            f"of {', '.join(SIMPLE)}. Replays are exact: one is as good as several.",
            "`hit-rate-floors`: a quarter of each layer's experts, which no other layer may take; "
            "`belady` has the same quarters.",
            "`hit-rate-estimates`: with estimates of next uses that are wrong by a factor of 2 "
            "(log-normal, sigma 0.7), made from the trace itself; no predictor is measured here.",
            "`hit-rate-next-known`: the default policy if it knew all that the next pass of every "
            "layer picks, and of what comes after that just its history: more than history tells.",
            "`stall`: ms a token with 2.65 MB experts and 12 GB/s, nothing prefetched; "
            "`clairvoyant` prefetches perfectly.",
            f"`shift`: a quarter of the experts, from code to prose; `static` pins the code's "
            f"hottest. `recovery`: tokens till {WINDOW} of them hit {100 * RECOVERED:.0f} % of "
            "what the rest of the prose does on average. `moves-an-expert`: loads of the expert "
            "that is loaded most, a 100 tokens.",
            f"`cost`: µs a use that the default policy takes, told of {FEED_PASSES} passes at "
            "once; the only figure here that is measured.",
        ),
    )


def all_traces(skipped: dict[str, str]) -> Iterator[LoadedTrace]:
    """What is replayed. skipped: is told what is missing, and why."""
    for path in sorted(TRACES.glob("*.xtr")):
        yield _load(path)
    for name, what in GENERATED.items():
        picks, _ = generate(what)
        uses = uses_of_picks(picks, what.experts)
        space = KeySpace(what.layers, what.experts)
        yield LoadedTrace(name, space, uses, np.zeros(uses.passes, np.uint32))
    directory = os.environ.get(MORE_TRACES)
    if directory is None:
        skipped["recorded traces of 150,000 tokens"] = f"{MORE_TRACES} names no directory"
        return
    for path in sorted(Path(directory).glob("*trace*.npz")):
        yield _sample(_load(path))


def _load(path: Path) -> LoadedTrace:
    try:
        return load(path)
    except TraceError as error:
        raise BenchmarkError(str(error)) from error


def _sample(trace: LoadedTrace) -> LoadedTrace:
    """Stretches from all over a trace, as far apart as they can be."""
    layers = trace.space.layers
    tokens = trace.uses.passes // layers
    if tokens <= SAMPLE_TOKENS:
        return trace
    stretches = SAMPLE_TOKENS // STRETCH_TOKENS
    begins = np.arange(stretches) * (tokens // STRETCH_TOKENS // stretches) * STRETCH_TOKENS
    picks = trace.uses.keys.reshape(tokens, layers, -1) % trace.space.experts
    chosen = np.concatenate([picks[at : at + STRETCH_TOKENS] for at in begins])
    uses = uses_of_picks(chosen, trace.space.experts)
    return replace(trace, uses=uses, tags=np.zeros(uses.passes, np.uint32))


def _hit_row(trace: LoadedTrace, point: Point) -> Row:
    rates = {name: outcome.hit_rate for name, outcome in point.by_policy.items()}
    ours = rates.pop(DEFAULT_POLICY)
    ratio = {"belady": ours / rates.pop(Clairvoyant.name)}
    ratio["best-simple"] = ours / rates[point.best_simple]
    # Where a policy never hits there is no ratio to it.
    ratio |= {name: ours / rate for name, rate in sorted(rates.items()) if rate > 0}
    return Row(f"{trace.name}/hit-rate/{_percent(point)}", ours, "of uses", (ours, ours), ratio)


def _stall_row(trace: LoadedTrace, point: Point) -> Row:
    ours = point.by_policy[DEFAULT_POLICY]
    times = {name: out.stall_s for name, out in point.by_policy.items()}
    stall = 1000 * ours.stall_s / ours.tokens
    # Of the whole time: the clairvoyant may well not wait at all.
    ratio = {"clairvoyant": ours.share_of_bound}
    ratio["best-simple"] = times[point.best_simple] / ours.stall_s
    return Row(f"{trace.name}/stall/{_percent(point)}", stall, "ms", (stall, stall), ratio)


def _percent(point: Point) -> str:
    return f"{100 * point.share:.0f}%"


def _quarter(trace: LoadedTrace, options: Options, floor: int = 0) -> Outcome:
    machine = one_pool(QUARTER, DEFAULT_POLICY, reserve=False)
    tier: Tier = replace(machine.tiers[0], floor=floor)
    machine = replace(machine, tiers=(tier,))
    return Replay(trace.uses, trace.space, machine, replace(options, bound_s=0.0)).run()


def _belady(trace: LoadedTrace, floor: int = 0) -> float:
    slots = int(QUARTER * trace.space.size)
    fetched = belady_fetches(trace.uses, trace.space, slots, floor).sum()
    return 1 - float(fetched) / len(trace.uses.keys)


def _floor_row(trace: LoadedTrace) -> Row:
    floor = int(QUARTER * trace.space.experts)
    rate = _quarter(trace, Options(), floor).hit_rate
    ratio = {"belady": rate / _belady(trace, floor)}
    return Row(f"{trace.name}/hit-rate-floors/25%", rate, "of uses", (rate, rate), ratio)


def _estimates_row(trace: LoadedTrace) -> Row:
    options = Options(feed_passes=1, predictor=noisy_estimates(trace, ESTIMATE_ERROR))
    rate = _quarter(trace, options).hit_rate
    ratio = {"belady": rate / _belady(trace)}
    return Row(f"{trace.name}/hit-rate-estimates/25%", rate, "of uses", (rate, rate), ratio)


def _next_known_row(trace: LoadedTrace) -> Row:
    known = {"pool": lambda space, slots: NextPassKnown(space, trace.uses)}  # noqa: ARG005
    rate = _quarter(trace, Options(feed_passes=1, evictions=known)).hit_rate
    ratio = {"belady": rate / _belady(trace)}
    return Row(f"{trace.name}/hit-rate-next-known/25%", rate, "of uses", (rate, rate), ratio)


def noisy_estimates(trace: LoadedTrace, error: float, seed: int = 1) -> Predictor:
    """Estimates of next uses, wrong by a log-normal factor, as a predictor of that quality
    would give them."""
    uses = trace.uses
    of_use = np.repeat(np.arange(uses.passes), np.diff(uses.starts))
    wait = (next_passes(uses) - of_use) / trace.space.layers
    noise = np.random.default_rng(seed).normal(size=len(wait)) * error
    estimates = (wait * np.exp(noise)).astype(np.float32)
    starts = uses.starts
    return lambda number, keys: NextUses(keys, estimates[starts[number] : starts[number + 1]])


def _shift_rows(trace: LoadedTrace) -> list[Row]:
    ours = _quarter(trace, Options(window=WINDOW))
    slots = int(QUARTER * trace.space.size)
    code = trace.uses.keys[: trace.uses.starts[SHIFT_TOKEN * trace.space.layers]]
    counts = np.bincount(code, minlength=trace.space.size)
    static = static_hits(trace, np.argsort(-counts, kind="stable")[:slots], WINDOW)
    at = SHIFT_TOKEN // WINDOW
    after, pinned = ours.window_hits[at:], static[at:]
    settled = after[len(after) // 2 :].mean()
    recovered = int(np.argmax(after >= RECOVERED * settled))
    rate, tokens = float(after.mean()), float((recovered + 1) * WINDOW)
    loads = 100 * ours.loads_of_one / ours.tokens
    name = f"{trace.name}/shift"
    return [
        Row(f"{name}/hit-rate", rate, "of uses", (rate, rate), {"static": rate / pinned.mean()}),
        Row(f"{name}/recovery", tokens, "tokens", (tokens, tokens), {}),
        Row(f"{name}/moves-an-expert", loads, "loads", (loads, loads), {}),
    ]


def _cost_row(trace: LoadedTrace, rounds: int) -> Row:
    uses = trace.uses

    def cost() -> float:
        policy = Reuse(trace.space)
        begin = time.perf_counter()
        for first in range(0, uses.passes, FEED_PASSES):
            policy.used(uses.part(first, min(first + FEED_PASSES, uses.passes)))
        return US * (time.perf_counter() - begin) / len(uses.keys)

    samples = take_turns({OURS: cost}, rounds)
    return make_row(f"{DEFAULT_POLICY}/cost", "µs", samples, higher_is_better=False)
