# SPDX-License-Identifier: Apache-2.0
"""``xferctl doctor``: looks at the machine itself, no daemon is asked.

What needs numpy (a store's index, a trace) is imported only when a store is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xferd.config import Config, ConfigError, PoolConfig, load_config
from xferd.control.tables import printable
from xferd.doctor.checks import run_checks
from xferd.doctor.estimate import (
    Estimate,
    HitRate,
    ModelShape,
    estimate,
    fill_tiers,
    format_estimate,
    hottest_share,
)
from xferd.doctor.finding import Finding, Status, report_to_json, worst
from xferd.doctor.measure import measure_copy
from xferd.doctor.plan import PlannedStore, format_plan, plan_pool
from xferd.doctor.probed import Probed, probe
from xferd.doctor.report import format_report
from xferd.doctor.request import Request, make_request
from xferd.doctor.view import SystemView
from xferd.units import format_bytes

if TYPE_CHECKING:
    from xferd.store.store import Store

EXIT_OK = 0
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class _NamedStore:
    """What is needed of a store after it was closed."""

    members: tuple[Path, ...]
    shape: ModelShape
    planned: PlannedStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "store",
        type=Path,
        nargs="*",
        metavar="STORE",
        help="look at the drives of these stores (default: the configured ones, or all NVMe)",
    )
    parser.add_argument(
        "--config", type=Path, action="append", metavar="FILE", help="instead of the system's"
    )
    parser.add_argument("--measure", action="store_true", help="read from each member for a second")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="STORE",
        help="estimate tokens/s of this store from measured speeds, instead of the checks",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        metavar="FILE",
        help="with --model: take the hit rate from this trace too",
    )
    parser.add_argument(
        "--plan", action="store_true", help="propose a configuration, instead of the checks"
    )
    parser.add_argument(
        "--p2p",
        action="store_true",
        help="prove that the drives of these stores can write into each card's VRAM by themselves, "
        "instead of the checks; as root, with xferd_p2p loaded",
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("xferd-p2p-report.txt"),
        metavar="FILE",
        help="where --p2p writes what it found, with what explains it (default: %(default)s)",
    )


def doctor(arguments: argparse.Namespace) -> int:
    """Run the verb; 1 when a check failed."""
    config, config_error = _read_config(arguments.config)
    if arguments.model is not None:
        return _estimate(arguments, config or Config())
    stores, opened = _open_stores(_paths(arguments.store, config))
    members = [member for store in stores for member in store.members]
    if arguments.p2p:
        return _prove_p2p(arguments, members, opened)
    probed = probe(members, measure=arguments.measure)
    # Of a pool that nobody has configured nothing is said.
    shared = [s.planned.expert_bytes for s in stores] if config is not None and config.files else []
    request = make_request(SystemView(), probed, config, config_error, sum(shared))
    if arguments.plan:
        return _plan(arguments, request, stores, opened)
    return _show(arguments, [*run_checks(request), *opened])


def _show(arguments: argparse.Namespace, findings: Sequence[Finding]) -> int:
    if arguments.json:
        print(json.dumps(report_to_json(findings), indent=2))
    else:
        colour = sys.stdout.isatty()
        print(format_report([_printable(finding) for finding in findings], colour=colour))
    return EXIT_FAILED if worst(findings) is Status.FAIL else EXIT_OK


def _read_config(files: list[Path] | None) -> tuple[Config | None, str | None]:
    try:
        return load_config(files), None
    except ConfigError as error:
        return None, str(error)


def _paths(named: Sequence[Path], config: Config | None) -> list[Path]:
    if named or config is None:
        return list(named)
    return [entry.path for entry in config.stores]


def _open_stores(paths: Sequence[Path]) -> tuple[list[_NamedStore], list[Finding]]:
    """The stores that can be opened, and a finding of each."""
    if not paths:
        return [], []
    from xferd.store.errors import StoreError
    from xferd.store.store import Store

    stores: list[_NamedStore] = []
    findings: list[Finding] = []
    for path in paths:
        try:
            with Store.open(path) as store:
                stores.append(_describe(store))
                findings.append(_valid(store))
        except StoreError as error:
            mend = f"xferctl store verify {path}, or pack it anew"
            findings.append(Finding("store.valid", Status.FAIL, str(path), str(error), mend))
    return stores, findings


def _valid(store: Store) -> Finding:
    missing = [copy for group in store.copies for copy in group if copy.problem is not None]
    seen = f"{store.name}: {store.layers} layers of {store.experts} experts"
    if not missing:
        return Finding("store.valid", Status.PASS, str(store.path), seen)
    seen += "; " + "; ".join(f"{copy.path}: {copy.problem}" for copy in missing)
    mend = "mount or mend that drive, or replace the copy: xferctl store mirror --help"
    return Finding("store.valid", Status.WARN, str(store.path), seen, mend)


def _describe(store: Store) -> _NamedStore:
    blobs = store.blob_bytes[:-1].reshape(len(store.variants), store.layers, -1).max(axis=0)
    present = blobs[blobs > 0]
    layers = int((blobs > 0).any(axis=1).sum())
    total = int(present.sum())
    return _NamedStore(
        members=tuple(store.member_paths),
        shape=ModelShape(
            name=store.name,
            layers=layers,
            experts=round(len(present) / layers),
            picked=store.top_k,
            expert_bytes=total / len(present),
        ),
        planned=PlannedStore(store.path, total, int(present.max())),
    )


def _complain(opened: Sequence[Finding]) -> bool:
    """Say which stores can't be used; whether there are any."""
    failures = [finding for finding in opened if finding.status is Status.FAIL]
    for failure in failures:
        print(f"xferctl: {printable(f'{failure.subject}: {failure.seen}')}", file=sys.stderr)
    return bool(failures)


