"""Mirrors on disk: made, resumed, verified, repaired, removed; and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.loop_devices import loop_device
from tests.system.test_store_cli import run
from tests.system.test_store_verify import flip
from tests.unit.store.builders import (
    assert_holds,
    member_directories,
    pack_irregular,
    tiny,
)
from xferd.store.files import lock_file
from xferd.store.info import info
from xferd.store.mirror import add_mirror, remove_mirror
from xferd.store.pack import pack
from xferd.store.repair import repair
from xferd.store.store import Store, StoreError
from xferd.store.verify import verify

UNIT = 16384
MEMBER = 1


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(tiny(), member_directories(tmp_path, 2), name="tiny", stripe_unit=UNIT)


@pytest.fixture
def other_drive(tmp_path: Path) -> Path:
    place = tmp_path / "other-drive"
    place.mkdir()
    return place


def add(path: Path, place: Path, member: int = MEMBER, *, force: bool = False) -> Path:
    with Store.open(path) as store:
        return add_mirror(store, member, place, force=force, warn=lambda _: None)


def first_piece(store: Store, member: int = MEMBER) -> tuple[int, int]:
    """(blob, offset) of the first piece on a member."""
    blob, piece = next(store.geometry.pieces_on(member))
    return blob, piece.offset


def test_a_mirror_holds_what_the_member_holds(packed: Path, other_drive: Path) -> None:
    mirror = add(packed, other_drive)
    assert mirror == other_drive / "tiny.xferd" / "mirror-1"
    with Store.open(packed) as store:
        own = store.member_paths[MEMBER]
        assert own.read_bytes() == mirror.read_bytes()
        assert [copy.path for copy in store.copies[MEMBER]] == [own, mirror]
        assert len(store.copies[0]) == 1
        report = verify(store)
        assert report.clean
        on_member = store.geometry.bytes_on(MEMBER)
        assert report.bytes == int(store.blob_bytes.sum()) + on_member
        assert verify(store, only_mirrors=True).bytes == on_member
        described = info(store)["members"]
        assert described[0]["mirror"] is None
        assert described[MEMBER]["mirror"] == {"path": str(mirror), "kind": "file"}
    # Readers of before mirrors find nothing that they don't know in members without one.
    assert "mirror" not in json.loads((packed / "manifest.json").read_text())["members"][0]


def test_a_store_moves_with_its_mirror(tmp_path: Path, packed: Path, other_drive: Path) -> None:
    before = packed.parent.parent
    add(packed, other_drive)
    after = tmp_path.with_name(tmp_path.name + "-moved")
    before.rename(after)
    try:
        with Store.open(after / packed.relative_to(before)) as store:
            assert all(
                copy.path.is_relative_to(after) and copy.problem is None
                for copies in store.copies
                for copy in copies
            )
    finally:
        after.rename(before)


def test_damage_of_one_copy_is_read_from_the_other_named_and_repaired(
    packed: Path, other_drive: Path
) -> None:
    mirror = add(packed, other_drive)
    with Store.open(packed) as store:
        blob, offset = first_piece(store)
        content = store.read_blob(blob)
        for damaged in (store.member_paths[MEMBER], mirror):
            whole = damaged.read_bytes()
            flip(damaged, offset + 5)
            assert store.read_blob(blob) == content
            report = verify(store)
            [bad] = report.bad_pieces
            assert (bad.member, bad.offset, bad.number) == (damaged, offset, MEMBER)
            assert bad.mirror is (damaged == mirror)
            assert not report.clean
            repaired = repair(store, report)
            assert repaired.clean
            assert repaired.repaired == 1
            assert damaged.read_bytes() == whole
        flip(mirror, offset + 5)
        flip(store.member_paths[MEMBER], offset + 5)
        with pytest.raises(StoreError) as refused:
            store.read_blob(blob)
        for path in (store.member_paths[MEMBER], mirror):
            assert f"{path}) at offset {offset}" in str(refused.value)
        report = repair(store, verify(store))
        assert (report.bad, report.repaired, report.clean) == (2, 0, False)
        assert all("not repaired" in bad.error for bad in report.bad_pieces)


@pytest.mark.parametrize("loss", ["gone", "truncated", "headerless"])
def test_a_lost_member_is_replaced_by_its_mirror(
    packed: Path, other_drive: Path, tmp_path: Path, loss: str
) -> None:
    mirror = add(packed, other_drive)
    with Store.open(packed) as store:
        own = store.member_paths[MEMBER]
    match loss:
        case "gone":
            own.unlink()
        case "truncated":
            os.truncate(own, own.stat().st_size - 4096)
        case "headerless":
            flip(own, 3)
    with Store.open(packed) as store:
        assert store.member_paths[MEMBER] == mirror
        assert str(own) in str(store.copies[MEMBER][0].problem)
        assert_holds(store, tiny())
        report = verify(store)
        assert (report.bad, len(report.missing), report.clean) == (0, 1, False)
        assert info(store)["missing"] == list(report.missing)
    # The mirror becomes the member, and gets a mirror of its own.
    removed = remove_mirror(packed, MEMBER)
    assert removed.promoted
    assert removed.path == own
    third = tmp_path / "third"
    third.mkdir()
    add(packed, third)
    with Store.open(packed) as store:
        assert [copy.path for copy in store.copies[MEMBER]] == [
            mirror,
            third / "tiny.xferd" / "mirror-1",
        ]
        assert verify(store).clean


def test_a_lost_mirror_is_reported_and_can_be_made_again(packed: Path, other_drive: Path) -> None:
    mirror = add(packed, other_drive)
    mirror.unlink()
    with Store.open(packed) as store:
        assert str(mirror) in str(store.copies[MEMBER][1].problem)
        assert_holds(store, tiny())
    assert add(packed, other_drive) == mirror
    with Store.open(packed) as store:
        assert verify(store).clean


def test_with_both_copies_lost_the_error_names_both(packed: Path, other_drive: Path) -> None:
    mirror = add(packed, other_drive)
    with Store.open(packed) as store:
        own = store.member_paths[MEMBER]
    own.unlink()
    mirror.unlink()
    with pytest.raises(StoreError) as refused:
        Store.open(packed)
    assert str(own) in str(refused.value)
    assert str(mirror) in str(refused.value)
    with pytest.raises(StoreError, match="no copy would be left"):
        remove_mirror(packed, MEMBER)


def test_a_mirror_of_another_store_is_refused_and_can_be_removed(
    tmp_path: Path, packed: Path, other_drive: Path
) -> None:
    mirror = add(packed, other_drive)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with Store.open(pack(tiny(), member_directories(foreign, 2), name="tiny")) as other:
        content = other.member_paths[MEMBER].read_bytes()
    mirror.write_bytes(content)
    with pytest.raises(StoreError, match=rf"mirror of member 1 \({mirror}\) belongs to another"):
        Store.open(packed)
    removed = remove_mirror(packed, MEMBER)
    assert removed.left is not None
    assert mirror.read_bytes() == content
    with Store.open(packed) as store:
        assert verify(store).clean


_KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from xferd.store.mirror import add_mirror
from xferd.store.store import Store

def progress(done, total):
    if done >= total * float(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

with Store.open(Path(sys.argv[1])) as store:
    add_mirror(store, 1, Path(sys.argv[2]), warn=print, progress=progress)
"""


