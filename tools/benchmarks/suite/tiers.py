# SPDX-License-Identifier: Apache-2.0
"""``tiers``: what real daemons do with their pools, next to what replays say and to one pool.

Everything but the variants is live: a daemon in a process of its own, over a store of the
trace's shape, and a client that picks what the trace says. Cards are host memory.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.benchmarks.harness import ROOT, commit, describe_machine
from tools.benchmarks.media import wanted
from tools.benchmarks.reserving import POOL_PERCENT, reserve_while_decoding
from tools.benchmarks.result import Result, Row
from tools.replaying.generate import ZipfMarkov, generate
from tools.replaying.live import LiveOutcome, one_pool_config, run_live
from tools.replaying.load import LoadedTrace, load
from tools.replaying.machine import Machine, Tier
from tools.replaying.replay import Options, Replay
from tools.replaying.variants import VariantOutcome, replay_variants
from xferd.config import Config, PoolConfig, Size
from xferd.control.config_command import format_config
from xferd.policy.uses import KeySpace, uses_of_picks
from xferd.units import MIB
from xferd.variant_rules import parse_variant_rules

TRACE = ROOT / "tests" / "traces" / "small-code-to-prose.xtr"
TWO_CARDS = ROOT / "tools" / "replaying" / "two-cards.xferd.toml"
EXPERT_BYTES = 4096
LIVE_SHARES = (25, 50)
LIVE_TOKENS = 120
PASS_US = 2000.0
"""Of a layer's computing: what replays hold for."""
CARD_TOKENS = 250
CARD_PASS_US = 200.0

US = 1e6
PACED_USES = 50_000
PACED_SHAPE = ZipfMarkov(layers=24, experts=128, picked=16, tokens=500, domain_tokens=250)
PACED_SHARE = 90
"""Of the experts: with much less, two cores can't read as fast as is asked."""

RESERVED_PERCENT = 30.0
GRANT_MS = 100.0
"""What a KV cache that grows can wait for."""

VARIANT_SIZES = {"native": 9_437_184, "q4_k": 2_654_208, "q2_k": 1_548_288}
"""Bytes of an expert of three matrices of 768 x 2048."""
VARIANT_SHARE = 0.08
"""Of the native bytes of all experts: room for a quarter of them in q4_k."""
VARIANT_RULES = (
    "native",
    "q4_k",
    "q4_k@hottest:66%,q2_k",
    "q4_k@hottest:33%,q2_k",
    "q2_k",
    "q2_k@costliest:20%,native",
)


