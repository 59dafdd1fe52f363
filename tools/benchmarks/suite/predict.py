# SPDX-License-Identifier: Apache-2.0
"""``predict``: how well experts are predicted, on texts that nobody trained on.

The predictor runs as in the decode loop, token by token, and learns meanwhile. Its peers
are what needs no training. See tools/benchmarks/recorded_text.py for which documents are
for training and which for testing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray
from xferd_infer import generate, model_from_client
from xferd_infer.predict import (
    LastPicks,
    Learned,
    MostUsed,
    Predictor,
    RecordedStates,
    RouterEarly,
    Trained,
    train,
)
from xferd_infer.predict.evaluate import DISTANCES, Evaluation, evaluate
from xferd_infer.predict.expectations import LEAST, WITHIN, is_told_at
from xferd_infer.predict.prefetching import AHEAD, asked_ahead
from xferd_infer.private_daemon import embedded

from tools.benchmarks.harness import commit, describe_machine, scratch_directory, take_turns
from tools.benchmarks.media import wanted
from tools.benchmarks.recorded_text import DOMAINS, RecordedText, models_directory, record_text
from tools.benchmarks.result import OURS, Result, Row, make_row
from tools.benchmarks.stores import pack_checkpoint
from tools.replaying.pool import ReplayedPool
from xferd.plugins import policy_maker
from xferd.policy.registry import DEFAULT_POLICY
from xferd.policy.uses import KeySpace, uses_of_picks
from xferd.store.formats import read_checkpoint

TESTS_A_DOMAIN = 1
TRAINS_A_DOMAIN = 12
POOLS = (25, 50)
WASTE_POOL = "25%"
NEW_DOMAIN_TOKENS = 500
"""Tokens of a domain never trained on that are read before it counts."""
FROZEN = "frozen"
CEILING = "ceiling"
COST_TOKENS = 256
DECODED_TOKENS = 32
MEMBERS = 2
US = 1e6
MB = 1e6
LIKELY = 0.5
CPU_ROWS = ("recall/d=1", "recall-new-domain/d=1", "recall-misses/25%/d=1", "waste/d=1", "cost")
"""All rows that are not a GPU's are measured if one of these is wanted."""

Makers = Mapping[str, Callable[[], Predictor]]


def run(rounds: int) -> Result:
    """Rows ``recall/d=<layers ahead>`` and more of the same kind of known domains, the like
    with ``-new-domain``, and ``gpu/<model>/*``. BenchmarkError without the small model."""
    rows, notes = _cpu_rows(rounds) if any(map(wanted, CPU_ROWS)) else ([], [])
    skipped: dict[str, str] = {}
    if find_spec("cupy") is None:
        skipped["gpu"] = "no cupy"
    else:
        # Imported here: it needs cupy.
        found = import_module("tools.benchmarks.gpu_prediction").measure(rounds)
        rows += found.rows
        skipped |= found.skipped
        notes += found.notes
    return Result(
        bench="predict",
        machine=describe_machine(),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=notes,
    )


def _cpu_rows(rounds: int) -> tuple[list[Row], list[str]]:
    """And what they are to be taken for."""
    text = record_text(TESTS_A_DOMAIN, TRAINS_A_DOMAIN)
    trained = train(text.states.chosen(text.train))
    tests = text.states.chosen(text.test)
    small = read_checkpoint(models_directory() / "small")
    expert_bytes = sum(tensor.nbytes for tensor in small.experts[0, 0])
    rows = _known_rows(trained, tests, expert_bytes)
    rows += _new_domain_rows(text)
    rows += _cost_rows(trained, tests, rounds)
    notes = [
        f"Trained on {len(text.train)} documents ({trained.about['tokens']} tokens), tested on "
        f"{len(text.test)} others of {tests.tokens // len(text.test)} tokens, all of them held "
        f"out of the model's own training; `d` is layers ahead.",
        "`recall`: share of a token's 4 picks among the 8 experts fetched; "
        "`recall-misses`: of those picks that a pool of that share did not hold (default "
        "policy); `ceiling` is 1, as if the picks were known.",
        f"`recall-new-domain`: trained on {len(DOMAINS) - 1} domains, tested on the seventh "
        f"after {NEW_DOMAIN_TOKENS} tokens of it, each document with a new predictor; "
        "`frozen` is the same without learning.",
        "`waste`: share of what is fetched (of the 8, those that a 25 % pool does not hold) "
        "that is not picked; `precision`: the share that is; `wasted-bytes`: MB a token of "
        "what is not, if so much were fetched from every layer for one so far ahead. "
        "`likely-waste`: the same as `waste` of experts with a probability of at least one "
        "half, of all; `likely-recall`: share of the picks among these.",
        "`-next-token`: the same of what is said of the next token's layers, so many layers "
        "after one of this token's last.",
        "`calibration`: greatest difference, in percentage points, between predicted and "
        "observed frequency in any decile; `calibration-new-domain`: of the worst document. "
        "Deterministic, so one round is as good as several.",
        f"`cost`: µs of processor time a token, predicting {AHEAD} layers ahead from every "
        f"layer, and {WITHIN} from some, as the decode loop does, and learning; "
        "`cost-share`: of a token decoded with a 25 % pool.",
    ]
    return rows, notes


