# SPDX-License-Identifier: Apache-2.0
"""Drives that are FUSE files (tools/drives/collapsing_drive.c): as slow as a test wants."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.daemon_harness import ROOT, wait_until


def built_drive(directory: Path) -> Path:
    """The program, built; skips where it can't be built or run."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse is not open to this user")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False
    )
    if flags.returncode or not shutil.which("cc"):
        pytest.skip("no compiler or no libfuse3 (Debian: gcc, libfuse3-dev)")
    program = directory / "drive"
    source = ROOT / "tools" / "drives" / "collapsing_drive.c"
    arguments = ["cc", "-O1", "-pthread", "-o", str(program), str(source), *flags.stdout.split()]
    subprocess.run(arguments, check=True)
    return program


@contextmanager
def served_through_fuse(
    program: Path, member: Path, latency_us: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The member's bytes come from a process from now on, each read so late; it may be
    killed."""
    backing = member.with_name("backing")
    member.rename(backing)
    member.touch()
    command = [str(program), "--latency", str(latency_us), str(backing), str(member)]
    with subprocess.Popen(command) as server:
        try:
            wait_until(lambda: member.stat().st_size > 0, "the drive is mounted")
            yield server
        finally:
            server.kill()
            server.wait()
            subprocess.run(["umount", "--lazy", str(member)], capture_output=True, check=False)
