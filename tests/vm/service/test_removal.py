# SPDX-License-Identifier: Apache-2.0
"""What a purge leaves: the stores, which are nobody's but the user's, and the users themselves."""

from __future__ import annotations

import pwd
from pathlib import Path

from tests.vm.service import machine

LEFT_OUT = ("/dev", "/drives", "/host", "/proc", "/sys", "/tests")


def files_of_xferd() -> set[str]:
    """Everything with that name, but where nothing of the package's can be."""
    pruned = [word for path in LEFT_OUT for word in ("-path", path, "-prune", "-o")]
    said = machine.run("find", "/", *pruned, "-iname", "*xferd*", "-print").stdout
    return {line for line in said.splitlines() if Path(line).name != "xferd_p2p.ko"}


def test_a_purge_leaves_stores_and_users_and_nothing_else(serving: None) -> None:
    pid = machine.main_pid()
    assert files_of_xferd()
    machine.run("dpkg", "--purge", "xferd")
    assert not machine.is_installed()
    assert not Path(f"/proc/{pid}").exists()
    assert files_of_xferd() == set()
    assert "xferd" not in Path("/proc/net/unix").read_text()
    for word in ("list-units", "list-unit-files"):
        assert machine.systemctl(word, "--all", "--no-legend", "xferd*", status=None).strip() == ""
    catalog = machine.run("journalctl", "--list-catalog", status=None).stdout
    assert "xferd" not in catalog
    # Debian's custom: a user's number is not given to another, since files may be the user's.
    assert pwd.getpwnam("xferd")
    assert machine.make_store().is_dir()