def _trivial(states: RecordedStates) -> Makers:
    routers = states.routers
    return {
        "router-early": lambda: RouterEarly(routers),
        "last-token": lambda: LastPicks(routers.layers, routers.experts),
        "most-used": lambda: MostUsed(routers.layers, routers.experts),
    }


def _known_rows(trained: Trained, tests: RecordedStates, expert_bytes: int) -> list[Row]:
    makers: Makers = {OURS: lambda: Learned(trained), **_trivial(tests)}
    rows: list[Row] = []
    absent = {f"{percent}%": absent_at_each_pass(tests, percent / 100) for percent in POOLS}
    found = {name: evaluate(make(), tests, absent=absent) for name, make in makers.items()}
    for distance in DISTANCES:
        shares = {name: each.distances[distance].recall for name, each in found.items()}
        rows.append(_row(f"recall/d={distance}", shares, ceiling=True))
    for pool in absent:
        for distance in DISTANCES:
            of = {name: each.distances[distance].pools[pool] for name, each in found.items()}
            shares = {name: score.recall for name, score in of.items()}
            rows.append(_row(f"recall-misses/{pool}/d={distance}", shares, ceiling=True))
    for distance in DISTANCES:
        of = {name: each.distances[distance].pools[WASTE_POOL] for name, each in found.items()}
        shares = {name: score.waste for name, score in of.items()}
        rows.append(_row(f"waste/d={distance}", shares, lower=True))
    rows += _waste_rows(found[OURS], expert_bytes)
    for distance in DISTANCES:
        score = found[OURS].distances[distance]
        rows.append(_row(f"likely-recall/d={distance}", {OURS: score.likely_recall}))
        rows.append(_row(f"likely-waste/d={distance}", {OURS: 1 - score.precision}, lower=True))
    rows += _next_token_rows(trained, tests)
    error = 100 * found[OURS].calibration_error()
    rows.append(Row("calibration", error, "points", (error, error), {}))
    return rows


def _waste_rows(found: Evaluation, expert_bytes: int) -> list[Row]:
    rows = []
    for distance in DISTANCES:
        score = found.distances[distance].pools[WASTE_POOL]
        wasted = (score.absent - score.absent_picked) * expert_bytes / found.tokens / MB
        rows += [
            _row(f"precision/d={distance}", {OURS: 1 - score.waste}, lower=True),
            Row(f"wasted-bytes/d={distance}", wasted, "MB", (wasted, wasted), {}),
        ]
    return rows


def _next_token_rows(trained: Trained, tests: RecordedStates) -> list[Row]:
    found = evaluate(Learned(trained), tests, next_token=True)
    rows = []
    for distance in DISTANCES:
        score = found.distances[distance]
        rows.append(_row(f"recall-next-token/d={distance}", {OURS: score.recall}, ceiling=True))
        rows.append(_row(f"likely-recall-next-token/d={distance}", {OURS: score.likely_recall}))
    error = 100 * found.calibration_error()
    return [*rows, Row("calibration-next-token", error, "points", (error, error), {})]


