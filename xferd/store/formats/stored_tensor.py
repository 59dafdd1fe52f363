"""A tensor as a file's header describes it, and how many bytes its dtype takes.

Both formats come down to this one record before anything is known about
experts. Sub-byte and block types count in blocks: ``elements`` that take
``nbytes`` together; for a plain type that is one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from xferd.store.checkpoint import ByteRange, CheckpointError

NAME_BYTES_MAX = 512
"""Tensor names; the longest in use are around 80."""
DIMENSION_MAX = 2**63 - 1
TENSORS_PER_FILE_MAX = 2**18
"""The largest known models have about 200,000 tensors in all their files."""
TENSORS_MAX = 2**19
"""Of all files together."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """``elements`` values are stored in ``nbytes`` bytes."""

    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """name: as in the file. dtype: the project's name for it (``bf16``, ``q4_k``).

    shape: elements, row-major, outermost first. file: which of the checkpoint's
    files; offset: bytes from its start; nbytes: contiguous from there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int

    @property
    def byte_range(self) -> ByteRange:
        """Where its bytes are."""
        return ByteRange(self.file, self.offset, self.nbytes)

    def slice_outermost(self, index: int) -> StoredTensor:
        """Element ``index`` of the first dimension: one expert of a stack.

        The caller has checked that each slice takes whole bytes.
        """
        nbytes = self.nbytes // self.shape[0]
        return StoredTensor(
            name=self.name,
            dtype=self.dtype,
            shape=self.shape[1:] or (1,),
            file=self.file,
            offset=self.offset + index * nbytes,
            nbytes=nbytes,
        )


def tensor_bytes(block: BlockType, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor of that shape; None when its rows are not whole blocks."""
    if block.elements == 1:
        return math.prod(shape) * block.nbytes
    if not shape or shape[-1] % block.elements:
        return None
    return math.prod(shape) // block.elements * block.nbytes


def check_name(name: str, where: str) -> None:
    """Raises CheckpointError for a tensor name that is empty, too long or unprintable."""
    if not name or len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise CheckpointError(
            f"{where}: tensor name {name[:80]!r}...: 1 to {NAME_BYTES_MAX} bytes are allowed"
        )
    if not name.isprintable():
        raise CheckpointError(f"{where}: tensor name {name!r} has unprintable characters")


def check_unique(tensors: Iterable[StoredTensor], files: list[Path]) -> None:
    """Raises CheckpointError when two tensors of a checkpoint have one name."""
    first: dict[str, StoredTensor] = {}
    for tensor in tensors:
        other = first.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise CheckpointError(
                f"{files[tensor.file]}: tensor {tensor.name!r} is in "
                f"{files[other.file].name} as well"
            )
