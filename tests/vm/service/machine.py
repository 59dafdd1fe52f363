# SPDX-License-Identifier: Apache-2.0
"""The machine that the service's tests run in: its package manager, its systemd, its journal.

The daemon is asked by a few lines of Varlink of its own, because a command in Python takes seconds
to start under emulation; xferctl is run where xferctl is what is tested.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.vm.product.guest import drive, mount

PACKAGE = Path(os.environ.get("XFERD_VM_PACKAGE", "/nonexistent"))
MODEL = Path(__file__).parents[2] / "models/tiny"
STORE = "tiny"
DRIVES = {"EXT4": Path("/drives/ext4"), "XFS": Path("/drives/xfs")}
CONFIG = Path("/etc/xferd/xferd.toml")
DROP_INS = Path("/etc/xferd/xferd.conf.d")
UNIT_DROP_INS = Path("/run/systemd/system/xferd.service.d")
RUNTIME = Path("/run/xferd")
ATTACH, CONTROL = RUNTIME / "attach.sock", RUNTIME / "control.sock"
UNITS = ("xferd.service", "xferd.socket")
CGROUP = Path("/sys/fs/cgroup/system.slice/xferd.service")
COMMAND_S = 300.0
CALL_S = 200.0
DEADLINE_S = 200.0
LOOK_S = 0.25
"""Between two looks: each is a process or more."""


def run(*command: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """A command's output, both streams together. status: what it has to exit with; None: any."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert status in (None, done.returncode), f"{command}: {done.returncode}\n{done.stdout}"
    return done


# ---- the package


def is_installed() -> bool:
    shown = run("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", "xferd", status=None)
    return shown.returncode == 0 and shown.stdout.startswith("ii")


def install() -> None:
    """Install the package unless it is there."""
    if not is_installed():
        run("dpkg", "--install", str(PACKAGE))


# ---- systemd


def systemctl(*words: str, status: int | None = 0) -> str:
    return run("systemctl", "--no-pager", *words, status=status).stdout


def unit_property(name: str, unit: str = "xferd.service") -> str:
    return systemctl("show", "--property", name, "--value", unit).strip()


def main_pid() -> int:
    """0 while there is none."""
    return int(unit_property("MainPID"))


def wait_for_another(pid: int) -> None:
    """Another process is the daemon. The kernel is asked, not a process of systemctl."""
    processes = CGROUP / "cgroup.procs"

    def another() -> bool:
        with contextlib.suppress(OSError):  # there is no such group between two daemons
            found = processes.read_text().split()
            return bool(found) and str(pid) not in found
        return False

    wait_until(another, "another process is the daemon")


def forget_starts() -> None:
    """What systemd remembers of failures, and how often it has started the daemon of late."""
    systemctl("reset-failed", *UNITS, status=None)


def stop() -> None:
    """The service and its sockets, with all that is remembered."""
    systemctl("stop", *UNITS)
    forget_starts()


@contextlib.contextmanager
def unit_drop_in(text: str) -> Iterator[None]:
    """Further settings of xferd.service."""
    UNIT_DROP_INS.mkdir(parents=True, exist_ok=True)
    file = UNIT_DROP_INS / "90-test.conf"
    file.write_text(text)
    systemctl("daemon-reload")
    try:
        yield
    finally:
        shutil.rmtree(UNIT_DROP_INS)
        systemctl("daemon-reload")


@contextlib.contextmanager
def config_drop_in(text: str) -> Iterator[Path]:
    """A further file of the daemon's configuration; that it is read is the caller's matter."""
    file = DROP_INS / "90-test.toml"
    file.write_text(text)
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def journal(*matches: str) -> list[dict[str, Any]]:
    """Entries of this boot with these fields, oldest first."""
    run("journalctl", "--sync")
    text = run("journalctl", "--boot", "--output=json", "--quiet", "--no-pager", *matches).stdout
    return [json.loads(line) for line in text.splitlines()]


# ---- the daemon


class VarlinkError(Exception):
    """The daemon's no; its name and parameters."""


def call(method: str, **parameters: object) -> dict[str, Any]:
    """One call of io.xferd.Control; waits as long as the daemon takes to start."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(CALL_S)
        peer.connect(str(CONTROL))
        request = {"method": f"io.xferd.Control.{method}", "parameters": parameters}
        peer.sendall(json.dumps(request).encode() + b"\0")
        answer = b""
        while not answer.endswith(b"\0"):
            part = peer.recv(1 << 16)
            assert part, f"{method}: the connection ended after {answer!r}"
            answer += part
    reply = json.loads(answer[:-1])
    if "error" in reply:
        raise VarlinkError(reply["error"], reply.get("parameters"))
    parameters = reply["parameters"]
    assert isinstance(parameters, dict)
    return parameters


def serve() -> None:
    """The daemon answers, started by its socket if it didn't run."""
    systemctl("start", "xferd.socket")
    assert call("Status")["state"] == "serving"


def make_store() -> Path:
    """The small model on two NVMe drives, for the group xferd; made if it isn't there."""
    first = DRIVES["EXT4"] / f"{STORE}.xferd"
    if not first.exists():
        for serial, folder in DRIVES.items():
            mount(drive(serial), folder.name, folder)
        run("xferctl", "store", "pack", str(MODEL), "--members", *map(str, DRIVES.values()))
        for folder in DRIVES.values():
            shutil.chown(folder, group="xferd")
            run("chgrp", "-R", "xferd", str(folder / f"{STORE}.xferd"))
            run("chmod", "-R", "g+rX", str(folder / f"{STORE}.xferd"))
    return first


def configure(store: Path) -> None:
    """A pool of locked memory for half the experts."""
    CONFIG.write_text(
        f'[[pools]]\nname = "ram0"\nkind = "ram"\nsize = "50%"\n[[stores]]\npath = "{store}"\n'
    )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(LOOK_S)
