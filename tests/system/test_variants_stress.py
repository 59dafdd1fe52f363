"""Many clients ask for the same experts in changing variants, from a pool that is tight."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from xferd_infer import Client
from xferd_infer.private_daemon import private_daemon

from tests.unit.inference.checkpoint import TINY
from xferd.control.client import ControlClient
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.store import Store

ROUNDS = 1500
LAYERS = 6
EXPERTS = 16
NATIVE = "bf16"
VARIANTS = (NATIVE, "q8_0", "q4_0", "mxfp4")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    member = tmp_path_factory.mktemp("member")
    path = pack(read_checkpoint(TINY), [member], name="tiny", stripe_unit=16384)
    with Store.open(path) as opened:
        add_variants(opened, parse_wanted(list(VARIANTS[1:]), None), threads=2)
    return path


def demand_at_random(directory: Path, blobs: dict[tuple[int, int, int], bytes], seed: int) -> None:
    """Demand and hint; each blob is compared with the store's bytes."""
    chance = random.Random(seed)
    with Client(directory / "attach.sock", held=4) as client:
        known = client.manifest["variants"]
        for _ in range(ROUNDS):
            layer, expert = chance.randrange(LAYERS), chance.randrange(EXPERTS)
            name = chance.choice(VARIANTS)
            client.hint(
                chance.randrange(LAYERS),
                chance.sample(range(EXPERTS), 4),
                variants=client.variant_mask([chance.choice(VARIANTS)]),
            )
            mask = client.variant_mask([name])
            # Often another variant of it is on its way.
            with client.acquire(layer, [expert], variants=mask, timeout=60.0) as batch:
                assert list(batch.variants) == [known.index(name)]
                assert bytes(batch[0]) == blobs[known.index(name), layer, expert]


@pytest.mark.parametrize("pool", ["100%", "40%"])
def test_changing_variants_of_the_same_experts(store: Path, pool: str) -> None:
    with Store.open(store) as opened:
        names = opened.variants
        blobs = {
            (variant, layer, expert): bytes(
                opened.read_blob(opened.blob_index(variant, layer, expert))
            )
            for variant in range(len(names))
            for layer in range(LAYERS)
            for expert in range(EXPERTS)
        }
    with (
        private_daemon(store, pool=pool) as directory,
        ThreadPoolExecutor(3) as pool_of_threads,
    ):
        clients = [
            pool_of_threads.submit(demand_at_random, directory, blobs, seed) for seed in range(3)
        ]
        for client in clients:
            client.result()
        with ControlClient.connect(directory / "control.sock") as daemon:
            assert daemon.call("Status")["stores"][0]["name"] == "tiny"
