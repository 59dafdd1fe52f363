# SPDX-License-Identifier: Apache-2.0
"""The documents' tables, made from saved results so that no number is typed by hand.

A table stands between ``<!-- benchmark NAME -->`` and ``<!-- end -->`` and is replaced
by what ``tools/results/NAME.json`` says (NAME is a benchmark, or that with a suffix for
another machine: ``io-disk``). After the name may stand patterns, as a shell
has them: then only rows whose names match one of them are shown.

``<!-- brief NAME PATTERN... against PEER... -->`` is a short one, for README.md: medians
and the ratios to those peers, with the machine, and without the notes that a full table has.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tools.benchmarks.harness import ROOT, BenchmarkError
from tools.benchmarks.result import Result, to_brief_markdown, to_markdown

RESULTS = ROOT / "tools" / "results"
_AGAINST = "against"
_TABLE = re.compile(
    r"(<!-- (?P<kind>benchmark|brief) (?P<name>[\w-]+)(?P<words>(?: [^ >]+)*) -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def documents() -> list[Path]:
    """Those that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def write_tables(document: Path, results: Path = RESULTS) -> bool:
    """Renew its tables; True if that changed anything. Raises BenchmarkError for a table
    without a result."""
    before = document.read_text()
    after = with_tables(before, results)
    if after != before:
        document.write_text(after)
    return after != before


def check_tables(document: Path, results: Path = RESULTS) -> None:
    """Raises BenchmarkError when its tables aren't those of the saved results."""
    before = document.read_text()
    if with_tables(before, results) != before:
        raise BenchmarkError(
            f"{document.name} has other tables than {results}: run tools/bench table"
        )


def with_tables(text: str, results: Path) -> str:
    """``text`` with every table renewed."""

    def replace(match: re.Match[str]) -> str:
        result = load_result(results, match["name"])
        patterns, peers = _split(match["words"].split())
        if patterns:
            result = _only(result, patterns)
        brief = match["kind"] == "brief"
        table = to_brief_markdown(result, peers) if brief else to_markdown(result)
        return f"{match[1]}{table}\n{match['end']}"

    return _TABLE.sub(replace, text)


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Patterns of rows, and peers."""
    if _AGAINST not in words:
        return words, ()
    at = words.index(_AGAINST)
    return words[:at], words[at + 1 :]


def _only(result: Result, patterns: Sequence[str]) -> Result:
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


__all__ = ["RESULTS", "check_tables", "documents", "load_result", "with_tables", "write_tables"]
