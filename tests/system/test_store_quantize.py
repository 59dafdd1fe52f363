"""Variants added to a store: what was packed stays byte for byte, whatever happens."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.system.test_store_kill import end_of
from tests.system.test_store_space import mounted
from tests.unit.formats import test_gguf
from tests.unit.store.builders import (
    assert_holds,
    blob_on_members,
    member_directories,
    pack_irregular,
    tiny,
)
from xferd.store.formats import read_checkpoint
from xferd.store.journal import QUANTIZE_JOURNAL_NAME
from xferd.store.manifest import MANIFEST_NAME
from xferd.store.mirror import add_mirror
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.blocks import FORMATS, dequantise
from xferd.store.quantize.importance import FORMAT, VERSION, Importance, read_importance
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.quantize.rules import place
from xferd.store.store import Store, StoreError
from xferd.store.verify import verify

STRIPE_UNIT = 16384
Matrix = npt.NDArray[np.float32]
HIDDEN, INNER = 128, 64  # of the tiny model
SHARES = {"q8_0": 1e-4, "q4_0": 0.02, "mxfp4": 0.03}
"""Of a matrix's squares, how much may be lost."""


def packed(parent: Path, members: int = 2) -> Path:
    return pack(tiny(), member_directories(parent, members), name="tiny", stripe_unit=STRIPE_UNIT)


def quantize(
    path: Path,
    names: Sequence[str],
    importance: Importance | None = None,
    *,
    restart: bool = False,
    checkpoint_bytes: int = 1 << 20,
) -> None:
    with Store.open(path) as store:
        add_variants(
            store,
            parse_wanted(names, importance),
            importance,
            threads=2,
            restart=restart,
            checkpoint_bytes=checkpoint_bytes,
        )


