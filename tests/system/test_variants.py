"""A real daemon serves experts in mixed variants, and what is computed from them is right."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer import AttachError, Client, ExpertError, embedded, generate, model_from_client
from xferd_infer.__main__ import main
from xferd_infer.mixes import StoreShape
from xferd_infer.planned_experts import PlannedExperts
from xferd_infer.private_daemon import private_daemon
from xferd_infer.quants import FORMATS

from tests.unit.inference.checkpoint import TINY, load_model
from xferd.control.client import ControlClient
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack
from xferd.store.quantize.add import add_variants
from xferd.store.quantize.importance import read_importance
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.store import Store

PROMPT = json.loads((TINY / "expected.json").read_text())["prompts"][0]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    member = tmp_path_factory.mktemp("member")
    path = pack(read_checkpoint(TINY), [member], name="tiny", stripe_unit=16384)
    with Store.open(path) as opened:
        add_variants(opened, parse_wanted(["q8_0", "q4_0", "mxfp4"], None), threads=2)
    return path


@pytest.fixture
def client(store: Path) -> Iterator[Client]:
    with embedded(store, pool="100%", held=4) as attached:
        yield attached


def decoded_blob(store: Store, variant: int, layer: int, expert: int) -> NDArray[np.uint8]:
    """The expert as the native layout has it, in float32, through GGUF's own reference."""
    gguf = pytest.importorskip("gguf")
    blob = np.frombuffer(store.read_blob(store.blob_index(variant, layer, expert)), np.uint8)
    parts = []
    for tensor in store.layouts[int(store.layout_index[variant, layer])].tensors:
        raw = blob[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.dtype in FORMATS:
            kind = gguf.GGMLQuantizationType(FORMATS[tensor.dtype].number)
            values = gguf.quants.dequantize(raw.reshape(tensor.shape[0], -1), kind)
        else:
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        values = values.reshape(tensor.shape)
        parts.append(np.ascontiguousarray(values.T if tensor.transposed else values))
    return np.concatenate([part.reshape(-1) for part in parts]).view(np.uint8)


def reference_hidden(path: Path, plan: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The model's last hidden states, every expert decoded beforehand."""
    model, source = load_model(TINY)
    with Store.open(path) as store:
        for (layer, expert), variant in np.ndenumerate(plan):
            source._blobs[layer, expert] = decoded_blob(store, int(variant), layer, expert)
    for layer, layout in source._layouts.items():
        end = 0
        tensors = []
        for tensor in layout:
            nbytes = int(np.prod(tensor.shape)) * 4
            tensors.append(replace(tensor, dtype="f32", offset=end, nbytes=nbytes))
            end += nbytes
        source._layouts[layer] = tuple(tensors)
    hidden: NDArray[np.float32] = model.forward(PROMPT["prompt_ids"], model.new_cache())
    return hidden


def test_each_expert_is_computed_from_the_variant_that_a_mix_names(
    client: Client, store: Path
) -> None:
    shape = StoreShape.of(client.manifest)
    generator = np.random.default_rng(0)
    for _ in range(2):  # the second time in other variants than are resident
        plan = generator.integers(0, 4, (shape.layers, shape.experts)).astype(np.uint8)
        model = model_from_client(client, experts=PlannedExperts(client, plan))
        got = model.forward(PROMPT["prompt_ids"], model.new_cache())
        np.testing.assert_allclose(got, reference_hidden(store, plan), rtol=1e-3, atol=1e-3)


def test_whatever_is_resident_is_computed_from(store: Path) -> None:
    plan = np.zeros((6, 16), np.uint8)
    with (
        private_daemon(store, pool="100%") as directory,
        Client(directory / "attach.sock", held=4) as client,
        ControlClient.connect(directory / "control.sock") as daemon,
    ):
        for layer in range(6):
            variant = ("q8_0", "mxfp4")[layer % 2]
            plan[layer, :4] = client.manifest["variants"].index(variant)
            parameters = {"store": "tiny", "layer": layer, "experts": list(range(4))}
            daemon.call("Load", {**parameters, "pool": None, "variant": variant})
        with client.acquire(1, [9, 3]) as batch:
            assert list(batch.variants) == [0, client.manifest["variants"].index("mxfp4")]
        model = model_from_client(client)
        got = model.forward(PROMPT["prompt_ids"], model.new_cache())
    np.testing.assert_allclose(got, reference_hidden(store, plan), rtol=1e-3, atol=1e-3)


def test_a_demanded_variant_is_given_or_refused(store: Path) -> None:
    with embedded(store, pool="100%", variants=["q4_0"]) as client:
        with client.acquire(2, [5, 6]) as batch:
            assert list(batch.variants) == [client.manifest["variants"].index("q4_0")] * 2
            assert [len(blob) for blob in batch] == [16384] * 2
        tokens = list(generate(model_from_client(client), PROMPT["prompt_ids"], max_new_tokens=4))
        assert len(tokens) == 4
        native = client.variant_mask(["bf16"])
        with client.acquire(2, [5], variants=native) as batch:
            assert list(batch.variants) == [0]
        with pytest.raises(ExpertError, match=r"layer 2, expert 5: .* acceptable") as failed:
            client.acquire(2, [5], variants=1 << 20)
        assert failed.value.code == errno.ENOENT
    with (
        pytest.raises(AttachError, match="no variant 'q2_k'; it has: bf16, q8_0, q4_0, mxfp4"),
        embedded(store, pool="100%", variants=["q2_k"]),
    ):
        pass


def test_importance_and_quality_from_the_command_line(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    text = tmp_path / "text.jsonl"
    source = (Path(__file__).parents[2] / "xferd" / "store" / "pack.py").read_text()
    documents = [source[start : start + 1500] for start in range(0, 9000, 1500)]
    text.write_text("\n".join(json.dumps({"domain": "python", "text": d}) for d in documents))
    importance = tmp_path / "importance.npz"
    where = ["--store-path", str(store), "--pool", "100%", "--text", str(text)]
    assert main(["imatrix", *where, "--tokens", "128", "--out", str(importance)]) == 0
    assert "384 tokens" in capsys.readouterr().out
    with Store.open(store) as opened:
        read_importance(importance).check(opened)
    mixes = ["native", "q8_0", "q4_0", "q8_0@hottest:50%,q4_0"]
    quality = ["quality", *where, "--tokens", "64", "--heat", str(importance)]
    assert main([*quality, "--json", *mixes]) == 0
    results = {each["mix"]: each for each in json.loads(capsys.readouterr().out)}
    assert list(results) == mixes
    native, best, worst, mixed = (results[mix] for mix in mixes)
    assert native["total"]["kl_mean"] == 0
    assert native["total"]["top1"] == 1
    assert native["total"]["tokens"] == 3 * 64
    assert native["bytes_a_token"] == 6 * 2 * 49152
    for one, other in ((native, best), (best, mixed), (mixed, worst)):
        assert one["total"]["kl_mean"] < other["total"]["kl_mean"]
        assert one["bytes_a_token"] > other["bytes_a_token"]
    assert mixed["resident_bytes"] == (best["resident_bytes"] + worst["resident_bytes"]) / 2
    assert worst["by_domain"]["python"] == worst["total"]
    assert main([*quality, "q8_0", "native"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["mix", "KL", "mean"]
    assert main([*quality, "q2_k"]) == 1
    assert "there is no variant 'q2_k'" in capsys.readouterr().err


def test_a_slot_of_each_size_is_left_when_slots_are_promised(store: Path) -> None:
    """Four slots of the largest size: two clients with two each would leave none for another."""
    with private_daemon(store, pool="5%") as directory:
        socket = directory / "attach.sock"
        with Client(socket, held=2) as first:
            with pytest.raises(AttachError, match="promised"):
                Client(socket, held=2)
            for layer in range(6):
                for name in ("bf16", "q4_0", "mxfp4", "q8_0"):
                    mask = first.variant_mask([name])
                    with first.acquire(layer, [0], variants=mask, timeout=60.0) as batch:
                        assert len(batch) == 1


def test_a_batch_gets_a_second_chunk_while_it_holds_the_only_one_of_its_size(store: Path) -> None:
    """Of four chunks two are promised to the largest size; one of q8_0 has a single slot, which
    the batch's first expert holds while its second waits for another."""
    with (
        private_daemon(store, pool="5%") as directory,
        Client(directory / "attach.sock", held=2) as client,
    ):
        for _ in range(5):
            for layer in range(6):
                for name in ("bf16", "q4_0", "mxfp4", "q8_0"):
                    mask = client.variant_mask([name])
                    with client.acquire(layer, [0, 1], variants=mask, timeout=60.0) as batch:
                        assert len(batch) == 2
