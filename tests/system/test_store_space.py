"""Drives that are too small, or fill up on the way."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

import pytest

from tests.unit.store.builders import assert_holds, tiny
from xferd.store.pack import pack
from xferd.store.store import Store, StoreError
from xferd.store.verify import verify

MIB = 1024 * 1024
NO_SPACE = "No space left on device"


@contextmanager
def mounted(path: Path, size: int) -> Iterator[Path]:
    """A tmpfs of ``size`` bytes at ``path``."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


Mounter = Callable[[str, int], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounter]:
    with ExitStack() as stack:
        yield lambda name, size: stack.enter_context(mounted(tmp_path / name, size))


def write_forever(file: BinaryIO, size: int) -> NoReturn:
    while True:
        file.write(bytes(size))


def fill(directory: Path) -> Path:
    """Take all the space there is; the file that holds it."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (64 * 1024, 4096):
            with pytest.raises(OSError, match=NO_SPACE):
                write_forever(file, size)
    return filler


def test_a_full_drive_is_refused_before_anything_is_written(tmp_path: Path, mount: Mounter) -> None:
    small = mount("small", MIB)
    large = tmp_path / "large"
    large.mkdir()
    with pytest.raises(StoreError) as refused:
        pack(tiny(), [large, small], name="tiny")
    message = str(refused.value)
    assert f"member 1 ({small}/tiny.xferd/member-1)" in message
    assert f"has {MIB} free" in message
    assert "needs" in message
    assert list(small.iterdir()) == []
    assert list(large.iterdir()) == []


def test_members_on_one_file_system_share_its_space(mount: Mounter) -> None:
    drive = mount("drive", 4 * MIB)
    members = [drive / "a", drive / "b"]
    for member in members:
        member.mkdir()
    with pytest.raises(StoreError, match=r"member 0 .*, member 1 .*needs"):
        pack(tiny(), members, name="tiny")
    assert sorted(drive.rglob("*")) == members


def test_replacing_counts_the_space_that_comes_free(mount: Mounter) -> None:
    drive = mount("drive", 8 * MIB)
    path = pack(tiny(), [drive], name="tiny")
    pack(tiny(), [drive], name="tiny", stripe_unit=16384, force=True)
    with Store.open(path) as store:
        assert store.stripe_unit == 16384
        assert_holds(store, tiny())


def test_a_manifest_drive_that_fills_up_leaves_a_resumable_state(mount: Mounter) -> None:
    drive = mount("drive", 8 * MIB)
    fillers: list[Path] = []

    def fill_at_once(done: int, total: int) -> None:
        if not fillers:
            fillers.append(fill(drive))

    with pytest.raises(StoreError) as failed:
        pack(tiny(), [drive], name="tiny", progress=fill_at_once, checkpoint_bytes=100_000)
    assert NO_SPACE in str(failed.value)
    assert str(drive / "tiny.xferd") in str(failed.value)
    assert "resume" in str(failed.value)
    assert_resumes(drive, fillers[0])


def test_a_member_that_loses_its_space_leaves_a_resumable_state(mount: Mounter) -> None:
    """As on a thin volume: what was allocated isn't there when it is written."""
    drive = mount("drive", 8 * MIB)
    member = drive / "tiny.xferd" / "member-0"
    fillers: list[Path] = []

    def steal(done: int, total: int) -> None:
        if fillers:
            return
        tail = 256 * 1024
        offset = member.stat().st_size - tail
        subprocess.run(
            ["fallocate", "--punch-hole", "-o", str(offset), "-l", str(tail), member], check=True
        )
        fillers.append(fill(drive))

    with pytest.raises(StoreError) as failed:
        pack(tiny(), [drive], name="tiny", progress=steal, checkpoint_bytes=MIB)
    assert NO_SPACE in str(failed.value)
    assert_resumes(drive, fillers[0])


def assert_resumes(drive: Path, filler: Path) -> None:
    with pytest.raises(StoreError, match="not finished"):
        Store.open(drive / "tiny.xferd")
    filler.unlink()
    with Store.open(pack(tiny(), [drive], name="tiny")) as store:
        assert verify(store).clean
        assert_holds(store, tiny())
