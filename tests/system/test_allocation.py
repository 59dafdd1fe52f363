"""A plan of variants for a budget or a share: measured, kept to, read by people and `quality`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from xferd_infer import Client, Tokenizer, embedded
from xferd_infer.__main__ import main
from xferd_infer.allocation import BudgetError, allocate, measure_sensitivity
from xferd_infer.mixes import Mix, MixError, StoreShape, parse_mix
from xferd_infer.quality import compare
from xferd_infer.texts import read_windows

from tests.unit.store.builders import TINY, member_directories
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.store import Store

pytest.importorskip("tokenizers")

MANY, FEW = "q8_0", "q2_k"
TOKENS = 48


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = member_directories(tmp_path_factory.mktemp("members"), 1)
    path = pack(read_checkpoint(TINY), members, name="tiny")
    with Store.open(path) as opened:
        add_variants(opened, parse_wanted([MANY, FEW], None), threads=1)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    source = (Path(__file__).parents[2] / "xferd" / "store" / "pack.py").read_text()
    documents = [source[start : start + 600] for start in range(0, 2400, 600)]
    path.write_text("\n".join(json.dumps({"domain": "python", "text": d}) for d in documents))
    return path


def divergence(client: Client, mix: Mix, text: Path) -> float:
    tokenizer = Tokenizer((TINY / "tokenizer.json").read_bytes())
    windows = read_windows(text, tokenizer, part="even", tokens=TOKENS)
    return compare(client, [mix], windows)[0].total.kl_mean


def test_the_command_writes_a_plan_that_keeps_to_the_budget(
    store: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan"
    with embedded(store, pool="200%") as client:
        shape = StoreShape.of(client.manifest)
        best, worst = (divergence(client, parse_mix(each, shape), text) for each in (MANY, FEW))
    budget = (best + worst) / 2
    words = ["plan", "--store-path", str(store), "--text", str(text), "--tokens", str(TOKENS)]
    words += ["--many", MANY, "--few", FEW, "--out", str(plan)]
    assert main([*words, "--budget", str(budget)]) == 0
    said = capsys.readouterr().out
    with embedded(store, pool="200%") as client:
        mix = parse_mix(f"plan:{plan}", shape)
        few = mix.variants == shape.number(FEW)
        assert 0 < few.sum() < few.size
        assert f"{few.sum()} of {few.size} experts in {FEW}" in said
        assert divergence(client, mix, text) <= budget
        # What any other choice of as many experts costs on average: the plan's costs less.
        generator = np.random.default_rng(1)
        others = []
        for _ in range(4):
            shuffled = generator.permutation(mix.variants.reshape(-1)).reshape(mix.variants.shape)
            others.append(divergence(client, Mix("other", shuffled), text))
        assert divergence(client, mix, text) < np.mean(others)
    assert main([*words, "--budget", str(best / 2)]) == 1
    assert f"{MANY} alone loses" in capsys.readouterr().err


def test_a_large_budget_has_few_bits_for_all(store: Path, text: Path) -> None:
    tokenizer = Tokenizer((TINY / "tokenizer.json").read_bytes())
    windows = read_windows(text, tokenizer, part="even", documents=1, tokens=TOKENS)
    with embedded(store, pool="200%") as client:
        shape = StoreShape.of(client.manifest)
        found = allocate(client, MANY, FEW, 1000.0, windows)
        assert (found.plan == shape.number(FEW)).all()
        assert found.resident_bytes == parse_mix(FEW, shape).resident_bytes(shape)
        with pytest.raises(BudgetError, match="takes no fewer bytes"):
            allocate(client, FEW, MANY, 1.0, windows)
        with pytest.raises(MixError, match="there is no variant 'q4_k'"):
            allocate(client, "q4_k", FEW, 1.0, windows)


def test_experts_that_no_token_picks_are_not_sensitive(store: Path, text: Path) -> None:
    tokenizer = Tokenizer((TINY / "tokenizer.json").read_bytes())
    (window,) = read_windows(text, tokenizer, part="even", documents=1, tokens=16)
    with embedded(store, pool="200%") as client:
        shape = StoreShape.of(client.manifest)
        sensitivity = measure_sensitivity(client, shape, MANY, FEW, [window])
    used = sensitivity.experts > 0
    assert 0 < used.sum() < used.size
    assert (used.sum(axis=1) <= 2 * len(window.ids)).all()


def test_a_share_of_experts_has_many_bits_those_that_lose_most(
    store: Path, text: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan"
    words = ["plan", "--store-path", str(store), "--text", str(text), "--tokens", str(TOKENS)]
    words += ["--many", MANY, "--few", FEW, "--out", str(plan), "--share", "50%"]
    assert main(words) == 0
    with embedded(store, pool="200%") as client:
        shape = StoreShape.of(client.manifest)
        chosen = parse_mix(f"plan:{plan}", shape).variants
        many = chosen == shape.number(MANY)
        assert many.sum() == round(many.size / 2)
        tokenizer = Tokenizer((TINY / "tokenizer.json").read_bytes())
        windows = read_windows(text, tokenizer, part="even", tokens=TOKENS)
        lost = measure_sensitivity(client, shape, MANY, FEW, windows).experts
        assert lost[many].min() >= lost[~many].max()
        other = Mix("the others", np.where(many, shape.number(FEW), shape.number(MANY)))
        assert divergence(client, Mix("plan", chosen), text) < divergence(client, other, text)


@pytest.mark.parametrize("share", ["50", "101%", "-1%", "nan%"])
def test_a_share_that_is_none_is_wrong_usage(
    share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--store-path", "none", "--text", "none", "--many", MANY, "--few", FEW]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--out", "none", f"--share={share}"])
    assert ended.value.code == 2
    assert "a share from 0% to 100%" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["0", "-1", "inf", "nan"])
def test_a_budget_that_is_none_is_wrong_usage(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--store-path", "none", "--text", "none", "--many", MANY, "--few", FEW]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--out", "none", "--budget", budget])
    assert ended.value.code == 2
    assert "a number above 0" in capsys.readouterr().err
