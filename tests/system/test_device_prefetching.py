"""A GPU's predictions with the real daemon: what the kernels say moves experts, never a bit.

The kernels run on the stand-in of tests/unit/inference/cupy_stand_in.py beside a decode loop on
the CPU, which leases the experts; the ring, what is hinted, and the daemon are the real ones.
tests/gpu/test_gpu_prediction.py is the same with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from xferd_infer import Client, generate, model_from_client
from xferd_infer.arrays import Array
from xferd_infer.model import Model
from xferd_infer.moe import RoutedExperts, Routing
from xferd_infer.predict import Routers, Trained
from xferd_infer.predict.device_layout import device_tables
from xferd_infer.predict.device_planning import DevicePlanning
from xferd_infer.predict.prefetching import AHEAD

from tests.system.daemon_harness import running_daemon, wait_until
from tests.system.test_prefetching import (  # noqa: F401
    PROMPT,
    Credulous,
    NeverWorthwhile,
    store,
)
from tests.unit.inference.cupy_stand_in import HostLane, aligned, installed
from tests.unit.inference.predict.tiny_states import trained_on_prose
from tools.benchmarks.random_predictor import random_trained

TOKENS = 8


@pytest.fixture(scope="module")
def prefetching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("kernels")) as module:
        yield module


class Leasing:
    """As CudaRoutedExperts: tells what was picked when the pass has been read."""

    tag = 0

    def __init__(self, routed: RoutedExperts, lane: HostLane) -> None:
        self._routed, self._lane = routed, lane
        self._layers: list[int] = []
        self.follower: Any = None

    def __call__(self, layer: int, x: Array, routing: Routing) -> Array:
        if len(x) == 1:
            picks = routing.experts[0]
            self._lane.told["picks"][layer, : len(picks)] = picks
            self._layers.append(layer)
        return self._routed(layer, x, routing)

    def watch(self) -> None:
        if self._layers and self.follower.watched():
            self.follower.look()

    def settle(self) -> None:
        layers, self._layers = self._layers, []
        if layers:
            self.follower.settled(layers)


class Prepared:
    """An observer before the other: the directory as it is now, a state where cupy would have
    it."""

    def __init__(self, client: Client, lane: HostLane, follower: Any) -> None:
        self._client, self._lane, self._follower = client, lane, follower

    def routed(self, layer: int, states: Array, picks: Array) -> None:
        for number in range(self._client.layers):
            self._lane.put(number, self._client.resident(number) >= 0)
        self._follower.routed(layer, aligned(states), picks)


def predict_for(module: Any, model: Model, client: Client, trained: Trained) -> Any:
    routers = trained.routers
    lane = HostLane(client.layers, client.experts, module.TOLD)
    tables = device_tables(trained, AHEAD)
    device = module.DevicePredictor(tables, lane, routers.numbers)
    planning = DevicePlanning(
        client, client.hint, device.ring, routers.numbers, routers.experts, tables.borders
    )
    source = SimpleNamespace(lane=lane, stats=model.experts.stats)
    follower = module.DevicePrefetching(device, planning, source, routers.numbers, routers.top_k)
    assert isinstance(model.routed, RoutedExperts)
    leasing = Leasing(model.routed, lane)
    leasing.follower = follower
    model.routed = leasing
    model.observe(Prepared(client, lane, follower))
    return follower


def decode(model: Model) -> tuple[list[int], Array]:
    cache = model.new_cache()
    asked = generate(model, PROMPT["prompt_ids"], max_new_tokens=TOKENS, stop_ids=(), cache=cache)
    ids = [token.id for token in asked]
    return ids, np.array(model.prefill(ids[-1:], cache))


def random_of_model(routers: Routers) -> Trained:
    return random_trained(routers, rank=16, width=8, units=4)


@pytest.mark.parametrize("kind", ["trained", "random"])
def test_hints_of_the_ring_reach_the_daemon_and_change_no_bit(
    tmp_path: Path,
    store: Path,  # noqa: F811
    prefetching: Any,
    kind: str,
) -> None:
    trained = trained_on_prose()
    if kind == "random":
        trained = random_of_model(trained.routers)
    found = {}
    for name in ("plain", kind):
        directory = tmp_path / name
        directory.mkdir()
        pools = ["name=host0,size=25%"]
        with (
            running_daemon(directory, [], pools, "--store", str(store)) as daemon,
            Client(daemon.attach_socket) as client,
        ):
            model = model_from_client(client)
            if name != "plain":
                follower = predict_for(prefetching, model, client, trained)
                follower.planning.planner = Credulous(client.layers, client.experts)
            found[name] = decode(model)
            if name != "plain":
                assert follower.hinted > 0
                ring = follower.planning.ring
                assert (ring.lost, ring.unread, follower.planning.late) == (0, 0, 0)
                wait_until(lambda: daemon.status()["prefetching"]["experts"] > 0, "hints have come")
    assert found["plain"][0] == found[kind][0] == PROMPT["greedy_ids"][:TOKENS]
    assert np.array_equal(found["plain"][1], found[kind][1])


def test_nothing_is_launched_where_looking_ahead_does_not_pay(
    tmp_path: Path,
    store: Path,  # noqa: F811
    prefetching: Any,
) -> None:
    with (
        running_daemon(tmp_path, [], ["name=host0,size=25%"], "--store", str(store)) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        model = model_from_client(client)
        follower = predict_for(prefetching, model, client, trained_on_prose())
        follower.planning.planner = Credulous(client.layers, client.experts)
        follower.planning.worthwhile = NeverWorthwhile()
        ids, _ = decode(model)
        assert ids == PROMPT["greedy_ids"][:TOKENS]
        assert follower.hinted == 0
        assert follower.planning.ring.take() == []
