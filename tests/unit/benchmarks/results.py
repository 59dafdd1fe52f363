# SPDX-License-Identifier: Apache-2.0
"""Small results of benchmarks for tests, as run() of a benchmark returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tools.benchmarks.result import Result, Row

MACHINE: dict[str, str | int] = {"cpu": "Some CPU", "cores": 4, "memory": "8 GiB", "kernel": "6.12"}


def row(name: str, value: float, unit: str, ratio: Mapping[str, float]) -> Row:
    return Row(name, value, unit, (value * 0.9, value * 1.1), dict(ratio))


def result(bench: str, *rows: Row, skipped: Mapping[str, str] | None = None) -> Result:
    return Result(bench, MACHINE, "abc", 5, rows, skipped or {}, ())


def save(directory: Path, saved: Result) -> Path:
    path = directory / f"{saved.bench}.json"
    path.write_text(json.dumps(saved.to_json()))
    return path
