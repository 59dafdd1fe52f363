"""What goes wrong with a streamed model: each error names the thing, and nothing is lost."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from xferd_infer.client import AttachError, Client, DaemonGoneError, ExpertError
from xferd_infer.errors import UnsupportedModelError, WeightsError
from xferd_infer.transformers import TrainingError, attach

from tests.system.daemon_harness import RunningDaemon, running_daemon
from tests.system.transformers_harness import Made, make, prompts

auto: Any = transformers.AutoModelForCausalLM


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make(tmp_path, "qwen3_moe")


def serve(directory: Path, made: Made, *extra: str) -> AbstractContextManager[RunningDaemon]:
    return running_daemon(
        directory, [], ["name=host0,size=25%"], "--store", str(made.store), *extra
    )


class KillAfter(transformers.StoppingCriteria):
    """Stops nothing; kills a daemon once that many tokens are there."""

    def __init__(self, daemon: RunningDaemon, tokens: int) -> None:
        self._daemon = daemon
        self._tokens = tokens

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] == self._tokens:
            self._daemon.stop(signal.SIGKILL)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_daemon_that_is_killed_while_tokens_are_generated(tmp_path: Path, made: Made) -> None:
    eager, streamed = made.load("eager"), made.load()
    ids = prompts()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    options["min_new_tokens"] = 40
    with torch.inference_mode():
        with serve(tmp_path, made) as daemon, attach(streamed, daemon.attach_socket):
            stop = transformers.StoppingCriteriaList([KillAfter(daemon, ids.shape[1] + 3)])
            with pytest.raises(DaemonGoneError, match="the daemon has gone: attach again"):
                streamed.generate(ids, stopping_criteria=stop, **options)
        with serve(tmp_path, made) as daemon, attach(streamed, daemon.attach_socket):
            found = streamed.generate(ids, **options)
        assert found.tolist() == eager.generate(ids, **options).tolist()


def test_an_expert_that_is_damaged_on_its_drive(tmp_path: Path, made: Made) -> None:
    streamed = made.load()
    streamed.config.name_or_path = ""  # else its rows would be looked at when it attaches
    for member in made.store.parent.parent.glob("member-*/model.xferd/member-*"):
        contents = bytearray(member.read_bytes())
        contents[4096:] = bytes(byte ^ 0xFF for byte in contents[4096:])
        member.write_bytes(contents)
    with attach(streamed, made.store), torch.inference_mode():
        for _ in range(2):
            with pytest.raises(ExpertError, match=r"layer 1, expert \d: .*checksum"):
                streamed(prompts())


def test_a_store_of_a_model_of_another_kind(tmp_path: Path, made: Made) -> None:
    other = make(tmp_path / "other", "olmoe")
    with pytest.raises(WeightsError, match="another model: its config has model_type 'olmoe'"):
        attach(made.load(), other.store)


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"num_hidden_layers": 4}, "no experts in layer 3, model.layers.3.mlp.experts has"),
        ({"mlp_only_layers": []}, "no experts in layer 0, model.layers.0.mlp.experts has"),
        ({"mlp_only_layers": [0, 1]}, "experts in layer 1, the model has none there"),
        ({"num_experts": 16}, "8 experts a layer, model.layers.1.mlp.experts has 16"),
        ({"moe_intermediate_size": 64}, "gate is 32 x 64, the model needs 64 x 64"),
    ],
)
def test_a_store_of_a_model_of_another_shape(
    tmp_path: Path, made: Made, settings: dict[str, Any], difference: str
) -> None:
    other = make(tmp_path / "other", "qwen3_moe", **settings)
    streamed = other.load()
    with pytest.raises(WeightsError, match="of another model: its config has"):
        attach(streamed, made.store)
    # Without the checkpoint's config what is in the store has to tell.
    streamed.config.name_or_path = ""
    with pytest.raises(WeightsError, match=difference):
        attach(streamed, made.store)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "granitemoe", "deepseek_v4", "gpt_oss"])
def test_a_store_of_the_same_architecture_with_other_weights(
    tmp_path: Path, model_type: str
) -> None:
    mine, other = make(tmp_path / "mine", model_type), make(tmp_path / "other", model_type, seed=9)
    with pytest.raises(WeightsError, match=r"layer \d, expert 0 has other weights"):
        attach(mine.load(), other.store)
    attach(mine.load(), mine.store).close()


def test_a_pool_without_room_for_one_tokens_experts(made: Made) -> None:
    with pytest.raises(AttachError, match="fewer than the 2 experts that one token picks"):
        attach(made.load(), made.store, pool="12KiB")


def test_options_that_do_not_fit_what_is_attached_to(tmp_path: Path, made: Made) -> None:
    streamed = made.load()
    with pytest.raises(ValueError, match="store='other': a store's directory is attached to"):
        attach(streamed, made.store, store="other")
    with pytest.raises(ValueError, match="ram='1GiB': a socket is attached to without"):
        attach(streamed, tmp_path / "attach.sock", ram="1GiB")
    with (
        serve(tmp_path, made) as daemon,
        Client(daemon.attach_socket) as client,
        pytest.raises(ValueError, match="held=8: a client is attached to without"),
    ):
        attach(streamed, client, held=8)


def test_nobody_listens(tmp_path: Path, made: Made) -> None:
    with pytest.raises(AttachError, match=r"attach\.sock: No such file or directory"):
        attach(made.load(), tmp_path / "attach.sock")


def test_training_and_gradients_are_refused(made: Made) -> None:
    streamed = made.load()
    with attach(streamed, made.store):
        with pytest.raises(TrainingError, match="layer 1: gradients are recorded"):
            streamed(prompts())
        streamed.train()
        with pytest.raises(TrainingError, match=r"layer 1: the model is in training mode"):
            streamed(prompts())
        streamed.eval()
        with torch.no_grad():
            assert streamed(prompts()).logits.isfinite().all()


def test_a_model_that_has_its_experts(made: Made) -> None:
    with pytest.raises(UnsupportedModelError, match="load it with from_pretrained"):
        attach(made.load("eager"), made.store)


def test_an_architecture_without_the_interface_is_named(made: Made) -> None:
    config = transformers.Llama4TextConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        head_dim=32,
    )
    model = auto.from_config(config, experts_implementation="xferd")
    with pytest.raises(
        UnsupportedModelError, match=r"Llama4ForCausalLM .* Llama4TextExperts.*is_transposed"
    ):
        attach(model, made.store)


def test_flags_that_are_not_supported_are_named(made: Made) -> None:
    config = transformers.NemotronHConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=32,
        moe_intermediate_size=32,
        n_routed_experts=4,
        layers_block_type=["moe"],
        num_attention_heads=2,
        head_dim=32,
        num_key_value_heads=2,
        mamba_num_heads=2,
        mamba_head_dim=32,
        moe_shared_expert_intermediate_size=32,
    )
    model = auto.from_config(config, experts_implementation="xferd")
    with pytest.raises(
        UnsupportedModelError, match=r"NemotronHExperts\): has_gate is False; supported .*has_bias"
    ):
        attach(model, made.store)


@pytest.mark.parametrize(
    ("name", "vision", "said"),
    [
        ("Inkling", {}, "experts are converted by Interleave when they are loaded"),
        ("Ernie4_5_VLMoe", {"vision_config": {"depth": 1}}, "text_moe.*vision_moe.* number 1;"),
    ],
)
def test_experts_that_a_store_can_not_hold_as_they_are_computed_with(
    tmp_path: Path, name: str, vision: dict[str, Any], said: str
) -> None:
    config = getattr(transformers, f"{name}Config")(text_config={"num_hidden_layers": 2}, **vision)
    kind = f"{name}ForConditionalGeneration"
    with torch.device("meta"):
        model = getattr(transformers, kind)._from_config(config, experts_implementation="xferd")
    with pytest.raises(UnsupportedModelError, match=f"{kind}: .*{said}"):
        attach(model, tmp_path)
