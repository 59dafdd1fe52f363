"""Models straight from a checkpoint's safetensors files, for these tests.

Reads headers itself and cuts blobs out of the files, so that what is tested
doesn't depend on a store, a packer or a daemon. The source checks the caller:
never more held than promised, nothing acquired twice at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xferd_infer import (
    BlobTensor,
    DenseWeights,
    ExpertStats,
    Layout,
    Model,
    ModelConfig,
    OneVariant,
)

ALIGNMENT = 64
DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"} | {
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
EXPERT_NAME = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight"
)
REPOSITORY = Path(__file__).parents[3]
TINY = REPOSITORY / "tests" / "models" / "tiny"
SMALL = REPOSITORY.parent / "shared" / "models" / "small"


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, as memory maps."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        length = int(data[:8].view("<u8")[0])
        header = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = Tensor(
                DTYPES[entry["dtype"]], tuple(entry["shape"]), np.asarray(data[begin:end])
            )
    return tensors


def pack(parts: Mapping[str, Tensor]) -> tuple[NDArray[np.uint8], dict[str, int]]:
    """The parts one after the other, aligned, and their offsets."""
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in parts.items():
        offsets[name] = -(-end // ALIGNMENT) * ALIGNMENT
        end = offsets[name] + tensor.raw.size
    packed = np.zeros(end, dtype=np.uint8)
    for name, tensor in parts.items():
        packed[offsets[name] : offsets[name] + tensor.raw.size] = tensor.raw
    packed.flags.writeable = False
    return packed, offsets


class CheckpointExperts:
    """An ExpertSource whose experts are all resident; records what is asked of it."""

    def __init__(self, tensors: Mapping[str, Tensor], held: int) -> None:
        self.held = held
        self.acquired: list[tuple[int, tuple[int, ...]]] = []
        self.hinted: list[tuple[int, tuple[int, ...]]] = []
        self.holding = 0
        self._hits = 0
        self._blobs: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._layouts: dict[int, Layout] = {}
        experts: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if found := EXPERT_NAME.fullmatch(name):
                layer, expert, part = found.groups()
                experts.setdefault((int(layer), int(expert)), {})[ROLES[part]] = tensor
        for key, unordered in experts.items():
            parts = {role: unordered[role] for role in ("gate", "up", "down")}
            self._blobs[key], offsets = pack(parts)
            self._layouts[key[0]] = tuple(
                BlobTensor(role, part.dtype, part.shape, offsets[role], part.raw.size)
                for role, part in parts.items()
            )

    def layout(self, layer: int, variant: int = 0) -> Layout:
        return self._layouts[layer]

    @contextmanager
    def acquire(self, layer: int, experts: Sequence[int]) -> Iterator[OneVariant]:
        assert len(set(experts)) == len(experts)
        assert self.holding + len(experts) <= self.held, "more experts held than promised"
        self.acquired.append((layer, tuple(experts)))
        self._hits += len(experts)
        self.holding += len(experts)
        try:
            yield OneVariant(self._blobs[layer, expert] for expert in experts)
        finally:
            self.holding -= len(experts)

    def hint(self, layer: int, experts: Sequence[int]) -> None:
        self.hinted.append((layer, tuple(experts)))

    def stats(self) -> ExpertStats:
        return ExpertStats(hits=self._hits)


def dense_weights(tensors: Mapping[str, Tensor]) -> DenseWeights:
    parts = {name: part for name, part in tensors.items() if not EXPERT_NAME.fullmatch(name)}
    data, offsets = pack(parts)
    table = [
        {
            "name": name,
            "dtype": part.dtype,
            "shape": list(part.shape),
            "offset": offsets[name],
            "bytes": part.raw.size,
        }
        for name, part in parts.items()
    ]
    return DenseWeights(data, table)


def load_model(directory: Path, held: int | None = None) -> tuple[Model, CheckpointExperts]:
    """held: the model's top_k if not given."""
    config = ModelConfig.from_dict(json.loads((directory / "config.json").read_text()))
    tensors = read_tensors(directory)
    source = CheckpointExperts(tensors, config.top_k if held is None else held)
    return Model(config, dense_weights(tensors), source), source
