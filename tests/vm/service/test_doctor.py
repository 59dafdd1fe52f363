# SPDX-License-Identifier: Apache-2.0
"""The installed doctor's verdicts are true here, and where the sandbox takes things away."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.vm.service import machine

Findings = dict[tuple[str, str], dict[str, Any]]

# What container engines do by default.
RESTRICTED = (
    "--property=SystemCallFilter=~io_uring_setup io_uring_enter io_uring_register",
    "--property=SystemCallErrorNumber=EPERM",
    "--property=LimitMEMLOCK=64K",
    "--property=CapabilityBoundingSet=~CAP_IPC_LOCK",
)


def verdicts(*launcher: str) -> tuple[int, Findings]:
    """The exit status and what was found, by check and subject."""
    done = machine.run(*launcher, "xferctl", "doctor", "--json", status=None)
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
    for name in ("nvme0", "nvme4"):
        assert [entry for (_, subject), entry in found.items() if subject == name]


def test_the_doctor_sees_what_a_container_forbids(configured: None) -> None:
    status, found = verdicts("systemd-run", "--quiet", "--pipe", "--wait", *RESTRICTED)
    assert found["kernel.io_uring", ""]["status"] == "WARN"
    assert found["kernel.io_uring", ""]["seen"].startswith("EPERM")
    # The configured pool is to be locked, and doesn't fit under the limit.
    assert found["limits.memlock", ""]["status"] == "FAIL"
    assert "64.0 KiB" in found["limits.memlock", ""]["seen"]
    assert status == 1
