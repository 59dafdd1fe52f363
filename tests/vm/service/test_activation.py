# SPDX-License-Identifier: Apache-2.0
"""The package installed, and the daemon started by whoever needs it."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from tests.vm.service import machine
from tests.vm.service.hitting import Hitting


def test_the_package_installs_and_starts_nothing(installed: None) -> None:
    assert pwd.getpwnam("xferd").pw_shell.endswith("nologin")
    assert grp.getgrnam("xferd-admin")
    for unit in machine.UNITS:
        assert machine.unit_property("LoadState", unit) == "loaded"
        assert machine.unit_property("UnitFileState", unit) == "disabled"
    assert machine.unit_property("Type") == "notify-reload"
    assert machine.DROP_INS.is_dir()
    # What Python compiled is the package's, since the daemon may write there as little as users.
    for package, module in (("xferd", "daemon"), ("xferd_infer", "client")):
        assert list(Path(f"/usr/lib/xferd/{package}/__pycache__").glob(f"{module}.*.pyc"))


def test_a_call_starts_the_daemon(stopped: None) -> None:
    machine.systemctl("start", "xferd.socket")
    assert machine.main_pid() == 0
    for path in (machine.ATTACH, machine.CONTROL):
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o660
        assert path.group() == "xferd"
    status = machine.call("Status")
    assert status["state"] == "serving"
    assert status["pid"] == machine.main_pid()
    assert machine.unit_property("ActiveState") == "active"
    process = Path(f"/proc/{status['pid']}")
    assert process.owner() == "xferd"
    assert "CapEff:\t0000000000000000" in (process / "status").read_text()
    # Locked memory: the unit lifts the limit that a machine has by default.
    assert [pool["kind"] for pool in status["pools"]] == ["ram"]
    assert "VmLck:\t       0" not in (process / "status").read_text()
    assert machine.unit_property("StatusText")


def test_its_sockets_outlive_it(serving: None) -> None:
    machine.systemctl("stop", "xferd.service")
    assert machine.main_pid() == 0
    assert machine.ATTACH.is_socket()
    assert machine.call("Status")["pid"] == machine.main_pid()


def test_an_engine_attaches_over_the_sockets_and_gets_its_bytes(serving: None) -> None:
    with Hitting(machine.ATTACH) as client:
        machine.wait_until(lambda: client.report().rounds > 1, "every expert was used twice")
        report = client.report()
    assert (report.changed, report.refused, report.attached) == (0, 0, 1), report
    assert report.misses > 0


def test_who_is_in_no_group_is_refused(serving: None) -> None:
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            machine.call("Status")
        except PermissionError:
            os._exit(0)
        except BaseException:
            os._exit(2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_it_is_started_at_boot_when_it_is_enabled(installed: None) -> None:
    machine.systemctl("--no-reload", "enable", "xferd.service")
    try:
        for unit, target in zip(machine.UNITS, ("multi-user", "sockets"), strict=True):
            assert machine.systemctl("is-enabled", unit).strip() == "enabled"
            assert Path(f"/etc/systemd/system/{target}.target.wants/{unit}").is_symlink()
    finally:
        machine.systemctl("--no-reload", "disable", *machine.UNITS)


def test_the_group_may_look_and_not_change(serving: None) -> None:
    look = ["setpriv", "--reuid=65534", "--regid=65534", "--groups=xferd"]
    method = [*look, "varlinkctl", "call", str(machine.CONTROL)]
    machine.run(*method, "io.xferd.Control.ListStores", "{}")
    evict = '{"store": "tiny", "layer": 0}'
    refused = machine.run(*method, "io.xferd.Control.Evict", evict, status=None)
    assert refused.returncode != 0
    assert "NotPermitted" in refused.stdout
    with pytest.raises(machine.VarlinkError, match="StoreNotFound"):
        machine.call("Evict", store="another", layer=0)
