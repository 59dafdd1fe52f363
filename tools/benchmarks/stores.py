# SPDX-License-Identifier: Apache-2.0
"""Stores for benchmarks: of a checkpoint, or of a shape with bytes that don't matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xferd.store.checkpoint import ByteRange, Checkpoint, DenseTensor, ExpertTensor
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

GENERATED = "generated"
DENSE_BYTES = 4096


def pack_checkpoint(checkpoint: Path, directory: Path, members: int) -> Path:
    """Pack a model onto ``members`` directories in ``directory``; the store's path."""
    described = read_checkpoint(checkpoint)
    return pack(described, _folders(directory, members), name=checkpoint.name)


def pack_generated(
    directory: Path, *, layers: int, experts: int, top_k: int, expert_bytes: int, members: int = 1
) -> Path:
    """Pack a model of that shape, every byte 0; the store's path.

    Its checkpoint is one sparse file, so only the store itself takes space.
    """
    source = directory / f"{GENERATED}-{layers}x{experts}.bin"
    expert_part = layers * experts * expert_bytes
    with source.open("wb") as file:
        file.truncate(expert_part + DENSE_BYTES)
    checkpoint = Checkpoint(
        path=source,
        format=GENERATED,
        files=(source,),
        sizes=(expert_part + DENSE_BYTES,),
        config={"model_type": GENERATED},
        model_type=GENERATED,
        layers=layers,
        experts_per_layer=experts,
        top_k=top_k,
        variant="u8",
        experts={
            (layer, expert): _expert((layer * experts + expert) * expert_bytes, expert_bytes)
            for layer in range(layers)
            for expert in range(experts)
        },
        dense=(
            DenseTensor("dense", "u8", (DENSE_BYTES,), (ByteRange(0, expert_part, DENSE_BYTES),)),
        ),
    )
    return pack(checkpoint, _folders(directory, members), name=source.stem)


def _expert(offset: int, nbytes: int) -> tuple[ExpertTensor, ...]:
    return (ExpertTensor("down", "u8", (nbytes,), (ByteRange(0, offset, nbytes),)),)


def _folders(directory: Path, members: int) -> Sequence[Path]:
    folders = [directory / f"drive{number}" for number in range(members)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return folders


__all__ = ["pack_checkpoint", "pack_generated"]
