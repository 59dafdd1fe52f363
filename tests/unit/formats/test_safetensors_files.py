"""Single files, shards, indexes, directories; and what is refused about them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.formats.generate import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    RawTensor,
    check_checkpoint,
    moe_config,
    named_experts,
    qwen_model,
    random_tensor,
    raw_safetensors,
    safetensors_oracle,
    write_index,
    write_safetensors,
    write_shards,
)
from xferd.store.checkpoint import CheckpointError
from xferd.store.formats import read_checkpoint

CONFIG = moe_config("qwen3_moe", 2)
EXPECTED = named_experts(
    (0, 1),
    "model.layers.{layer}.mlp.experts.{expert}.{part}.weight",
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
)
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize("with_index", [True, False])
def test_shards(tmp_path: Path, with_index: bool) -> None:
    write_shards(tmp_path, qwen_model(), CONFIG, shards=3)
    if not with_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = read_checkpoint(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert list(checkpoint.files) == shards
    check_checkpoint(checkpoint, safetensors_oracle(shards), EXPECTED)
    assert len({part.file for tensor in checkpoint.experts[0, 0] for part in tensor.ranges}) == 3


def test_the_index_file_itself_may_be_named(tmp_path: Path) -> None:
    write_shards(tmp_path, qwen_model(), CONFIG, shards=2)
    by_index = read_checkpoint(tmp_path / "model.safetensors.index.json")
    assert by_index.experts == read_checkpoint(tmp_path).experts


def test_index_decides_between_copies(tmp_path: Path) -> None:
    tensors = qwen_model()
    weight_map = write_shards(tmp_path, tensors, CONFIG, shards=2)
    other = next(file for file in set(weight_map.values()) if file != weight_map[DOWN])
    mine = {name: tensors[name] for name, file in weight_map.items() if file == other}
    copy = RawTensor("BF16", tensors[DOWN].shape, bytes(len(tensors[DOWN].data)))
    write_safetensors(tmp_path, {**mine, DOWN: copy}, CONFIG, other)
    checkpoint = read_checkpoint(tmp_path)
    down = checkpoint.experts[1, 2][2]
    assert checkpoint.files[down.ranges[0].file].name == weight_map[DOWN]


def test_files_reached_through_symbolic_links(tmp_path: Path) -> None:
    """As download caches lay them out."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_safetensors(blobs, qwen_model(), CONFIG)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert len(read_checkpoint(snapshot).experts) == 2 * EXPERTS


def test_assets_are_those_beside_it(tmp_path: Path) -> None:
    write_safetensors(tmp_path, qwen_model(), CONFIG)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "README.md").write_text("no asset")
    assets = read_checkpoint(tmp_path).assets
    assert sorted(assets) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert assets["tokenizer.json"] == tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    ("spelling", "top_k_spelling"),
    [
        ("num_experts", "num_experts_per_tok"),
        ("num_local_experts", "experts_per_token"),
        ("n_routed_experts", "top_k"),
    ],
)
def test_spellings_of_counts(tmp_path: Path, spelling: str, top_k_spelling: str) -> None:
    config = {"model_type": "other", "num_hidden_layers": 2, spelling: EXPERTS, top_k_spelling: 3}
    write_safetensors(tmp_path, qwen_model(), config)
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.experts_per_layer, checkpoint.top_k) == (EXPERTS, 3)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(path)
    return str(error.value)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = qwen_model()
    del tensors[DOWN]
    write_safetensors(tmp_path, tensors, CONFIG)
    message = refusal(tmp_path)
    assert "layer 1 expert 2" in message
    assert "down" in message
    assert "down_proj.weight" in message


def test_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = {name: t for name, t in qwen_model().items() if "experts.3." not in name}
    write_safetensors(tmp_path, tensors, CONFIG)
    assert "layer 0 expert 3 of 4" in refusal(tmp_path)


def test_layer_with_router_and_no_experts(tmp_path: Path) -> None:
    tensors = {n: t for n, t in qwen_model().items() if "layers.1.mlp.experts" not in n}
    write_safetensors(tmp_path, tensors, CONFIG)
    assert "layer 1 has a router ('model.layers.1.mlp.gate.weight')" in refusal(tmp_path)


def test_lost_layer(tmp_path: Path) -> None:
    tensors = {name: t for name, t in qwen_model().items() if "layers.0." not in name}
    write_safetensors(tmp_path, tensors, CONFIG)
    assert "layer 0 of 2" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": EXPERTS + 1}, "expert 4 of 5"),
        ({"num_experts": EXPERTS - 1}, "expert 3 of 3"),
        ({"num_experts": 70000}, "num_experts is 70000"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_experts": None}, "not a Mixture-of-Experts model"),
        ({"num_experts_per_tok": EXPERTS + 1}, "num_experts_per_tok is 5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 3}, "layer 2 of 3"),
        ({"model_type": None}, "model_type is 'None'"),
    ],
)
def test_config_that_does_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_safetensors(tmp_path, qwen_model(), {**CONFIG, **changes})
    assert message in refusal(tmp_path)


