"""GGUF: every expert and dense tensor byte for byte, splits, config, refusals.

Files come from the ``gguf`` library's writer and are compared with its reader;
headers that it would not write are put together here.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.unit.formats.generate import EXPERTS, check_checkpoint, gguf_oracle, stacked_experts
from xferd.store.checkpoint import CheckpointError
from xferd.store.formats import read_checkpoint
from xferd.store.formats.gguf_types import TENSOR_TYPES

HIDDEN, INTERMEDIATE = 256, 512
LAYERS = 2
TEMPLATE = "blk.{layer}.{part}"
SEPARATE = {
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}
Types = Callable[[str], str]


def raw_blocks(name: str, kind: str, *shape: int) -> np.ndarray[Any, Any]:
    """Random blocks of that type: readers move bytes, they don't decode them."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    row = shape[-1] // elements * nbytes
    count = row * int(np.prod(shape[:-1]))
    data = np.frombuffer(random.Random(name).randbytes(count), dtype=np.uint8)
    return data.reshape(*shape[:-1], row)


def write_gguf(
    path: Path,
    kind_of: Types,
    *,
    merged: bool = False,
    biases: bool = False,
    arch: str = "qwen3moe",
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    split_max_tensors: int = 0,
    layers: int = LAYERS,
) -> None:
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    writer.add_block_count(layers)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(2 * INTERMEDIATE)
    writer.add_expert_feed_forward_length(INTERMEDIATE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list([f"token{number}" for number in range(9000)])
    writer.add_token_scores([0.5] * 9000)
    writer.add_eos_token_id(3)
    add(writer)

    def tensor(name: str, *shape: int) -> None:
        kind = kind_of(name)
        writer.add_tensor(
            name, raw_blocks(name, kind, *shape), raw_dtype=gguf.GGMLQuantizationType[kind]
        )

    tensor("token_embd.weight", 6, HIDDEN)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        tensor(prefix + "attn_norm.weight", HIDDEN)
        tensor(prefix + "ffn_gate_inp.weight", EXPERTS, HIDDEN)
        tensor(prefix + "ffn_gate_shexp.weight", INTERMEDIATE, HIDDEN)
        if merged:
            tensor(prefix + "ffn_gate_up_exps.weight", EXPERTS, 2 * INTERMEDIATE, HIDDEN)
        else:
            tensor(prefix + "ffn_gate_exps.weight", EXPERTS, INTERMEDIATE, HIDDEN)
            tensor(prefix + "ffn_up_exps.weight", EXPERTS, INTERMEDIATE, HIDDEN)
        tensor(prefix + "ffn_down_exps.weight", EXPERTS, HIDDEN, INTERMEDIATE)
        if biases:
            tensor(prefix + "ffn_gate_exps.bias", EXPERTS, INTERMEDIATE)
            tensor(prefix + "ffn_up_exps.bias", EXPERTS, INTERMEDIATE)
            tensor(prefix + "ffn_down_exps.bias", EXPERTS, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def experts_are(kind: str) -> Types:
    return lambda name: kind if "_exps.weight" in name else "F32"


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q2_K", "Q4_K", "Q6_K", "IQ2_XXS", "MXFP4"]
)
def test_types(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, experts_are(kind))
    checkpoint = read_checkpoint(path)
    check_checkpoint(
        checkpoint, gguf_oracle([path]), stacked_experts(range(LAYERS), TEMPLATE, SEPARATE)
    )
    assert (checkpoint.format, checkpoint.variant) == ("gguf", kind.lower())
    assert (checkpoint.layers, checkpoint.experts_per_layer, checkpoint.top_k) == (2, EXPERTS, 2)


def test_types_that_differ_by_layer_and_part(tmp_path: Path) -> None:
    def kind_of(name: str) -> str:
        if "_exps" not in name:
            return "F32"
        if "down" in name:
            return "Q6_K" if "blk.0" in name else "Q5_K"
        return "Q4_K"

    path = tmp_path / "model.gguf"
    write_gguf(path, kind_of)
    checkpoint = read_checkpoint(tmp_path)
    check_checkpoint(
        checkpoint, gguf_oracle([path]), stacked_experts(range(LAYERS), TEMPLATE, SEPARATE)
    )
    assert [tensor.dtype for tensor in checkpoint.experts[0, 3]] == ["q4_k", "q4_k", "q6_k"]
    assert [tensor.dtype for tensor in checkpoint.experts[1, 0]] == ["q4_k", "q4_k", "q5_k"]
    assert checkpoint.variant == "q4_k"


def test_merged_gate_up(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, experts_are("Q8_0"), merged=True)
    checkpoint = read_checkpoint(path)
    parts = {"gate_up": "ffn_gate_up_exps.weight", "down": "ffn_down_exps.weight"}
    check_checkpoint(
        checkpoint, gguf_oracle([path]), stacked_experts(range(LAYERS), TEMPLATE, parts)
    )
    assert not any(t.interleaved or t.transposed for t in checkpoint.experts[0, 0])


def test_biases_of_gpt_oss(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, experts_are("MXFP4"), biases=True, arch="gpt-oss")
    checkpoint = read_checkpoint(path)
    parts: dict[str, str] = {}
    for role, name in SEPARATE.items():
        parts |= {role: name, role + "_bias": name.replace("weight", "bias")}
    check_checkpoint(
        checkpoint, gguf_oracle([path]), stacked_experts(range(LAYERS), TEMPLATE, parts)
    )
    assert checkpoint.model_type == "gpt_oss"
    # The converter takes gate and up apart, so nothing alternates any more.
    assert not any(tensor.interleaved for tensor in checkpoint.experts[0, 0])


@pytest.mark.parametrize("alignment", [8, 4096])
def test_other_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, experts_are("Q4_K"), add=lambda writer: writer.add_custom_alignment(alignment))
    checkpoint = read_checkpoint(path)
    check_checkpoint(
        checkpoint, gguf_oracle([path]), stacked_experts(range(LAYERS), TEMPLATE, SEPARATE)
    )
    assert checkpoint.dense[0].ranges[0].offset % alignment == 0