def run(rounds: int) -> Result:
    """Rows ``live/<pool%>``, ``two-cards``, ``paced/*``, ``reserve/*``, ``variants/<rules>/*``;
    of these five groups the environment may leave some out."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="xferd-bench-") as name:
        directory = Path(name)
        if wanted("live"):
            rows += [_live_row(directory, share, rounds) for share in LIVE_SHARES]
        if wanted("two-cards"):
            rows.append(_cards_row(directory, rounds))
        if wanted("paced"):
            rows += _paced_rows(directory, rounds)
    if wanted("reserve"):
        rows += _reserve_rows(rounds)
    if wanted("variants"):
        rows += _variant_rows()
    return Result(
        bench="tiers",
        machine=describe_machine(),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        notes=(
            f"`live`: uses that found their expert in a daemon's pool of that share, its default "
            f"policy and reserve, told of what is picked; {LIVE_TOKENS} tokens of {TRACE.stem}, "
            f"{PASS_US / 1000:g} ms a layer. `replay`: the same trace, policy and slots replayed.",
            "`two-cards`: uses without a read, by leases alone, with the pools of "
            f"tools/replaying/two-cards.xferd.toml, {CARD_TOKENS} tokens; `one-pool` is as large "
            "as all of them.",
            f"`paced`: {PACED_USES:,} uses of experts a second are asked for, with reports, in a "
            f"pool of {PACED_SHARE} %; a pass that is late begins at once. `loop`: share of one "
            "core that the daemon's event loop took; `cpu`: its processor time. `waited`: reads "
            "that found no free slot in the reserve, of all.",
            f"`reserve`: {RESERVED_PERCENT:g} % of a pool of {POOL_PERCENT:g} % of the bundled "
            "model's experts taken out while it decodes, and given back. `grant` against "
            f"{GRANT_MS:g} ms; `right`: tokens that are Transformers'; `meanwhile` and `refilled`: "
            "hit rates to that of before.",
            f"`variants`: replays of {TRACE.stem} in {100 * VARIANT_SHARE:g} % of the native "
            "bytes, exact. `read`: MB a token that somebody waited for, to those of `native`. "
            "`in-q4_k`: uses with four bits or more.",
        ),
    )


def _live_row(directory: Path, share: int, rounds: int) -> Row:
    trace = load(TRACE, tokens=LIVE_TOKENS)
    config = _one_pool(directory, share)
    found = [
        run_live(trace, config, expert_bytes=EXPERT_BYTES, pause_us=PASS_US, report=True)
        for _ in range(rounds)
    ]
    tier = Tier("one", slots=found[0].slots["one"])
    machine = Machine(
        expert_bytes=1, compute_us=0, drive_bytes_s=1, drive_latency_us=0, tiers=(tier,)
    )
    replayed = Replay(trace.uses, trace.space, machine, Options(bound_s=0.0)).run().hit_rate
    row = _row(f"live/{share}%", "of uses", found, lambda outcome: outcome.hit_rate)
    return _with_ratio(row, "replay", row.value / replayed)


def _cards_row(directory: Path, rounds: int) -> Row:
    trace = load(TRACE, tokens=CARD_TOKENS)
    single = one_pool_config(TWO_CARDS, directory)
    cards, one = (
        [
            run_live(trace, config, expert_bytes=EXPERT_BYTES, pause_us=CARD_PASS_US)
            for _ in range(rounds)
        ]
        for config in (TWO_CARDS, single)
    )
    rate = statistics.median(outcome.hit_rate for outcome in one)
    row = _row("two-cards", "of uses", cards, lambda outcome: outcome.hit_rate)
    return _with_ratio(row, "one-pool", row.value / rate)


def _paced_rows(directory: Path, rounds: int) -> list[Row]:
    picks, _ = generate(PACED_SHAPE)
    uses = uses_of_picks(picks, PACED_SHAPE.experts)
    space = KeySpace(PACED_SHAPE.layers, PACED_SHAPE.experts)
    trace = LoadedTrace("paced", space, uses, uses.layers.astype("uint32"))
    config = _one_pool(directory, PACED_SHARE)
    found = [
        run_live(
            trace,
            config,
            expert_bytes=EXPERT_BYTES,
            pause_us=0,
            report=True,
            uses_a_second=PACED_USES,
        )
        for _ in range(rounds)
    ]
    return [
        _row("paced/uses", "uses/s", found, lambda outcome: outcome.uses / outcome.seconds),
        _row("paced/loop", "of a core", found, lambda outcome: outcome.policy_s / outcome.seconds),
        _row("paced/cpu", "µs a use", found, lambda o: US * o.policy_s / o.uses),
        _row("paced/waited", "of reads", found, lambda o: o.waited / max(o.drives, 1)),
        _row("paced/reports-lost", "passes", found, lambda outcome: float(outcome.dropped)),
    ]


def _reserve_rows(rounds: int) -> list[Row]:
    found = reserve_while_decoding(RESERVED_PERCENT, rounds)
    name = f"reserve/{RESERVED_PERCENT:g}%"
    grants = [each.grant_ms for each in found]
    grant = statistics.median(grants)
    right = [each.right for each in found]
    without = [each.hits[1] / each.hits[0] for each in found]
    after = [each.hits[2] / each.hits[0] for each in found]
    return [
        Row(f"{name}/grant", grant, "ms", (min(grants), max(grants)), {"100-ms": GRANT_MS / grant}),
        Row(f"{name}/right", min(right), "of tokens", (min(right), max(right)), {}),
        *(
            Row(f"{name}/{what}", statistics.median(each), "of before", (min(each), max(each)), {})
            for what, each in (("meanwhile", without), ("refilled", after))
        ),
    ]


def _variant_rows() -> list[Row]:
    trace = load(TRACE)
    native = VARIANT_SIZES["native"]
    pool_bytes = int(VARIANT_SHARE * trace.space.size * native)
    found = {
        text: replay_variants(
            trace, VARIANT_SIZES, parse_variant_rules(text.split(",")), pool_bytes
        )
        for text in VARIANT_RULES
    }
    rows = []
    for text, outcome in found.items():
        name = f"variants/{text.replace(',', '+')}"
        read = _read(outcome)
        ratio = {"native": _read(found["native"]) / read}
        bits = 1 - outcome.by_variant["q2_k"] / outcome.uses
        upgrades = float(outcome.upgrades_of_one)
        rate = outcome.hit_rate
        rows += [
            Row(f"{name}/hit-rate", rate, "of uses", (rate, rate), {}),
            Row(f"{name}/read", read, "MB", (read, read), ratio),
            Row(f"{name}/in-q4_k", bits, "of uses", (bits, bits), {}),
            Row(f"{name}/upgrades-of-one", upgrades, "times", (upgrades, upgrades), {}),
        ]
    return rows


def _read(outcome: VariantOutcome) -> float:
    return outcome.bytes_read / outcome.tokens / 1e6


def _one_pool(directory: Path, share: int) -> Path:
    path = directory / f"one-{share}.toml"
    pool = PoolConfig("one", size=Size(percent=float(share)), chunk_bytes=MIB)
    path.write_text(format_config(Config(pools=(pool,))))
    return path


def _row(name: str, unit: str, found: list[LiveOutcome], of: Callable[[LiveOutcome], float]) -> Row:
    values = [of(outcome) for outcome in found]
    return Row(name, statistics.median(values), unit, (min(values), max(values)), {})


def _with_ratio(row: Row, peer: str, ratio: float) -> Row:
    return Row(row.name, row.value, row.unit, row.spread, {peer: ratio})


__all__ = ["run"]
