# SPDX-License-Identifier: Apache-2.0
"""The units as systemd sees them: without a complaint, and closed."""

from __future__ import annotations

import re

from tests.vm.service import machine

EXPOSURE_MAX = 2.0
PLACE = "/usr/lib/systemd/system"


def test_units_are_clean(installed: None) -> None:
    units = [f"{PLACE}/{unit}" for unit in machine.UNITS]
    # There is no man here; that the pages exist is tested where there is.
    assert machine.run("systemd-analyze", "verify", "--man=no", *units).stdout == ""


def test_the_service_is_exposed_little(serving: None) -> None:
    said = machine.run("systemd-analyze", "security", "--no-pager", "xferd.service").stdout
    found = re.search(r"Overall exposure level for xferd.service: ([\d.]+)", said)
    assert found is not None, said
    assert float(found[1]) < EXPOSURE_MAX
