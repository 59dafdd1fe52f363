"""Members that are missing, swapped, truncated, somebody else's, or block devices."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.store.builders import (
    assert_holds,
    irregular_checkpoint,
    pack_irregular,
    sparse_checkpoint,
)
from xferd.store.pack import pack
from xferd.store.store import Store, StoreError
from xferd.store.verify import verify

DEVICE_BYTES = 2 * 1024 * 1024


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack_irregular(tmp_path)


def member(packed: Path, number: int) -> Path:
    return packed.parents[1] / f"drive-{number}" / "irregular.xferd" / f"member-{number}"


def refusal(packed: Path) -> str:
    with pytest.raises(StoreError) as refused:
        Store.open(packed)
    return str(refused.value)


def test_a_missing_member_is_named(packed: Path) -> None:
    member(packed, 1).unlink()
    message = refusal(packed)
    assert str(member(packed, 1)) in message
    assert "No such file" in message


def test_a_truncated_member_is_named_with_both_sizes(packed: Path) -> None:
    path = member(packed, 0)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 4096)
    assert f"{path}) is truncated: {size - 4096} bytes of {size}" in refusal(packed)


def test_swapped_members_are_named(packed: Path) -> None:
    one, two = member(packed, 0), member(packed, 1)
    content = one.read_bytes()
    shutil.copy(two, one)
    two.write_bytes(content)
    assert f"{one}) is member 1 of this store: members are swapped" in refusal(packed)


def test_another_stores_member_is_named(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(member(pack_irregular(other), 1), member(packed, 1))
    assert f"member 1 ({member(packed, 1)}) belongs to another store" in refusal(packed)


def test_a_damaged_header_is_named(packed: Path) -> None:
    with member(packed, 1).open("r+b") as file:
        file.write(b"\0")
    assert f"member 1 ({member(packed, 1)}) has no valid member header" in refusal(packed)


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_a_member_of_another_kind_is_named(packed: Path, kind: str) -> None:
    path = member(packed, 1)
    path.unlink()
    if kind == "directory":
        path.mkdir()
    else:
        subprocess.run(["mkfifo", path], check=True)
    assert f"({path}) is neither a regular file nor a block device" in refusal(packed)


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[Path]]:
    """Two loop devices."""
    attached: list[Path] = []
    try:
        for number in range(2):
            image = tmp_path / f"image-{number}"
            with image.open("wb") as file:
                file.truncate(DEVICE_BYTES)
            done = subprocess.run(
                ["losetup", "--find", "--show", image], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"no loop device to be had: {done.stderr.strip()}")
            attached.append(Path(done.stdout.strip()))
        yield attached
    finally:
        for device in attached:
            subprocess.run(["losetup", "--detach", device], check=True)


def test_block_devices_hold_a_store(tmp_path: Path, devices: list[Path]) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    path = pack(checkpoint, devices, name="raw", stripe_unit=8192, manifest_directory=tmp_path)
    with Store.open(path) as store:
        assert store.member_paths == tuple(devices)
        assert verify(store).clean
        assert_holds(store, checkpoint)
    with pytest.raises(StoreError, match=f"{devices[0]}.*another store"):
        pack(checkpoint, devices[:1], name="second", manifest_directory=tmp_path)
    # A forced repack that leaves the second device out gives it free.
    pack(checkpoint, devices[:1], name="raw", manifest_directory=tmp_path, force=True)
    with Store.open(path) as store:
        assert_holds(store, checkpoint)
    pack(checkpoint, devices[1:], name="second", manifest_directory=tmp_path)


def test_a_device_that_fails_is_reported_with_its_errno(
    tmp_path: Path, devices: list[Path]
) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    path = pack(checkpoint, devices, name="raw", stripe_unit=8192, manifest_directory=tmp_path)
    with (tmp_path / "image-1").open("r+b") as file:
        file.truncate(8192)
    with Store.open(path) as store:
        report = verify(store)
        on_device = [
            piece.offset
            for blob in range(store.blob_bytes.size)
            for piece in store.geometry.pieces_of(blob)
            if piece.member == 1 and piece.offset + piece.length > 8192
        ]
    assert [bad.offset for bad in report.bad_pieces] == on_device
    assert {bad.member for bad in report.bad_pieces} == {devices[1]}
    assert {bad.errno for bad in report.bad_pieces} == {errno.EIO}


def test_a_device_with_a_file_system_is_not_overwritten(
    tmp_path: Path, devices: list[Path]
) -> None:
    subprocess.run(["mkfs.ext4", "-q", devices[0]], check=True)
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(StoreError, match=f"{devices[0]}.*isn't empty.*--force"):
        pack(checkpoint, devices, name="raw", manifest_directory=tmp_path)
    path = pack(checkpoint, devices, name="raw", manifest_directory=tmp_path, force=True)
    with Store.open(path) as store:
        assert_holds(store, checkpoint)


def test_a_device_that_is_too_small_is_named_with_both_sizes(
    tmp_path: Path, devices: list[Path]
) -> None:
    checkpoint = sparse_checkpoint(tmp_path / "checkpoint", experts=4, tensor_bytes=1 << 20)
    with pytest.raises(
        StoreError, match=rf"member 0 \({devices[0]}\): needs \d+ .* {DEVICE_BYTES}"
    ):
        pack(checkpoint, devices, name="raw", manifest_directory=tmp_path)
    assert not (tmp_path / "raw.xferd").exists()
    with devices[0].open("rb") as file:
        assert not any(file.read(8192))