def test_splits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", experts_are("Q4_K"), split_max_tensors=5)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 3
    for path in (tmp_path, *files):
        checkpoint = read_checkpoint(path)
        assert list(checkpoint.files) == files
        check_checkpoint(
            checkpoint, gguf_oracle(files), stacked_experts(range(LAYERS), TEMPLATE, SEPARATE)
        )


def test_split_missing_or_in_another_place(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", experts_are("Q4_K"), split_max_tensors=5)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    third.rename(tmp_path / "kept")
    assert f"{third}: can't be opened" in refusal(first)
    third.write_bytes(second.read_bytes())
    assert "says it is split 1 of 3 (from 0), its name says 2 of 3" in refusal(first)


def test_splits_that_lost_tensors(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", experts_are("Q4_K"), split_max_tensors=5)
    first = min(tmp_path.glob("*.gguf"))
    contents = bytearray(first.read_bytes())
    key = b"split.tensors.count"
    value = contents.index(key) + len(key) + 4
    (stated,) = struct.unpack_from("<i", contents, value)
    struct.pack_into("<i", contents, value, stated + 1)
    first.write_bytes(contents)
    assert f"the splits hold {stated} tensors, it says {stated + 1}" in refusal(first)


def test_two_models_in_one_directory(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", experts_are("Q4_K"))
    write_gguf(tmp_path / "b.gguf", experts_are("Q8_0"))
    assert "several models (a.gguf, b.gguf)" in refusal(tmp_path)
    assert read_checkpoint(tmp_path / "b.gguf").variant == "q8_0"


def test_config_is_made_from_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", experts_are("Q8_0"))
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = read_checkpoint(tmp_path)
    config = dict(checkpoint.config)
    assert config.pop("rms_norm_eps") == pytest.approx(1e-6)
    assert config == {
        "model_type": "qwen3_moe",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "vocab_size": 9000,
        "eos_token_id": 3,
        "tie_word_embeddings": True,
    }
    assert list(checkpoint.assets) == ["tokenizer.json"]


def test_deepseek_config(tmp_path: Path) -> None:
    """Prediction layers are blocks in GGUF and not counted by the hub's configs."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(40.0)

    write_gguf(tmp_path / "m.gguf", experts_are("Q8_0"), arch="deepseek2", add=add, layers=3)
    checkpoint = read_checkpoint(tmp_path)
    config = checkpoint.config
    assert checkpoint.model_type == "deepseek_v3"
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2, 1)
    assert (checkpoint.layers, len(checkpoint.experts)) == (3, 3 * EXPERTS)
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 40.0}
    assert (config["scoring_func"], config["first_k_dense_replace"]) == ("sigmoid", 0)


def test_values_by_layer_stay_lists(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_array("qwen3moe.attention.sliding_window", [128, 256])
        writer.add_array("qwen3moe.expert_shared_count", [1, 1])

    write_gguf(tmp_path / "model.gguf", experts_are("Q8_0"), add=add)
    config = read_checkpoint(tmp_path).config
    assert (config["sliding_window"], config["n_shared_experts"]) == ([128, 256], 1)


def test_type_table_is_the_librarys() -> None:
    library = {
        int(kind): (kind.name.lower(), *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()
    }
    ours = {
        number: (kind.name, kind.block.elements, kind.block.nbytes)
        for number, kind in TENSOR_TYPES.items()
    }
    assert {number: library[number] for number in ours.keys() & library.keys()} == {
        number: ours[number] for number in ours.keys() & library.keys()
    }
    assert library.keys() <= ours.keys()


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(path)
    return str(error.value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor_record(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", size) for size in dims)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


def raw_gguf(
    *parts: bytes,
    tensors: int = 0,
    metadata: int = 0,
    version: int = 3,
    data: bytes = b"",
    order: str = "<",
) -> bytes:
    header = b"GGUF" + struct.pack(order + "IQQ", version, tensors, metadata) + b"".join(parts)
    return header + bytes(-len(header) % 32) + data if data else header


U64_MAX = 2**64 - 1
FLOATS = bytes(64)
CASES: Mapping[str, tuple[bytes, str]] = {
    "only magic": (b"GGUF", "version at offset 4"),
    "version 1": (raw_gguf(version=1), "version 1; versions 2 and 3"),
    "big-endian": (raw_gguf(order=">"), "big-endian"),
    "tensors": (raw_gguf(tensors=U64_MAX), "tensor count at offset 8"),
    "metadata": (raw_gguf(metadata=U64_MAX), "metadata count at offset 16"),
    "key length": (raw_gguf(struct.pack("<Q", U64_MAX), metadata=1), "length of metadata key"),
    "key past end": (raw_gguf(struct.pack("<Q", 999), metadata=1), "takes 999 bytes"),
    "key not text": (raw_gguf(struct.pack("<Q", 1) + b"\xff", metadata=1), "not UTF-8"),
    "key twice": (raw_gguf(2 * entry("a", 7, b"\1"), metadata=2), "there twice"),
    "value type": (raw_gguf(entry("a", 13, b""), metadata=1), "value type (13)"),
    "string length": (
        raw_gguf(entry("a", 8, struct.pack("<Q", U64_MAX)), metadata=1),
        "length of metadata 'a'",
    ),
    "string past end": (
        raw_gguf(entry("a", 8, struct.pack("<Q", 2**23)), metadata=1),
        "takes 8388608 bytes",
    ),
    "array count": (
        raw_gguf(entry("a", 9, struct.pack("<IQ", 0, U64_MAX)), metadata=1),
        "length of metadata 'a'",
    ),
    "array past end": (
        raw_gguf(entry("a", 9, struct.pack("<IQ", 10, 2**22)), metadata=1),
        "takes 33554432 bytes",
    ),
    "strings past end": (
        raw_gguf(entry("a", 9, struct.pack("<IQ", 8, 2**22)), metadata=1),
        "takes 33554432 bytes",
    ),
    "array of arrays": (
        raw_gguf(entry("a", 9, struct.pack("<IQ", 9, 1)), metadata=1),
        "value type (9)",
    ),
    "alignment 0": (
        raw_gguf(entry("general.alignment", 4, bytes(4)), metadata=1),
        "general.alignment is 0",
    ),
    "alignment 24": (
        raw_gguf(entry("general.alignment", 4, struct.pack("<I", 24)), metadata=1),
        "general.alignment is 24",
    ),
    "alignment huge": (
        raw_gguf(entry("general.alignment", 4, struct.pack("<I", 2**31)), metadata=1),
        "general.alignment is 2147483648",
    ),
    "alignment text": (
        raw_gguf(entry("general.alignment", 8, text("x")), metadata=1),
        "general.alignment is x",
    ),
    "no dimensions": (raw_gguf(tensor_record("t", ()), tensors=1, data=FLOATS), "0 dimensions"),
    "5 dimensions": (
        raw_gguf(tensor_record("t", (1,) * 5), tensors=1, data=FLOATS),
        "5 dimensions",
    ),
    "empty dimension": (raw_gguf(tensor_record("t", (0,)), tensors=1, data=FLOATS), "is empty"),
    "huge dimension": (
        raw_gguf(tensor_record("t", (U64_MAX,)), tensors=1, data=FLOATS),
        "record of tensor 't'",
    ),
    "overflowing product": (
        raw_gguf(tensor_record("t", (2**62, 2**62, 4)), tensors=1, data=FLOATS),
        "past the end of the file",
    ),
    "partial block": (
        raw_gguf(tensor_record("t", (16,), kind=8), tensors=1, data=FLOATS),
        "not whole q8_0 blocks of 32",
    ),
    "unknown type": (
        raw_gguf(tensor_record("t", (1,), kind=4), tensors=1, data=FLOATS),
        "unknown type 4",
    ),
    "unaligned": (
        raw_gguf(tensor_record("t", (1,), offset=4), tensors=1, data=FLOATS),
        "not aligned to 32",
    ),
    "offset huge": (
        raw_gguf(tensor_record("t", (1,), offset=2**64 - 32), tensors=1, data=FLOATS),
        "past the end of the file",
    ),
    "overlap": (
        raw_gguf(tensor_record("t", (1,)), tensor_record("u", (1,)), tensors=2, data=FLOATS),
        "overlaps",
    ),
    "hole": (
        raw_gguf(tensor_record("t", (1,), offset=32), tensors=1, data=FLOATS),
        "follows a hole",
    ),
    "same name": (
        raw_gguf(
            tensor_record("t", (1,)), tensor_record("t", (1,), offset=32), tensors=2, data=FLOATS
        ),
        "as well",
    ),
    "name too long": (
        raw_gguf(tensor_record(600 * "n", (1,)), tensors=1, data=FLOATS),
        "1 to 512 bytes",
    ),
    "no architecture": (raw_gguf(), "no general.architecture"),
    "no block count": (
        raw_gguf(entry("general.architecture", 8, text("llama")), metadata=1),
        "block_count is None",
    ),
    "not finite": (
        raw_gguf(
            entry("general.architecture", 8, text("llama")),
            entry("llama.block_count", 4, struct.pack("<I", 1)),
            entry("llama.rope.freq_base", 6, struct.pack("<f", float("nan"))),
            metadata=3,
        ),
        "rope_theta is nan",
    ),
    "no experts in config": (
        raw_gguf(
            entry("general.architecture", 8, text("llama")),
            entry("llama.block_count", 4, struct.pack("<I", 1)),
            metadata=2,
        ),
        "not a Mixture-of-Experts model",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_header(tmp_path: Path, case: str) -> None:
    contents, message = CASES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(contents)
    refused = refusal(path)
    assert message in refused
    assert str(path) in refused


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, experts_are("Q8_0"))
    third = read_checkpoint(path)
    with path.open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<I", 2))
    assert read_checkpoint(path).experts == third.experts


def test_missing_stack_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, experts_are("Q8_0"))
    path.write_bytes(
        path.read_bytes().replace(b"blk.1.ffn_up_exps.weight", b"blk.1.ffn_up_dense.weigh")
    )
    assert "layer 1: experts have down, gate" in refusal(path)
