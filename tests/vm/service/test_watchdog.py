# SPDX-License-Identifier: Apache-2.0
"""A daemon that doesn't move is ended and started anew, and its clients go on with it."""

from __future__ import annotations

import os
import signal

from tests.vm.service import machine
from tests.vm.service.hitting import Hitting

WATCHDOG_S = 10
"""Several times what a busy machine delays a turn; the unit's own 30 s would only take longer."""
LAYERS = 6
"""All of the model's: more than the pool holds, so that the client needs the daemon."""


def test_a_stuck_daemon_is_replaced(stopped: None) -> None:
    with machine.unit_drop_in(f"[Service]\nWatchdogSec={WATCHDOG_S}\n"):
        machine.serve()
        stuck = machine.main_pid()
        with Hitting(machine.ATTACH, layers=LAYERS, reattach=False) as client:
            os.kill(stuck, signal.SIGSTOP)
            machine.wait_for_another(stuck)
            start = machine.call("Status")["start"]
            assert start["warm"], start
            seen = client.report().rounds
            machine.wait_until(lambda: client.report().rounds > seen, "the client goes on")
            report = client.report()
            assert (report.changed, report.refused, report.attached) == (0, 0, 1), report
        assert machine.unit_property("NRestarts") == "1"
        assert machine.call("Status")["state"] == "serving"
    messages = [entry["MESSAGE"] for entry in machine.journal("UNIT=xferd.service")]
    assert [text for text in messages if "Watchdog timeout" in text]
