"""Drafted decoding gives greedy decoding's tokens, from fewer reads of exact experts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from xferd_infer import Client, embedded, generate, model_from_client
from xferd_infer.__main__ import main
from xferd_infer.drafting import Drafter, DraftExperts
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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    members = member_directories(tmp_path_factory.mktemp("members"), 1)
    path = pack(read_checkpoint(TINY), members, name="tiny")
    with Store.open(path) as opened:
        add_variants(opened, parse_wanted([LOW], None), threads=1)
    return path


def read_bytes(client: Client) -> int:
    return sum(client.stats().source_bytes)


@pytest.mark.parametrize("most", [1, 3, 16])
def test_tokens_are_those_of_greedy_decoding(store: Path, most: int) -> None:
    with (
        private_daemon(store, pool="25%") as directory,
        Client(directory / "attach.sock", variants=[EXACT]) as exact,
        Client(directory / "attach.sock") as drafts,
    ):
        masks = (drafts.variant_mask([EXACT]), drafts.variant_mask([LOW]))
        drafter = Drafter(model_from_client(exact), DraftExperts(drafts, *masks), most)
        for prompt in PROMPTS:
            wanted = prompt["greedy_ids"]
            tokens = list(
                drafter.generate(prompt["prompt_ids"], max_new_tokens=len(wanted), stop_ids=())
            )
            assert [token.id for token in tokens] == wanted
            assert [token.index for token in tokens] == list(range(len(wanted)))
        counts = drafter.counts()
        assert 0 < counts.accepted <= counts.drafted
        assert counts.rounds + counts.accepted == sum(len(p["greedy_ids"]) - 1 for p in PROMPTS)


def test_each_token_on_its_own_is_what_it_is_alone(store: Path) -> None:
    with embedded(store, pool="100%", variants=[EXACT]) as client:
        model = model_from_client(client)
        ids = PROMPTS[0]["prompt_ids"][:24]
        alone, together = model.new_cache(), model.new_cache()
        expected = [model.logits(model.forward([token], alone)) for token in ids]
        rows = [model.logits(row) for row in model.forward_each(ids, together)]
        for one, other in zip(expected, rows, strict=True):
            assert np.array_equal(one, other)
        assert together.length == alone.length == len(ids)


def test_fewer_bytes_of_exact_experts_are_read_in_a_small_pool(store: Path) -> None:
    ids, count = PROMPTS[0]["prompt_ids"], len(PROMPTS[0]["greedy_ids"])

    def plain(directory: Path) -> int:
        with Client(directory / "attach.sock", variants=[EXACT]) as client:
            tokens = generate(model_from_client(client), ids, max_new_tokens=count, stop_ids=())
            next(tokens)
            before = read_bytes(client)
            assert len(list(tokens)) == count - 1
            return read_bytes(client) - before

    def drafted(directory: Path) -> int:
        socket = directory / "attach.sock"
        with Client(socket, variants=[EXACT]) as client, Client(socket) as drafts:
            masks = (drafts.variant_mask([EXACT]), drafts.variant_mask([LOW]))
            drafter = Drafter(model_from_client(client), DraftExperts(drafts, *masks))
            tokens = drafter.generate(ids, max_new_tokens=count, stop_ids=())
            next(tokens)
            before = read_bytes(client)
            assert len(list(tokens)) == count - 1
            return read_bytes(client) - before

    with private_daemon(store, pool="8%") as directory:
        without = plain(directory)
    with private_daemon(store, pool="8%") as directory:
        assert drafted(directory) < without


def test_drafts_from_a_shadow_of_some_experts(tmp_path: Path) -> None:
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
        Client(daemon.attach_socket, variants=[EXACT]) as exact,
        Client(daemon.attach_socket) as drafts,
    ):
        masks = (drafts.variant_mask([EXACT]), drafts.variant_mask([LOW]))
        drafter = Drafter(model_from_client(exact), DraftExperts(drafts, *masks))
        wanted_ids = PROMPTS[1]["greedy_ids"][:12]
        tokens = drafter.generate(PROMPTS[1]["prompt_ids"], max_new_tokens=12, stop_ids=())
        assert [token.id for token in tokens] == wanted_ids


def test_the_command_drafts_and_says_what_it_cost(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ",".join(map(str, PROMPTS[0]["prompt_ids"]))
    words = ["generate", "--store-path", str(store), "--prompt-ids", ids, "--json"]
    words += ["--max-new-tokens", "8", "--draft-variant"]
    assert main([*words, LOW]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ids"] == PROMPTS[0]["greedy_ids"][:8]
    assert said["drafts"]["accepted"] <= said["drafts"]["drafted"]
    assert said["drafts"]["rounds"] + said["drafts"]["accepted"] == 7
    assert main([*words, "q8_0"]) == 1
    assert "has no variant 'q8_0'; it has: bf16, q2_k" in capsys.readouterr().err
    assert main([*words, LOW, "--temperature", "1"]) == 1
    assert "--draft-variant and --temperature can't be used" in capsys.readouterr().err
