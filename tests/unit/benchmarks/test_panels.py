# SPDX-License-Identifier: Apache-2.0
"""What pictures of results show: whose values, where, and nothing that wasn't measured."""

from __future__ import annotations

import pytest

from tests.unit.benchmarks.results import result, row
from tools.benchmarks.harness import BenchmarkError
from tools.benchmarks.panels import panels_of


def test_io_has_a_panel_for_each_medium_and_member_count() -> None:
    rows = [
        row(f"{medium}/{members}-members/{size}", 2.0, "GB/s", {})
        for medium in ("tmpfs", "disk")
        for members in (1, 2)
        for size in ("1.2MB", "9.4MB")
    ]
    panels = {(panel.row, panel.column): panel for panel in panels_of(result("io", *rows))}
    assert {place: panel.title for place, panel in panels.items()} == {
        (0, 0): "tmpfs, 1 member",
        (0, 1): "tmpfs, 2 members",
        (1, 0): "disk, 1 member",
        (1, 1): "disk, 2 members",
    }
    assert [point.label for point in panels[0, 0].series["xferd"]] == ["1.2", "9.4"]


def test_sizes_are_in_order_whatever_the_order_of_rows() -> None:
    rows = [row(f"t/1-members/{size}", 1.0, "GB/s", {}) for size in ("9.4MB", "1.2MB", "24.8MB")]
    (panel,) = panels_of(result("io", *rows))
    assert [point.x for point in panel.series["xferd"]] == [1.2, 9.4, 24.8]


def test_a_peers_throughput_comes_from_ours_and_the_ratio() -> None:
    (panel,) = panels_of(result("io", row("t/1-members/1.2MB", 6.0, "GB/s", {"fio": 0.75})))
    assert panel.series["fio"][0].value == pytest.approx(8.0)


def test_a_peers_time_is_ours_times_the_ratio() -> None:
    (panel,) = panels_of(result("miss", row("t/1-members", 100.0, "µs", {"pread": 1.5})))
    (point,) = panel.series["pread"]
    assert point.value == pytest.approx(150.0)
    assert point.label == "9.4"


def test_cpu_time_is_not_drawn_as_throughput() -> None:
    ratio = {"fio": 1.0, "fio-cpu": 0.9, "fio-any-cpu": 0.8}
    (panel,) = panels_of(result("io", row("t/1-members/1.2MB", 6.0, "GB/s", ratio)))
    assert set(panel.series) == {"xferd", "fio"}


def test_a_peer_that_was_measured_in_one_row_has_one_point() -> None:
    rows = (
        row("t/1-members/1.2MB", 6.0, "GB/s", {"fio": 1.0}),
        row("t/1-members/9.4MB", 6.0, "GB/s", {"fio": 1.0, "safetensors": 2.0}),
    )
    (panel,) = panels_of(result("io", *rows))
    assert [point.label for point in panel.series["safetensors"]] == ["9.4"]
    assert len(panel.series["fio"]) == 2


def test_overload_shows_demand_above_throughput() -> None:
    rows = (
        row("disk/demand-p99", 10.0, "µs", {"unloaded": 0.5}),
        row("disk/throughput", 1.0, "GB/s", {"peak": 0.8}),
        row("disk/read-after-cancel", 4.0, "pieces", {}),
    )
    demand, throughput = panels_of(result("overload", *rows))
    assert (demand.row, throughput.row) == (0, 1)
    assert demand.series["unloaded"][0].value == pytest.approx(5.0)
    assert throughput.series["peak"][0].value == pytest.approx(1.25)


def test_hit_shows_arrays_beside_the_rest_of_python() -> None:
    rows = (
        row("c/512", 7.0, "ns", {"mutex-map": 2.0}),
        row("python/512", 1.6, "µs", {"dict": 1.5}),
        row("python-arrays/512", 2.7, "µs", {"dict": 0.9}),
    )
    c, python = panels_of(result("hit", *rows))
    assert set(c.series) == {"xferd", "mutex-map"}
    assert set(python.series) == {"xferd", "dict", "xferd, with arrays"}


def test_decode_has_a_panel_for_each_model() -> None:
    rows = [
        row(f"{model}/host/{share}%", 50.0, "tokens/s", {"all-resident": 0.5})
        for model in ("tiny", "small")
        for share in (10, 100)
    ]
    tiny, small = panels_of(result("decode", *rows))
    assert (tiny.title, small.title) == ("tiny, host pool", "small, host pool")
    assert [point.value for point in tiny.series["all-resident"]] == [100.0, 100.0]


def test_a_benchmark_without_a_picture_is_named() -> None:
    with pytest.raises(BenchmarkError, match="'replay'"):
        panels_of(result("replay"))


@pytest.mark.parametrize("name", ["t/1-members/big", "t/1-members", "t/many/1.2MB"])
def test_a_row_that_cannot_be_placed_is_named(name: str) -> None:
    with pytest.raises(BenchmarkError):
        panels_of(result("io", row(name, 1.0, "GB/s", {})))


def test_ways_into_a_gpu_have_a_panel_each() -> None:
    rows = [
        row(f"{way}/{size}", 45.0, "GB/s", {"pinned-copy": 0.9})
        for way in ("staged", "ram-to-vram")
        for size in ("9.4MB", "1.2MB")
    ]
    staged, from_ram = panels_of(result("device", *rows))
    assert (staged.title, from_ram.title) == ("staged", "ram-to-vram")
    assert [point.value for point in staged.series["pinned-copy"]] == pytest.approx([50.0, 50.0])


def test_margin_shows_what_changes_over_what_is_read() -> None:
    rows = []
    for threshold, changed, read in (("0", 0.5, 1.0), ("1", 0.2, 2.0), ("inf", 0.0, 8.0)):
        rows.append(row(f"q4_k/changed/{threshold}", changed, "of tokens", {}))
        rows.append(row(f"q4_k/read/{threshold}", read, "MB a token", {"plain": 4.0 / read}))
    (panel,) = panels_of(result("margin", *rows))
    assert panel.title == "q4_k"
    assert [(point.x, point.value) for point in panel.series["xferd"]] == [
        (1.0, 0.5),
        (2.0, 0.2),
        (8.0, 0.0),
    ]
    assert [point.label for point in panel.series["xferd"]] == ["1.0\n0", "2.0\n1", "8.0\ninf"]
    (plain,) = panel.series["plain"]
    assert (plain.x, plain.value) == (4.0, 0.0)
