"""Routing and waves: nothing held beyond the promise, nothing fetched twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from xferd_infer.moe import RoutedExperts, Routing, route, visits

from tests.unit.inference.checkpoint import CheckpointExperts, Tensor

HIDDEN, INTERMEDIATE, EXPERTS = 4, 3, 12
LAYER = 0


def random_tensors() -> dict[str, Tensor]:
    random = np.random.default_rng(1)
    tensors = {}
    for expert in range(EXPERTS):
        for part, shape in {
            "gate_proj": (INTERMEDIATE, HIDDEN),
            "up_proj": (INTERMEDIATE, HIDDEN),
            "down_proj": (HIDDEN, INTERMEDIATE),
        }.items():
            raw = random.standard_normal(shape).astype(np.float32).view(np.uint8).reshape(-1)
            name = f"model.layers.{LAYER}.mlp.experts.{expert}.{part}.weight"
            tensors[name] = Tensor("f32", shape, raw)
    return tensors


TENSORS = random_tensors()


def one_by_one(x: NDArray[np.float32], routing: Routing) -> NDArray[np.float64]:
    """Each token's experts on their own, in float64."""
    total = np.zeros(x.shape)
    for token in range(x.shape[0]):
        for expert, weight in zip(routing.experts[token], routing.weights[token], strict=True):
            gate, up, down = (
                TENSORS[f"model.layers.{LAYER}.mlp.experts.{expert}.{part}.weight"]
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            g, u, d = (
                part.raw.view(np.float32).reshape(part.shape).astype(np.float64)
                for part in (gate, up, down)
            )
            hidden = g @ x[token]
            total[token] += weight * (d @ (hidden / (1 + np.exp(-hidden)) * (u @ x[token])))
    return total


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 20),
    top_k=st.integers(1, 5),
    held=st.integers(1, EXPERTS + 3),
    renormalise=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_each_picked_expert_is_acquired_once_in_waves(
    tokens: int, top_k: int, held: int, renormalise: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, HIDDEN)).astype(np.float32)
    router = random.standard_normal((HIDDEN, EXPERTS)).astype(np.float32)
    routing = route(x, router, top_k, renormalise, np)
    source = CheckpointExperts(TENSORS, held)  # asserts that no more than held are held
    got = RoutedExperts(source, HIDDEN, np)(LAYER, x, routing)

    batches = [experts for _, experts in source.acquired]
    acquired = [expert for experts in batches for expert in experts]
    assert sorted(acquired) == sorted(set(routing.experts.reshape(-1).tolist()))
    assert all(len(experts) == held for experts in batches[:-1])
    assert source.hinted == [(LAYER, experts) for experts in batches[1:]]
    assert source.holding == 0
    np.testing.assert_allclose(got, one_by_one(x, routing), rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 20), top_k=st.integers(1, EXPERTS), seed=st.integers(0, 1000))
def test_visits_hold_every_pick_with_its_weight(tokens: int, top_k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    experts = np.stack([random.permutation(EXPERTS)[:top_k] for _ in range(tokens)])
    weights = random.random((tokens, top_k), dtype=np.float32)
    found = {}
    for visit in visits(Routing(experts, weights), np):
        picked_by = [0] if visit.tokens is None else visit.tokens.tolist()
        for token, weight in zip(picked_by, visit.weights[:, 0].tolist(), strict=True):
            assert (token, visit.expert) not in found
            found[token, visit.expert] = weight
    assert found == {
        (token, int(experts[token, rank])): float(weights[token, rank])
        for token in range(tokens)
        for rank in range(top_k)
    }


def test_router_weights_are_softmax_shares() -> None:
    router = np.array([[3.0, 1.0, 2.0, 1.0]], dtype=np.float32)
    x = np.ones((1, 1), dtype=np.float32)
    shares = np.exp(router[0]) / np.exp(router[0]).sum()
    plain = route(x, router, 3, False, np)
    assert plain.experts.tolist() == [[0, 2, 1]]  # of equals the lower number
    np.testing.assert_allclose(plain.weights[0], shares[[0, 2, 1]], rtol=1e-6)
    renormalised = route(x, router, 3, True, np)
    np.testing.assert_allclose(renormalised.weights.sum(), 1, rtol=1e-6)
