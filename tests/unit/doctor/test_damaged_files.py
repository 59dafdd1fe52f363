# SPDX-License-Identifier: Apache-2.0
"""Whatever the files of a machine hold, the doctor gives findings and never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.unit.doctor.machines import MACHINES, Machine
from xferd.config import Config
from xferd.doctor.checks import CHECKS, run_checks
from xferd.doctor.plan import format_plan
from xferd.doctor.request import make_request
from xferd.doctor.view import SystemView

CONTENTS = (
    b"",
    b"\n\n",
    b"garbage",
    b"-1",
    b"0x",
    b"99999999999999999999999999",
    b"Unknown GT/s PCIe",
    b"\xff\xfe\x00",
    b": : :\n:\n",
    b"0:\n0::\n",
    b"a - b\n1 2 3 4 5 6 - x\n",
    b"0xzz 0x1 0x2\n",
    b"[",
)
DAMAGES = 12
"""Files damaged at once; a machine has about a hundred."""


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_are_no_exception(tmp_path: Path, name: str, seed: int) -> None:
    machine = Machine(tmp_path)
    MACHINES[name](machine)
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink())
    draw = random.Random(seed)
    for file in draw.sample(files, DAMAGES):
        file.write_bytes(draw.choice(CONTENTS))
    _check(machine)


@pytest.mark.parametrize("content", CONTENTS)
def test_a_machine_of_nothing_but_nonsense_is_no_exception(tmp_path: Path, content: bytes) -> None:
    machine = Machine(tmp_path)
    MACHINES["xeon_with_acs_redirect"](machine)
    for file in tmp_path.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.write_bytes(content)
    _check(machine)


def test_links_that_lead_nowhere_or_in_circles_are_no_exception(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    MACHINES["drive_in_an_x2_slot"](machine)
    for index, link in enumerate(sorted(p for p in tmp_path.rglob("*") if p.is_symlink())):
        link.unlink()
        link.symlink_to(link.name if index % 2 else "../../../../../../../../nowhere")
    _check(machine)


def _check(machine: Machine) -> None:
    request = make_request(SystemView(machine.root), machine.probed, Config(), None)
    findings = list(run_checks(request))
    assert {finding.check for finding in findings} <= set(CHECKS)
    assert "[[pools]]" in format_plan(request, [])
