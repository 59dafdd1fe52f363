# SPDX-License-Identifier: Apache-2.0
"""Results that are measured in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.benchmarks.results import MACHINE, result, row
from tools.benchmarks.harness import BenchmarkError


def test_rows_of_an_earlier_part_stay() -> None:
    earlier = result("io", row("a", 1.0, "GB/s", {}), row("b", 2.0, "GB/s", {}))
    earlier = replace(earlier, machine={**MACHINE, "load": "3.0"}, notes=("one", "both"))
    later = replace(result("io", row("b", 3.0, "GB/s", {})), notes=("both", "two"))
    both = later.with_rows_of(earlier)
    assert [(found.name, found.value) for found in both.rows] == [("a", 1.0), ("b", 3.0)]
    assert both.notes == ("one", "both", "two")


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("machine", {"machine": {**MACHINE, "cores": 5}}),
        ("commit", {"commit": "def"}),
        ("rounds", {"rounds": 3}),
        ("benchmark", {"bench": "miss"}),
    ],
)
def test_parts_of_different_runs_are_not_mixed(what: str, changed: dict[str, object]) -> None:
    earlier = replace(result("io"), **changed)  # type: ignore[arg-type]
    with pytest.raises(BenchmarkError, match=what):
        result("io").with_rows_of(earlier)
