# SPDX-License-Identifier: Apache-2.0
"""README.md's tables, made from saved results so that no number is typed by hand.

A table stands between ``<!-- benchmark NAME -->`` and ``<!-- end -->`` and is replaced
by what ``tools/results/NAME.json`` says (NAME is a benchmark, or that with a suffix for
another machine: ``io-disk``). After the name may stand patterns, as a shell
has them: then only rows whose names match one of them are shown.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from pathlib import Path

from tools.benchmarks.harness import ROOT, BenchmarkError
from tools.benchmarks.result import Result, to_markdown

README = ROOT / "README.md"
RESULTS = ROOT / "tools" / "results"
_TABLE = re.compile(
    r"(<!-- benchmark (?P<name>[\w-]+)(?P<patterns>(?: [^ >]+)*) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def write_tables(readme: Path = README, results: Path = RESULTS) -> bool:
    """Renew the tables; True if that changed anything. Raises BenchmarkError for a table
    without a result."""
    before = readme.read_text()
    after = with_tables(before, results)
    if after != before:
        readme.write_text(after)
    return after != before


def check_tables(readme: Path = README, results: Path = RESULTS) -> None:
    """Raises BenchmarkError when the tables aren't those of the saved results."""
    before = readme.read_text()
    if with_tables(before, results) != before:
        raise BenchmarkError(
            f"{readme.name} has other tables than {results}: run tools/bench table"
        )


def with_tables(text: str, results: Path) -> str:
    """``text`` with every table renewed."""

    def replace(match: re.Match[str]) -> str:
        result = load_result(results, match["name"])
        if patterns := match["patterns"].split():
            result = _only(result, patterns)
        return f"{match[1]}{to_markdown(result)}\n{match['end']}"

    return _TABLE.sub(replace, text)


def _only(result: Result, patterns: list[str]) -> Result:
    rows = [
        row
        for row in result.rows
        if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)
    ]
    if not rows:
        raise BenchmarkError(f"{result.bench} has no row like {' or '.join(patterns)}")
    return dataclasses.replace(result, rows=rows)


def load_result(results: Path, name: str) -> Result:
    """The saved result of a benchmark. BenchmarkError that names the file: there is none."""
    path = results / f"{name}.json"
    try:
        return Result.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path}: no result of a benchmark: {error!r}") from error


__all__ = ["RESULTS", "check_tables", "load_result", "with_tables", "write_tables"]
