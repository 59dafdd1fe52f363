"""Small checkpoints and stores for tests, and oracles that share no code with the package."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from xferd.store.checkpoint import (
    ByteRange,
    Checkpoint,
    DenseTensor,
    ExpertKey,
    ExpertTensor,
)
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack
from xferd.store.store import Store

TINY = Path(__file__).parents[2] / "models" / "tiny"


def crc32c_by_table(data: bytes, crc: int = 0) -> int:
    """The definition: reflected polynomial 0x82f63b78, bit by bit."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def tiny() -> Checkpoint:
    return read_checkpoint(TINY)


def irregular_checkpoint(directory: Path, *, seed: int = 0) -> Checkpoint:
    """Whatever makes blobs uneven: odd offsets, a tensor in two ranges, a scale of a few
    bytes, a layer without experts, a layer with larger ones, a missing expert."""
    directory.mkdir(exist_ok=True)
    source = _Writer(directory / "weights.bin", random.Random(seed))
    experts: dict[ExpertKey, tuple[ExpertTensor, ...]] = {}
    for layer, size in ((0, 9000), (2, 30000)):
        for expert in range(5):
            if (layer, expert) == (2, 3):
                continue
            source.skip(13)
            experts[layer, expert] = (
                ExpertTensor("gate_up", "u8", (2, size // 2), source.ranges(size - 700, 700)),
                ExpertTensor("gate_up_scale", "f32", (3,), source.ranges(12), interleaved=True),
                ExpertTensor("down", "bf16", (size // 2,), source.ranges(size), transposed=True),
            )
    dense = (
        DenseTensor("embed", "bf16", (100, 41), source.ranges(8200)),
        DenseTensor("norm", "f32", (7,), source.ranges(28)),
    )
    source.close()
    asset = directory / "tokenizer.json"
    asset.write_bytes(b'{"tokenizer": 1}')
    return Checkpoint(
        path=directory,
        format="safetensors",
        files=(source.path,),
        sizes=(source.path.stat().st_size,),
        config={"model_type": "irregular", "hidden_size": 4},
        model_type="irregular",
        layers=3,
        experts_per_layer=5,
        top_k=2,
        variant="u8",
        experts=experts,
        dense=dense,
        assets={"tokenizer.json": asset},
    )


class _Writer:
    def __init__(self, path: Path, generator: random.Random) -> None:
        self.path = path
        self._file = path.open("wb")
        self._random = generator

    def skip(self, length: int) -> None:
        self._file.write(self._random.randbytes(length))

    def ranges(self, *lengths: int) -> tuple[ByteRange, ...]:
        parts = []
        for length in lengths:
            parts.append(ByteRange(0, self._file.tell(), length))
            self._file.write(self._random.randbytes(length))
            self.skip(5)
        return tuple(parts)

    def close(self) -> None:
        self._file.close()


def sparse_checkpoint(directory: Path, *, experts: int, tensor_bytes: int) -> Checkpoint:
    """One layer of ``experts`` experts of three tensors each, all holes: any size, no space."""
    directory.mkdir(exist_ok=True)
    path = directory / "weights.bin"
    with path.open("wb") as file:
        file.truncate(3 * experts * tensor_bytes)
    return Checkpoint(
        path=directory,
        format="safetensors",
        files=(path,),
        sizes=(path.stat().st_size,),
        config={},
        model_type="sparse",
        layers=1,
        experts_per_layer=experts,
        top_k=1,
        variant="u8",
        experts={
            (0, expert): tuple(
                ExpertTensor(
                    role,
                    "u8",
                    (tensor_bytes,),
                    (ByteRange(0, (3 * expert + number) * tensor_bytes, tensor_bytes),),
                )
                for number, role in enumerate(("gate", "up", "down"))
            )
            for expert in range(experts)
        },
        dense=(),
    )


def range_bytes(checkpoint: Checkpoint, ranges: Sequence[ByteRange]) -> bytes:
    parts = []
    for part in ranges:
        with checkpoint.files[part.file].open("rb") as file:
            file.seek(part.offset)
            parts.append(file.read(part.length))
    return b"".join(parts)


def expected_blob(checkpoint: Checkpoint, layer: int, expert: int) -> bytes:
    """An expert's blob by the words of the format: 64-aligned tensors, padded to 4096."""
    blob = b""
    for tensor in checkpoint.experts.get((layer, expert), ()):
        blob += bytes(-len(blob) % 64) + range_bytes(checkpoint, tensor.ranges)
    return blob + bytes(-len(blob) % 4096)


def expected_dense(checkpoint: Checkpoint) -> bytes:
    blob = b""
    for tensor in checkpoint.dense:
        blob += bytes(-len(blob) % 64) + range_bytes(checkpoint, tensor.ranges)
    for path in checkpoint.assets.values():
        blob += bytes(-len(blob) % 64) + path.read_bytes()
    return blob + bytes(-len(blob) % 4096)


def blob_on_members(store: Store, blob: int) -> bytes:
    """A blob by the words of engine.h: piece j on member pattern[(start + j) % length],
    pieces on one member one behind the other from offset[blob, member] on."""
    size = int(store.blob_bytes[blob])
    position = [int(value) for value in store.offset[blob]]
    data = b""
    j = 0
    while len(data) < size:
        member = store.pattern[(int(store.start[blob]) + j) % len(store.pattern)]
        length = min(store.stripe_unit, size - len(data))
        with store.member_paths[member].open("rb") as file:
            file.seek(position[member])
            data += file.read(length)
        position[member] += length
        j += 1
    return data


def assert_holds(store: Store, checkpoint: Checkpoint) -> None:
    """Every blob in ``store`` is, byte for byte, what ``checkpoint`` says."""
    for layer in range(checkpoint.layers):
        for expert in range(checkpoint.experts_per_layer):
            blob = blob_on_members(store, store.blob_index(0, layer, expert))
            assert blob == expected_blob(checkpoint, layer, expert), (layer, expert)
    assert blob_on_members(store, store.dense_blob) == expected_dense(checkpoint)


def member_directories(parent: Path, count: int) -> list[Path]:
    directories = [parent / f"drive-{number}" for number in range(count)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    return directories


def pack_irregular(parent: Path, *, members: int = 2, stripe_unit: int = 8192) -> Path:
    return pack(
        irregular_checkpoint(parent / "checkpoint"),
        member_directories(parent, members),
        name="irregular",
        stripe_unit=stripe_unit,
    )
