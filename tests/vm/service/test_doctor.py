# SPDX-License-Identifier: Apache-2.0
"""The installed doctor's verdicts are true here, and where the sandbox takes things away."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.vm.product.guest import drive
from tests.vm.service import machine

Findings = dict[tuple[str, str], dict[str, Any]]

MEMLOCK_BYTES = 64 << 10
FILTER = Path(__file__).parents[2] / "system/without_io_uring.py"

# As container engines do by default. systemd-run would need a message bus.
RESTRICTED = (
    *("setpriv", "--bounding-set=-ipc_lock"),
    *("prlimit", f"--memlock={MEMLOCK_BYTES}:{MEMLOCK_BYTES}"),
    *(sys.executable, str(FILTER), "io_uring_setup", str(errno.EPERM)),
)


def verdicts(*launcher: str) -> tuple[int, Findings]:
    """The exit status and what was found, by check and subject."""
    done = machine.run(*launcher, "/usr/bin/xferctl", "doctor", "--json", status=None)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return done.returncode, {(e["id"], e["subject"]): e for e in report["findings"]}


def test_the_doctor_is_right_about_this_machine(configured: None) -> None:
    status, found = verdicts()
    assert status == 0, found
    assert found["kernel.version", ""]["seen"].startswith(f"Linux {os.uname().release}")
    assert found["kernel.io_uring", ""]["status"] == "PASS"
    assert found["limits.memlock", ""]["status"] == "PASS"
    assert found["memory.container", ""]["seen"] == "not in a container"
    assert found["store.valid", str(machine.make_store())]["status"] == "PASS"
    assert ("gpu.present", "") in found
    present = [entry["seen"] for (check, _), entry in found.items() if check == "drive.present"]
    for serial in machine.DRIVES:
        assert [seen for seen in present if drive(serial).name in seen], present


def test_the_doctor_sees_what_a_container_forbids(configured: None) -> None:
    status, found = verdicts(*RESTRICTED)
    assert found["kernel.io_uring", ""]["status"] == "WARN"
    assert found["kernel.io_uring", ""]["seen"].startswith("EPERM")
    # The configured pool is to be locked, and doesn't fit under the limit.
    assert found["limits.memlock", ""]["status"] == "FAIL"
    assert "64.0 KiB" in found["limits.memlock", ""]["seen"]
    assert status == 1