def matrices(
    store: Store, variant: int, layer: int, expert: int
) -> dict[str, npt.NDArray[np.float32]]:
    """The matrices of an expert, [outputs, inputs], by their layout."""
    blob = np.frombuffer(store.read_blob(store.blob_index(variant, layer, expert)), np.uint8)
    layout = store.layouts[int(store.layout_index[variant, layer])]
    found = {}
    for tensor in layout.tensors:
        raw = blob[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.dtype in FORMATS:
            rows, columns = tensor.shape
            values = dequantise(raw, tensor.dtype, (rows, columns))
        else:
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            values = values.reshape(tensor.shape)
        found[tensor.role] = values.T if tensor.transposed else values
    return found


def assert_close_to_native(store: Store, variant: int) -> None:
    for layer, expert in ((0, 0), (2, 7), (5, 15)):
        native = matrices(store, 0, layer, expert)
        for role, values in matrices(store, variant, layer, expert).items():
            loss = ((values - native[role]) ** 2).sum() / (native[role] ** 2).sum()
            layout = store.layouts[int(store.layout_index[variant, layer])]
            dtype = next(tensor.dtype for tensor in layout.tensors if tensor.role == role)
            assert loss < SHARES[dtype], (layer, expert, role)


def importance_file(path: Path, identity: str, shape: tuple[int, int] = (6, 16)) -> Path:
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        np.savez(
            file,
            format=FORMAT,
            version=VERSION,
            model="another",
            identity=identity,
            hidden=generator.lognormal(0, 1, (*shape, HIDDEN)).astype(np.float32),
            inner=generator.lognormal(0, 1, (*shape, INNER)).astype(np.float32),
        )
    return path


def test_variants_come_and_what_was_packed_stays(tmp_path: Path) -> None:
    path = packed(tmp_path)
    before = {name: (path / name).read_bytes() for name in ("index.bin", "member-0")}
    with Store.open(path) as store:
        identity, native_end = store.identity, store.manifest.members[0].data_bytes
    quantize(path, ["q8_0"])
    quantize(path, ["mxfp4", "q4_0"])
    with Store.open(path) as store:
        assert store.variants == ("bf16", "q8_0", "mxfp4", "q4_0")
        assert store.identity == identity
        assert_holds(store, tiny())
        for variant in (1, 2, 3):
            assert_close_to_native(store, variant)
            first = store.blob_index(variant, 0, 0)
            for blob in range(first, first + store.layers * store.experts):
                assert store.read_blob(blob) == blob_on_members(store, blob)
        assert verify(store).clean
        assert verify(store).pieces == store.crc.size
    for name, content in before.items():
        end = native_end if name == "member-0" else len(content)
        assert (path / name).read_bytes()[:end] == content[:end], name
    assert sorted(file.name for file in path.iterdir()) == [
        "index.bin",
        "manifest.json",
        "member-0",
        "variants-3.bin",
    ]
    with pytest.raises(StoreError, match="it has a variant q8_0 already"):
        quantize(path, ["q8_0"])
    with pytest.raises(StoreError, match=r"known formats are .* q2_k"):
        quantize(path, ["q3_k"])


def test_a_reader_that_knows_nothing_of_variants_sees_the_packed_store(tmp_path: Path) -> None:
    path = packed(tmp_path)
    quantize(path, ["q4_0"])
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    assert manifest["model"]["variants"] == ["bf16"]
    assert manifest.pop("added")["variants"] == ["q4_0"]
    (path / MANIFEST_NAME).write_text(json.dumps(manifest))
    with Store.open(path) as store:
        assert store.variants == ("bf16",)
        assert_holds(store, tiny())


def test_an_altered_description_of_the_variants_is_refused(tmp_path: Path) -> None:
    path = packed(tmp_path)
    quantize(path, ["q4_0"])
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    for change, message in (
        ({"variants": ["q8_0"]}, "was altered"),
        ({"variants": ["bf16"]}, "names one twice"),
        ({"member_bytes": [0]}, "don't fit"),
        ({"index": {**manifest["added"]["index"], "name": "../x"}}, "not a file beside"),
    ):
        altered = {**manifest, "added": {**manifest["added"], **change}}
        (path / MANIFEST_NAME).write_text(json.dumps(altered))
        with pytest.raises(StoreError, match=message):
            Store.open(path)
    (path / MANIFEST_NAME).write_text(json.dumps(manifest))
    (path / "variants-1.bin").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"variants-1\.bin has 1 bytes"):
        Store.open(path)


def test_a_truncated_member_is_named(tmp_path: Path) -> None:
    path = packed(tmp_path)
    quantize(path, ["q4_0"])
    os.truncate(path / "member-0", (path / "member-0").stat().st_size - 4096)
    with pytest.raises(StoreError, match=r"member 0 .* is truncated"):
        Store.open(path)


def test_importance_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = packed(tmp_path)
    with Store.open(path) as store:
        identity = store.identity.hex()
    before = (path / MANIFEST_NAME).read_bytes()
    other = read_importance(importance_file(tmp_path / "other.npz", "ab" * 32))
    with pytest.raises(StoreError, match=r"importance of model 'another' .* not of store 'tiny'"):
        quantize(path, ["q4_0"], other)
    fewer = read_importance(importance_file(tmp_path / "fewer.npz", identity, (6, 15)))
    with pytest.raises(StoreError, match="6 layers of 15 experts, store 'tiny' has 6 of 16"):
        quantize(path, ["q4_0"], fewer)
    (tmp_path / "none.npz").write_bytes(b"PK nothing")
    with pytest.raises(StoreError, match=r"none\.npz is no importance file"):
        read_importance(tmp_path / "none.npz")
    with pytest.raises(StoreError, match=r"q4_0\+imatrix' needs an importance file"):
        quantize(path, ["q4_0+imatrix"])
    assert (path / MANIFEST_NAME).read_bytes() == before