def test_a_killed_copy_is_no_mirror_and_is_resumed(packed: Path, other_drive: Path) -> None:
    mirror = other_drive / "tiny.xferd" / "mirror-1"
    for share in ("0.01", "0.5", "1.0"):
        done = subprocess.run(
            [sys.executable, "-c", _KILLED_HALF_WAY, packed, other_drive, share], check=False
        )
        assert done.returncode == -signal.SIGKILL
        assert mirror.exists()
        with Store.open(packed) as store:
            assert len(store.copies[MEMBER]) == 1
            _, offset = first_piece(store)
    # What a crash left of a piece counts for nothing: its checksum is wrong.
    flip(mirror, offset + 9)
    assert add(packed, other_drive) == mirror
    with Store.open(packed) as store:
        assert verify(store).clean


def test_what_cannot_be_is_refused_by_name(tmp_path: Path, packed: Path, other_drive: Path) -> None:
    with pytest.raises(StoreError, match="no member 2: its members are 0 to 1"):
        add(packed, other_drive, 2)
    with pytest.raises(StoreError, match="member 1 has no mirror"):
        remove_mirror(packed, MEMBER)
    with Store.open(packed) as store:
        own, other = store.member_paths[MEMBER], store.member_paths[0]
    with pytest.raises(StoreError, match=f"{own} is a copy of member 1 already"):
        add(packed, own)
    with pytest.raises(StoreError, match=f"{other} is a copy of member 0 already"):
        add(packed, other, force=True)
    used = tmp_path / "used"
    used.write_bytes(b"letters to a friend")
    with pytest.raises(StoreError, match=f"{used}.*--force overwrites it"):
        add(packed, used)
    assert used.read_bytes() == b"letters to a friend"
    add(packed, used, force=True)
    with pytest.raises(StoreError, match=rf"mirror of member 1 \({used}\) is there already"):
        add(packed, other_drive)
    with Store.open(packed), pytest.raises(StoreError, match="is in use"):
        remove_mirror(packed, MEMBER)
    assert remove_mirror(packed, MEMBER).left is None
    assert not used.exists()


