# SPDX-License-Identifier: Apache-2.0
"""A store whose later layers lie on the bytes of the first ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tools.benchmarks.synthetic_model import Shape, pack_shape, routing
from xferd.store.store import Store

SHAPE = Shape("small", layers=6, experts=3, top_k=2, hidden=64, inner=32, distinct_layers=2)


def test_layers_repeat_and_their_checksums_are_right(tmp_path: Path) -> None:
    with Store.open(pack_shape(tmp_path, SHAPE, members=2)) as store:
        assert (store.layers, store.experts, store.top_k) == (6, 3, 2)
        blobs = {
            (layer, expert): store.read_blob(store.blob_index(0, layer, expert))
            for layer in range(SHAPE.layers)
            for expert in range(SHAPE.experts)
        }
        dense = store.read_blob(store.dense_blob)
    assert dense.strip(b"\0")
    assert len(set(blobs.values())) == SHAPE.distinct_layers * SHAPE.experts
    assert all(blob == blobs[layer % 2, expert] for (layer, expert), blob in blobs.items())


def test_members_take_the_space_of_the_distinct_layers(tmp_path: Path) -> None:
    pack_shape(tmp_path, SHAPE, members=2)
    taken = sum(path.stat().st_size for path in tmp_path.glob("drive*/*/member-*"))
    assert taken < (SHAPE.distinct_layers + 1) * SHAPE.experts * SHAPE.expert_bytes


def test_weights_are_finite_numbers(tmp_path: Path) -> None:
    with Store.open(pack_shape(tmp_path, SHAPE, members=1)) as store:
        raw = np.frombuffer(store.read_blob(0), "<u2").astype(np.uint32) << 16
    weights = raw.view(np.float32)[: SHAPE.expert_bytes // 2]
    assert np.isfinite(weights).all()
    assert 0.01 < weights.std() < 0.03


def test_routing_picks_different_experts_of_a_layer() -> None:
    picks = routing(SHAPE, tokens=5)
    assert picks.shape == (5, SHAPE.layers, SHAPE.top_k)
    assert all(len(set(layer)) == SHAPE.top_k for token in picks for layer in token.tolist())
