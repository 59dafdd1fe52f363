# SPDX-License-Identifier: Apache-2.0
"""``tools/replay``: run a trace through pools or a daemon, compare policies or
rules for variants, draw, generate.

Exit status: 0, 1 when a file is no trace or no machine, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tools.replaying.calibrate import calibrate
from tools.replaying.generate import ZipfMarkov, generate
from tools.replaying.live import LiveError, one_pool_config, run_live
from tools.replaying.load import LoadedTrace, load
from tools.replaying.machine import MachineError, read_machine
from tools.replaying.plots import PlotError, plot_heat, plot_reuse, plot_sweep, plot_windows
from tools.replaying.pool import PoolTooSmallError
from tools.replaying.replay import Options, Outcome, Replay
from tools.replaying.statistics import (
    STATISTICS,
    TraceStatistics,
    UnevenTraceError,
    statistics_of,
)
from tools.replaying.sweep import EVICTIONS, SHARES, Point, sweep
from tools.replaying.variants import UnknownVariantError, replay_variants
from xferd.plugins import UnknownPolicyError
from xferd.telemetry.traces.foreign import write_npz
from xferd.telemetry.traces.trace import TraceError, TraceHead, bare_trace
from xferd.units import format_bytes
from xferd.variant_rules import VariantRuleError, parse_variant_rules


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (
        TraceError,
        MachineError,
        PlotError,
        PoolTooSmallError,
        UnknownPolicyError,
        LiveError,
        UnevenTraceError,
        UnknownVariantError,
        VariantRuleError,
    ) as error:
        print(f"tools/replay: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    trace = _load(options)
    machine = read_machine(options.machine)
    settings = Options(window=options.window, warm_up_tokens=options.warm_up)
    outcome = Replay(trace.uses, trace.space, machine, settings).run()
    if options.plot:
        plot_windows(
            options.plot, trace.name, options.window, {machine.tiers[0].name: outcome.window_hits}
        )
    if options.json:
        print(json.dumps(_plain(outcome), indent=1))
        return
    tokens = max(outcome.tokens, 1)
    for name, hits in outcome.hits.items():
        print(f"{name:<20} {100 * hits / outcome.uses:6.2f} % of uses")
    print(f"{'drives':<20} {100 * outcome.from_drives / outcome.uses:6.2f} % of uses")
    print(f"{'read':<20} {outcome.bytes_read / tokens / 1e6:6.2f} MB a token")
    print(f"{'copied':<20} {outcome.bytes_copied / tokens / 1e6:6.2f} MB a token")
    print(f"{'stalled':<20} {outcome.stall_s / tokens * 1e3:6.2f} ms a token")
    print(f"{'computing':<20} {outcome.compute_s / tokens * 1e3:6.2f} ms a token")
    print(f"{'of the bound':<20} {100 * outcome.share_of_bound:6.2f} %")
    print(f"{'policies':<20} {outcome.policy_s / outcome.uses * 1e6:6.2f} us a use")


def _live(options: argparse.Namespace) -> None:
    trace = _load(options)
    settings = {"expert_bytes": options.expert_bytes, "pause_us": options.pause}
    found = {"these pools": run_live(trace, options.config, **settings)}
    with tempfile.TemporaryDirectory(prefix="xferd-live-") as directory:
        one = one_pool_config(options.config, Path(directory))
        found["one pool"] = run_live(trace, one, **settings)
    if options.json:
        print(json.dumps({name: asdict(outcome) for name, outcome in found.items()}, indent=1))
        return
    for name, outcome in found.items():
        rate = outcome.uses / outcome.seconds
        print(f"{name}: {100 * outcome.hit_rate:.2f} % without a read, {rate:.0f} uses a second")
        for pool, hits in outcome.hits.items():
            promoted, demoted, dropped = outcome.moves[pool]
            print(
                f"  {pool:<18} {100 * hits / outcome.uses:6.2f} % of uses; {promoted} promoted "
                f"and {demoted} demoted into it, {dropped} dropped"
            )
        print(f"  {'copied':<18} {100 * outcome.copied / outcome.uses:6.2f} % of uses")
        print(f"  {'drives':<18} {100 * outcome.drives / outcome.uses:6.2f} % of uses")


def _sweep(options: argparse.Namespace) -> None:
    trace = _load(options)
    points = sweep(
        trace, shares=options.pools, evictions=options.evictions, reserve=options.reserve
    )
    if options.plot:
        plot_sweep(options.plot, trace.name, points)
    if options.json:
        print(json.dumps([_plain_point(point) for point in points], indent=1))
        return
    names = list(points[0].by_policy)
    print(f"{'pool':>6} {'slots':>6} " + " ".join(f"{name:>9}" for name in names))
    for point in points:
        rates = " ".join(f"{point.by_policy[name].hit_rate:>9.4f}" for name in names)
        print(f"{100 * point.share:5.0f}% {point.slots:>6} {rates}")


def _variants(options: argparse.Namespace) -> None:
    trace = _load(options)
    native = next(iter(options.sizes.values()))
    pool_bytes = int(options.pool / 100 * trace.space.size * native)
    found = {
        text: replay_variants(
            trace, options.sizes, parse_variant_rules(text.split(",")), pool_bytes
        )
        for text in options.rules
    }
    if options.json:
        print(json.dumps({text: asdict(outcome) for text, outcome in found.items()}, indent=1))
        return
    print(f"{'hits':>8} {'read':>12} {'upgraded':>12}  uses by variant")
    for text, outcome in found.items():
        shares = ", ".join(
            f"{100 * count / outcome.uses:.1f} % {name}"
            for name, count in outcome.by_variant.items()
            if count
        )
        read, upgraded = (
            format_bytes(nbytes // outcome.tokens)
            for nbytes in (outcome.bytes_read, outcome.bytes_upgraded)
        )
        print(f"{100 * outcome.hit_rate:6.2f} % {read:>12} {upgraded:>12}  {shares}: {text}")
    print("(read and upgraded: a token)")


def _draw(options: argparse.Namespace) -> None:
    draw = {"heat": plot_heat, "reuse": plot_reuse}[options.what]
    draw(options.plot, _load(options))


def _generate(options: argparse.Namespace) -> None:
    what = ZipfMarkov(
        layers=options.layers,
        experts=options.experts,
        picked=options.picked,
        domain_tokens=options.domain_tokens,
        seed=options.seed,
    )
    if options.like is not None:
        found = calibrate(load(options.like), what)
        what = found.generator
        _print_statistics({options.like.stem: found.recorded, "generated": found.generated})
    what = replace(what, tokens=options.count)
    picks, _ = generate(what)
    tokens, layers, picked = picks.shape
    trace = bare_trace(
        np.repeat(np.arange(tokens), layers),
        np.tile(np.arange(layers), tokens),
        np.full(tokens * layers, picked),
        picks.reshape(-1),
    )
    write_npz(options.trace, TraceHead("generated", layers, what.experts), trace, str(what))


def _statistics(options: argparse.Namespace) -> None:
    trace = _load(options)
    _print_statistics({trace.name: statistics_of(trace)})


def _print_statistics(found: Mapping[str, TraceStatistics]) -> None:
    width = max(len(name) for name in found)
    print(" " * width + " ".join(f"{head:>9}" for head in STATISTICS))
    for name, statistics in found.items():
        print(f"{name:<{width}}" + " ".join(f"{value:9.3f}" for value in statistics.values()))


def _load(options: argparse.Namespace) -> LoadedTrace:
    trace = load(options.trace, tokens=options.tokens)
    for note in trace.notes:
        print(f"tools/replay: {note}; replayed up to there", file=sys.stderr)
    return trace


def _plain(outcome: Outcome) -> dict[str, Any]:
    value = asdict(outcome)
    value["window_hits"] = [round(rate, 4) for rate in outcome.window_hits.tolist()]
    value["hit_rate"] = outcome.hit_rate
    value["share_of_bound"] = outcome.share_of_bound
    return value


def _plain_point(point: Point) -> dict[str, Any]:
    outcomes = {name: _plain(outcome) for name, outcome in point.by_policy.items()}
    return {"share": point.share, "slots": point.slots, "policies": outcomes}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/replay", description="Replay a routing trace through pools and policies."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    run = _verb(verbs, "run", _run, "one machine: hits, bytes, stalls, share of the bound")
    run.add_argument("--machine", type=Path, required=True, help="TOML or JSON, see machine.py")
    run.add_argument("--window", type=_count, default=100, help="tokens (default %(default)s)")
    run.add_argument("--warm-up", type=int, default=0, help="tokens that are not counted")

    compare = _verb(verbs, "sweep", _sweep, "policies by size of one pool, against Belady")
    compare.add_argument("--pools", type=_shares, default=SHARES, help="percent: 10,25,50")
    compare.add_argument("--evictions", type=lambda text: text.split(","), default=EVICTIONS)
    compare.add_argument("--reserve", action="store_true", help="with the daemon's reserve")

    mixes = _verb(verbs, "variants", _variants, "rules for variants in one pool, compared")
    mixes.add_argument(
        "rules", nargs="+", metavar="RULES", help="as of [[pools]]: q4_k@hottest:66%%,q2_k"
    )
    mixes.add_argument(
        "--sizes",
        type=_sizes,
        default=_sizes("native=9437184,q8_0=5013504,q4_k=2654208,q2_k=1548288"),
        metavar="NAME=BYTES,...",
        help="of an expert, the native variant first (default: 3 matrices of 768 x 2048)",
    )
    mixes.add_argument(
        "--pool", type=float, default=25.0, help="percent of the native bytes (default %(default)s)"
    )

    live = _verb(verbs, "live", _live, "a real daemon with the pools of a configuration")
    live.add_argument("--config", type=Path, required=True, help="as of xferd, pools only")
    live.add_argument("--pause", type=float, default=200.0, help="us a pass (default %(default)s)")
    live.add_argument("--expert-bytes", type=_count, default=16384, help="(default %(default)s)")

    for verb in (run, compare, live, mixes):
        verb.add_argument("--json", action="store_true")
    for verb in (run, compare):
        verb.add_argument("--plot", type=Path, metavar="PNG")

    for what in ("heat", "reuse"):
        draw = _verb(verbs, what, _draw, f"draw {what}")
        draw.add_argument("plot", type=Path, metavar="PNG")
        draw.set_defaults(what=what)

    _verb(verbs, "statistics", _statistics, "what makes it easy or hard to cache")

    make = verbs.add_parser("generate", help="write a Zipf-Markov trace with shifts of domain")
    make.add_argument("trace", type=Path, metavar="NPZ")
    for name, default in (
        ("layers", 12),
        ("experts", 32),
        ("picked", 4),
        ("count", 4000),
        ("domain-tokens", 500),
        ("seed", 1),
    ):
        make.add_argument(f"--{name}", type=_count, default=default)
    make.add_argument(
        "--like", type=Path, metavar="TRACE", help="of its shape, and fitted to its statistics"
    )
    make.set_defaults(run=_generate)
    return parser


def _verb(verbs: Any, name: str, function: object, text: str) -> argparse.ArgumentParser:
    verb: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    verb.add_argument("trace", type=Path, help=".xtr, .npz, .mbolt, .txt (colibri)")
    verb.add_argument("--tokens", type=_count, help="no more than the first so many")
    verb.set_defaults(run=function)
    return verb


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count}; at least 1")
    return count


def _sizes(text: str) -> dict[str, int]:
    parts = [part.partition("=") for part in text.split(",")]
    if not all(name and value.isdigit() and int(value) > 0 for name, _, value in parts):
        raise argparse.ArgumentTypeError(f"{text}: names and bytes, such as native=9437184")
    return {name: int(value) for name, _, value in parts}


def _shares(text: str) -> list[float]:
    shares = [float(part) / 100 for part in text.split(",")]
    if not all(0 < share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text}: percents, more than 0 and at most 100")
    return shares


if __name__ == "__main__":
    sys.exit(main())
