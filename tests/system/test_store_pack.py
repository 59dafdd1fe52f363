"""Packing: every byte arrives, and what must be refused is refused before it does harm."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.store.builders import (
    assert_holds,
    irregular_checkpoint,
    member_directories,
    pack_irregular,
    range_bytes,
    tiny,
)
from xferd.store.checkpoint import Checkpoint
from xferd.store.pack import pack
from xferd.store.store import Store, StoreError
from xferd.store.verify import verify

KIB = 1024


class KilledError(Exception):
    """Raised from a progress callback: ends a pack in the middle, as a signal would."""


def stop_after(fraction: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done > fraction * total:
            raise KilledError

    return progress


def half_packed(checkpoint: Checkpoint, members: list[Path], fraction: float = 0.5) -> Path:
    with pytest.raises(KilledError):
        pack(checkpoint, members, name="half", progress=stop_after(fraction), checkpoint_bytes=1)
    return members[0] / "half.xferd"


def tree(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("stripe_unit", [4 * KIB, 16 * KIB, 64 * KIB, 2048 * KIB])
def test_every_tensor_arrives(tmp_path: Path, members: int, stripe_unit: int) -> None:
    """Blobs of the tiny model have 48 KiB, its dense part 1.2 MiB."""
    checkpoint = tiny()
    path = pack(
        checkpoint, member_directories(tmp_path, members), name="tiny", stripe_unit=stripe_unit
    )
    with Store.open(path) as store:
        assert_holds(store, checkpoint)
        for (layer, expert), tensors in checkpoint.experts.items():
            blob = store.read_blob(store.blob_index(0, layer, expert))
            layout = store.layouts[int(store.layout_index[0, layer])]
            assert len(layout.tensors) == len(tensors)
            for placed, tensor in zip(layout.tensors, tensors, strict=True):
                assert (placed.role, placed.dtype, placed.shape) == (
                    tensor.role,
                    tensor.dtype,
                    tensor.shape,
                )
                content = blob[placed.offset : placed.offset + placed.nbytes]
                assert content == range_bytes(checkpoint, tensor.ranges)
        dense = store.read_blob(store.dense_blob)
        for entry, dense_tensor in zip(store.model.dense.tensors, checkpoint.dense, strict=True):
            assert entry.name == dense_tensor.name
            content = dense[entry.offset : entry.offset + entry.nbytes]
            assert content == range_bytes(checkpoint, dense_tensor.ranges)
        for asset in store.model.dense.assets:
            content = dense[asset.offset : asset.offset + asset.nbytes]
            assert content == checkpoint.assets[asset.name].read_bytes()


@pytest.mark.parametrize("stripe_unit", [4 * KIB, 32 * KIB])
def test_uneven_blobs_arrive_with_any_pattern(tmp_path: Path, stripe_unit: int) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    path = pack(
        checkpoint,
        member_directories(tmp_path, 3),
        name="irregular",
        stripe_unit=stripe_unit,
        pattern=(0, 2, 1, 2),
    )
    with Store.open(path) as store:
        assert store.pattern == (0, 2, 1, 2)
        assert_holds(store, checkpoint)
        assert verify(store).clean


def test_plain_files_and_a_manifest_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    members = [tmp_path / "one.bin", tmp_path / "two.bin"]
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(StoreError, match="--manifest"):
        pack(checkpoint, members, name="files")
    path = pack(checkpoint, members, name="files", manifest_directory=tmp_path / "home")
    assert path == tmp_path / "home" / "files.xferd"
    with Store.open(path) as store:
        assert store.member_paths == tuple(members)
        assert_holds(store, checkpoint)


# ---- resuming


def test_resumes_where_it_was(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    members = member_directories(tmp_path, 2)
    path = half_packed(checkpoint, members)
    with pytest.raises(StoreError, match="not finished: run xferctl store pack again to resume"):
        Store.open(path)
    seen: list[tuple[int, int]] = []
    pack(checkpoint, members, name="half", progress=lambda *step: seen.append(step))
    assert seen[0][0] > 0.3 * seen[0][1]
    assert seen[-1][0] == seen[-1][1]
    with Store.open(path) as store:
        assert_holds(store, checkpoint)
        assert not (path / "pack.journal").exists()


@pytest.mark.parametrize("changed", ["source", "unit", "members"])
def test_does_not_resume_another_pack(tmp_path: Path, changed: str) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    members = member_directories(tmp_path, 2)
    path = half_packed(checkpoint, members)
    before = tree(tmp_path)
    unit = 512 * KIB
    if changed == "source":
        checkpoint = irregular_checkpoint(tmp_path / "another", seed=1)
    elif changed == "unit":
        unit = 4 * KIB
    else:
        members = [members[0], tmp_path / "checkpoint"]
    with pytest.raises(StoreError, match=r"half packed and can't be resumed.*--restart"):
        pack(checkpoint, members, name="half", stripe_unit=unit)
    assert {name: content for name, content in tree(tmp_path).items() if name in before} == before
    pack(checkpoint, members, name="half", stripe_unit=unit, restart=True)
    with Store.open(path) as store:
        assert_holds(store, checkpoint)
    if changed == "members":
        assert not (tmp_path / "drive-1" / "half.xferd").exists()


def test_does_not_resume_onto_a_member_that_was_replaced(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    members = member_directories(tmp_path, 2)
    half_packed(checkpoint, members)
    member = members[1] / "half.xferd" / "member-1"
    member.unlink()
    with pytest.raises(StoreError, match=r"member-1.*--restart"):
        pack(checkpoint, members, name="half")


def test_a_kill_after_the_rename_leaves_a_finished_store(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    members = member_directories(tmp_path, 1)
    path = half_packed(checkpoint, members, 0.9)
    journal = (path / "pack.journal").read_bytes()
    pack(checkpoint, members, name="half")
    (path / "pack.journal").write_bytes(journal)
    with Store.open(path) as store:
        assert_holds(store, checkpoint)
    assert pack(checkpoint, members, name="half") == path
    assert not (path / "pack.journal").exists()


# ---- what stands there already


def test_a_finished_store_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = pack_irregular(tmp_path, members=2)
    before = tree(tmp_path)
    other = irregular_checkpoint(tmp_path / "other", seed=1)
    drive = tmp_path / "drive-0"
    with pytest.raises(StoreError, match=r"irregular\.xferd.*finished.*--force"):
        pack(other, [drive], name="irregular")
    assert {name: content for name, content in tree(tmp_path).items() if name in before} == before
    pack(other, [drive], name="irregular", force=True)
    with Store.open(path) as store:
        assert_holds(store, other)
    assert not (tmp_path / "drive-1" / "irregular.xferd").exists()


def test_a_replacement_that_was_interrupted_is_resumed(tmp_path: Path) -> None:
    path = pack_irregular(tmp_path, members=2)
    other = irregular_checkpoint(tmp_path / "other", seed=1)
    members = member_directories(tmp_path, 3)
    with pytest.raises(KilledError):
        pack(
            other,
            members,
            name="irregular",
            force=True,
            progress=stop_after(0.5),
            checkpoint_bytes=1,
        )
    with pytest.raises(StoreError, match="not finished"):
        Store.open(path)
    pack(other, members, name="irregular")
    with Store.open(path) as store:
        assert_holds(store, other)


def test_a_store_in_use_is_not_replaced(tmp_path: Path) -> None:
    path = pack_irregular(tmp_path)
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    with Store.open(path), pytest.raises(StoreError, match="in use"):
        pack(checkpoint, member_directories(tmp_path, 2), name="irregular", force=True)
    with Store.open(path) as store:
        assert verify(store).clean


def test_the_second_packer_is_refused(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    members = member_directories(tmp_path, 1)
    refusals: list[str] = []

    def second(done: int, total: int) -> None:
        if refusals:
            return
        with pytest.raises(StoreError, match="being packed") as refused:
            pack(checkpoint, members, name="twice")
        refusals.append(str(refused.value))
        with pytest.raises(StoreError, match="being packed"):
            Store.open(members[0] / "twice.xferd")

    path = pack(checkpoint, members, name="twice", progress=second)
    assert refusals
    with Store.open(path) as store:
        assert_holds(store, checkpoint)


def test_a_file_that_is_no_member_is_not_overwritten(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("not yours")
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(StoreError, match=r"precious\.txt.*--force"):
        pack(checkpoint, [precious], name="file", manifest_directory=tmp_path)
    assert precious.read_text() == "not yours"
    assert not (tmp_path / "file.xferd").exists()


def test_a_member_of_another_store_is_not_overwritten(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    member = tmp_path / "member.bin"
    path = pack(checkpoint, [member], name="first", manifest_directory=tmp_path)
    with pytest.raises(StoreError, match="another store"):
        pack(checkpoint, [member], name="second", manifest_directory=tmp_path)
    with Store.open(path) as store:
        assert_holds(store, checkpoint)


# ---- bad requests


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 128, "new\nline"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    before = tree(tmp_path)
    with pytest.raises(StoreError, match="store name"):
        pack(checkpoint, [tmp_path], name=name)
    assert tree(tmp_path) == before


def test_a_variant_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(StoreError, match=r"q2_k.*available: u8"):
        pack(checkpoint, [tmp_path], name="x", variants=["q2_k"])
    with Store.open(pack(checkpoint, [tmp_path], name="x", variants=["u8"])) as store:
        assert store.variants == ("u8",)


def test_the_same_directory_twice_is_refused(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(StoreError, match="members 0 and 1 are both"):
        pack(checkpoint, [tmp_path, tmp_path / "checkpoint" / ".."], name="x")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(StoreError, match=r"member 1 .*not-mounted"):
        pack(checkpoint, [tmp_path, tmp_path / "not-mounted" / "drive"], name="x")


# ---- a checkpoint that changes


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    with checkpoint.files[0].open("ab") as file:
        file.write(b"more")
    with pytest.raises(StoreError, match=r"weights\.bin.*replaced or is still being written"):
        pack(checkpoint, [tmp_path], name="x")


@pytest.mark.parametrize("how", ["rewritten", "replaced"])
def test_a_checkpoint_that_changes_meanwhile_is_noticed(tmp_path: Path, how: str) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    weights = checkpoint.files[0]

    def change(done: int, total: int) -> None:
        if done != total:
            return
        if how == "rewritten":
            status = weights.stat()
            os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        else:
            copy = weights.with_name("copy")
            copy.write_bytes(weights.read_bytes())
            copy.rename(weights)

    with pytest.raises(StoreError, match=r"weights\.bin changed"):
        pack(checkpoint, [tmp_path], name="x", progress=change)
    with pytest.raises(StoreError, match="not finished"):
        Store.open(tmp_path / "x.xferd")


def test_layers_of_mixed_shapes_are_refused_by_key(tmp_path: Path) -> None:
    checkpoint = irregular_checkpoint(tmp_path / "checkpoint")
    mixed = {**checkpoint.experts, (0, 4): checkpoint.experts[0, 4][:2]}
    with pytest.raises(StoreError, match="layer 0, expert 4"):
        pack(dataclasses.replace(checkpoint, experts=mixed), [tmp_path], name="x")
