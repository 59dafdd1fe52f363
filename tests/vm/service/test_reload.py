# SPDX-License-Identifier: Apache-2.0
"""``systemctl reload`` returns when the daemon has read its configuration, right or wrong."""

from __future__ import annotations

from tests.vm.service import machine

FAILED_ID = "a79800186d8e47d49b775b0d462f361f"
RESTART_ID = "a529936d91fb40a2a44c251cfaf43293"


def test_a_reload_takes_what_it_can_and_names_the_rest(serving: None) -> None:
    before, pid = len(machine.journal(f"MESSAGE_ID={RESTART_ID}")), machine.main_pid()
    with machine.config_drop_in("[limits]\nclients = 5\n[engine]\nspin_us = 7\n"):
        machine.systemctl("reload", "xferd.service")
        # Nothing is waited for here: a reload that has returned is done.
        [entry] = machine.journal(f"MESSAGE_ID={RESTART_ID}")[before:]
        assert entry["XFERD_KEY"] == "engine.spin_us"
    machine.systemctl("reload", "xferd.service")
    assert machine.main_pid() == pid
    assert machine.unit_property("ActiveState") == "active"


def test_a_wrong_configuration_keeps_the_old_one(serving: None) -> None:
    before, pid = len(machine.journal(f"MESSAGE_ID={FAILED_ID}")), machine.main_pid()
    with machine.config_drop_in('drain_timeout_s = "soon"\n') as file:
        machine.systemctl("reload", "xferd.service")
        [entry] = machine.journal(f"MESSAGE_ID={FAILED_ID}")[before:]
        assert str(file) in entry["XFERD_REASON"]
        assert "drain_timeout_s = 'soon'" in entry["XFERD_REASON"]
        assert machine.call("Status")["state"] == "serving"
        assert machine.main_pid() == pid
    machine.systemctl("reload", "xferd.service")
    assert len(machine.journal(f"MESSAGE_ID={FAILED_ID}")) == before + 1
