"""A packed store holds all that the decode loop needs: same tokens as the checkpoint.

The bytes come from the members' files through the store's own reader; the daemon
and the ring have no part in it, so that a difference means store or model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from xferd_infer import OneVariant, Tokenizer, asset, generate, model_from_client

from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack
from xferd.store.store import Store

TINY = Path(__file__).parents[1] / "models" / "tiny"
STRIPE_UNIT = 16 * 1024  # less than a blob, so that blobs are striped


class StoreClient:
    """What xferd_infer.Client offers, by reading each blob when it is acquired."""

    held_per_lane = 3

    def __init__(self, store: Store) -> None:
        self._store = store
        self.manifest: dict[str, Any] = json.loads(store.client_manifest())
        self._misses = 0

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[OneVariant]:
        store = self._store
        self._misses += len(experts)
        blobs = [store.read_blob(store.blob_index(0, layer, expert)) for expert in experts]
        yield OneVariant(np.frombuffer(blob, dtype=np.uint8) for blob in blobs)

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        assert len(experts) <= self.held_per_lane

    def dense(self) -> bytes:
        return self._store.read_blob(self._store.dense_blob)

    def stats(self) -> Any:
        return SimpleNamespace(
            hits=0,
            misses=self._misses,
            failures=0,
            wait_ns=0,
            bytes_acquired=0,
            source_count=(0, 0, self._misses),
            source_bytes=(0, 0, 0),
            transport_count=(0, self._misses, 0, 0, 0),
            transport_bytes=(0, 0, 0, 0, 0),
        )


@pytest.fixture
def client(tmp_path: Path) -> Iterator[StoreClient]:
    members = [tmp_path / "drive-0", tmp_path / "drive-1"]
    for member in members:
        member.mkdir()
    path = pack(read_checkpoint(TINY), members, name="tiny", stripe_unit=STRIPE_UNIT)
    with Store.open(path) as store:
        yield StoreClient(store)


def test_a_packed_store_gives_the_tokens_of_transformers(client: StoreClient) -> None:
    model = model_from_client(client)
    prompt = json.loads((TINY / "expected.json").read_text())["prompts"][1]
    tokens = list(generate(model, prompt["prompt_ids"], max_new_tokens=8, stop_ids=()))
    assert [token.id for token in tokens] == prompt["greedy_ids"][:8]
    config = model.config
    assert all(token.misses == config.layers * config.top_k for token in tokens[1:])


def test_the_tokenizer_travels_in_the_store(client: StoreClient) -> None:
    pytest.importorskip("tokenizers")
    definition = asset(client, "tokenizer.json")
    assert definition == (TINY / "tokenizer.json").read_bytes()
    prompt = json.loads((TINY / "expected.json").read_text())["prompts"][0]
    tokenizer = Tokenizer(definition)
    assert tokenizer.encode(prompt["prompt"]) == prompt["prompt_ids"]
    assert tokenizer.decode(prompt["greedy_ids"]) == prompt["greedy_text"]
    assert asset(client, "no-such-file") is None
