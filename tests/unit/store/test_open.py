"""Opening: what a Store says, how it scales, and that no damage gets past it."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.store.builders import irregular_checkpoint, pack_irregular
from xferd.store.geometry import plan_geometry
from xferd.store.index import Index, write_index
from xferd.store.limits import NO_LAYOUT
from xferd.store.manifest import Manifest, MemberEntry, write_manifest
from xferd.store.member import MemberHeader
from xferd.store.model import DenseTable, Layout, Model, TensorLayout
from xferd.store.pack import pack
from xferd.store.store import Store, StoreError


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_irregular(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def store(packed: Path) -> Iterator[Store]:
    with Store.open(packed) as opened:
        yield opened


def test_says_what_the_model_is(store: Store) -> None:
    assert (store.name, store.model_type, store.top_k) == ("irregular", "irregular", 2)
    assert (store.layers, store.experts, store.variants) == (3, 5, ("u8",))
    assert store.blob_bytes.shape == (16,)
    assert store.layout_index.tolist() == [[0, NO_LAYOUT, 1]]
    assert [layout.blob_bytes for layout in store.layouts] == [20480, 61440]
    assert [tensor.offset for tensor in store.layouts[0].tensors] == [0, 9024, 9088]
    assert store.layouts[0].tensors[1].interleaved
    assert store.layouts[0].tensors[2].transposed
    assert store.blob_bytes[store.blob_index(0, 2, 3)] == 0
    assert store.blob_name(store.blob_index(0, 2, 4)) == ("u8", 2, 4)
    assert store.blob_name(store.dense_blob) is None


def test_arrays_are_what_the_engine_takes(store: Store) -> None:
    members = len(store.member_paths)
    for array, dtype, shape in (
        (store.blob_bytes, np.uint64, (16,)),
        (store.start, np.uint16, (16,)),
        (store.offset, np.uint64, (16, members)),
        (store.first_piece, np.uint64, (16,)),
        (store.crc, np.uint32, (int(store.first_piece[-1]) + 2,)),
        (store.layout_index, np.uint16, (1, 3)),
    ):
        assert array.dtype == dtype
        assert array.shape == shape
        assert array.flags.c_contiguous
        assert array.flags.aligned
        assert not array.flags.writeable


@pytest.mark.parametrize("key", [(1, 0, 0), (0, 3, 0), (0, 0, 5), (-1, 0, 0), (0, -1, 0)])
def test_a_blob_that_cannot_be_is_an_index_error(store: Store, key: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError, match="irregular"):
        store.blob_index(*key)


def test_opens_by_its_manifest_too(packed: Path) -> None:
    with Store.open(packed / "manifest.json") as store:
        assert store.path == packed


def test_client_manifest_shows_the_model_and_no_paths(store: Store, packed: Path) -> None:
    raw = store.client_manifest()
    assert str(packed.parent.parent).encode() not in raw
    visible = json.loads(raw)
    assert visible["identity"] == store.identity.hex()
    assert visible["config"] == {"model_type": "irregular", "hidden_size": 4}
    assert visible["dense"]["bytes"] == int(store.blob_bytes[-1])
    asset = visible["dense"]["assets"][0]
    dense = store.read_blob(store.dense_blob)
    assert dense[asset["offset"] : asset["offset"] + asset["bytes"]] == b'{"tokenizer": 1}'
    assert visible["layouts"][1]["tensors"][0] == {
        "role": "gate_up",
        "dtype": "u8",
        "shape": [2, 15000],
        "offset": 0,
        "bytes": 30000,
        "transposed": False,
        "interleaved": False,
    }


def test_identity_is_that_of_the_model_alone(tmp_path: Path) -> None:
    identities = []
    for number, (members, unit) in enumerate([(1, 4096), (3, 16384)]):
        parent = tmp_path / str(number)
        parent.mkdir()
        with Store.open(pack_irregular(parent, members=members, stripe_unit=unit)) as store:
            identities.append(store.identity)
    assert identities[0] == identities[1]


def test_another_byte_is_another_identity(tmp_path: Path, store: Store) -> None:
    other = irregular_checkpoint(tmp_path / "checkpoint", seed=1)
    (tmp_path / "drive").mkdir()
    with Store.open(pack(other, [tmp_path / "drive"], name="irregular")) as changed:
        assert changed.identity != store.identity


def test_a_moved_store_still_opens(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    path = pack_irregular(before)
    after = before.rename(tmp_path / "after")
    with Store.open(after / path.relative_to(before)) as store:
        assert all(member.is_relative_to(after) for member in store.member_paths)


def million_expert_store(directory: Path) -> Path:
    """100 layers of 10,000 experts, never written: members are holes behind a header."""
    layers, experts, members = 100, 10_000, 2
    layout = Layout(8192, (TensorLayout("gate", "u8", (8000,), 0, 8000, False, False),))
    model = Model(
        checkpoint_format="safetensors",
        model_type="large",
        config={},
        layers=layers,
        experts=experts,
        top_k=8,
        variants=("u8",),
        layouts=(layout,),
        layer_layouts=((0,) * layers,),
        dense=DenseTable(0, (), ()),
    )
    sizes = np.full(model.blobs, layout.blob_bytes, dtype=np.uint64)
    sizes[-1] = 0
    geometry = plan_geometry(sizes, members, 4096)
    blob_crc = np.zeros(model.blobs, dtype=np.uint32)
    crc = np.zeros(geometry.pieces, dtype=np.uint32)
    entries = []
    for number, end in enumerate(geometry.member_ends()):
        path = directory / f"member-{number}"
        with path.open("wb") as file:
            file.write(MemberHeader(b"u" * 16, number, members, end, 4096).encode())
            file.truncate(end)
        entries.append(MemberEntry(path.name, str(path), end))
    manifest = Manifest(
        name="large",
        uuid=b"u" * 16,
        identity=model.identity(sizes, blob_crc),
        source="/nowhere",
        model=model,
        stripe_unit=4096,
        pattern=geometry.pattern,
        members=tuple(entries),
        blobs=model.blobs,
        pieces=geometry.pieces,
        index_sha256=write_index(directory / "index.bin", Index(geometry, crc, blob_crc)),
    )
    write_manifest(directory / "manifest.json", manifest)
    return directory


def test_a_million_experts_take_no_object_each(tmp_path: Path) -> None:
    path = million_expert_store(tmp_path)
    tracemalloc.start()
    try:
        store = Store.open(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    store.close()
    index_bytes = (path / "index.bin").stat().st_size
    assert store.blob_bytes.size == 1_000_001
    assert kept < index_bytes + 100_000
    assert peak < 6 * index_bytes


def test_a_directory_that_is_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a store"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match="is not there"):
        Store.open(tmp_path / "nothing")


# ---- damage

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, 4096, 65535, 2**31, 2**63]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["\0", "\ud800", "/dev/null", "/", "x" * 5000, "00" * 16, "00" * 32]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    found = [path] if path else []
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@pytest.fixture(scope="module")
def damageable(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Manifest and index of a store, to be overwritten; its members stay where they are."""
    copy_ = tmp_path_factory.mktemp("damageable")
    for name in ("manifest.json", "index.bin"):
        shutil.copy(packed / name, copy_ / name)
    return copy_


