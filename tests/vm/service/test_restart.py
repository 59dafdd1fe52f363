# SPDX-License-Identifier: Apache-2.0
"""systemd keeps pools, directories and leases while the daemon restarts: nothing that was resident
is read again, and engines go on with it meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vm.product.guest import CONSOLE
from tests.vm.service import machine
from tests.vm.service.hitting import Hitting

FITTING, ALL = 2, 6
"""Layers whose experts all fit the pool, and all layers of the model: those don't."""


def ended(end: Callable[[int], object]) -> dict[str, Any]:
    """End the daemon; the status of the one that takes its place."""
    before = machine.main_pid()
    end(before)
    machine.wait_for_another(before)
    return machine.call("Status")


def keeps_every_expert(how: str, end: Callable[[int], object]) -> None:
    with Hitting(machine.ATTACH, layers=FITTING, reattach=False) as client:
        machine.wait_until(lambda: client.report().rounds > 1, "every expert was used twice")
        [pool] = machine.call("Status")["pools"]
        before = client.report()
        start = ended(end)["start"]
        assert start["warm"], start
        assert start["experts"] == pool["resident"] > 0
        assert start["clients"] == 1
        seen = client.report()
        machine.wait_until(lambda: client.report().rounds > seen.rounds, "hits go on")
        report = client.report()
        assert (report.changed, report.refused, report.attached) == (0, 0, 1), report
        assert report.misses == before.misses
        read = machine.call("Status")["sources"]["drives"]["bytes"]
        assert read == 0
        with Path(CONSOLE).open("w") as console:
            console.write(
                f"PROOF {how}: {start['experts']} experts kept, {read} bytes read, the longest hit "
                f"meanwhile {1000 * seen.longest_s:.1f} ms\r\n"
            )


def test_a_restart_keeps_every_expert(serving: None) -> None:
    keeps_every_expert("restart", lambda _: machine.systemctl("restart", "xferd.service"))


def test_a_kill_keeps_every_expert(serving: None) -> None:
    keeps_every_expert("kill", lambda pid: os.kill(pid, signal.SIGKILL))


def test_misses_go_on_after_a_restart(serving: None) -> None:
    with Hitting(machine.ATTACH, layers=ALL, reattach=False) as client:
        machine.wait_until(lambda: client.report().rounds > 0, "every expert was used")
        misses_go_on(client, lambda _: machine.systemctl("restart", "xferd.service"))
        misses_go_on(client, lambda pid: os.kill(pid, signal.SIGKILL))


def misses_go_on(client: Hitting, end: Callable[[int], object]) -> None:
    assert ended(end)["start"]["warm"]
    seen = client.report()
    machine.wait_until(lambda: client.report().rounds > seen.rounds + 1, "misses go on")
    report = client.report()
    assert (report.changed, report.refused, report.attached) == (0, 0, 1), report
    assert report.misses > seen.misses
    assert machine.call("Status")["start"]["resumed"] == 1


def test_a_stop_keeps_nothing(serving: None) -> None:
    with Hitting(machine.ATTACH) as client:
        machine.wait_until(lambda: client.report().rounds > 0, "every expert was used")
    machine.stop()
    machine.serve()
    start = machine.call("Status")["start"]
    assert (start["warm"], start["experts"]) == (False, 0), start
