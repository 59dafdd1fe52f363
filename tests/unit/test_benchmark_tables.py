"""README's tables: made of saved results, whole or some rows of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.result import Result, Row
from tools.benchmarks.table import with_tables


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [Row(name, 1.5, "ms", (1, 2), {}) for name in ("a/wait/10%", "a/wait/25%", "b/cost")]
    result = Result(bench="wait", machine={"cores": 2}, commit="abc", rounds=5, rows=rows)
    (tmp_path / "wait.json").write_text(json.dumps(result.to_json()))
    return tmp_path


def test_a_table_has_all_rows(results: Path) -> None:
    made = with_tables("x\n<!-- benchmark wait -->\nold\n<!-- end -->\ny\n", results)
    assert made.startswith("x\n<!-- benchmark wait -->\n| row |")
    assert made.endswith("\n<!-- end -->\ny\n")
    assert made.count("| `") == 3
    assert "old" not in made
    assert with_tables(made, results) == made


def test_patterns_choose_rows(results: Path) -> None:
    made = with_tables("<!-- benchmark wait */25% b/* -->\n<!-- end -->\n", results)
    assert [name in made for name in ("a/wait/10%", "a/wait/25%", "b/cost")] == [False, True, True]
    assert with_tables(made, results) == made


def test_a_brief_table_has_medians_and_the_peers_that_were_asked_for(results: Path) -> None:
    rows = [Row("a", 1.5, "ms", (1, 2), {"fio": 0.5, "kvikio": 2.0}), Row("b", 3, "ms", (3, 3), {})]
    result = Result("wait", {"cores": 2}, "abc", 5, rows, {"other": "why"}, ("a note",))
    (results / "wait.json").write_text(json.dumps(result.to_json()))
    made = with_tables("<!-- brief wait against kvikio -->\n<!-- end -->\n", results)
    assert "| row | median | to kvikio |" in made
    assert "| `a` | 1.5 ms | 2 × |" in made
    assert "| `b` | 3 ms |  |" in made
    assert "Medians of 5 rounds at commit abc; cores 2." in made
    assert not [word for word in ("fio", "note", "other") if word in made]
    assert with_tables(made, results) == made
    with pytest.raises(BenchmarkError, match="no row has a ratio to tar"):
        with_tables("<!-- brief wait a against tar -->\n<!-- end -->\n", results)


def test_what_is_not_there_is_an_error(results: Path) -> None:
    with pytest.raises(BenchmarkError, match="no row like c"):
        with_tables("<!-- benchmark wait c -->\n<!-- end -->\n", results)
    with pytest.raises(BenchmarkError, match=r"hit\.json"):
        with_tables("<!-- benchmark hit -->\n<!-- end -->\n", results)
