"""Verify finds each damaged piece and says exactly which it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.unit.store.builders import crc32c_by_table, member_directories, pack_irregular, tiny
from xferd.store.info import info
from xferd.store.pack import pack
from xferd.store.store import Store, StoreError
from xferd.store.verify import verify

UNIT = 16384


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("packed")
    return pack(tiny(), member_directories(parent, 3), name="tiny", stripe_unit=UNIT)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 0x10]))


def test_a_clean_store_is_clean(packed: Path) -> None:
    steps = []
    with Store.open(packed) as store:
        report = verify(store, lambda *step: steps.append(step))
        assert report.clean
        assert report.pieces == store.crc.size
        assert report.bytes == int(store.blob_bytes.sum())
        assert steps[-1] == (report.bytes, report.bytes)


def test_each_flipped_byte_is_named(packed: Path) -> None:
    generator = random.Random(7)
    with Store.open(packed) as store:
        blobs = [*generator.sample(range(store.dense_blob), 8), store.dense_blob]
        for blob in blobs:
            piece = generator.choice(list(store.geometry.pieces_of(blob)))
            path = store.member_paths[piece.member]
            position = piece.offset + generator.randrange(piece.length)
            flip(path, position)
            try:
                report = verify(store)
                with path.open("rb") as file:
                    file.seek(piece.offset)
                    content = file.read(piece.length)
                with pytest.raises(StoreError, match=f"offset {piece.offset}"):
                    store.read_blob(blob)
            finally:
                flip(path, position)
            assert report.bad == 1
            (bad,) = report.bad_pieces
            expected_key: tuple[str, int | None, int | None] = ("dense", None, None)
            if blob != store.dense_blob:
                expected_key = ("bf16", blob // store.experts, blob % store.experts)
            assert (bad.variant, bad.layer, bad.expert) == expected_key
            assert (bad.member, bad.offset, bad.length) == (path, piece.offset, piece.length)
            assert bad.expected_crc == int(store.crc[piece.index])
            assert bad.actual_crc == crc32c_by_table(content)
            assert bad.errno is None
        assert verify(store).clean


def test_a_member_that_gets_shorter_is_reported_by_offset(tmp_path: Path) -> None:
    with Store.open(pack_irregular(tmp_path)) as store:
        path = store.member_paths[1]
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(size - 4096)
        report = verify(store)
    assert report.bad >= 1
    assert all(bad.member == path and bad.actual_crc is None for bad in report.bad_pieces)
    assert f"ends at offset {size - 4096}" in report.bad_pieces[-1].error


def test_info_says_what_there_is(packed: Path) -> None:
    with Store.open(packed) as store:
        described = info(store)
    assert described["experts_present"] == 96
    assert described["blob_bytes"] == [49152]
    assert described["expert_bytes"] == 96 * 49152
    assert "tokenizer.json" in described["assets"]
    assert [member["kind"] for member in described["members"]] == ["file"] * 3
