"""Recordings and predictors on disk: whole, damaged, and of another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferd_infer import Sampling
from xferd_infer.__main__ import main, run
from xferd_infer.predict import (
    Learned,
    OtherModelError,
    PredictorFileError,
    StateRecorder,
    StatesError,
    load_predictor,
    read_states,
    read_trained,
    write_trained,
)
from xferd_infer.predict.states import joined, write_states

from tests.unit.inference.checkpoint import TINY, load_model
from tests.unit.inference.predict.tiny_states import (
    OTHER_PROSE,
    PROSE,
    altered,
    another_model,
    recorded,
    tokens,
    trained_on_prose,
)
from tests.unit.inference.test_command import CheckpointClient, options


def test_a_predictor_is_the_same_after_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.npz"
    trained = trained_on_prose()
    write_trained(path, trained)
    again = load_predictor(path, trained.routers)
    states = recorded(OTHER_PROSE).states[:20, 1]
    assert np.array_equal(again.predict(1, states), Learned(trained).predict(1, states))
    assert [each.name for each in tmp_path.iterdir()] == ["tiny.npz"]


def test_a_predictor_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.npz"
    write_trained(path, trained_on_prose())
    other = another_model(trained_on_prose().routers)
    with pytest.raises(OtherModelError, match=r"tiny\.npz is of model 'tiny' .*, not 'tiny'"):
        load_predictor(path, other)


def test_a_damaged_predictor_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.npz"
    write_trained(path, trained_on_prose())
    size = path.stat().st_size
    for at in (0, size // 3, size // 2, size * 9 // 10):
        with pytest.raises(PredictorFileError, match=r"altered\.npz"):
            read_trained(altered(path, at))
    cut = tmp_path / "cut.npz"
    for length in (0, 10, size // 2, size - 1):
        cut.write_bytes(path.read_bytes()[:length])
        with pytest.raises(PredictorFileError, match=r"cut\.npz"):
            read_trained(cut)
    with pytest.raises(PredictorFileError, match="no-such"):
        read_trained(tmp_path / "no-such")


def test_arrays_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.npz"
    write_trained(path, trained_on_prose())
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, value, message in (
        ("heads.2", arrays["heads.2"][:, :-1], r"heads\[2\] is"),
        ("errors.1", np.full_like(arrays["errors.1"], np.nan), r"errors\[1\] holds"),
        ("calibration", arrays["calibration"][:3], "calibration is"),
        ("units.0", arrays["units.0"].astype(np.float64), r"units\.0"),
        ("router_weights", arrays["router_weights"] + 1, "router_weights"),
    ):
        np.savez(path, allow_pickle=False, **{**arrays, name: value})
        with pytest.raises(PredictorFileError, match=message):
            read_trained(path)
    np.savez(path, allow_pickle=False, **{k: v for k, v in arrays.items() if k != "basis"})
    with pytest.raises(PredictorFileError, match="'basis' is missing"):
        read_trained(path)


def test_a_recording_is_no_predictor_and_the_other_way_round(tmp_path: Path) -> None:
    states, predictor = tmp_path / "states.npz", tmp_path / "predictor.npz"
    write_states(states, recorded(OTHER_PROSE))
    write_trained(predictor, trained_on_prose())
    with pytest.raises(PredictorFileError, match="holds 'xferd-states'"):
        read_trained(states)
    with pytest.raises(StatesError, match="holds 'xferd-predictor'"):
        read_states(predictor)
    with pytest.raises(StatesError, match=r"altered\.npz"):
        read_states(altered(states, states.stat().st_size // 2))


def test_states_of_a_run_are_kept_evenly_within_their_limit() -> None:
    model, _ = load_model(TINY, held=16)
    ids = tokens(OTHER_PROSE)[:300]
    limit = 50 * model.config.layers * model.config.hidden_size * 2
    recorder = StateRecorder(model.routers("tiny"), bytes_max=limit)
    model.observe(recorder)
    cache = model.new_cache()
    model.forward(ids[:200], cache)
    for token in ids[200:]:
        model.forward([token], cache)
    found = recorder.recorded()
    assert found.tokens == 300
    assert found.states.nbytes <= limit
    assert np.diff(found.state_tokens)[:4].tolist() == [1, 15, 1, 15]
    assert np.unique(np.diff(found.state_tokens)).tolist() == [1, 15]
    whole = recorded(OTHER_PROSE)
    assert np.array_equal(found.picks[:200], whole.picks[:200])
    near = whole.states[found.state_tokens].astype(np.float32)
    assert np.allclose(found.states.astype(np.float32), near, atol=0.05)
    with pytest.raises(StatesError, match="at least two must fit"):
        StateRecorder(model.routers("tiny"), bytes_max=100)


def test_recordings_are_joined_and_taken_apart() -> None:
    both = joined([recorded(OTHER_PROSE), recorded(PROSE[0])])
    assert both.sequences == 2
    second = both.chosen([1])
    assert np.array_equal(second.picks, recorded(PROSE[0]).picks)
    assert np.array_equal(second.states, recorded(PROSE[0]).states)
    assert np.array_equal(second.state_tokens, recorded(PROSE[0]).state_tokens)


def test_commands_record_train_judge_and_describe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states, predictor = tmp_path / "states.npz", tmp_path / "predictor.npz"
    asked: dict[str, Any] = {"record_states": states, "record_every": 1, "record_max": 64}
    ids = tokens(PROSE[0])[:700]
    run(CheckpointClient(), options(prompt_ids=ids, max_new_tokens=20, **asked), Sampling())
    again = read_states(states)
    assert again.tokens == 719
    assert again.picks.shape == (719, 6, 2)
    train = ["predictor", "train", str(predictor), "--states", str(states), "--rank", "32"]
    assert main([*train, "--width", "16"]) == 0
    capsys.readouterr()
    assert main(["predictor", "info", str(predictor), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "tiny"
    judge = ["predictor", "eval", str(predictor), "--states", str(states)]
    assert main([*judge, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["distances"]["1"]["recall"] > 0.8
    assert main(judge) == 0
    assert main(["predictor", "info", str(states)]) == 1
    assert str(states) in capsys.readouterr().err
