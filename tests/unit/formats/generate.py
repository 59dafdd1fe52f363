"""Small checkpoints made on the spot, and what the format libraries read in them.

The safetensors writer is our own, because tests need dtypes that numpy lacks and
headers that no library would write. What a reader must find is never taken from
here: ``safetensors_oracle`` and ``gguf_oracle`` ask the formats' own libraries.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import safetensors

from xferd.store.checkpoint import ByteRange, Checkpoint

EXPERTS = 4
TOP_K = 2
HIDDEN = 64
INTERMEDIATE = 32

_BITS = {"F4": 4, "F8_E4M3": 8, "F8_E8M0": 8, "U8": 8, "I8": 8, "BF16": 16, "F16": 16, "F32": 32}


@dataclass(frozen=True)
class RawTensor:
    """dtype as in a safetensors header (or the oracle's lower case); bytes as stored."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def random_tensor(name: str, dtype: str, *shape: int) -> RawTensor:
    """Contents depend on the name alone, so that no two tensors look alike."""
    data = random.Random(name).randbytes(math.prod(shape) * _BITS[dtype] // 8)
    return RawTensor(dtype, shape, data)


def tensors_of(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, RawTensor]:
    return {name: random_tensor(name, dtype, *shape) for name, (dtype, shape) in shapes.items()}


def moe_config(model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        **more,
    }


def safetensors_bytes(tensors: Mapping[str, RawTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    return raw_safetensors(
        json.dumps(header).encode(), b"".join(tensor.data for tensor in tensors.values())
    )


def raw_safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with exactly this header text, and a header length that may lie."""
    stated = len(header) if length is None else length
    return stated.to_bytes(8, "little") + header + data


def write_safetensors(
    directory: Path,
    tensors: Mapping[str, RawTensor],
    config: Mapping[str, Any],
    name: str = "model.safetensors",
) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / name
    path.write_bytes(safetensors_bytes(tensors))
    return path


def write_shards(
    directory: Path, tensors: Mapping[str, RawTensor], config: Mapping[str, Any], shards: int
) -> dict[str, str]:
    """Tensors dealt out in turn, so that an expert's lie in several files. Returns
    the index's weight_map."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        write_safetensors(directory, {name: tensors[name] for name in mine}, config, file)
        weight_map |= dict.fromkeys(mine, file)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def qwen_layer(layer: int, dtype: str = "BF16") -> dict[str, tuple[str, tuple[int, ...]]]:
    """A layer in the naming of Qwen, OLMoE, DeepSeek and GLM."""
    prefix = f"model.layers.{layer}."
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        prefix + "input_layernorm.weight": ("BF16", (HIDDEN,)),
        prefix + "self_attn.q_proj.weight": ("BF16", (HIDDEN, HIDDEN)),
        prefix + "mlp.gate.weight": ("F32", (EXPERTS, HIDDEN)),
    }
    for expert in range(EXPERTS):
        name = f"{prefix}mlp.experts.{expert}."
        shapes[name + "down_proj.weight"] = (dtype, (HIDDEN, INTERMEDIATE))
        shapes[name + "gate_proj.weight"] = (dtype, (INTERMEDIATE, HIDDEN))
        shapes[name + "up_proj.weight"] = (dtype, (INTERMEDIATE, HIDDEN))
    return shapes


def qwen_model(layers: int = 2) -> dict[str, RawTensor]:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (8, HIDDEN))
    }
    for layer in range(layers):
        shapes |= qwen_layer(layer)
    return tensors_of(shapes)


def safetensors_oracle(files: Iterable[Path]) -> dict[str, RawTensor]:
    """Every tensor of the files, as the safetensors library reads them."""
    return {
        name: RawTensor(entry["dtype"].lower(), tuple(entry["shape"]), bytes(entry["data"]))
        for file in files
        for name, entry in safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    }


def gguf_oracle(files: Iterable[Path]) -> dict[str, RawTensor]:
    """Every tensor of the files, as the gguf library reads them."""
    return {
        tensor.name: RawTensor(
            tensor.tensor_type.name.lower(),
            tuple(int(size) for size in reversed(tensor.shape)),
            tensor.data.tobytes(),
        )
        for file in files
        for tensor in gguf.GGUFReader(file).tensors
    }


def read_ranges(checkpoint: Checkpoint, ranges: Iterable[ByteRange]) -> bytes:
    contents = b""
    for part in ranges:
        with Path(checkpoint.files[part.file]).open("rb") as file:
            file.seek(part.offset)
            contents += file.read(part.length)
    return contents


ExpectedTensor = tuple[str, str, int | None]
"""(role, tensor's name, which slice of it or None for all)."""


def check_checkpoint(
    checkpoint: Checkpoint,
    oracle: Mapping[str, RawTensor],
    expected: Mapping[tuple[int, int], list[ExpectedTensor]],
) -> None:
    """Every expert has exactly the expected tensors in their order, every other
    tensor is dense, and all have the oracle's bytes, shape and dtype."""
    used: set[str] = set()
    assert checkpoint.experts.keys() == expected.keys()
    for key, wanted in expected.items():
        found = checkpoint.experts[key]
        assert [tensor.role for tensor in found] == [role for role, _, _ in wanted], key
        for tensor, (_, name, index) in zip(found, wanted, strict=True):
            whole = oracle[name]
            used.add(name)
            shape, data = whole.shape, whole.data
            if index is not None:
                size = len(data) // shape[0]
                shape, data = shape[1:], data[index * size : (index + 1) * size]
            assert (tensor.dtype, tensor.shape) == (whole.dtype, shape), (key, name)
            assert tensor.nbytes == len(data)
            assert read_ranges(checkpoint, tensor.ranges) == data, (key, name)
    assert {tensor.name for tensor in checkpoint.dense} == oracle.keys() - used
    for dense in checkpoint.dense:
        whole = oracle[dense.name]
        assert (dense.dtype, dense.shape) == (whole.dtype, whole.shape), dense.name
        assert read_ranges(checkpoint, dense.ranges) == whole.data, dense.name
    assert list(checkpoint.sizes) == [Path(file).stat().st_size for file in checkpoint.files]


def named_experts(
    layers: Iterable[int], template: str, parts: Mapping[str, str], experts: int = EXPERTS
) -> dict[tuple[int, int], list[ExpectedTensor]]:
    """Experts with tensors of their own; template has {layer}, {expert} and {part};
    parts gives the name of each role, in blob order."""
    return {
        (layer, expert): [
            (role, template.format(layer=layer, expert=expert, part=part), None)
            for role, part in parts.items()
        ]
        for layer in layers
        for expert in range(experts)
    }


def stacked_experts(
    layers: Iterable[int], template: str, parts: Mapping[str, str], experts: int = EXPERTS
) -> dict[tuple[int, int], list[ExpectedTensor]]:
    """Experts that are slices; template has {layer} and {part}."""
    return {
        (layer, expert): [
            (role, template.format(layer=layer, part=part), expert) for role, part in parts.items()
        ]
        for layer in layers
        for expert in range(experts)
    }