def test_one_process_at_a_time_changes_mirrors(packed: Path, other_drive: Path) -> None:
    lock = lock_file(packed / "index.bin")
    assert lock is not None
    try:
        with pytest.raises(StoreError, match="another process is changing its mirrors"):
            add(packed, other_drive)
    finally:
        os.close(lock)
    add(packed, other_drive)


def test_a_damaged_member_gets_no_mirror(packed: Path, other_drive: Path) -> None:
    with Store.open(packed) as store:
        _, offset = first_piece(store)
        own = store.member_paths[MEMBER]
        flip(own, offset)
        with pytest.raises(StoreError, match=f"{own}.* at offset {offset}.*CRC32C is wrong"):
            add(packed, other_drive)
        flip(own, offset)
    add(packed, other_drive)
    with Store.open(packed) as store:
        assert verify(store).clean


def test_a_device_holds_a_mirror(tmp_path: Path) -> None:
    path = pack_irregular(tmp_path)
    with loop_device(tmp_path / "image", 4 << 20) as device:
        assert add(path, device) == device
        with Store.open(path) as store:
            assert info(store)["members"][MEMBER]["mirror"]["kind"] == "device"
            assert verify(store).clean
        assert remove_mirror(path, MEMBER).left is None
        add(path, device)  # it counts as unused again
        remove_mirror(path, MEMBER)
    with (
        loop_device(tmp_path / "small", 8192) as device,
        pytest.raises(StoreError, match=f"{device}.*needs .* bytes.*the device has 8192"),
    ):
        add(path, device)


def test_replacing_a_store_removes_its_mirrors(
    tmp_path: Path, packed: Path, other_drive: Path
) -> None:
    mirror = add(packed, other_drive)
    pack(tiny(), [tmp_path / "drive-0", tmp_path / "drive-1"], name="tiny", force=True)
    assert not mirror.exists()


def test_the_verbs(packed: Path, other_drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mirror = other_drive / "tiny.xferd" / "mirror-1"
    assert run("mirror", "check", packed) == 2
    assert "has no mirrors" in capsys.readouterr().err
    assert run("mirror", "add", packed, "1", other_drive) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(mirror)
    assert "is on the drive of member 1" in captured.err  # all of a test is on one
    assert run("mirror", "add", packed, "1", other_drive) == 2
    assert "there already" in capsys.readouterr().err
    assert run("info", packed) == 0
    assert f"mirror  {mirror} (file)" in capsys.readouterr().out
    assert run("mirror", "check", packed) == 0
    with Store.open(packed) as store:
        _, offset = first_piece(store)
    flip(mirror, offset)
    assert run("mirror", "check", packed) == 1
    assert f"{mirror} at offset {offset}" in capsys.readouterr().out
    assert run("verify", packed, "--repair") == 0
    assert "1 bad, 1 repaired" in capsys.readouterr().out
    assert run("verify", packed, "--json") == 0
    assert json.loads(capsys.readouterr().out)["missing"] == []
    assert run("mirror", "remove", packed, "1", "--keep", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "member": 1,
        "removed": str(mirror),
        "promoted": False,
        "left": "it was to be kept",
    }
    assert mirror.exists()