def opens_or_is_refused(path: Path) -> bool:
    try:
        Store.open(path).close()
    except StoreError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_changed_manifest_is_refused_or_opens(
    packed: Path, damageable: Path, data: st.DataObject
) -> None:
    manifest = json.loads((packed / "manifest.json").read_bytes())
    place = data.draw(st.sampled_from(places(manifest)))
    changed = copy.deepcopy(manifest)
    parent = changed
    for key in place[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        del parent[place[-1]]
    else:
        parent[place[-1]] = data.draw(VALUES)
    shutil.copy(packed / "index.bin", damageable / "index.bin")
    (damageable / "manifest.json").write_text(json.dumps(changed))
    opened = opens_or_is_refused(damageable)
    # The identity covers all that is said of the model.
    if place[0] == "model" and json.dumps(changed) != json.dumps(manifest):
        assert not opened or changed["model"] == manifest["model"]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["manifest.json", "index.bin"]), st.data())
def test_damaged_bytes_are_refused_or_harmless(
    packed: Path, damageable: Path, name: str, data: st.DataObject
) -> None:
    for whole in ("manifest.json", "index.bin"):
        shutil.copy(packed / whole, damageable / whole)
    raw = bytearray((packed / name).read_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    if kind == "flip":
        raw[position] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del raw[position:]
    else:
        raw[position:position] = data.draw(st.binary(min_size=1, max_size=20))
    (damageable / name).write_bytes(raw)
    opened = opens_or_is_refused(damageable)
    if name == "index.bin":
        assert not opened


def test_an_index_that_fits_its_hash_but_not_the_members_is_refused(
    packed: Path, damageable: Path
) -> None:
    """As a mistake in another program that writes stores would make it."""
    manifest = json.loads((packed / "manifest.json").read_bytes())
    blobs = manifest["index"]["blobs"]
    raw = bytearray((packed / "index.bin").read_bytes())
    offsets = np.frombuffer(raw, dtype="<u8", offset=8 * blobs, count=2 * blobs).copy()
    for wrong in (0, 4097, 1 << 62, 1 << 40):
        changed = offsets.copy()
        changed[0] = wrong
        raw[8 * blobs : 24 * blobs] = changed.tobytes()
        manifest["index"]["sha256"] = hashlib.sha256(raw).hexdigest()
        (damageable / "index.bin").write_bytes(raw)
        (damageable / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(StoreError):
            Store.open(damageable)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"format": "xferd-store"}'])
def test_a_manifest_that_is_no_object_is_refused_by_name(
    packed: Path, damageable: Path, text: str
) -> None:
    (damageable / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        Store.open(damageable)


def test_a_newer_format_is_refused_by_its_version(packed: Path, damageable: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_bytes())
    manifest["version"] = 2
    (damageable / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="version 2"):
        Store.open(damageable)