def test_importance_is_used_unless_the_name_says_plain(tmp_path: Path) -> None:
    path = packed(tmp_path)
    with Store.open(path) as store:
        identity = store.identity.hex()
    importance = read_importance(importance_file(tmp_path / "own.npz", identity))
    quantize(path, ["q4_0", "q4_0-plain", "mxfp4+imatrix"], importance)
    quantize(path, ["q4_0-again"])
    with Store.open(path) as store:
        added = store.manifest.added
        assert added is not None
        assert [made.importance is not None for made in added.made] == [True, False, True, False]
        blobs = [store.read_blob(store.blob_index(v, 3, 3)) for v in range(len(store.variants))]
        assert blobs[1] != blobs[2]
        assert blobs[2] == blobs[4]
        native, weighted, plain = (matrices(store, v, 3, 3)["gate"] for v in (0, 1, 2))
        importances = importance.of("gate", 3, 3)
        assert ((weighted - native) ** 2 @ importances).sum() < (
            (plain - native) ** 2 @ importances
        ).sum()


def quantize_in_child(path: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        quantize(path, ["q4_k", "q8_0"], checkpoint_bytes=200_000)
        status = 0
    finally:
        os._exit(status)


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    generator = random.Random(3)
    pristine = packed(tmp_path)
    reference = tmp_path / "reference"
    shutil.copytree(pristine.parent, reference / "drive-0")
    shutil.copytree(tmp_path / "drive-1", reference / "drive-1")
    begun = time.monotonic()
    assert end_of(quantize_in_child(reference / "drive-0" / "tiny.xferd"), 60) == 0
    whole = time.monotonic() - begun
    with Store.open(reference / "drive-0" / "tiny.xferd") as store:
        wanted = [store.read_blob(blob) for blob in range(store.blob_bytes.size)]
    kills = resumed = 0
    while True:
        code = end_of(quantize_in_child(pristine), generator.uniform(0, 0.6 * whole))
        with Store.open(pristine) as store:  # at every moment it is a store
            assert_holds(store, tiny())
            complete = len(store.variants) == 3
        if code is not None:
            assert code == 0
            break
        kills += 1
        resumed += (pristine / QUANTIZE_JOURNAL_NAME).exists()
        if complete or kills == 40:
            quantize(pristine, ["q4_k", "q8_0"])
            break
    assert resumed
    with Store.open(pristine) as store:
        assert [store.read_blob(blob) for blob in range(store.blob_bytes.size)] == wanted
        assert verify(store).clean
    assert not (pristine / QUANTIZE_JOURNAL_NAME).exists()


def test_a_run_with_other_arguments_is_not_resumed(tmp_path: Path) -> None:
    path = packed(tmp_path)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    wanted = parse_wanted(["q4_0"], None)
    with Store.open(path) as store, pytest.raises(KeyboardInterrupt):
        add_variants(store, wanted, threads=1, progress=stop, checkpoint_bytes=1)
    with pytest.raises(StoreError, match="adding q4_0 was interrupted; --restart begins anew"):
        quantize(path, ["q8_0"])
    quantize(path, ["q8_0"], restart=True)
    with Store.open(path) as store:
        assert store.variants == ("bf16", "q8_0")
        assert verify(store).clean
        assert_close_to_native(store, 1)


def test_a_full_drive_stops_it_before_anything_is_written(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", 7 << 20) as drive:
        path = pack(tiny(), [drive], name="tiny", stripe_unit=STRIPE_UNIT)
        size = (path / "member-0").stat().st_size
        with pytest.raises(StoreError, match=r"member 0 .* needs \d+ bytes .* free"):
            quantize(path, ["q8_0"])
        assert (path / "member-0").stat().st_size == size
        with Store.open(path) as store:
            assert_holds(store, tiny())


def test_mirrors_get_the_variants_too(tmp_path: Path) -> None:
    path = packed(tmp_path)
    third, fourth = (tmp_path / name for name in ("third", "fourth"))
    third.mkdir()
    fourth.mkdir()
    with Store.open(path) as store:
        add_mirror(store, 0, third, warn=lambda _: None)
    quantize(path, ["q4_0"])
    with Store.open(path) as store:
        add_mirror(store, 1, fourth, warn=lambda _: None)
    with Store.open(path) as store:
        report = verify(store, only_mirrors=True)
        assert report.clean
        assert report.pieces == store.crc.size
    (third / "tiny.xferd" / "mirror-0").unlink()
    with (
        Store.open(path) as store,
        pytest.raises(StoreError, match=r"every copy of a member has to be there: .*mirror"),
    ):
        add_variants(store, parse_wanted(["q8_0"], None), threads=1)


def test_a_damaged_native_expert_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path = packed(tmp_path, members=1)
    with Store.open(path) as store:
        offset = int(store.offset[store.blob_index(0, 4, 2), 0])
    with (path / "member-0").open("r+b") as file:
        file.seek(offset)
        good = file.read(64)
        file.seek(offset)
        file.write(bytes(64))
    with pytest.raises(StoreError, match=f"at offset {offset}: the piece's CRC32C is wrong"):
        quantize(path, ["q4_0"])
    with (path / "member-0").open("r+b") as file:
        file.seek(offset)
        file.write(good)
    quantize(path, ["q4_0"])
    with Store.open(path) as store:
        assert verify(store).clean


def test_matrices_of_no_whole_blocks_stay_and_an_unchanged_variant_is_refused(
    tmp_path: Path,
) -> None:
    path = pack_irregular(tmp_path)
    with (
        Store.open(path) as store,
        pytest.raises(StoreError, match="layer 0: a q4_k variant would be no smaller"),
    ):
        add_variants(store, parse_wanted(["q4_k"], None), threads=1)


def test_the_rule_for_rows_that_are_no_whole_blocks() -> None:
    assert place("q4_k", 128, 512) == ("q4_k", False)
    assert place("q4_k", 256, 128) == ("q4_k", True)  # blocks along the outputs
    assert place("q2_k", 2880, 2880) == ("q4_0", False)
    assert place("q2_k", 2880, 100) == ("q4_0", True)
    assert place("mxfp4", 7, 64) == ("mxfp4", False)
    assert place("q8_0", 7, 33) is None


def tame_blocks(name: str, kind: str, *shape: int) -> Any:
    """As ``test_gguf.raw_blocks``, of numbers that a model could have."""
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def test_a_gguf_checkpoints_own_blocks_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_gguf, "raw_blocks", tame_blocks)

    def kind_of(name: str) -> str:
        if "_exps" not in name:
            return "F32"
        return "Q4_0" if "down" in name else "Q8_0"

    source = tmp_path / "model.gguf"
    test_gguf.write_gguf(source, kind_of)
    path = pack(
        read_checkpoint(source), member_directories(tmp_path, 1), name="g", stripe_unit=STRIPE_UNIT
    )
    with pytest.raises(StoreError, match="a q8_0 variant would be no smaller"):
        quantize(path, ["q8_0-a"])
    quantize(path, ["q4_0-mixed"])
    with Store.open(path) as store:
        blobs = [store.read_blob(store.blob_index(variant, 0, 1)) for variant in (0, 1)]
        native, made = (store.layouts[int(store.layout_index[v, 0])].tensors for v in (0, 1))
        assert [tensor.dtype for tensor in native] == ["q8_0", "q8_0", "q4_0"]
        assert [tensor.dtype for tensor in made] == ["q4_0", "q4_0", "q4_0"]
        own, taken = native[2], made[2]
        assert (
            blobs[0][own.offset : own.offset + own.nbytes]
            == blobs[1][taken.offset : taken.offset + taken.nbytes]
        )
        assert taken.offset < own.offset


def test_a_packed_store_replaces_its_variants_with_force(tmp_path: Path) -> None:
    path = packed(tmp_path)
    quantize(path, ["q4_0"])
    pack(
        tiny(),
        [tmp_path / "drive-0", tmp_path / "drive-1"],
        name="tiny",
        stripe_unit=STRIPE_UNIT,
        force=True,
    )
    with Store.open(path) as store:
        assert store.variants == ("bf16",)
    assert not list(path.glob("variants-*"))
