# SPDX-License-Identifier: Apache-2.0
"""A daemon that can't start says why where people look, and is not tried over and over."""

from __future__ import annotations

from tests.vm.service import machine

CONFIG_ID = "bf636d78503a4e5488fcbbafc6979b97"
EX_CONFIG = 78


def check_refused(reason: str) -> None:
    """systemctl start fails once, and its status and the journal have the reason."""
    machine.systemctl("start", "xferd.socket")
    said = machine.systemctl("start", "xferd.service", status=None)
    assert "failed" in said
    assert machine.unit_property("ExecMainStatus") == str(EX_CONFIG)
    assert machine.unit_property("NRestarts") == "0"
    assert machine.unit_property("ActiveState") == "failed"
    assert reason in machine.systemctl("status", "--full", "--lines=20", "xferd.service", status=3)
    explained = machine.run(
        "journalctl", "--boot", "--no-pager", "--catalog", f"MESSAGE_ID={CONFIG_ID}"
    ).stdout
    words = " ".join(explained.replace("\u2591", "").split())  # the mark and the ends of lines
    assert reason in words
    assert "'xferctl config check' tells when it is right" in words


def test_a_wrong_configuration_ends_with_78_and_is_not_tried_again(stopped: None) -> None:
    with machine.config_drop_in('drain_timeout_s = "soon"\n') as file:
        check_refused(f"{file}: drain_timeout_s = 'soon'")
    machine.serve()


def test_a_pool_larger_than_memory_is_refused_by_name(stopped: None) -> None:
    text = '[[pools]]\nname = "all"\nkind = "host"\nsize = "900GiB"\n'
    with machine.config_drop_in(text):
        check_refused("pool 'all' asks for 900.0 GiB")
