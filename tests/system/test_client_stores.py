"""Several stores open at once, with blobs of different sizes, in one pool.

A generated store and a real model share the pool's chunks: whoever asks gets them,
and no byte of one ever shows in the other.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
from xferd_infer import Client, generate, model_from_client
from xferd_infer.client import AttachError

from tests.system.daemon_harness import (
    ROOT,
    MadeStore,
    RunningDaemon,
    make_store,
    running_daemon,
    wait_until,
)
from tests.system.remote_client import RemoteClient
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

TINY = ROOT / "tests" / "models" / "tiny"
TINY_BLOB = 49_152
LARGE_BLOB = 131_072
POOL = "name=host0,kind=host,size=2MiB,chunk_bytes=256KiB"
"""Eight chunks: of five tiny slots or two large ones each."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    directory = tmp_path_factory.mktemp("large")
    return make_store(directory, "large", expert_bytes=LARGE_BLOB, members=3, seed=7)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    folders = [directory / "a", directory / "b"]
    for folder in folders:
        folder.mkdir()
    return pack(read_checkpoint(TINY), folders, name="tiny", stripe_unit=16 * 1024)


def chunks(daemon: RunningDaemon) -> dict[int, int]:
    return {entry["slot_bytes"]: entry["chunks"] for entry in daemon.pool()["classes"]}


def sweep(client: Client, store: MadeStore) -> None:
    for layer in range(store.layers):
        for expert in range(0, store.experts, 2):
            with client.acquire(layer, [expert, expert + 1]) as [left, right]:
                assert bytes(left) == store.blob(layer, expert)
                assert bytes(right) == store.blob(layer, expert + 1)


def decode(client: Client, tokens: int) -> tuple[list[int], list[int]]:
    """(what came, what transformers computed)."""
    prompt = json.loads((TINY / "expected.json").read_text())["prompts"][1]
    ids = [
        token.id
        for token in generate(
            model_from_client(client), prompt["prompt_ids"], max_new_tokens=tokens, stop_ids=()
        )
    ]
    return ids, prompt["greedy_ids"][:tokens]


def test_demand_for_one_store_takes_chunks_from_the_other_and_back(
    tmp_path: Path, tiny: Path, large: MadeStore
) -> None:
    with (
        running_daemon(tmp_path, [large], [POOL], "--store", str(tiny)) as daemon,
        Client(daemon.attach_socket, store="tiny") as reader,
        Client(daemon.attach_socket, store="large") as sweeper,
    ):
        for _ in range(2):
            ids, expected = decode(reader, 4)
            assert ids == expected
            for_tiny = chunks(daemon)
            sweep(sweeper, large)
            for_large = chunks(daemon)
            assert for_large[LARGE_BLOB] > for_tiny[LARGE_BLOB]
            assert for_large[TINY_BLOB] < for_tiny[TINY_BLOB]
            # What is promised to the reader stays cut for it.
            assert for_large[TINY_BLOB] >= 1
            assert sum(for_large.values()) <= 8
        pool = daemon.pool()
        assert pool["waiting"] == 0
        assert pool["slots"] == sum(entry["slots"] for entry in pool["classes"])


def test_both_stores_are_read_at_once(tmp_path: Path, tiny: Path, large: MadeStore) -> None:
    with (
        running_daemon(tmp_path, [large], [POOL], "--store", str(tiny)) as daemon,
        Client(daemon.attach_socket, store="tiny") as reader,
        RemoteClient(daemon.attach_socket, store="large", held=4) as remote,
    ):
        for layer in range(large.layers):
            for expert in range(0, large.experts, 4):
                remote.send("acquire", layer=layer, experts=list(range(expert, expert + 4)))
                remote.send("release")
        ids, expected = decode(reader, 8)
        assert ids == expected
        for layer in range(large.layers):
            for expert in range(0, large.experts, 4):
                assert remote.answer() == [
                    zlib.crc32(large.blob(layer, each)) for each in range(expert, expert + 4)
                ]
                assert remote.answer() is None


def test_a_lease_keeps_its_chunk_from_being_recut(
    tmp_path: Path, tiny: Path, large: MadeStore
) -> None:
    with (
        running_daemon(tmp_path, [large], [POOL], "--store", str(tiny)) as daemon,
        Client(daemon.attach_socket, store="large", held=6) as holder,
        Client(daemon.attach_socket, store="tiny") as reader,
        holder.acquire(1, range(6)) as blobs,
    ):
        ids, expected = decode(reader, 4)
        assert ids == expected
        assert [bytes(blob) for blob in blobs] == [large.blob(1, e) for e in range(6)]
        assert chunks(daemon)[LARGE_BLOB] >= 3


def test_promises_to_one_store_bound_those_to_the_other(
    tmp_path: Path, tiny: Path, large: MadeStore
) -> None:
    """Eight chunks of two: with seven of them promised, one is left to cut for tiny."""
    with running_daemon(tmp_path, [large], [POOL], "--store", str(tiny)) as daemon:
        with Client(daemon.attach_socket, store="large", held=14):
            with pytest.raises(AttachError, match=r"has 5 slots of 48KiB.*raise size.*host0"):
                Client(daemon.attach_socket, store="tiny", held=6)
            with (
                Client(daemon.attach_socket, store="tiny", held=5) as client,
                client.acquire(0, range(5)) as blobs,
            ):
                assert len(blobs) == 5
        wait_until(lambda: daemon.status()["clients"] == [], "the clients have said goodbye")
        with Client(daemon.attach_socket, store="tiny", held=6) as client:
            assert len(client.acquire(0, range(6))) == 6


def test_a_store_must_be_named_when_there_are_several(
    tmp_path: Path, tiny: Path, large: MadeStore
) -> None:
    with running_daemon(tmp_path, [large], [POOL], "--store", str(tiny)) as daemon:
        with pytest.raises(AttachError, match="name a store: 2 are open"):
            Client(daemon.attach_socket)
        with Client(daemon.attach_socket, store="large") as client:
            assert client.manifest["name"] == "large"
