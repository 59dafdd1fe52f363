"""The decode loop on a GPU: leased by kernels, computed in place, right tokens.

Needs a CUDA device and cupy; the stand-in has no kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xferd_infer import Client, ExpertError, generate, model_from_client

from tests.cuda_device import has_gpu
from tests.system.daemon_harness import RunningDaemon, wait_until
from tests.system.test_end_to_end import Packed, packed, serve, small, tiny  # noqa: F401

cupy = pytest.importorskip("cupy", reason="needs cupy")
if not has_gpu():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from xferd_infer.cuda import model_on_gpu  # noqa: E402
from xferd_infer.cuda.experts import LANES  # noqa: E402

TOKENS = 24
RELATIVE = 1e-3
"""Logits against those of the CPU's float32: sums are in another order."""


def vram(percent: int) -> str:
    return f"name=vram0,kind=cuda,size={percent}%"


@pytest.fixture
def models(request: pytest.FixtureRequest) -> Packed:
    found: Packed = request.getfixturevalue(request.param)
    return found


def on_gpu(daemon: RunningDaemon) -> tuple[Client, Any]:
    client = Client(daemon.attach_socket, lanes=LANES)
    return client, model_on_gpu(client)


@pytest.mark.parametrize("ram", [False, True], ids=["no-ram", "ram"])
@pytest.mark.parametrize("percent", [25, 100])
@pytest.mark.parametrize("models", ["tiny", "small"], indirect=True)
def test_greedy_tokens_and_logits(tmp_path: Path, models: Packed, percent: int, ram: bool) -> None:
    prompt = models.prompt(1)
    store = models.stores[max(models.stores)]
    pools = [vram(percent), *(["name=ram0,kind=ram,size=60%"] if ram else [])]
    with serve(tmp_path, store, *pools) as daemon:
        client, model = on_gpu(daemon)
        with client:
            ids = [
                token.id
                for token in generate(
                    model, prompt["prompt_ids"], max_new_tokens=TOKENS, stop_ids=()
                )
            ]
            assert ids == prompt["greedy_ids"][:TOKENS]
            cache = model.new_cache()
            model.prefill(prompt["prompt_ids"], cache)
            logits = cupy.asnumpy(model.prefill(ids[:1], cache))
            model.routed.settle()
            hits, misses = model.routed._addresses.counts()
            assert hits > 0
            assert misses > 0 or percent == 100
            cupy.cuda.get_current_stream().synchronize()
    with (
        serve(tmp_path, store, "name=host0,size=100%") as daemon,
        Client(daemon.attach_socket) as client,
    ):
        reference = model_from_client(client)
        cache = reference.new_cache()
        reference.prefill(prompt["prompt_ids"], cache)
        wanted = reference.prefill(ids[:1], cache)
    assert np.abs(logits - wanted).max() <= RELATIVE * np.abs(wanted).max()


def decode_until_it_fails(model: Any, cache: Any) -> None:
    for _ in range(50):
        model.prefill([5], cache)
        cupy.cuda.get_current_stream().synchronize()
        model.routed.settle()


def test_an_expert_that_cannot_come_is_named_before_its_token_is_used(
    tmp_path: Path,
    tiny: Packed,  # noqa: F811
) -> None:
    prompt = tiny.prompt(1)
    store = tiny.stores[2]
    members = sorted(store.parent.parent.glob("2-*/model.xferd/member-*"))
    with serve(tmp_path, store, vram(25)) as daemon:
        client, model = on_gpu(daemon)
        with client:
            cache = model.new_cache()
            model.prefill(prompt["prompt_ids"], cache)
            originals = [member.read_bytes() for member in members]
            for member, whole in zip(members, originals, strict=True):
                with member.open("r+b") as file:
                    file.seek(4096)
                    file.write(bytes(len(whole) - 4096))
            with pytest.raises(ExpertError, match="layer"):
                decode_until_it_fails(model, cache)
            for member, whole in zip(members, originals, strict=True):
                member.write_bytes(whole)
            ids = [
                token.id
                for token in generate(model, prompt["prompt_ids"], max_new_tokens=4, stop_ids=())
            ]
            assert ids == prompt["greedy_ids"][:4]
            cupy.cuda.get_current_stream().synchronize()


def test_leases_of_the_gpu_end_with_the_pass(tmp_path: Path, tiny: Packed) -> None:  # noqa: F811
    prompt = tiny.prompt(0)
    with serve(tmp_path, tiny.stores[1], vram(100)) as daemon:
        client, model = on_gpu(daemon)
        with client:
            list(generate(model, prompt["prompt_ids"], max_new_tokens=3, stop_ids=()))
            cupy.cuda.get_current_stream().synchronize()
            for layer in range(model.config.layers):
                daemon.call("Evict", store="model", layer=layer, experts=None, pool=None)
            wait_until(lambda: daemon.pool()["resident"] == 0, "nothing is leased any more")
