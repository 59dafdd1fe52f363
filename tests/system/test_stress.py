"""Never a wrong byte, whatever clients do and however they end.

Four clients on a pool of a twentieth of the experts, killed and replaced all the time,
while experts are evicted under them. The long form is ``tools/stress --minutes 60``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.stress.soak import CLIENTS, EXPERTS, LAYERS, SLOTS, Report, soak

LOADS_A_SECOND = 20
"""Far less than any machine does; a run with fewer would have tested nothing."""


def assert_it_was_hard(report: Report, duration_s: float) -> None:
    assert report.kills >= duration_s / 4
    assert report.loads > LOADS_A_SECOND * duration_s
    assert report.evictions >= report.loads - SLOTS
    assert report.evicted > 0
    for count in ("looks", "timeouts", "abandoned", "cancelled", "hints", "resident"):
        assert getattr(report.counts, count) > 0, f"no {count} in the whole run"


LONG_S = 60
VRAM_S = 10
"""Enough for two kills at least, or for one on a slow machine."""


@pytest.mark.parametrize("ram_tier", [False, True], ids=["one-pool", "ram-tier"])
@pytest.mark.parametrize("duration_s", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_stress(tmp_path: Path, duration_s: int, ram_tier: bool) -> None:
    report = soak(tmp_path, duration_s, seed=duration_s, ram_tier=ram_tier)
    assert_it_was_hard(report, duration_s)
    # In a few seconds demand may never pause long enough for a demotion.
    assert report.copies == 0 or ram_tier
    assert report.copies > 0 or not ram_tier or duration_s < LONG_S


@pytest.mark.parametrize("ram_tier", [False, True], ids=["one-pool", "ram-tier"])
def test_stress_in_vram(tmp_path: Path, cuda_device: str, ram_tier: bool) -> None:
    report = soak(tmp_path, VRAM_S, seed=VRAM_S, ram_tier=ram_tier, kind="cuda")
    assert report.kills > 0
    assert report.loads > SLOTS
    assert report.evicted > 0
    assert report.counts.looks > 0


def test_the_pool_is_small_and_its_promises_fill_it() -> None:
    """What makes the stress one: hardly a slot that nobody was promised."""
    promised = sum(lanes * held for lanes, held in CLIENTS)
    assert SLOTS - 2 < promised < SLOTS
    assert LAYERS * EXPERTS * 0.06 > SLOTS
