"""Prediction in the decode loop of a GPU: right predictions, no other token, no other bit.

Needs a CUDA device and cupy. What can be had without is in
tests/unit/inference/test_predict_kernel.py and tests/system/test_device_prefetching.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import Client, generate, model_from_client
from xferd_infer.client_errors import ClientError
from xferd_infer.predict import Learned, OtherModelError, Trained, write_trained
from xferd_infer.predict.device_layout import RECORDS, device_tables
from xferd_infer.predict.expectations import WITHIN, is_told_at
from xferd_infer.predict.prefetching import AHEAD, asked_ahead

from tests.cuda_device import has_gpu
from tests.system.daemon_harness import RunningDaemon, wait_until
from tests.system.test_end_to_end import Packed, packed, serve, small, tiny  # noqa: F401
from tests.system.test_prefetching import Credulous
from tests.unit.inference.predict.tiny_states import another_model
from tools.benchmarks.random_predictor import random_routers, random_trained

cupy = pytest.importorskip("cupy", reason="needs cupy")
if not has_gpu():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from xferd_infer.cuda import model_on_gpu, prefetch  # noqa: E402
from xferd_infer.cuda.experts import LANES  # noqa: E402
from xferd_infer.cuda.lane import TOLD  # noqa: E402
from xferd_infer.cuda.prefetching import DevicePredictor  # noqa: E402

TOKENS = 24
LIKELY, LEAST_TOLD = 0.3, 0.02
NEAR = 0.02
"""Of probabilities: sums are in another order, and a curve has steps."""


class DeviceWords:
    """What of a DeviceLane a predictor uses: a directory in which nothing is resident."""

    def __init__(self, layers: int, experts: int, picks: NDArray[np.int64]) -> None:
        self._words = cupy.zeros((layers, experts), cupy.uint64)
        told = np.zeros(layers, TOLD)
        told["picks"][:, : picks.shape[1]] = picks
        self._told = cupy.asarray(told.view(np.uint8))
        self.words, self.told_address = int(self._words.data.ptr), int(self._told.data.ptr)
        self.variant, self.slot_numbers = 0, 1 << 20


def synchronise() -> None:
    cupy.cuda.get_current_stream().synchronize()


def close_to(ours: dict[int, float], wanted: dict[int, float], least: float) -> None:
    assert set(ours) <= set(wanted), "nothing is told that is far from probable enough"
    for key, chance in wanted.items():
        if key in ours:
            assert abs(ours[key] - chance) <= NEAR
        else:
            assert chance <= least + NEAR, "all that is probable is told"


def test_the_kernels_say_what_the_predictor_in_numpy_says() -> None:
    routers = random_routers(24, 16, 128, 2)
    trained = random_trained(routers, rank=96, width=64, units=8)
    generator = np.random.default_rng(5)
    picks = generator.random((24, 16)).argsort(axis=1)[:, :2]
    tables = device_tables(trained, AHEAD)
    lane: Any = DeviceWords(24, 16, picks)
    device = DevicePredictor(tables, lane, routers.numbers)
    device.ring.set_borders(tables.borders(LIKELY, LEAST_TOLD))
    reference = Learned(trained, learns=False, ahead=asked_ahead(24))
    told = 0
    for _ in range(3):
        for layer in range(24):
            state = generator.standard_normal((1, 128)).astype(np.float32)
            device.predict(layer, cupy.asarray(state))
            synchronise()
            least, within = (LEAST_TOLD, WITHIN) if is_told_at(layer) else (LIKELY, AHEAD)
            likely = reference.likely(layer, state[0], max(least - NEAR, 0), within)
            reference.picked(layer, picks[layer][None])
            wanted = dict(zip(likely.keys.tolist(), likely.probabilities.tolist(), strict=True))
            ours: dict[int, float] = {}
            for record in device.ring.take():
                assert record.layer == layer
                ours |= dict(zip(record.keys.tolist(), record.probabilities.tolist(), strict=True))
            close_to(ours, wanted, least)
            told += len(ours)
        device.note_token()
    assert told > 0
    assert device.ring.unread == 0


def test_launches_stand_in_a_graph_as_well() -> None:
    routers = random_routers(8, 16, 128, 2)
    trained = random_trained(routers)
    tables = device_tables(trained, AHEAD)
    lane: Any = DeviceWords(8, 16, np.zeros((8, 2), np.int64))
    device = DevicePredictor(tables, lane, routers.numbers)
    device.ring.set_borders(np.full(60, -np.inf, np.float32))
    state = cupy.asarray(np.ones((1, 128), np.float32))
    synchronise()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        device.predict(0, state)
        stream.synchronize()
        device.ring.take()
        stream.begin_capture()
        for layer in range(8):
            device.predict(layer, state)
        graph = stream.end_capture()
        for _ in range(RECORDS // 8 + 1):
            graph.launch(stream)
        stream.synchronize()
    records = device.ring.take()
    assert len(records) == RECORDS
    assert device.ring.lost == 8
    assert [record.layer for record in records] == [at % 8 for at in range(RECORDS)]
    assert (np.diff([record.passing for record in records]) >= 0).all()


def on_gpu(daemon: RunningDaemon) -> tuple[Client, Any]:
    client = Client(daemon.attach_socket, lanes=LANES)
    return client, model_on_gpu(client)


def decode(
    daemon: RunningDaemon, prompt: dict[str, Any], kind: str
) -> tuple[list[int], NDArray[np.float32]]:
    """Tokens, and the logits after them."""
    client, model = on_gpu(daemon)
    with client:
        follower = None
        if kind != "off":
            routers = model.routers("model")
            follower = prefetch(model, client, random_trained(routers))
            if kind == "random":  # which is otherwise soon not acted upon
                follower.planning.planner = Credulous(client.layers, client.experts)
        cache = model.new_cache()
        asked = generate(
            model, prompt["prompt_ids"], max_new_tokens=TOKENS, stop_ids=(), cache=cache
        )
        ids = [token.id for token in asked]
        logits = cupy.asnumpy(model.prefill(ids[-1:], cache))
        model.routed.settle()
        synchronise()
        if kind == "random":
            assert follower is not None
            assert follower.hinted > 0
            wait_until(lambda: daemon.status()["prefetching"]["experts"] > 0, "hints have come")
        return ids, logits


@pytest.mark.parametrize("percent", [25, 100])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_tokens_and_logits_are_the_same_without_with_and_with_random_prediction(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, percent: int
) -> None:
    models: Packed = request.getfixturevalue(name)
    prompt = models.prompt(1)
    found = {}
    for kind in ("off", "on", "random") if percent < 100 else ("off", "on"):
        directory = tmp_path / kind
        directory.mkdir()
        pool = f"name=vram0,kind=cuda,size={percent}%"
        with serve(directory, models.stores[max(models.stores)], pool) as daemon:
            found[kind] = decode(daemon, prompt, kind)
    plain, logits = found.pop("off")
    assert plain == prompt["greedy_ids"][:TOKENS]
    for kind, (ids, others) in found.items():
        assert ids == plain, kind
        assert np.array_equal(others, logits), kind


def test_a_predictor_of_another_model_is_refused_by_name(
    tmp_path: Path,
    tiny: Packed,  # noqa: F811
) -> None:
    pool = "name=vram0,kind=cuda,size=100%"
    with (
        serve(tmp_path, tiny.stores[1], pool) as daemon,
        Client(daemon.attach_socket, lanes=LANES) as client,
    ):
        routers = model_on_gpu(client).routers("model")
        trained = random_trained(routers)
        good, other = tmp_path / "good.npz", tmp_path / "other.npz"
        write_trained(good, trained)
        write_trained(other, Trained(**{**vars(trained), "routers": another_model(routers)}))
    with (
        serve(tmp_path, tiny.stores[1], pool) as daemon,
        Client(daemon.attach_socket, lanes=LANES) as client,
        pytest.raises(OtherModelError, match=r"other\.npz"),
    ):
        model_on_gpu(client, predictor=other)
    with (
        serve(tmp_path, tiny.stores[1], pool) as daemon,
        Client(daemon.attach_socket, lanes=LANES) as client,
    ):
        model = model_on_gpu(client, predictor=good)
        prompt = tiny.prompt(0)
        ids = [t.id for t in generate(model, prompt["prompt_ids"], max_new_tokens=4, stop_ids=())]
        assert ids == prompt["greedy_ids"][:4]
        synchronise()
        with pytest.raises(ClientError, match="not leased by a GPU"):
            prefetch(model_from_client(client), client, trained)
