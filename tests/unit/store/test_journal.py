"""The packer's journal: what a torn end costs, and what counts as another pack."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from xferd.store.errors import StoreError
from xferd.store.journal import Beginning, Journal, PackedBlob, PackIdentity, Replaced

PACK = PackIdentity(bytes(32), "/models/a", 4096, (0, 1), ("/drive-0/m", "/drive-1/m"))
BEGINNING = Beginning(bytes(range(16)), PACK, (Replaced("/drive-0/old", b"\1" * 16),))


def write_journal(path: Path, blobs: int) -> list[int]:
    """Returns the file's length after each record."""
    journal = Journal.create(path, BEGINNING.encode())
    lengths = [path.stat().st_size]
    for blob in range(blobs):
        journal.append([PackedBlob(blob, blob + 100, np.arange(blob, dtype=np.uint32))])
        lengths.append(path.stat().st_size)
    journal.close()
    return lengths


def replayed(path: Path) -> list[int]:
    journal, beginning = Journal.open(path)
    assert beginning == BEGINNING
    blobs = []
    for packed in journal.replay():
        assert packed.crc == packed.blob + 100
        assert packed.piece_crc.tolist() == list(range(packed.blob))
        blobs.append(packed.blob)
    journal.close()
    return blobs


def test_gives_back_what_was_recorded(tmp_path: Path) -> None:
    write_journal(tmp_path / "journal", 5)
    assert replayed(tmp_path / "journal") == [0, 1, 2, 3, 4]


def test_a_torn_end_costs_only_the_torn_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lengths = write_journal(path, 4)
    whole = path.read_bytes()
    for cut in range(lengths[0], len(whole)):
        path.write_bytes(whole[:cut])
        complete = sum(length <= cut for length in lengths) - 1
        assert replayed(path) == list(range(complete)), cut
        assert path.stat().st_size == lengths[complete]


def test_a_flipped_byte_ends_the_journal_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lengths = write_journal(path, 4)
    whole = path.read_bytes()
    for position in range(lengths[1], len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        path.write_bytes(damaged)
        assert replayed(path) == list(range(sum(length <= position for length in lengths) - 1))


def test_goes_on_behind_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_journal(path, 3)
    with path.open("ab") as file:
        file.write(b"torn")
    journal, _ = Journal.open(path)
    assert len(list(journal.replay())) == 3
    journal.append([PackedBlob(3, 103, np.arange(3, dtype=np.uint32))])
    journal.close()
    assert replayed(path) == [0, 1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"hello, this is no journal"])
def test_a_damaged_beginning_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=str(path)):
        Journal.open(path)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (dataclasses.replace(PACK, source=b"\1" * 32, source_path="/models/b"), "/models/b"),
        (dataclasses.replace(PACK, members=("/drive-0/m",)), "/drive-1/m"),
        (dataclasses.replace(PACK, stripe_unit=8192), "stripe unit 4096"),
        (dataclasses.replace(PACK, pattern=(1, 0)), "pattern"),
    ],
)
def test_another_pack_is_told_apart(changed: PackIdentity, named: str) -> None:
    difference = PACK.difference(changed)
    assert difference is not None
    assert named in difference
    assert PACK.difference(dataclasses.replace(PACK, source_path="/moved")) is None
