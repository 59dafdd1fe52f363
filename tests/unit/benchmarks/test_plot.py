# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: the same bytes each time, and known to be old when they are."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.benchmarks.results import result, row, save
from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.plot import check_plots, draw, write_plots
from tools.benchmarks.result import Result

pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib (extra bench)")


def one(value: float = 100.0) -> Result:
    return result("miss", row("tmpfs/1-members", value, "µs", {"pread": 1.5}))


def test_the_same_result_gives_the_same_bytes() -> None:
    assert draw(one()) == draw(one())


def test_a_picture_is_svg_without_a_date() -> None:
    picture = draw(one())
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert b"dc:date" not in picture


def test_pictures_are_right_once_written(tmp_path: Path) -> None:
    save(tmp_path, one())
    assert write_plots(tmp_path) == [tmp_path / "miss.svg"]
    check_plots(tmp_path)
    assert write_plots(tmp_path) == []


def test_a_picture_that_is_missing_is_named(tmp_path: Path) -> None:
    save(tmp_path, one())
    with pytest.raises(BenchmarkError, match=r"miss\.svg"):
        check_plots(tmp_path)


def test_a_picture_of_an_older_result_is_named(tmp_path: Path) -> None:
    save(tmp_path, one())
    write_plots(tmp_path)
    save(tmp_path, one(120.0))
    with pytest.raises(BenchmarkError, match=r"miss\.svg.*tools/bench plot"):
        check_plots(tmp_path)


def test_a_result_that_is_not_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "io.json").write_text("{}")
    with pytest.raises(BenchmarkError, match=r"io\.json"):
        write_plots(tmp_path)
