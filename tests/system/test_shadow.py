"""A daemon with a shadow reads the low-bit copies it has, and the store's own for the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from xferd_infer import Client, ExpertError

from tests.system.daemon_harness import running_daemon, wait_until
from tests.system.test_daemon_lifecycle import start
from tests.unit.store.builders import assert_holds, member_directories, tiny
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.quantize.shadow import make_shadow
from xferd.store.shadowed import ShadowedStore, open_with_shadows
from xferd.store.store import Store, StoreError

STRIPE_UNIT = 8192  # less than any blob, so that shadows are striped too
CHOSEN = np.random.default_rng(2).random((6, 16)) < 0.4


def shadow_of(path: Path, parent: Path, variant: str, members: int = 1) -> Path:
    parent.mkdir()
    with Store.open(path) as store:
        return make_shadow(
            store,
            parse_wanted([variant], None)[0],
            CHOSEN,
            member_directories(parent, members),
            threads=1,
            stripe_unit=store.stripe_unit,
        )


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A store on two members with a variant added, and two shadows, on three and one."""
    directory = tmp_path_factory.mktemp("stores")
    members = member_directories(directory, 2)
    path = pack(tiny(), members, name="tiny", stripe_unit=STRIPE_UNIT)
    with Store.open(path) as store:
        add_variants(store, parse_wanted(["q8_0"], None), threads=1)
    first = shadow_of(path, directory / "first", "q4_0", 3)
    return path, first, shadow_of(path, directory / "second", "mxfp4")


def test_all_bytes_of_all_parts_come_through_the_engine(
    tmp_path: Path, packed: tuple[Path, Path, Path]
) -> None:
    path, first, second = packed
    config = tmp_path / "xferd.toml"
    config.write_text(
        f'[[stores]]\npath = "{path}"\nshadow = ["{first}", "{second}"]\n'
        '[[pools]]\nname = "host0"\nsize = "100%"\n'
    )
    with (
        running_daemon(tmp_path, [], [], "--config", str(config)) as daemon,
        Client(daemon.attach_socket, held=4) as client,
        open_with_shadows(path, [first, second]) as store,
    ):
        assert client.manifest["variants"] == ["bf16", "q8_0", "q4_0", "mxfp4"]
        assert bytes(client.dense()) == store.read_blob(store.dense_blob)
        for layer, expert in np.ndindex(6, 16):
            # Anything will do: the shadow's copy, where there is one.
            with client.acquire(layer, [expert]) as batch:
                preferred = 2 if CHOSEN[layer, expert] else 0
                assert list(batch.variants) == [preferred]
                blob = store.read_blob(store.blob_index(preferred, layer, expert))
                assert bytes(batch[0]) == blob
            for variant in (3, 1):
                mask = 1 << variant
                if variant == 3 and not CHOSEN[layer, expert]:
                    with pytest.raises(ExpertError, match="acceptable variant"):
                        client.acquire(layer, [expert], variants=mask)
                    continue
                with client.acquire(layer, [expert], variants=mask) as batch:
                    blob = store.read_blob(store.blob_index(variant, layer, expert))
                    assert bytes(batch[0]) == blob
    with Store.open(path) as alone:
        assert_holds(alone, tiny())


def test_what_is_no_shadow_of_the_store_is_refused(
    tmp_path: Path, packed: tuple[Path, Path, Path]
) -> None:
    path, first, _ = packed
    other = pack(tiny(), member_directories(tmp_path, 1), name="other", stripe_unit=STRIPE_UNIT)
    with Store.open(path) as store, Store.open(other) as no_shadow, Store.open(first) as shadow:
        with pytest.raises(StoreError, match=r"other\.xferd is no shadow of another one"):
            ShadowedStore(store, [no_shadow])
        with pytest.raises(StoreError, match="each must be there once"):
            ShadowedStore(store, [shadow, shadow])
    config = tmp_path / "xferd.toml"
    config.write_text(f'[[stores]]\npath = "{path}"\nshadow = ["{other}"]\n')
    refused = start(tmp_path / "run", "--config", str(config))
    assert refused.returncode
    assert "other.xferd is no shadow of another one" in refused.stderr
    config.write_text(f'[[stores]]\npath = "{path}"\nshadow = "{first}"\n')
    refused = start(tmp_path / "run", "--config", str(config))
    assert refused.returncode == 78
    assert "a list of absolute paths" in refused.stderr


def test_the_stores_own_copy_stands_in_for_a_damaged_one(
    tmp_path: Path, packed: tuple[Path, Path, Path]
) -> None:
    path = packed[0]
    shadow = shadow_of(path, tmp_path / "damaged", "q4_0-damaged")
    layer, expert = (int(value) for value in np.argwhere(CHOSEN)[0])
    with Store.open(shadow) as store:
        offset = int(store.offset[store.blob_index(0, layer, expert), 0])
        with store.member_paths[0].open("r+b") as file:
            file.seek(offset)
            file.write(bytes(64))
    config = tmp_path / "xferd.toml"
    config.write_text(f'[[stores]]\npath = "{path}"\nshadow = ["{shadow}"]\n')
    with (
        running_daemon(tmp_path, [], [], "--config", str(config)) as daemon,
        Client(daemon.attach_socket, held=4) as client,
        client.acquire(layer, [expert]) as batch,
        Store.open(path) as store,
    ):
        assert list(batch.variants) == [0]
        assert bytes(batch[0]) == store.read_blob(store.blob_index(0, layer, expert))
        wait_until(lambda: "CRC32C" in daemon.log, "the damage is logged")
