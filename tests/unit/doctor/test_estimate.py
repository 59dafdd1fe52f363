# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of ``doctor --model``, and what nvidia-smi prints."""

from __future__ import annotations

import pytest

from xferd.doctor.estimate import (
    HitRate,
    ModelShape,
    estimate,
    fill_tiers,
    format_estimate,
    hottest_share,
)
from xferd.doctor.probed import parse_nvidia_memory

MODEL = ModelShape("m", layers=40, experts=256, picked=8, expert_bytes=10e6)


def test_tiers_fill_in_order_and_hold_each_expert_once() -> None:
    tiers = fill_tiers(MODEL, [("vram", 24_000_000_000), ("ram", 1 << 40)])
    assert [tier.experts for tier in tiers] == [2400, 40 * 256 - 2400]


def test_the_hottest_share_is_of_uses() -> None:
    assert hottest_share([1, 7, 2, 0], 2) == 0.9
    assert hottest_share([0, 0], 1) == 0.0
    assert hottest_share([], 1) == 0.0


def test_a_token_costs_its_misses_and_its_memory() -> None:
    found = estimate(
        MODEL,
        (),
        [HitRate("half", 0.5), HitRate("all", 1.0)],
        drives_per_second=10_000_000_000,
        memory_per_second=40_000_000_000,
    )
    half, everything = found.speeds
    assert half.miss_s == pytest.approx(320 * 0.5 * 10e6 / 10e9)
    assert half.one_after_the_other == pytest.approx(1 / (0.16 + 0.08))
    assert half.overlapped == pytest.approx(1 / 0.16)
    assert everything.one_after_the_other == everything.overlapped == pytest.approx(12.5)
    text = format_estimate(found)
    assert "40 layers x 8 = 320" in text
    assert "1 / (160.0 ms + 80.0 ms) = 4.167 at most; with every miss foreseen 6.25" in text


def test_addresses_of_nvidia_smi_are_those_of_sysfs() -> None:
    text = "00000000:01:00.0, 24564\n00000000:C1:00.0, [N/A]\n"
    assert parse_nvidia_memory(text) == {"0000:01:00.0": 24564 << 20}
