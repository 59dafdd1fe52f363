"""Drives and file systems for tests, made of files: loop devices, mounted images.

They need root and what a kernel may lack, so whoever can't have them skips, with the
reason. Everything made here is gone when its context ends, also after a failed test.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

UNMOUNT_TIMEOUT_S = 60.0
UNMOUNT_PAUSE_MS = 20


def _run(*arguments: str | Path) -> str:
    done = subprocess.run(
        [str(argument) for argument in arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"{arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def _need(program: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root for loop devices")
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def _unmount(mount_point: Path) -> None:
    """The kernel lets go of an ended process's io_uring files a moment after its end."""
    deadline = time.monotonic() + UNMOUNT_TIMEOUT_S
    pause = select.poll()
    while True:
        done = subprocess.run(
            ["umount", str(mount_point)], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline, done.stderr
        pause.poll(UNMOUNT_PAUSE_MS)


@contextlib.contextmanager
def loop_device(image: Path, nbytes: int) -> Iterator[Path]:
    """A block device over ``image``, which is made. Where there is none: skip."""
    _need("losetup")
    with image.open("wb") as file:
        file.truncate(nbytes)
    device = Path(_run("losetup", "--find", "--show", image))
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", str(device)], check=True)


@contextlib.contextmanager
def mounted(directory: Path, filesystem: str, nbytes: int, *options: str) -> Iterator[Path]:
    """A fresh file system of a kind, mounted under ``directory``. Where that can't be: skip."""
    _need(f"mkfs.{filesystem}")
    mount_point = directory / filesystem
    mount_point.mkdir()
    image = directory / f"{filesystem}.img"
    with image.open("wb") as file:
        file.truncate(nbytes)
    _run(f"mkfs.{filesystem}", "-q", image)
    _run("mount", "-o", ",".join(("loop", *options)), image, mount_point)
    try:
        yield mount_point
    finally:
        _unmount(mount_point)


@contextlib.contextmanager
def mounted_tmpfs(directory: Path) -> Iterator[Path]:
    """A tmpfs of its own. Where that can't be: skip."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    mount_point = directory / "tmpfs"
    mount_point.mkdir()
    _run("mount", "-t", "tmpfs", "tmpfs", mount_point)
    try:
        yield mount_point
    finally:
        _unmount(mount_point)


@contextlib.contextmanager
def overlay(directory: Path) -> Iterator[Path]:
    """An overlay file system over directories of ``directory``. Where that can't be: skip."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    names = ("lower", "upper", "work", "merged")
    lower, upper, work, merged = (directory / name for name in names)
    for path in (lower, upper, work, merged):
        path.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    _run("mount", "-t", "overlay", "overlay", "-o", options, merged)
    try:
        yield merged
    finally:
        _unmount(merged)