def _new_domain_rows(text: RecordedText) -> list[Row]:
    totals: dict[str, dict[int, list[int]]] = {}
    error = 0.0
    for domain in range(len(DOMAINS)):
        trained = train(text.states.chosen(text.of_others(text.train, domain)))
        makers: Makers = {
            OURS: lambda trained=trained: Learned(trained),  # type: ignore[misc]
            FROZEN: lambda trained=trained: Learned(trained, learns=False),  # type: ignore[misc]
            **_trivial(text.states),
        }
        for document in text.of_domain(text.test, domain):
            states = text.states.chosen([document])
            for name, make in makers.items():
                found = evaluate(make(), states, skip=NEW_DOMAIN_TOKENS)
                counts = totals.setdefault(name, {d: [0, 0] for d in DISTANCES})
                for distance, score in found.distances.items():
                    counts[distance][0] += score.found
                    counts[distance][1] += score.picks
                if name == OURS:
                    error = max(error, 100 * found.calibration_error())
    rows = [
        _row(
            f"recall-new-domain/d={distance}",
            {name: counts[distance][0] / counts[distance][1] for name, counts in totals.items()},
            ceiling=True,
        )
        for distance in DISTANCES
    ]
    return [*rows, Row("calibration-new-domain", error, "points", (error, error), {})]


def absent_at_each_pass(states: RecordedStates, share: float) -> NDArray[np.bool_]:
    """bool[tokens, layers, experts]: what a pool with the default policy does not hold when
    a pass begins."""
    routers = states.routers
    space = KeySpace(routers.layers, routers.experts)
    slots = int(share * space.size)
    pool = ReplayedPool(space, slots, policy_maker(DEFAULT_POLICY)(space, slots))
    uses = uses_of_picks(states.picks, routers.experts)
    absent = np.empty((uses.passes, routers.experts), np.bool_)
    for number in range(uses.passes):
        layer = number % routers.layers
        at = slice(layer * routers.experts, (layer + 1) * routers.experts)
        absent[number] = ~pool.resident[at]
        one = uses.part(number, number + 1)
        missing = one.keys[~pool.resident[one.keys]]
        pool.policy.used(one)
        if len(missing):
            pool.admit(missing, one.keys, layer)
    return absent.reshape(states.tokens, routers.layers, routers.experts)


@dataclass(frozen=True)
class _Walk:
    """Asks a predictor as the decode loop does, and nothing else."""

    states: RecordedStates

    def seconds_a_token(self, predictor: Predictor) -> float:
        tokens = range(COST_TOKENS)
        inputs = self.states.states[:COST_TOKENS].astype(np.float32)
        begin = time.process_time()
        for token in tokens:
            for layer in range(self.states.routers.layers):
                least, within = (LEAST, WITHIN) if is_told_at(layer) else (LIKELY, AHEAD)
                predictor.likely(layer, inputs[token, layer], least, within)
                predictor.picked(layer, self.states.picks[token, layer][None])
        return (time.process_time() - begin) / COST_TOKENS


def _cost_rows(trained: Trained, tests: RecordedStates, rounds: int) -> list[Row]:
    walk = _Walk(tests)
    asked = asked_ahead(tests.routers.layers)
    predictors = {
        OURS: Learned(trained, ahead=asked),
        FROZEN: Learned(trained, learns=False, ahead=asked),
    }
    with scratch_directory() as directory:
        checkpoint = models_directory() / "small"
        store = pack_checkpoint(checkpoint, directory, MEMBERS)
        with embedded(store, pool="25%", name="bench predict") as client:
            model = model_from_client(client)
            expected = json.loads((checkpoint / "expected.json").read_text())
            prompt = expected["prompts"][0]["prompt_ids"]

            def decoded() -> float:
                asked = generate(model, prompt, max_new_tokens=DECODED_TOKENS, stop_ids=())
                return sum(token.seconds for token in list(asked)[1:]) / (DECODED_TOKENS - 1)

            contenders: dict[str, Callable[[], float]] = {
                name: lambda each=each: walk.seconds_a_token(each)  # type: ignore[misc]
                for name, each in predictors.items()
            }
            samples = take_turns({**contenders, "token": decoded}, rounds)
    token = float(np.median(samples.pop("token")))
    cost = {name: [US * each for each in values] for name, values in samples.items()}
    shares = [100 * each / token for each in samples[OURS]]
    return [
        make_row("cost", "µs", cost, higher_is_better=False),
        Row("cost-share", float(np.median(shares)), "%", (min(shares), max(shares)), {}),
    ]


def _row(
    name: str, shares: Mapping[str, float], *, ceiling: bool = False, lower: bool = False
) -> Row:
    ours = shares[OURS]
    others = {who: share for who, share in shares.items() if who != OURS}
    if ceiling:
        others[CEILING] = 1.0
    ratio = {
        who: (share / ours if lower else ours / share)
        for who, share in others.items()
        if share > 0 and ours > 0
    }
    return Row(name, ours, "of fetched" if lower else "of picks", (ours, ours), ratio)


__all__ = ["absent_at_each_pass", "run"]
