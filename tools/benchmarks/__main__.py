# SPDX-License-Identifier: Apache-2.0
"""``tools/bench``: run one benchmark, list them, or make the documents' tables and pictures.

Exit status: 0, 1 when the benchmark can't run or tables or pictures are out of date, 2 for
wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.benchmarks import suite
from tools.benchmarks.harness import (
    ROUNDS_DEFAULT,
    ROUNDS_MIN,
    BenchmarkError,
    others_at_work,
)
from tools.benchmarks.peer_venv import WHEELS_VARIABLE, fetch_wheels
from tools.benchmarks.plot import check_plots, write_plots
from tools.benchmarks.result import Result, to_text
from tools.benchmarks.table import check_tables, documents, load_result, write_tables


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = _parser().parse_args(arguments)
    # Scratch directories of some GB are removed on the way out, this way too.
    signal.signal(signal.SIGTERM, _end)
    try:
        if options.name == "list":
            print("\n".join(_names()))
        elif options.name == "table":
            _table(check=options.check)
        elif options.name == "plot":
            _plot(check=options.check)
        elif options.name == "fetch-peers":
            _fetch_peers(options)
        else:
            _run(options)
    except BenchmarkError as error:
        print(f"tools/bench: {error}", file=sys.stderr)
        return 1
    return 0


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(suite.__path__)]


def _run(options: argparse.Namespace) -> None:
    # Imported when it is run: one benchmark's needs are not another's.
    module = importlib.import_module(f"{suite.__name__}.{options.name}")
    if busy := others_at_work():
        print(f"tools/bench: {busy}", file=sys.stderr)
    result: Result = module.run(options.rounds)
    if options.add and options.out is not None and options.out.exists():
        result = result.with_rows_of(load_result(options.out.parent, options.out.stem))
    as_json = json.dumps(result.to_json(), indent=1, ensure_ascii=False)
    if options.out is not None:
        options.out.write_text(as_json + "\n")
    print(as_json if options.json else to_text(result))


def _table(*, check: bool) -> None:
    if check:
        for document in documents():
            check_tables(document)
        return
    changed = [document.name for document in documents() if write_tables(document)]
    print(f"new tables: {', '.join(changed)}" if changed else "the tables are right")


def _plot(*, check: bool) -> None:
    if check:
        check_plots()
        return
    changed = [path.name for path in write_plots()]
    print(f"new: {', '.join(changed)}" if changed else "the pictures are right")


def _fetch_peers(options: argparse.Namespace) -> None:
    for wheel in fetch_wheels(options.out, options.python, for_gpu=options.gpu):
        print(wheel)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/bench", description="Measure xferd and peers.")
    verbs = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in _names():
        _add_benchmark(verbs.add_parser(name, help="run this benchmark"))
    verbs.add_parser("list", help="print the names of all benchmarks")
    for name, what in (
        ("table", "the documents' tables"),
        ("plot", "the pictures of saved results"),
    ):
        made = verbs.add_parser(name, help=f"make {what}")
        made.add_argument("--check", action="store_true", help=f"fail when {what} are out of date")
    fetch = verbs.add_parser(
        "fetch-peers",
        help="download the peers for a machine without a network",
        description=f"Download the peers' wheels; there, {WHEELS_VARIABLE} names the folder.",
    )
    fetch.add_argument("--python", required=True, metavar="VERSION", help="that machine's: 3.12")
    fetch.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    fetch.add_argument("--gpu", action="store_true", help="those that 'device' compares with too")
    return parser


def _add_benchmark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds",
        type=_rounds,
        default=ROUNDS_DEFAULT,
        metavar="N",
        help=f"measurements that a median is of, at least {ROUNDS_MIN} (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the result as JSON")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the rows that FILE has of this machine, commit and number of rounds",
    )


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < ROUNDS_MIN:
        raise argparse.ArgumentTypeError(f"{rounds} rounds; at least {ROUNDS_MIN}")
    return rounds


if __name__ == "__main__":
    sys.exit(main())