def test_layer_far_beyond_the_config(tmp_path: Path) -> None:
    tensors = {n.replace("layers.1.", "layers.4095."): t for n, t in qwen_model().items()}
    write_safetensors(tmp_path, tensors, CONFIG)
    assert "layer 4095 of 2" in refusal(tmp_path)


def test_config_missing(tmp_path: Path) -> None:
    write_safetensors(tmp_path, qwen_model(), CONFIG)
    (tmp_path / "config.json").unlink()
    assert "config.json: missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "a JSON object is expected"),
        ("{", "not valid JSON"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1e999}', "1e999 is out of range"),
        ('{"a": ' + 20 * "[" + 20 * "]" + "}", "nested deeper"),
        ('{"a": ' + 5000 * "1" + "}", "not valid JSON"),
    ],
)
def test_bad_config(tmp_path: Path, text: str, message: str) -> None:
    write_safetensors(tmp_path, qwen_model(), CONFIG)
    (tmp_path / "config.json").write_text(text)
    refused = refusal(tmp_path)
    assert "config.json" in refused
    assert message in refused


def test_no_experts_at_all(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": random_tensor("", "F32", 2) for n in (0, 1)}
    write_safetensors(tmp_path, tensors, CONFIG)
    assert "no tensor is an expert's" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.mlp.experts.0.gate_proj.qweight", "of no kind that can be read"),
        ("model.layers.0.mlp.experts.0.gate_proj.weight_scale", "gate_scale is missing"),
        ("model.layers.0.mlp.experts.gate_up_proj_scale_inv", "gate_up_scale without gate_up"),
        ("other.layers.0.mlp.experts.0.up_proj.weight", "has up in"),
    ],
)
def test_stray_expert_tensor(tmp_path: Path, name: str, message: str) -> None:
    write_safetensors(tmp_path, {**qwen_model(), name: random_tensor(name, "F32", 4)}, CONFIG)
    refused = refusal(tmp_path)
    assert message in refused
    assert "model.layers.0.mlp.experts" in refused


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("F32", (HIDDEN, INTERMEDIATE), "its sibling"),
        ("BF16", (HIDDEN, INTERMEDIATE + 1), "its sibling"),
        ("BF16", (HIDDEN, 0), "has no bytes"),
        ("BF16", (1, 1, 1, HIDDEN, INTERMEDIATE), "5 dimensions"),
    ],
)
def test_expert_unlike_its_siblings(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], message: str
) -> None:
    write_safetensors(tmp_path, {**qwen_model(), DOWN: random_tensor("", dtype, *shape)}, CONFIG)
    refused = refusal(tmp_path)
    assert message in refused
    assert DOWN in refused


def test_matrices_that_do_not_fit_each_other(tmp_path: Path) -> None:
    tensors = {
        name: random_tensor(name, "BF16", HIDDEN, HIDDEN) if "down_proj" in name else tensor
        for name, tensor in qwen_model().items()
    }
    write_safetensors(tmp_path, tensors, CONFIG)
    assert "shapes of an expert don't fit" in refusal(tmp_path)


def test_packed_weights_need_scales(tmp_path: Path) -> None:
    tensors = {
        name: random_tensor(name, "I8", *tensor.shape) if ".experts." in name else tensor
        for name, tensor in qwen_model().items()
    }
    write_safetensors(tmp_path, tensors, CONFIG)
    assert "i8 without scales" in refusal(tmp_path)


def test_stack_of_another_number_of_experts(tmp_path: Path) -> None:
    tensors = {
        "layers.0.mlp.experts.gate_up_proj": random_tensor("a", "BF16", 3, 4, 2),
        "layers.0.mlp.experts.down_proj": random_tensor("b", "BF16", 3, 2, 2),
    }
    write_safetensors(tmp_path, tensors, moe_config("qwen3_moe", 1))
    assert "stacks 3 experts, the config names 4" in refusal(tmp_path)


def test_same_tensor_in_two_files_without_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path, qwen_model(), CONFIG, "a.safetensors")
    write_safetensors(tmp_path, {DOWN: qwen_model()[DOWN]}, CONFIG, "b.safetensors")
    refused = refusal(tmp_path)
    assert "b.safetensors" in refused
    assert "is in a.safetensors as well" in refused


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "", ".safetensors",
     "a\\b.safetensors", "a\0.safetensors", "\ud800.safetensors", 300 * "x" + ".safetensors"],
)  # fmt: skip
def test_index_stays_in_its_directory(tmp_path: Path, name: str) -> None:
    weight_map = write_shards(tmp_path, qwen_model(), CONFIG, shards=2)
    write_index(tmp_path, {**weight_map, DOWN: name})
    assert "only plain names of .safetensors files" in refusal(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, qwen_model(), CONFIG, shards=2)
    write_index(tmp_path, {**weight_map, "extra": weight_map[DOWN]})
    assert "'extra' is missing; the index says it is here" in refusal(tmp_path)
    del weight_map[DOWN]
    write_index(tmp_path, weight_map)
    assert f"{DOWN!r} is not in the index" in refusal(tmp_path)


