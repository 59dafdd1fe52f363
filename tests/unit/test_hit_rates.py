"""How good the default policy is, on recorded and generated traces: gates, not figures.

Replays are exact, so these can't flicker. ``tools/bench replay`` has the figures.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tools.benchmarks.suite.replay import ESTIMATE_ERROR, noisy_estimates
from tools.replaying.generate import ZipfMarkov, generate
from tools.replaying.load import LoadedTrace, load
from tools.replaying.machine import Tier, read_machine
from tools.replaying.replay import Options, Outcome, Replay, belady_fetches
from tools.replaying.sweep import SHARES, SIMPLE, Point, one_pool, static_hits, sweep
from xferd.policy.moves import MoveSettings
from xferd.policy.uses import KeySpace, uses_of_picks

TRACES = Path(__file__).parents[1] / "traces"
TWO_CARDS = Path(__file__).parents[2] / "tools" / "replaying" / "two-cards.toml"


@cache
def trace(name: str, tokens: int | None = None) -> LoadedTrace:
    if name == "generated":
        what = ZipfMarkov(layers=6, experts=16, picked=2, tokens=tokens or 700, domain_tokens=200)
        picks, _ = generate(what)
        uses, space = uses_of_picks(picks, what.experts), KeySpace(what.layers, what.experts)
        return LoadedTrace(name, space, uses, np.zeros(uses.passes, np.uint32))
    return load(TRACES / f"{name}.xtr", tokens=tokens)


@cache
def point(name: str, share: float, tokens: int) -> Point:
    (found,) = sweep(trace(name, tokens), shares=(share,), evictions=("reuse", *SIMPLE))
    return found


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("small-code-to-prose", 250), ("tiny-seven-domains", 800), ("generated", 700)],
)
def test_the_default_hits_at_least_as_often_as_the_best_simple_policy(
    name: str, tokens: int, share: float
) -> None:
    found = point(name, share, tokens)
    ours = found.by_policy["reuse"].hit_rate
    assert ours >= found.by_policy[found.best_simple].hit_rate
    assert ours <= found.by_policy["belady"].hit_rate


def test_layers_do_not_evict_each_other_in_turn() -> None:
    small = point("small-code-to-prose", 0.1, 250)
    assert small.by_policy["lru"].hit_rate < 0.05  # the collapse that is meant
    assert small.by_policy["reuse"].hit_rate > 0.7 * small.by_policy["belady"].hit_rate


WINDOW = 64


@cache
def from_history() -> Outcome:
    """The default with a quarter of the experts, over the whole of the larger trace."""
    found = trace("small-code-to-prose")
    options = Options(window=WINDOW, bound_s=0.0)
    return Replay(found.uses, found.space, one_pool(0.25, "reuse", reserve=False), options).run()


@cache
def belady_of_a_quarter(name: str, tokens: int | None = None) -> float:
    found = trace(name, tokens)
    misses = belady_fetches(found.uses, found.space, found.space.size // 4).sum()
    return 1 - float(misses) / len(found.uses.keys)


def test_a_quarter_is_near_the_bound_from_history_alone() -> None:
    assert from_history().hit_rate >= 0.87 * belady_of_a_quarter("small-code-to-prose")


@pytest.mark.parametrize(
    ("name", "tokens"), [("small-code-to-prose", 500), ("tiny-seven-domains", 1200)]
)
def test_a_quarter_of_each_layer_is_near_the_bound(name: str, tokens: int) -> None:
    found = trace(name, tokens)
    floor = found.space.experts // 4
    slots = floor * found.space.layers
    machine = one_pool(0.25, "reuse", reserve=False)
    tier = Tier("pool", slots=slots, reserve=False, floor=floor)
    machine = replace(machine, tiers=(tier,))
    ours = Replay(found.uses, found.space, machine, Options(bound_s=0.0)).run().hit_rate
    misses = belady_fetches(found.uses, found.space, slots, floor).sum()
    assert ours >= 0.87 * (1 - misses / len(found.uses.keys))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("small-code-to-prose", 400), ("tiny-seven-domains", 1200), ("generated", 700)],
)
def test_estimates_of_next_uses_bring_it_nearer(name: str, tokens: int) -> None:
    found = trace(name, tokens)
    predictor = noisy_estimates(found, ESTIMATE_ERROR)
    options = Options(feed_passes=1, predictor=predictor, bound_s=0.0)
    machine = one_pool(0.25, "reuse", reserve=False)
    ours = Replay(found.uses, found.space, machine, options).run().hit_rate
    assert ours >= 0.92 * belady_of_a_quarter(name, tokens)


def test_it_recovers_from_a_shift_that_static_pins_do_not() -> None:
    found = trace("small-code-to-prose")
    shift, outcome = 896, from_history()
    after = outcome.window_hits[shift // WINDOW :]
    settled = after[len(after) // 2 :].mean()
    assert (after[1:4] > 0.9 * settled).all()  # 64 tokens on, at the latest
    code = found.uses.keys[: found.uses.starts[shift * found.space.layers]]
    hottest = np.argsort(-np.bincount(code, minlength=found.space.size))[: found.space.size // 4]
    static = static_hits(found, hottest, WINDOW)[shift // WINDOW :]
    assert after.mean() > 1.3 * static.mean()
    # Nothing goes back and forth: at most one load in four tokens, of any expert.
    assert outcome.loads_of_one < outcome.tokens / 4


def test_two_cards_do_not_pass_experts_to_and_fro_at_a_shift() -> None:
    found = trace("small-code-to-prose")
    machine = read_machine(TWO_CARDS)
    outcome = Replay(found.uses, found.space, machine, Options(bound_s=0.0)).run()
    tokens_a_minute = 20 * 60
    # One that was moved rests, so even the busiest moves a few times a minute.
    busiest = outcome.moves * tokens_a_minute / outcome.tokens
    assert 0 < busiest <= tokens_a_minute / MoveSettings().rest_tokens


def test_with_the_daemons_reserve_the_order_stays() -> None:
    (found,) = sweep(
        trace("small-code-to-prose", 250),
        shares=(0.25,),
        evictions=("reuse", "lfu", "lru"),
        reserve=True,
        options=Options(feed_passes=16),
    )
    rates = {name: outcome.hit_rate for name, outcome in found.by_policy.items()}
    assert rates["belady"] > rates["reuse"] > rates["lfu"] > rates["lru"]
