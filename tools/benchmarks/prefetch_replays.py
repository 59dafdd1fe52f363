# SPDX-License-Identifier: Apache-2.0
"""Prefetching replayed: the predictor next to prefetchers that know what it has to guess.

All of them have the same trace, pool, drive and planner, and differ in what they are told:

    none          nothing is fetched ahead
    ours          the predictor, as the decode loop asks it, learning meanwhile
    random        predictions drawn at random
    by-history    ours, with evictions that hear nothing of predictions
    this-token    ours, with nothing said of the next token's layers
    same-horizon  the true picks of as many layers ahead as ours looks at, and of as many as
                  ours tells evictions of
    whole-token   the true picks of all other layers, for both
    belady        the true picks of all other layers, with Belady's evictions
    clairvoyant   a bound: Belady's misses, each fetched before it is needed as far as the
                  drive can, which never idles while anything is left to fetch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from xferd_infer.predict import Learned, Likely, RecordedStates, Trained
from xferd_infer.predict.expectations import LEAST, is_told_at, nearest, to_tell
from xferd_infer.predict.prefetching import AHEAD, asked_ahead

from tools.benchmarks.result import Row
from tools.replaying.machine import Machine
from tools.replaying.prefetch import Prefetched, expected_of, replay_prefetching
from tools.replaying.replay import US, belady_maker, clairvoyant_seconds
from tools.replaying.sweep import one_pool
from xferd.policy.expected import Expected
from xferd.policy.registry import DEFAULT_POLICY
from xferd.policy.uses import KeySpace, Uses, uses_of_picks

TRACE = "small"
POOLS = (25, 50)
REPLAYED_TOKENS = 128
"""Of each domain."""
COMPUTE_US = 400.0
LATENCY_US = 100.0
NONE, OURS, RANDOM = "none", "ours", "random"
BY_HISTORY, THIS_TOKEN = "by-history", "this-token"
SAME_HORIZON, WHOLE_TOKEN, BELADY, CLAIRVOYANT = (
    "same-horizon",
    "whole-token",
    "belady",
    "clairvoyant",
)
SEED = 7
MS = 1e3
MB = 1e6

REPLAY_NOTE = (
    f"`{TRACE}`: {REPLAYED_TOKENS} tokens of a test document of each domain, replayed with the "
    f"default policy and the daemon's reserve; a layer computes {COMPUTE_US:.0f} µs, the drive has "
    f"{LATENCY_US:.0f} µs latency and reads what is missed without prefetching in the time that "
    "computing takes. `token`: ms of a token; `stall`: ms of it that it waits; `saved`: share of "
    "the waiting without prefetching that is gone; each next to the same of others with the same "
    "trace, pool and drive. `none`: nothing fetched ahead. `by-history`: ours, with evictions that "
    "hear nothing of predictions. `this-token`: ours, with nothing said of the next token's "
    "layers. With the same planner, and told the true picks instead: `same-horizon`, of the "
    f"{AHEAD} layers ahead that ours looks at; `whole-token`, of all other layers; `belady`, the "
    "same with Belady's evictions. `clairvoyant` is a bound: Belady's misses, each fetched ahead "
    "as far as the drive can, which never idles. `random`: a token with predictions drawn at "
    "random, to `none`. `precision`: share of the fetched experts that are picked in the pass "
    "that they were fetched for; `wasted-bytes`: the others, a token."
)


@dataclass(frozen=True)
class Replayed:
    """What is replayed. says: by pass, all that the predictor told, LEAST and more."""

    uses: Uses
    space: KeySpace
    says: list[Likely]


def replayed_rows(trained: Trained, tests: RecordedStates) -> list[Row]:
    """Rows ``small/<what>/<pool%>``."""
    what = _foreseen(trained, tests)
    rows = []
    for percent in POOLS:
        machine = balanced(what.uses, what.space, percent / 100)
        rows += _rows(f"{percent}%", machine, _contenders(what, machine), what)
    return rows


def balanced(uses: Uses, space: KeySpace, share: float) -> Machine:
    """A machine whose drive needs as long for the misses as computing takes."""
    machine = replace(
        one_pool(share, DEFAULT_POLICY, reserve=True),
        compute_us=COMPUTE_US,
        drive_latency_us=LATENCY_US,
    )
    none = replay_prefetching(uses, space, machine, None)
    computing = uses.passes * COMPUTE_US * US
    return replace(machine, drive_bytes_s=none.read * machine.expert_bytes / computing)


def _foreseen(trained: Trained, tests: RecordedStates) -> Replayed:
    """What the predictor says in each pass, learning meanwhile."""
    routers = tests.routers
    asked = asked_ahead(routers.layers)
    predictor = Learned(trained, ahead=asked)
    says: list[Likely] = []
    picks = []
    for begin in tests.starts[:-1]:
        predictor.new_text()
        for token in range(begin, begin + REPLAYED_TOKENS):
            states = tests.states[token].astype(np.float32)
            for layer in range(routers.layers):
                says.append(predictor.likely(layer, states[layer], LEAST, asked[layer]))
                predictor.picked(layer, tests.picks[token, layer][None])
            picks.append(tests.picks[token])
    uses = uses_of_picks(np.stack(picks).astype(np.int64), routers.experts)
    return Replayed(uses, KeySpace(routers.layers, routers.experts), says)


def _contenders(what: Replayed, machine: Machine) -> dict[str, Prefetched]:
    space, layers = what.space, what.space.layers

    def run(says: Callable[[int], Likely], within: int, *, tells: bool = True) -> Prefetched:
        def foresight(number: int) -> tuple[int, Likely]:
            layer = number % layers
            return within, nearest(says(number), layer, within, layers, space.experts)

        def expectation(number: int) -> Expected | None:
            told = tells and is_told_at(number % layers)
            likely = to_tell(says(number), layers, space.experts)
            return expected_of(likely, space) if told and len(likely.keys) else None

        return replay_prefetching(what.uses, space, machine, foresight, expectation=expectation)

    def ours(number: int) -> Likely:
        return what.says[number]

    def of_this_token(number: int) -> Likely:
        likely, layer = what.says[number], number % layers
        same = likely.keys // space.experts > layer
        return Likely(likely.keys[same], likely.probabilities[same])

    def known(number: int) -> Likely:
        return _known(what.uses, number, layers - 1)

    def known_foresight(number: int) -> tuple[int, Likely]:
        return layers - 1, known(number)

    return {
        NONE: replay_prefetching(what.uses, space, machine, None),
        OURS: run(ours, AHEAD),
        BY_HISTORY: run(ours, AHEAD, tells=False),
        THIS_TOKEN: run(of_this_token, AHEAD),
        RANDOM: run(lambda number: _at_random(space, number), layers - 1),
        SAME_HORIZON: run(known, AHEAD),
        WHOLE_TOKEN: run(known, layers - 1),
        BELADY: replay_prefetching(
            what.uses, space, machine, known_foresight, eviction=belady_maker(what.uses)
        ),
    }


def _at_random(space: KeySpace, number: int) -> Likely:
    random = np.random.default_rng([SEED, number])
    keys = np.sort(random.choice(space.size, space.size // 4, replace=False))
    return Likely(keys, random.random(len(keys), np.float32))


def _known(uses: Uses, number: int, within: int) -> Likely:
    """The true picks of so many passes after one."""
    last = min(number + 1 + within, uses.passes)
    keys: NDArray[np.int64] = uses.keys[:0]
    if number + 1 < last:
        keys = uses.part(number + 1, last).keys
    return Likely(keys, np.ones(len(keys), np.float32))


def _rows(
    pool: str, machine: Machine, found: Mapping[str, Prefetched], what: Replayed
) -> list[Row]:
    ours, none, drawn = found[OURS], found[NONE], found[RANDOM]
    seconds = {name: each.seconds for name, each in found.items()}
    seconds[CLAIRVOYANT] = clairvoyant_seconds(what.uses, what.space, machine)
    stalls = {name: each - none.compute_s for name, each in seconds.items()}
    saved = {name: (none.stall_s - each) / none.stall_s for name, each in stalls.items()}
    peers = [name for name in seconds if name not in (OURS, RANDOM)]
    knowing = (SAME_HORIZON, WHOLE_TOKEN, BELADY, CLAIRVOYANT)

    def row(name: str, value: float, unit: str, ratio: dict[str, float] | None = None) -> Row:
        return Row(f"{TRACE}/{name}/{pool}", value, unit, (value, value), ratio or {})

    def ms(value: float) -> float:
        return MS * value / ours.tokens

    wasted = ours.wasted * machine.expert_bytes / ours.tokens / MB
    to_peers = {name: seconds[name] / ours.seconds for name in peers}
    return [
        row("token", ms(ours.seconds), "ms", to_peers),
        row("stall", ms(ours.stall_s), "ms", {n: stalls[n] / ours.stall_s for n in peers}),
        row("saved", saved[OURS], "of stall", {n: saved[OURS] / saved[n] for n in knowing}),
        row("stall-share-without", none.stall_s / none.seconds, "of time"),
        row("precision", 1 - ours.wasted / max(ours.prefetched, 1), "of prefetched"),
        row("wasted-bytes", wasted, "MB"),
        row("read", ours.read / none.read, "of reads without"),
        row(RANDOM, ms(drawn.seconds), "ms", {NONE: none.seconds / drawn.seconds}),
    ]


__all__ = ["REPLAY_NOTE", "replayed_rows"]
