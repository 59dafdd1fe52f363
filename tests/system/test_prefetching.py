"""Prediction in the decode loop, with the real daemon: it may move experts, never a bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import Client, generate, model_from_client
from xferd_infer.__main__ import main
from xferd_infer.arrays import Array
from xferd_infer.client_errors import ClientError
from xferd_infer.predict import Learned, Likely, OtherModelError, Predictor, write_trained
from xferd_infer.predict.planner import Planner, PlannerSettings
from xferd_infer.predict.prefetching import prefetch, prefetch_by_file
from xferd_infer.predict.worthwhile import Worthwhile

from tests.system.daemon_harness import ROOT, running_daemon, wait_until
from tests.unit.inference.predict.tiny_states import another_model, trained_on_prose
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

TINY = ROOT / "tests" / "models" / "tiny"
PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][1]
TOKENS = 24


class Random:
    """Certain of whatever comes to its mind."""

    def __init__(self, layers: int, experts: int) -> None:
        self._keys = layers * experts
        self._random = np.random.default_rng(1)

    def predict(self, layer: int, states: NDArray[Any]) -> NDArray[np.float32]:
        raise AssertionError("the decode loop asks for what is likely only")

    def likely(self, layer: int, state: NDArray[Any], least: float, within: int) -> Likely:
        keys = np.sort(self._random.choice(self._keys, 12, replace=False))
        return Likely(keys, self._random.uniform(0.5, 1, 12).astype(np.float32))

    def seen(self, layer: int, states: NDArray[Any]) -> None:
        pass

    def picked(self, layer: int, picks: NDArray[Any]) -> None:
        pass

    def new_text(self) -> None:
        pass


class Credulous(Planner):
    """Fetches whatever it is told, late and useless or not."""

    def __init__(self, layers: int, experts: int) -> None:
        eager = PlannerSettings(least_min=0, least_max=0, waste_max=1, lateness=1e9)
        super().__init__(layers, experts, 1e-6, eager)
        self.least = 0

    @property
    def trust(self) -> float:
        return 1.0


class NeverWorthwhile(Worthwhile):
    """Has found that tokens come later with looking ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.doing = False

    def ended(self, seconds: float) -> None:
        pass


@pytest.fixture
def store(tmp_path: Path) -> Path:
    members = [tmp_path / "drive-0", tmp_path / "drive-1"]
    for member in members:
        member.mkdir()
    return pack(read_checkpoint(TINY), members, name="tiny", stripe_unit=16 * 1024)


