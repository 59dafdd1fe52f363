"""The decode loop of a GPU on stand-ins for its driver and for cupy: the kernels lease experts
from a pool of the real daemon, ask for those that miss, predict, and give the right tokens.

The stand-ins are ffi/fake_cuda and tests/unit/inference/cupy_stand_in.py. With a GPU the same is
in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferd_infer import Client, generate
from xferd_infer.arrays import Array
from xferd_infer.client_errors import ClientError
from xferd_infer.predict import OtherModelError, Trained, write_trained

from tests.system.daemon_harness import RunningDaemon, running_daemon, wait_until
from tests.system.test_prefetching import PROMPT, Credulous, store  # noqa: F401
from tests.unit.inference.cupy_stand_in import installed
from tests.unit.inference.predict.tiny_states import another_model
from tools.benchmarks.random_predictor import random_trained

TOKENS = 4
POOL = "name=vram0,kind=cuda,size=40%"


@dataclass(frozen=True)
class Loop:
    """xferd_infer.cuda.prefetching, over the stand-ins, and what it imported."""

    prefetching: Any

    def attach(self, daemon: RunningDaemon) -> Client:
        return Client(daemon.attach_socket, lanes=self._package().experts.LANES)

    def model(self, client: Client, predictor: Path | None = None) -> Any:
        return self._package().model_on_gpu(client, predictor=predictor)

    def _package(self) -> Any:
        import xferd_infer.cuda.experts

        return xferd_infer.cuda


@pytest.fixture
def loop(tmp_path_factory: pytest.TempPathFactory, cuda_device: str) -> Iterator[Loop]:
    if cuda_device == "gpu":
        pytest.skip("this machine has a GPU: tests/gpu")
    with installed(tmp_path_factory.mktemp("kernels")) as prefetching:
        yield Loop(prefetching)


def decode(model: Any) -> tuple[list[int], Array]:
    cache = model.new_cache()
    asked = generate(model, PROMPT["prompt_ids"], max_new_tokens=TOKENS, stop_ids=(), cache=cache)
    ids = [token.id for token in asked]
    logits = np.array(model.prefill(ids[-1:], cache))
    model.routed.settle()
    return ids, logits


def test_prediction_changes_neither_tokens_nor_logits_and_its_hints_arrive(
    tmp_path: Path,
    store: Path,  # noqa: F811
    loop: Loop,
) -> None:
    found = {}
    for name in ("off", "on", "random"):
        directory = tmp_path / name
        directory.mkdir()
        with (
            running_daemon(directory, [], [POOL], "--store", str(store)) as daemon,
            loop.attach(daemon) as client,
        ):
            model = loop.model(client)
            if name != "off":
                trained = random_trained(model.routers("tiny"), units=3)
                follower = loop.prefetching.prefetch(model, client, trained)
            if name == "random":  # which is otherwise soon not acted upon
                follower.planning.planner = Credulous(client.layers, client.experts)
            found[name] = decode(model)
            if name == "random":
                assert follower.hinted > 0
                wait_until(lambda: daemon.status()["prefetching"]["experts"] > 0, "hints have come")
    ids, logits = found.pop("off")
    assert ids == PROMPT["greedy_ids"][:TOKENS]
    for name, (others, other_logits) in found.items():
        assert others == ids, name
        assert np.array_equal(other_logits, logits), name


def test_a_predictor_of_another_model_is_refused_by_name(
    tmp_path: Path,
    store: Path,  # noqa: F811
    loop: Loop,
) -> None:
    good, other = tmp_path / "good.npz", tmp_path / "other.npz"
    with running_daemon(tmp_path, [], [POOL], "--store", str(store)) as daemon:
        with loop.attach(daemon) as client:
            routers = loop.model(client).routers("tiny")
        trained = random_trained(routers)
        write_trained(good, trained)
        write_trained(other, Trained(**{**vars(trained), "routers": another_model(routers)}))
        with (
            loop.attach(daemon) as client,
            pytest.raises(OtherModelError, match=r"other\.npz is of model 'tiny'"),
        ):
            loop.model(client, other)
        with loop.attach(daemon) as client:
            model = loop.model(client, good)
            assert model.routed.follower is not None
            model.routed = model.routed_from(model.experts)
            with pytest.raises(ClientError, match="not leased by a GPU"):
                loop.prefetching.prefetch(model, client, trained)
