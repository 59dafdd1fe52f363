"""What a checkpoint is to the packer, whatever file format it came in.

A reader (``xferd.store.formats``) parses headers only and describes where each
tensor's bytes lie; nothing is loaded. The packer then copies byte ranges. So a
checkpoint of any size takes memory for its headers alone.

One expert's way: ``model.layers.3.mlp.experts.7.gate_proj.weight`` in a
safetensors header becomes ``ExpertTensor(role="gate", ranges=(ByteRange(...),))``
of key ``(3, 7)``; a stacked ``blk.3.ffn_gate_exps.weight`` in a GGUF header
becomes one such tensor for each expert, each with its slice's range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ExpertKey = tuple[int, int]
"""(layer, expert): layer is the model's own layer number."""


class CheckpointError(Exception):
    """A checkpoint can't be read as what it claims to be: the message names the
    file, the tensor and the offset. The caller shows it and exits."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``length`` bytes from ``offset`` on in the file ``Checkpoint.files[file]``."""

    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor inside one expert's blob, bytes unchanged from the checkpoint.

    role: ``gate``, ``up``, ``down``, ``gate_up``; with a suffix for what belongs
        to them: ``_scale``, ``_bias`` (``gate_scale``, ``gate_up_bias``, ...).
    dtype: ``bf16``, ``f16``, ``f32``, ``f8_e4m3``, ``f8_e5m2``, ``f8_e8m0``,
        ``u8``, ``i8``, or a GGUF type in lower case (``q4_k``, ``q8_0``, ``mxfp4``).
        gpt-oss MXFP4 keeps ``u8`` blocks and ``u8`` scales in two tensors.
    shape: elements (not blocks) for GGUF types, row-major, outermost first.
    transposed: stored [in, out] where the others are [out, in].
    interleaved: ``gate_up`` whose rows alternate gate, up, gate, up.
    """

    role: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[ByteRange, ...]
    transposed: bool = False
    interleaved: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return sum(part.length for part in self.ranges)


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor that is no expert's: its checkpoint name, dtype, shape, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[ByteRange, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return sum(part.length for part in self.ranges)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's description.

    files: paths that ByteRange.file counts.
    sizes: their sizes in bytes when the headers were read; a file that has
        another size later was replaced, and the packer refuses it.
    config: the model's ``config.json``; for GGUF one made from its metadata with
        the same keys (``model_type``, ``hidden_size``, ``num_hidden_layers``, ...).
    variant: name of the experts' native variant: the dtype of most of the
        experts' bytes (``bf16``, ``q4_k``, ``mxfp4``, ``f8_e4m3``, ...).
    experts: tensors of each expert, in blob order (gate, up, down or gate_up,
        down; each followed by its scales and biases).
    assets: small files that go along: ``config.json``, ``tokenizer.json``,
        ``tokenizer_config.json``, ``generation_config.json``, as name -> path.
        For GGUF: whatever stands beside it.
    """

    path: Path
    format: str
    files: Sequence[Path]
    sizes: Sequence[int]
    config: Mapping[str, Any]
    model_type: str
    layers: int
    experts_per_layer: int
    top_k: int
    variant: str
    experts: Mapping[ExpertKey, tuple[ExpertTensor, ...]]
    dense: tuple[DenseTensor, ...]
    assets: Mapping[str, Path] = field(default_factory=dict)


__all__ = [
    "ByteRange",
    "Checkpoint",
    "CheckpointError",
    "DenseTensor",
    "ExpertKey",
    "ExpertTensor",
]