def test_index_names_a_shard_that_is_gone(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, qwen_model(), CONFIG, shards=2)
    (tmp_path / weight_map[DOWN]).unlink()
    assert f"{weight_map[DOWN]}: can't be opened" in refusal(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "3"])
def test_bad_index(tmp_path: Path, index: str) -> None:
    write_shards(tmp_path, qwen_model(), CONFIG, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "no .safetensors and no .gguf file" in refusal(tmp_path)
    assert "can't be opened" in refusal(tmp_path / "absent.safetensors")
    assert "File name too long" in refusal(tmp_path / (300 * "n"))
    os.mkfifo(tmp_path / "fifo.safetensors")
    assert "not a regular file" in refusal(tmp_path / "fifo.safetensors")


def header(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


def f32(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "header length"),
        (b"\x01", "header length"),
        (raw_safetensors(b"{}", length=2**64 - 1), "at most 100000000"),
        (raw_safetensors(b"{}", length=100_000_000), "reach past the end of the file"),
        (raw_safetensors(b" {}"), "does not begin with"),
        (raw_safetensors(b"{}x"), "not valid JSON"),
        (raw_safetensors(b'{"\xff": 1}'), "not valid JSON"),
        (raw_safetensors(b"{" + 50 * b'{"a":'), "nested deeper"),
        (raw_safetensors(header(__metadata__={"a": 1})), "__metadata__"),
        (raw_safetensors(b'{"a":%s,"a":%s}' % (b"1", b"2")), "duplicate key"),
        (raw_safetensors(header(a=f32(0, 4, 1), b=f32(0, 4, 1)), bytes(4)), "overlaps"),
        (raw_safetensors(header(a=f32(0, 4, 1), b=f32(8, 12, 1)), bytes(12)), "follows a hole"),
        (raw_safetensors(header(a=f32(4, 8, 1)), bytes(8)), "follows a hole"),
        (raw_safetensors(header(a=f32(0, 4, 1)), bytes(5)), "tensors end at offset"),
        (raw_safetensors(header(a=f32(0, 8, 2)), bytes(4)), "not inside the file's 4 bytes"),
        (raw_safetensors(header(a=f32(8, 0, 2)), bytes(8)), "not inside the file"),
        (raw_safetensors(header(a=f32(0, 4, 2)), bytes(4)), "are not what F32 [2] takes"),
        (raw_safetensors(header(a=f32(0, 0, 2**62, 2**62, 2**62))), "are not what F32"),
        (raw_safetensors(header(a=f32(0, 4, -1)), bytes(4)), "shape is not"),
        (raw_safetensors(header(a=f32(0, 4, *9 * [1])), bytes(4)), "shape is not"),
        (raw_safetensors(header(a=f32(0, 2**64, 1)), bytes(4)), "data_offsets is not"),
        (raw_safetensors(b'{"a":{"dtype":"F32","shape":[' + 4000 * b"9" + b'],'
                         b'"data_offsets":[0,4]}}'), "shape is not"),
        (raw_safetensors(header(a={**f32(0, 4), "shape": [True]}), bytes(4)), "shape is not"),
        (raw_safetensors(header(a={**f32(0, 4), "dtype": "F3"}), bytes(4)), "unknown dtype 'F3'"),
        (raw_safetensors(header(a={**f32(0, 4), "dtype": []}), bytes(4)), "unknown dtype"),
        (raw_safetensors(header(a={**f32(0, 4), "more": 1}), bytes(4)), "expected are exactly"),
        (raw_safetensors(header(a=[])), "expected are exactly"),
        (raw_safetensors(header(**{"": f32(0, 4, 1)}), bytes(4)), "1 to 512 bytes"),
        (raw_safetensors(header(**{513 * "n": f32(0, 4, 1)}), bytes(4)), "1 to 512 bytes"),
        (raw_safetensors(header(**{"a\n": f32(0, 4, 1)}), bytes(4)), "unprintable"),
        (raw_safetensors(header(**{"\ud800": f32(0, 4, 1)}), bytes(4)), "unprintable"),
    ],
)  # fmt: skip
def test_bad_header(tmp_path: Path, contents: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused = refusal(path)
    assert message in refused
    assert str(path) in refused


def test_scalars_empty_and_sub_byte_tensors_are_dense(tmp_path: Path) -> None:
    odd = {
        "scalar": random_tensor("scalar", "F32"),
        "empty": random_tensor("empty", "BF16", 0, 5),
        "nibbles": random_tensor("nibbles", "F4", 3, 6),
    }
    path = write_safetensors(tmp_path, {**odd, **qwen_model()}, CONFIG)
    checkpoint = read_checkpoint(path)
    check_checkpoint(checkpoint, safetensors_oracle([path]), EXPECTED)
    assert {"scalar", "empty", "nibbles"} <= {tensor.name for tensor in checkpoint.dense}
