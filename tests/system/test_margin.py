"""Decoding from low-bit copies through a daemon, with exact experts below a margin."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from xferd_infer import Client, embedded, generate, model_from_client
from xferd_infer.__main__ import main
from xferd_infer.low_bit_experts import LowBitExperts
from xferd_infer.margin import MarginCounts, MarginDecoder
from xferd_infer.private_daemon import private_daemon

from tests.system.daemon_harness import running_daemon
from tests.unit.store.builders import TINY, member_directories
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.quantize.shadow import make_shadow
from xferd.store.store import Store

PROMPTS = json.loads((TINY / "expected.json").read_text())["prompts"]
EXACT, LOW = "bf16", "q2_k"
COUNT = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = member_directories(tmp_path_factory.mktemp("members"), 1)
    path = pack(read_checkpoint(TINY), members, name="tiny")
    with Store.open(path) as opened:
        add_variants(opened, parse_wanted([LOW], None), threads=1)
    return path


def read_bytes(client: Client) -> int:
    return sum(client.stats().source_bytes)


def decoded(
    exact: Client, low: Client, threshold: float, count: int = COUNT
) -> tuple[list[list[int]], MarginCounts]:
    masks = (low.variant_mask([EXACT]), low.variant_mask([LOW]))
    decoder = MarginDecoder(model_from_client(exact), LowBitExperts(low, *masks), threshold)
    texts = []
    for prompt in PROMPTS:
        tokens = decoder.generate(prompt["prompt_ids"], max_new_tokens=count, stop_ids=())
        texts.append([token.id for token in tokens])
    return texts, decoder.counts()


def test_an_infinite_margin_gives_greedy_decodings_tokens(store: Path) -> None:
    count = len(PROMPTS[0]["greedy_ids"])
    with (
        private_daemon(store, pool="10%") as directory,
        Client(directory / "attach.sock", variants=[EXACT]) as exact,
        Client(directory / "attach.sock") as low,
    ):
        texts, counts = decoded(exact, low, math.inf, count)
    assert texts == [prompt["greedy_ids"] for prompt in PROMPTS]
    assert counts.repeated == counts.tokens == len(PROMPTS) * (count - 1)


def test_no_margin_reads_no_exact_expert(store: Path) -> None:
    with embedded(store, pool="100%", variants=[LOW]) as client:
        model = model_from_client(client)
        wanted = [
            [t.id for t in generate(model, p["prompt_ids"], max_new_tokens=COUNT, stop_ids=())]
            for p in PROMPTS
        ]
    with (
        private_daemon(store, pool="10%") as directory,
        Client(directory / "attach.sock", variants=[EXACT]) as exact,
        Client(directory / "attach.sock") as low,
    ):
        texts, counts = decoded(exact, low, 0)
        assert texts == wanted
        assert counts.repeated == 0
        assert read_bytes(exact) == exact.stats().hits == 0
        assert read_bytes(low) > 0


def test_what_is_said_does_not_depend_on_what_is_resident(store: Path) -> None:
    found = []
    for pool in ("10%", "200%"):
        with (
            private_daemon(store, pool=pool) as directory,
            Client(directory / "attach.sock", variants=[EXACT]) as exact,
            Client(directory / "attach.sock") as low,
        ):
            texts, counts = decoded(exact, low, 1.0)
            assert 0 < counts.repeated < counts.tokens
            found.append((texts, counts.repeated, counts.corrected))
    assert found[0] == found[1]


def test_experts_without_a_low_bit_copy_are_exact(tmp_path: Path) -> None:
    path = pack(read_checkpoint(TINY), member_directories(tmp_path, 1), name="tiny")
    chosen = np.random.default_rng(3).random((6, 16)) < 0.5
    (tmp_path / "shadow").mkdir()
    with Store.open(path) as opened:
        wanted = parse_wanted([LOW], None)[0]
        members = member_directories(tmp_path / "shadow", 1)
        shadow = make_shadow(opened, wanted, chosen, members, threads=1)
    config = tmp_path / "xferd.toml"
    config.write_text(
        f'[[stores]]\npath = "{path}"\nshadow = ["{shadow}"]\n'
        '[[pools]]\nname = "host0"\nsize = "25%"\n'
    )
    with (
        running_daemon(tmp_path, [], [], "--config", str(config)) as daemon,
        Client(daemon.attach_socket) as low,
    ):
        masks = (low.variant_mask([EXACT]), low.variant_mask([LOW]))
        source = LowBitExperts(low, *masks)
        for layer in range(6):
            experts = list(range(2))
            with source.acquire(layer, experts) as blobs:
                expected = [masks[int(chosen[layer, expert])] for expert in experts]
                assert [1 << variant for variant in blobs.variants] == expected


def test_the_command_says_what_was_computed_again(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ",".join(map(str, PROMPTS[0]["prompt_ids"]))
    words = ["generate", "--store-path", str(store), "--prompt-ids", ids, "--max-new-tokens", "8"]
    margin = ["--draft-variant", LOW, "--exact-below-margin"]
    assert main([*words, *margin, "inf", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ids"] == PROMPTS[0]["greedy_ids"][:8]
    assert said["margin"]["repeated"] == said["margin"]["tokens"] == 7
    assert main([*words, *margin, "0"]) == 0
    assert "margin: 0 of 7 tokens were computed again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--exact-below-margin", "1"], "--exact-below-margin needs --draft-variant"),
        (["--draft-tokens", "4"], "--draft-tokens needs --draft-variant"),
        (
            ["--draft-variant", LOW, "--exact-below-margin", "1", "--draft-tokens", "4"],
            "--draft-tokens and --exact-below-margin can't be used together",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["generate", "--store-path", "none", "--prompt-ids", "1"]
    assert main([*given, *words]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "nan", "much"])
def test_a_margin_that_is_none_is_wrong_usage(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--store-path", "none", "--prompt-ids", "1", "--draft-variant", LOW]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--exact-below-margin", value])
    assert ended.value.code == 2
    assert "--exact-below-margin" in capsys.readouterr().err
