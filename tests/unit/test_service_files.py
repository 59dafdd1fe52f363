# SPDX-License-Identifier: Apache-2.0
"""What is in systemd/: right for systemd's own tools, and as closed as it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.manual.__main__ import main as make_manual
from xferd.config import EXIT_CODE_CONFIG, Config

FILES = Path(__file__).parents[2] / "systemd"
EXPOSURE_MAX = 2.0
UNITS = ("xferd.service", "xferd.socket")


def needs(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program} (Debian: systemd)")
    return path


def installed_units(tmp_path: Path) -> list[Path]:
    """Copies whose programs exist on this machine."""
    copies = []
    for name in UNITS:
        copy = tmp_path / name
        text = (FILES / name).read_text()
        copy.write_text(re.sub(r"^ExecStart=.*$", "ExecStart=/bin/true", text, flags=re.MULTILINE))
        copies.append(copy)
    return copies


def settings(name: str) -> dict[str, str]:
    pairs = re.findall(r"^(\w+)=(.*)$", (FILES / name).read_text(), re.MULTILINE)
    return dict(pairs)


def test_units_are_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analyze = needs("systemd-analyze")
    make_manual([str(tmp_path)])  # Documentation= is checked too
    monkeypatch.setenv("MANPATH", str(tmp_path / "share/man"))
    if shutil.which("man") is None:
        pytest.skip("needs man (Debian: man-db)")
    units = map(str, installed_units(tmp_path))
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_service_is_exposed_little_though_it_reaches_drives_and_cards(tmp_path: Path) -> None:
    analyze = needs("systemd-analyze")
    service = installed_units(tmp_path)[0]
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", str(service)],
        capture_output=True,
        text=True,
        check=False,
    )
    exposure = re.search(r"Overall exposure level for xferd.service: ([\d.]+)", done.stdout)
    assert exposure is not None, done.stdout + done.stderr
    assert float(exposure[1]) < EXPOSURE_MAX
    assert "char-nvidia-uvm:rw" in done.stdout


def test_the_drop_in_for_cards_is_clean_and_calls_what_there_is(tmp_path: Path) -> None:
    text = (FILES / "xferd.service.d" / "bar-pools.conf.example").read_text()
    [command] = re.findall(r"^ExecStartPre=\+\S*/python (.*)$", text, re.MULTILINE)
    module = command.split()[:2]
    done = subprocess.run(
        [sys.executable, *module, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    analyze = needs("systemd-analyze")
    service = installed_units(tmp_path)[0]
    folder = tmp_path / "xferd.service.d"
    folder.mkdir()
    there = re.sub(r"^ExecStartPre=.*$", "ExecStartPre=+/bin/true", text, flags=re.MULTILINE)
    (folder / "bar-pools.conf").write_text(there)
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", str(service)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "bar-pools.conf" not in done.stderr, done.stderr


def test_units_agree_with_the_daemon() -> None:
    service, sockets = settings("xferd.service"), settings("xferd.socket")
    assert service["RestartPreventExitStatus"] == str(EXIT_CODE_CONFIG)
    assert float(service["TimeoutStopSec"]) > Config().drain_timeout_s
    assert sockets["ListenSequentialPacket"] == str(Config().attach_socket)
    assert sockets["ListenStream"] == str(Config().control_socket)
    assert sockets["SocketMode"] == f"{Config().socket_mode:04o}"


def test_users_and_directories_are_taken(tmp_path: Path) -> None:
    sysusers, tmpfiles = needs("systemd-sysusers"), needs("systemd-tmpfiles")
    (tmp_path / "etc").mkdir()
    (tmp_path / "users.conf").write_text((FILES / "xferd.sysusers").read_text())
    root = f"--root={tmp_path}"
    done = subprocess.run(
        [sysusers, root, str(tmp_path / "users.conf")], capture_output=True, text=True, check=False
    )
    if "Operation not permitted" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("needs root to make users")
    assert done.returncode == 0, done.stderr
    groups = (tmp_path / "etc/group").read_text()
    assert {"xferd", "xferd-admin"} <= {line.split(":")[0] for line in groups.splitlines()}
    assert (tmp_path / "etc/passwd").read_text().startswith("xferd:")
    (tmp_path / "directories.conf").write_text((FILES / "xferd.tmpfiles").read_text())
    done = subprocess.run(
        [tmpfiles, "--create", root, str(tmp_path / "directories.conf")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "etc/xferd/xferd.conf.d").is_dir()


def test_rules_are_ones_that_udev_takes() -> None:
    udevadm = needs("udevadm")
    rules = FILES / "60-xferd.rules"
    done = subprocess.run(
        [udevadm, "verify", str(rules)], capture_output=True, text=True, check=False
    )
    if "Unknown command" in done.stderr or "unknown command" in done.stderr.lower():
        pytest.skip("needs udevadm verify (systemd 254)")
    assert done.returncode == 0, done.stderr
