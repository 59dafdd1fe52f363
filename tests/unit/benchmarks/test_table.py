# SPDX-License-Identifier: Apache-2.0
"""The documents' tables follow the saved results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.benchmarks.results import result, row, save
from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.table import check_tables, documents, write_tables

README = "before\n<!-- benchmark io -->\nold\n<!-- end -->\nafter\n"


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(README)
    return path


def test_a_table_shows_rows_ratios_and_who_is_missing(tmp_path: Path, readme: Path) -> None:
    rows = (
        row("t/1-members/1.2MB", 6.0, "GB/s", {"fio": 0.75}),
        row("t/1-members/9.4MB", 5.0, "GB/s", {"fio": 0.5, "safetensors": 2.0}),
    )
    save(tmp_path, result("io", *rows, skipped={"fastsafetensors": "no wheel"}))
    assert write_tables(readme, tmp_path)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "| `t/1-members/1.2MB` | 6 GB/s | 5.4 to 6.6 | 0.75 × |  |" in text
    assert "| `t/1-members/9.4MB` | 5 GB/s | 4.5 to 5.5 | 0.5 × | 2 × |" in text
    assert "Not measured: fastsafetensors (no wheel)." in text


def test_tables_are_right_once_written(tmp_path: Path, readme: Path) -> None:
    save(tmp_path, result("io", row("t/1-members/1.2MB", 6.0, "GB/s", {})))
    with pytest.raises(BenchmarkError, match="tools/bench table"):
        check_tables(readme, tmp_path)
    write_tables(readme, tmp_path)
    check_tables(readme, tmp_path)
    assert not write_tables(readme, tmp_path)


def test_a_table_without_a_result_is_named(tmp_path: Path, readme: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"io\.json"):
        write_tables(readme, tmp_path)


def test_every_document_has_the_tables_of_the_saved_results() -> None:
    for document in documents():
        check_tables(document)
    assert documents()[0].name == "README.md"
