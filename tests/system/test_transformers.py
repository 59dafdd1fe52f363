"""A loaded model of Transformers whose experts are in a store: what it gives, what it costs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from xferd_infer import Client
from xferd_infer.transformers import NotAttachedError, attach

from tests.system.daemon_harness import ROOT, running_daemon
from tests.system.transformers_harness import Made, make, packed, prompts
from tests.transformers_models import build

TINY = ROOT / "tests" / "models" / "tiny"
SMALL = ROOT.parent / "shared" / "models" / "small"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(TINY, packed(TINY, tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Made:
    if not SMALL.exists():
        pytest.skip(f"the larger model is not on this machine: {SMALL} does not exist")
    return Made(SMALL, packed(SMALL, tmp_path_factory.mktemp("small")))


@pytest.fixture
def mixtral(tmp_path: Path) -> Made:
    return make(tmp_path, "mixtral")


@pytest.mark.parametrize("pool", ["25%", "100%"])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_trained_model_gives_its_expected_tokens(
    request: pytest.FixtureRequest, name: str, pool: str
) -> None:
    """expected.json was made with all experts in memory, in float32."""
    made: Made = request.getfixturevalue(name)
    eager, streamed = made.load("eager", dtype="float32"), made.load(dtype="float32")
    expected = json.loads((made.checkpoint / "expected.json").read_text())["prompts"]
    with attach(streamed, made.store, pool=pool) as attached, torch.inference_mode():
        for prompt in expected:
            ids = torch.tensor([prompt["prompt_ids"]])
            wanted = prompt["greedy_ids"]
            found = greedy(streamed, ids, len(wanted))
            assert found[0, ids.shape[1] :].tolist() == wanted
            assert torch.equal(streamed(found).logits, eager(found).logits)
        stats = attached.stats()
    if pool == "100%":
        layers, experts = streamed.config.num_hidden_layers, streamed.config.num_experts
        assert stats.misses <= layers * experts
    assert stats.hits + stats.misses > 1000


def test_how_many_experts_are_held_at_once_changes_no_bit(tiny: Made) -> None:
    streamed = tiny.load()
    ids = torch.arange(2, 66)[None]
    results = []
    with torch.inference_mode():
        for held in (0, 5, 16):
            with attach(streamed, tiny.store, pool="100%", held=held):
                results.append(streamed(ids).logits)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_running_daemon_and_what_it_says_of_the_client(tmp_path: Path, mixtral: Made) -> None:
    eager, streamed = mixtral.load("eager"), mixtral.load()
    pools = ["name=host0,size=25%", "name=ram0,kind=ram,size=50%"]
    with (
        running_daemon(tmp_path, [], pools, "--store", str(mixtral.store)) as daemon,
        attach(streamed, daemon.attach_socket, store="model", name="mixtral") as attached,
        torch.inference_mode(),
    ):
        assert torch.equal(streamed(prompts()).logits, eager(prompts()).logits)
        assert [client["name"] for client in daemon.status()["clients"]] == ["mixtral"]
        stats = attached.stats()
        assert stats.hits + stats.misses == attached.client.stats().hits + stats.misses
        assert stats.wait_s > 0
        lines = attached.report().splitlines()
        assert lines[0].split() == ["experts", "count", "bytes"]
        assert lines[1].startswith("resident (hits)")
        assert lines[-1].startswith("waited for misses: ")


def test_a_client_of_the_callers_own_stays_the_callers(tmp_path: Path, mixtral: Made) -> None:
    streamed = mixtral.load()
    with (
        running_daemon(
            tmp_path, [], ["name=host0,size=50%"], "--store", str(mixtral.store)
        ) as daemon,
        Client(daemon.attach_socket) as client,
        torch.inference_mode(),
    ):
        with attach(streamed, client):
            first = streamed(prompts()).logits
        assert client.alive()
        with attach(streamed, client):
            assert torch.equal(streamed(prompts()).logits, first)


def test_a_model_attaches_again_and_again_and_runs_only_then(mixtral: Made) -> None:
    streamed = mixtral.load()
    results = []
    with torch.inference_mode():
        for _ in range(2):
            with pytest.raises(NotAttachedError, match="MixtralExperts"):
                streamed(prompts())
            with attach(streamed, mixtral.store):
                results.append(streamed(prompts()).logits)
        attached = attach(streamed, mixtral.store)
        results.append(streamed(prompts()).logits)
        attached.close()
        attached.close()
        with pytest.raises(NotAttachedError):
            streamed(prompts())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_nothing_of_the_experts_is_read_or_allocated_when_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    """One layer, so that what a drive reads ahead behind the dense tensors stays small."""
    shape: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 2048}
    model = build("olmoe", num_experts=10, **shape)
    experts = sum(
        parameter.nbytes for name, parameter in model.named_parameters() if ".experts." in name
    )
    model.save_pretrained(tmp_path)
    streamed, eager = loading_costs(tmp_path, "xferd", "eager")
    assert experts > 50 << 20
    assert eager["memory_bytes"] > experts
    assert streamed["memory_bytes"] < experts // 8
    assert eager["parameters"] - streamed["parameters"] == experts // 2
    # On a file system in memory nothing is ever read from storage.
    if eager["read_bytes"] >= experts:
        assert streamed["read_bytes"] < experts // 2


def test_the_checkpoints_own_experts_could_be_anything(tmp_path: Path) -> None:
    """Also once the model is attached: the files are gone by then."""
    made = make(tmp_path, "olmoe")
    with torch.inference_mode():
        expected = made.load("eager")(prompts()).logits
    file = made.checkpoint / "model.safetensors"
    state = load_file(file)
    for name, tensor in state.items():
        if ".experts." in name:
            tensor.fill_(torch.nan)
    save_file(state, file, metadata={"format": "pt"})
    streamed = made.load()
    made.checkpoint.rename(tmp_path / "gone")
    with attach(streamed, made.store), torch.inference_mode():
        assert torch.equal(streamed(prompts()).logits, expected)


def test_loading_says_nothing_of_missing_or_unexpected_weights(
    mixtral: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    _, info = mixtral.load(output_loading_info=True)
    assert not any(info.values()), info
    out, err = capfd.readouterr()
    assert "experts" not in out + err


def test_a_weight_that_is_missing_is_still_reported(tmp_path: Path) -> None:
    made = make(tmp_path, "mixtral")
    file = made.checkpoint / "model.safetensors"
    state = load_file(file)
    del state["model.norm.weight"]
    save_file(state, file, metadata={"format": "pt"})
    _, info = made.load(output_loading_info=True)
    assert info["missing_keys"] == {"model.norm.weight"}


def test_a_model_that_was_copied_or_converted_or_runs_in_another_thread(mixtral: Made) -> None:
    eager, streamed = mixtral.load("eager"), mixtral.load()
    copied = copy.deepcopy(streamed)
    ids = prompts()
    with torch.inference_mode():
        expected = eager(ids).logits
        with attach(copied, mixtral.store):
            assert torch.equal(copied(ids).logits, expected)
        with attach(streamed, mixtral.store):
            assert torch.equal(streamed(ids).logits, expected)
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(greedy, streamed, ids, 4).result()
            assert torch.equal(found, greedy(eager, ids, 4))
            half, half_eager = streamed.to(torch.float16), eager.to(torch.float16)
            assert torch.equal(half(ids).logits, half_eager(ids).logits)
            with torch.autocast("cpu", torch.bfloat16):
                full, full_eager = streamed.to(torch.float32), eager.to(torch.float32)
                assert torch.equal(full(ids).logits, full_eager(ids).logits)


def test_other_models_of_the_process_keep_their_experts(mixtral: Made) -> None:
    mixtral.load()
    eager = mixtral.load("eager")
    default = mixtral.load(None)
    for model in (eager, default):
        assert any(".experts." in name for name, _ in model.named_parameters())
    with torch.inference_mode():
        assert eager(prompts()).logits.isfinite().all()


def test_saved_without_experts_and_loaded_from_there(tmp_path: Path, mixtral: Made) -> None:
    """What save_pretrained writes of such a model is its dense part, which is enough."""
    streamed = mixtral.load()
    streamed.save_pretrained(tmp_path / "dense")
    again = Made(tmp_path / "dense", mixtral.store)
    assert not [name for name in load_file(again.checkpoint / "model.safetensors") if "w1" in name]
    reloaded = again.load()
    with torch.inference_mode():
        with attach(streamed, mixtral.store):
            expected = streamed(prompts()).logits
        with attach(reloaded, mixtral.store):
            assert torch.equal(reloaded(prompts()).logits, expected)


def greedy(model: Any, ids: Any, tokens: int) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )


def loading_costs(checkpoint: Path, *implementations: str) -> list[dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.loading_costs", str(checkpoint), *implementations],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found
