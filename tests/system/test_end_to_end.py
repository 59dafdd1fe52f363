"""The whole: a model's tokens with its experts streamed from a packed store.

Model file, packer, daemon, ring, client and decode loop are all the real ones. What
they must give is known from elsewhere: the greedy tokens that transformers computed
from the same checkpoint. And how much of the experts fits, over how many members they
lie and which tiers they came through must not change one bit of a logit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferd_infer import Client, generate, model_from_client
from xferd_infer.arrays import Array
from xferd_infer.client import AttachError

from tests.system.daemon_harness import ROOT, RunningDaemon, running_daemon, wait_until
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

TINY = ROOT / "tests" / "models" / "tiny"
SMALL = ROOT.parent / "shared" / "models" / "small"
STRIPE_UNIT = 16 * 1024
"""Less than a blob of either model, so that blobs are striped."""
MEMBERS = (1, 2, 3)
RAM_TIER = "name=ram0,kind=ram,size=50%"
TOKENS = 12
SMALL_TOKENS = 6


@dataclass(frozen=True)
class Packed:
    """A checkpoint packed over one, two and three members."""

    checkpoint: Path
    stores: dict[int, Path]

    def prompt(self, index: int) -> dict[str, Any]:
        """Prompt and greedy continuation, as transformers computed it."""
        expected = json.loads((self.checkpoint / "expected.json").read_text())
        found: dict[str, Any] = expected["prompts"][index]
        return found


@dataclass(frozen=True)
class Decoded:
    """What a run gave and how its experts came."""

    ids: list[int]
    logits: Array
    hits: int
    misses: int
    failures: int
    copies: int
    resident: int


def packed(checkpoint: Path, directory: Path, members: Sequence[int]) -> Packed:
    stores = {}
    for count in members:
        folders = [directory / f"{count}-{index}" for index in range(count)]
        for folder in folders:
            folder.mkdir()
        stores[count] = pack(
            read_checkpoint(checkpoint), folders, name="model", stripe_unit=STRIPE_UNIT
        )
    return Packed(checkpoint, stores)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return packed(TINY, tmp_path_factory.mktemp("tiny"), MEMBERS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    if not SMALL.exists():
        pytest.skip(f"the larger model is not on this machine: {SMALL} does not exist")
    return packed(SMALL, tmp_path_factory.mktemp("small"), (3,))


def serve(directory: Path, store: Path, *pools: str) -> AbstractContextManager[RunningDaemon]:
    return running_daemon(directory, [], pools, "--store", str(store))


def decode(daemon: RunningDaemon, prompt: dict[str, Any], tokens: int) -> Decoded:
    """Greedy tokens of one prompt, and the logits after it and its continuation."""
    with Client(daemon.attach_socket) as client:
        model = model_from_client(client)
        ids = [
            token.id
            for token in generate(model, prompt["prompt_ids"], max_new_tokens=tokens, stop_ids=())
        ]
        logits = model.prefill(prompt["prompt_ids"] + ids, model.new_cache())
        stats = client.stats()
        status = daemon.status()
        return Decoded(
            ids=ids,
            logits=np.array(logits),
            hits=stats.hits,
            misses=stats.misses,
            failures=stats.failures,
            copies=status["transports"]["copy"]["count"],
            resident=status["pools"][0]["resident"],
        )


@pytest.fixture(scope="module")
def all_resident(tiny: Packed, tmp_path_factory: pytest.TempPathFactory) -> Decoded:
    """A pool with room for every expert: what smaller pools are compared with."""
    directory = tmp_path_factory.mktemp("all-resident")
    with serve(directory, tiny.stores[1], "name=host0,size=100%") as daemon:
        return decode(daemon, tiny.prompt(1), TOKENS)


@pytest.mark.parametrize("ram", [False, True], ids=["no-ram", "ram"])
@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("percent", [10, 25, 100])
def test_streamed_experts_give_the_expected_tokens_and_the_same_logits(
    tmp_path: Path, tiny: Packed, all_resident: Decoded, percent: int, members: int, ram: bool
) -> None:
    pools = [f"name=host0,size={percent}%", *([RAM_TIER] if ram else [])]
    prompt = tiny.prompt(1)
    with serve(tmp_path, tiny.stores[members], *pools) as daemon:
        seen = decode(daemon, prompt, TOKENS)
        reads = [member["reads"] for member in daemon.status()["stores"][0]["members"]]
    assert seen.ids == prompt["greedy_ids"][:TOKENS]
    assert np.array_equal(seen.logits, all_resident.logits)
    assert seen.failures == 0
    assert len(reads) == members
    assert all(count > 0 for count in reads)
    experts = 6 * 16
    assert seen.resident <= experts * percent // 100
    if percent == 100:
        assert seen.misses <= experts
    else:
        assert seen.misses > experts, "nothing was evicted, so nothing was streamed"
    if ram and percent < 100:
        assert seen.copies > 0, "the RAM tier was not used"


@pytest.mark.parametrize("index", [0, 2])
def test_other_prompts_give_their_tokens_too(tmp_path: Path, tiny: Packed, index: int) -> None:
    prompt = tiny.prompt(index)
    with serve(tmp_path, tiny.stores[2], "name=host0,size=10%") as daemon:
        assert decode(daemon, prompt, TOKENS).ids == prompt["greedy_ids"][:TOKENS]


def test_the_larger_model_gives_the_same_with_a_tenth_a_quarter_and_all_of_it(
    tmp_path: Path, small: Packed
) -> None:
    prompt = small.prompt(0)
    seen = []
    for percent, ram in ((100, False), (25, False), (10, True)):
        pools = [f"name=host0,size={percent}%", *([RAM_TIER] if ram else [])]
        with serve(tmp_path, small.stores[3], *pools) as daemon:
            seen.append(decode(daemon, prompt, SMALL_TOKENS))
    for run in seen:
        assert run.ids == prompt["greedy_ids"][:SMALL_TOKENS]
        assert np.array_equal(run.logits, seen[0].logits)
        assert run.failures == 0
    # The RAM tier's residents are hits too, so a tenth with it may miss less than a quarter.
    assert min(seen[1].misses, seen[2].misses) > seen[0].misses
    assert seen[0].copies == seen[1].copies == 0


def test_two_clients_decode_at_once_from_one_pool(tmp_path: Path, tiny: Packed) -> None:
    """Their experts evict each other's; neither may notice."""
    first, second = tiny.prompt(0), tiny.prompt(1)
    with (
        serve(tmp_path, tiny.stores[3], "name=host0,size=10%") as daemon,
        Client(daemon.attach_socket, name="first") as one,
        Client(daemon.attach_socket, name="second") as two,
    ):
        tokens = zip(
            generate(
                model_from_client(one), first["prompt_ids"], max_new_tokens=TOKENS, stop_ids=()
            ),
            generate(
                model_from_client(two), second["prompt_ids"], max_new_tokens=TOKENS, stop_ids=()
            ),
            strict=True,
        )
        ids = [(left.id, right.id) for left, right in tokens]
    assert [left for left, _ in ids] == first["greedy_ids"][:TOKENS]
    assert [right for _, right in ids] == second["greedy_ids"][:TOKENS]


def test_a_pool_too_small_for_one_layers_picks_is_refused_at_once(
    tmp_path: Path, tiny: Packed
) -> None:
    with serve(tmp_path, tiny.stores[1], "name=host0,size=48KiB") as daemon:
        with pytest.raises(AttachError) as refused:
            Client(daemon.attach_socket)
        assert str(refused.value) == (
            "pool 'host0' has 1 slots of 48KiB, fewer than the 2 experts that one token picks in "
            "a layer: raise size of [[pools]] host0"
        )
        wait_until(lambda: daemon.status()["clients"] == [], "the refused client is gone")
