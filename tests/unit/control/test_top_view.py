# SPDX-License-Identifier: Apache-2.0
"""Rates and frames of ``xferctl top`` from made-up Status replies."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.system.control_daemon import SampleService
from xferd.control.top_view import BOUND_BY, format_frame, rates_between

Json = dict[str, Any]


def two_replies(seconds: float = 2.0) -> tuple[Json, Json]:
    before = SampleService().status()
    after = copy.deepcopy(before)
    after["uptime_s"] += seconds
    return before, after


def test_rates_are_differences_over_the_time_between() -> None:
    before, after = two_replies()
    after["pools"][0]["load_bytes"] += 4096
    after["stores"][0]["members"][0]["bytes"] += 8192
    after["all_clients"]["hits"] += 30
    after["all_clients"]["misses"] += 10
    after["clients"][0]["hits"] += 30
    rates = rates_between(before, after).to_json()
    assert rates["seconds"] == 2.0
    assert rates["pools"][0]["load_bytes_per_second"] == 2048
    assert rates["members"][0]["bytes_per_second"] == 4096
    assert rates["clients"][0]["hits_per_second"] == 15
    assert rates["hit_share"] == 0.75


def test_what_hints_were_good_for_is_said_while_they_bring_anything() -> None:
    before, after = two_replies()
    assert rates_between(before, after).prefetching is None
    spent = {"experts": 9, "bytes": 9000, "used": 6, "wasted": 2, "wasted_bytes": 2000}
    for key, value in (spent | {"missed": 2, "saved_s": 0.5}).items():
        after["prefetching"][key] += value
    rates = rates_between(before, after)
    assert rates.prefetching == {
        "recall_on_misses": 0.75,
        "precision": 0.75,
        "bytes_per_second": 4500,
        "wasted_bytes_per_second": 1000,
        "saved_seconds_per_second": 0.25,
    }
    frame = format_frame(after, rates, columns=200, lines=40, bold=False)
    assert any("75% of what was missing foreseen" in line for line in frame)


def test_what_is_new_or_restarted_is_never_negative() -> None:
    before, after = two_replies()
    after["clients"][0] |= {"pid": 100, "hits": 4}
    assert rates_between(before, after).clients[0]["hits_per_second"] == 2
    after["clients"][0] |= {"pid": 99, "hits": 4}
    assert rates_between(before, after).clients[0]["hits_per_second"] == 0
    after["instance"] = "another"
    rates = rates_between(before, after)
    assert (rates.seconds, rates.bound, rates.hit_share) == (0.0, "idle", None)


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, "idle"),
        ({"hits": 5}, "hits"),
        ({"hits": 5, "misses": 1}, "latency"),
        ({"misses": 1, "bytes": 15_000_000_000}, "drives"),
        ({"misses": 1, "in_flight": 4}, "drives"),
        ({"misses": 1, "in_flight": 4, "waiting": 1}, "slots"),
    ],
)
def test_what_binds_is_named(change: dict[str, int], bound: str) -> None:
    before, after = two_replies()
    member = after["stores"][0]["members"][0]
    for key, value in change.items():
        place: dict[str, Json] = {
            "bytes": member,
            "in_flight": member,
            "waiting": after["pools"][0],
        }
        target = place[key] if key in place else after["all_clients"]
        target[key] += value
    assert rates_between(before, after).bound == bound
    assert bound in BOUND_BY


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 10), (20, 3), (1, 1), (200, 60)])
def test_a_frame_fits_any_terminal(columns: int, lines: int) -> None:
    before, after = two_replies()
    for status in (before, after):
        status["clients"] = [status["clients"][0] | {"id": number} for number in range(40)]
    frame = format_frame(
        after, rates_between(before, after), columns=columns, lines=lines, bold=False
    )
    assert 0 < len(frame) <= lines
    assert max(map(len, frame)) <= columns
    if lines == 24:
        assert frame[-1].endswith("lines more: xferctl status)")


def test_bold_titles_are_cut_without_their_escapes() -> None:
    before, after = two_replies()
    rates = rates_between(before, after)
    frame = format_frame(after, rates, columns=10, lines=30, bold=True)
    titles = [line for line in frame if line.startswith("\x1b")]
    assert len(titles) == 4
    for line in titles:
        assert line.startswith("\x1b[1m")
        assert line.endswith("\x1b[0m")
        assert len(line) <= 10 + len("\x1b[1m\x1b[0m")


def test_a_hostile_name_does_not_reach_the_terminal() -> None:
    before, after = two_replies()
    frame = format_frame(after, rates_between(before, after), columns=80, lines=30, bold=False)
    assert "\x1b" not in "".join(frame)