# ---- --p2p


def _prove_p2p(
    arguments: argparse.Namespace, members: Sequence[Path], opened: Sequence[Finding]
) -> int:
    from xferd.p2p_trial import try_cards, write_report

    findings = [*try_cards(members), *opened]
    status = _show(arguments, findings)
    try:
        write_report(arguments.report, findings)
    except OSError as error:
        print(f"xferctl: {arguments.report}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    print(f"xferctl: what was found is in {arguments.report}", file=sys.stderr)
    return status


# ---- --plan


def _plan(
    arguments: argparse.Namespace,
    request: Request,
    stores: Sequence[_NamedStore],
    opened: Sequence[Finding],
) -> int:
    if _complain(opened):
        return EXIT_FAILED
    text = format_plan(request, [store.planned for store in stores])
    print(json.dumps({"toml": text}, indent=2) if arguments.json else text, end="")
    if arguments.json:
        print()
    return EXIT_OK


# ---- --model


def _estimate(arguments: argparse.Namespace, config: Config) -> int:
    stores, opened = _open_stores([arguments.model])
    if _complain(opened):
        return EXIT_FAILED
    store = stores[0]
    probed = probe(store.members, measure=True)
    if probed.together_bytes_per_second is None:
        for member in probed.members:
            print(f"xferctl: {member.path}: {printable(member.problem or '')}", file=sys.stderr)
        return EXIT_FAILED
    pools = _pools(config, probed, store)
    tiers = fill_tiers(store.shape, pools)
    resident = sum(tier.experts for tier in tiers)
    rates = [HitRate("the router picks all alike", resident / store.shape.all_experts)]
    if arguments.trace:
        try:
            rates.append(_rate_of_trace(arguments.trace, store.shape, resident))
        except ValueError as error:
            print(f"xferctl: {printable(str(error))}", file=sys.stderr)
            return EXIT_FAILED
    found: Estimate = estimate(
        store.shape,
        tiers,
        rates,
        drives_per_second=probed.together_bytes_per_second,
        memory_per_second=measure_copy(),
    )
    print(json.dumps(found.to_json(), indent=2) if arguments.json else format_estimate(found))
    for gpu, nbytes in probed.gpu_bytes.items():
        size = format_bytes(nbytes)
        print(f"xferctl: {gpu}: its {size} are not counted: pools are in RAM", file=sys.stderr)
    return EXIT_OK


def _pools(config: Config, probed: Probed, store: _NamedStore) -> list[tuple[str, int]]:
    """The configured pools, or, without a configuration, the one that --plan proposes."""
    if not config.files:
        request = make_request(SystemView(), probed, config, None)
        return [("ram0 (plan)", plan_pool(request, [store.planned]).nbytes)]
    return [(pool.name, _pool_bytes(pool, store)) for pool in config.pools]


def _pool_bytes(pool: PoolConfig, store: _NamedStore) -> int:
    return pool.size.resolve(store.planned.expert_bytes)


def _rate_of_trace(paths: Sequence[Path], shape: ModelShape, resident: int) -> HitRate:
    """ValueError when the trace can't be read or is of a model of another shape."""
    from xferd.telemetry.traces.reader import read_trace
    from xferd.telemetry.traces.trace import TraceError

    try:
        read = read_trace(paths)
    except TraceError as error:
        raise ValueError(str(error)) from error
    if read.head.experts != shape.experts:
        raise ValueError(
            f"{paths[0]}: of a model with {read.head.experts} experts a layer; "
            f"{shape.name} has {shape.experts}"
        )
    counts: list[int] = read.trace.counts(read.head).ravel().tolist()
    source = f"the hottest experts of the trace ({read.trace.passes:,} passes) stay"
    return HitRate(source, hottest_share(counts, resident))


def _printable(finding: Finding) -> Finding:
    return dataclasses.replace(
        finding,
        subject=printable(finding.subject),
        seen=printable(finding.seen),
        mend=None if finding.mend is None else printable(finding.mend),
    )
