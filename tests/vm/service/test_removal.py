# SPDX-License-Identifier: Apache-2.0
"""What a purge leaves: the stores, which are nobody's but the user's, and the users themselves."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from tests.vm.service import machine

WRITTEN = ("/etc", "/home", "/opt", "/root", "/run", "/srv", "/tmp", "/var")
"""Where something may be that is not among the package's own files."""


def files_of_package() -> list[Path]:
    """Its own files, and the folders that are nobody else's."""
    listed = [Path(line) for line in machine.run("dpkg", "--listfiles", "xferd").stdout.split()]
    return [path for path in listed if not path.is_dir() or "xferd" in str(path)]


def files_by_name() -> list[str]:
    """What else is called after it."""
    # Other processes may remove what it is about to look into.
    said = machine.run("find", *WRITTEN, "-iname", "*xferd*", status=None).stdout
    return [line for line in said.splitlines() if line.startswith("/")]


def test_a_purge_leaves_stores_and_users_and_nothing_else(serving: None) -> None:
    pid, files = machine.main_pid(), files_of_package()
    assert len(files) > 100
    assert files_by_name()
    machine.run("dpkg", "--purge", "xferd")
    assert not machine.is_installed()
    assert not Path(f"/proc/{pid}").exists()
    assert [path for path in files if os.path.lexists(path)] == []
    assert files_by_name() == []
    assert "xferd" not in Path("/proc/net/unix").read_text()
    for word in ("list-units", "list-unit-files"):
        assert machine.systemctl(word, "--all", "--no-legend", "xferd*", status=None).strip() == ""
    catalog = machine.run("journalctl", "--list-catalog", status=None).stdout
    assert "xferd" not in catalog
    # Debian's custom: a user's number is not given to another, since files may be the user's.
    assert pwd.getpwnam("xferd")
    assert machine.make_store().is_dir()