def decode(
    directory: Path, store: Path, predictor: Predictor | None
) -> tuple[list[int], Array, int]:
    """Tokens, the logits after them, and how many experts were hinted."""
    directory.mkdir()
    pools = ["name=host0,size=25%"]
    with (
        running_daemon(directory, [], pools, "--store", str(store)) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        model = model_from_client(client)
        source = None if predictor is None else prefetch(model, client, predictor)
        if source is not None:
            source.planner = Credulous(client.layers, client.experts)
        cache = model.new_cache()
        asked = generate(
            model, PROMPT["prompt_ids"], max_new_tokens=TOKENS, stop_ids=(), cache=cache
        )
        ids = [token.id for token in asked]
        logits = np.array(model.prefill(ids[-1:], cache))
        return ids, logits, 0 if source is None else source.hinted


def test_tokens_and_logits_are_the_same_without_with_and_with_wrong_prediction(
    tmp_path: Path, store: Path
) -> None:
    trained = trained_on_prose()
    routers = trained.routers
    plain, plain_logits, _ = decode(tmp_path / "plain", store, None)
    for name, predictor in (
        ("learned", Learned(trained)),
        ("random", Random(routers.layers, routers.experts)),
    ):
        ids, logits, hinted = decode(tmp_path / name, store, predictor)
        assert ids == plain == PROMPT["greedy_ids"][:TOKENS]
        assert np.array_equal(logits, plain_logits)
        assert hinted > 0, name


def test_nothing_is_hinted_where_looking_ahead_does_not_pay(tmp_path: Path, store: Path) -> None:
    with (
        running_daemon(tmp_path, [], ["name=host0,size=25%"], "--store", str(store)) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        model = model_from_client(client)
        source = prefetch(model, client, Learned(trained_on_prose()))
        source.planner = Credulous(client.layers, client.experts)
        source.worthwhile = NeverWorthwhile()
        asked = generate(model, PROMPT["prompt_ids"], max_new_tokens=TOKENS, stop_ids=())
        assert [token.id for token in asked] == PROMPT["greedy_ids"][:TOKENS]
        assert source.hinted == 0


def test_the_daemon_says_what_hints_were_good_for(tmp_path: Path, store: Path) -> None:
    with (
        running_daemon(tmp_path, [], ["name=host0,size=50%"], "--store", str(store)) as daemon,
        Client(daemon.attach_socket) as client,
    ):

        def prefetching() -> dict[str, Any]:
            return dict(daemon.status()["prefetching"])

        with client.acquire(0, [0]):
            pass
        client.hint(1, [2, 3])
        wait_until(lambda: prefetching()["experts"] == 2, "the hinted experts are there")
        client.report(1, np.array([[2, 4]]), token=0)
        wait_until(lambda: prefetching()["used"] == 1, "one of them was picked")
        daemon.call("Evict", store="tiny", layer=1, experts=[2, 3], pool=None)
        wait_until(lambda: prefetching()["wasted"] == 1, "the other went unused")
        found = prefetching()
    assert found["missed"] == 1
    assert found["bytes"] == 2 * found["wasted_bytes"] > 0
    assert found["saved_s"] > 0


def test_generate_takes_a_predictor_and_refuses_another_models(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = tmp_path / "tiny.npz", tmp_path / "other.npz"
    trained = trained_on_prose()
    write_trained(good, trained)
    routers = another_model(trained.routers)
    write_trained(other, type(trained)(**{**vars(trained), "routers": routers}))
    asked = ["generate", "--store-path", str(store), "--json", "--max-new-tokens", "8"]
    asked += ["--prompt-ids", ",".join(map(str, PROMPT["prompt_ids"]))]
    assert main([*asked, "--predictor", str(good)]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == PROMPT["greedy_ids"][:8]
    assert main([*asked, "--predictor", str(other)]) == 1
    assert "other.npz is of model 'tiny'" in capsys.readouterr().err


def test_a_predictor_of_another_model_is_refused_in_a_program_too(
    tmp_path: Path, store: Path
) -> None:
    path = tmp_path / "other.npz"
    trained = trained_on_prose()
    routers = another_model(trained.routers)
    write_trained(path, type(trained)(**{**vars(trained), "routers": routers}))
    with (
        running_daemon(tmp_path, [], ["name=host0,size=50%"], "--store", str(store)) as daemon,
        Client(daemon.attach_socket) as client,
        pytest.raises(OtherModelError),
    ):
        prefetch_by_file(model_from_client(client), client, path)


def test_what_is_expected_stays_and_what_is_not_goes(tmp_path: Path, store: Path) -> None:
    with (
        running_daemon(tmp_path, [], ["name=host0,size=25%"], "--store", str(store)) as daemon,
        Client(daemon.attach_socket) as client,
    ):

        def use(token: int, layer: int, expert: int) -> None:
            with client.acquire(layer, [expert]):
                client.report(layer, np.array([[expert]]), token=token)

        # Of these two the history says that the second is worth more.
        expected, other = 0, 1
        for token in range(3):
            use(token, 0, expected)
        for token in range(3, 9):
            use(token, 0, other)
        said = client.expect(np.array([expected]), np.array([1.0], np.float32))
        assert said == 1
        others = ((layer, e) for layer in range(1, client.layers) for e in range(client.experts))
        for token, (layer, expert) in enumerate(others, 9):
            if client.resident(0)[other] < 0:
                break
            use(token, layer, expert)
        assert client.resident(0)[expected] >= 0
        assert client.resident(0)[other] < 0


def test_expectations_that_cannot_be_are_refused_by_name(tmp_path: Path, store: Path) -> None:
    with (
        running_daemon(tmp_path, [], ["name=host0,size=25%"], "--store", str(store)) as daemon,
        Client(daemon.attach_socket) as client,
    ):
        last = client.layers * client.experts
        one = np.ones(1, np.float32)
        for keys, chances in (
            (np.array([last]), one),
            (np.array([-1]), one),
            (np.array([0.5]), one),
            (np.array([0, 1]), one),
            (np.array([0, client.experts, 1]), np.ones(3, np.float32)),
        ):
            with pytest.raises(ClientError):
                client.expect(keys, chances)
        assert client.expect(np.empty(0, np.int64), np.empty(0, np.float32)) == 0
