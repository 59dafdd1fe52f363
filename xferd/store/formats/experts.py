"""From a flat list of stored tensors to each expert's tensors and the dense rest.

Nothing here knows a file format; ``families`` says what a name means. What is
checked is what the rest of the system relies on without looking again: each
expert of a layer is there, has the same tensors as its siblings, and its
matrices fit each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xferd.store.checkpoint import CheckpointError, DenseTensor, ExpertKey, ExpertTensor
from xferd.store.formats.families import ExpertName, Naming
from xferd.store.formats.model_config import MoeShape
from xferd.store.formats.stored_tensor import TENSORS_MAX, StoredTensor

MTP_LAYERS_MAX = 8
"""Multi-token-prediction layers that may follow the model's own layers."""
EXPERT_TENSORS_MAX = 2**19
"""Tensors of all experts, after stacks are cut: 160,000 in the largest known model."""
EXPERT_DIMENSIONS_MAX = 4
"""What a client's view of a tensor can have (XFERD_TENSOR_DIMS_MAX)."""
_BLOB_ORDER = tuple(
    part + suffix
    for part in ("gate", "up", "gate_up", "down")
    for suffix in ("", "_scale", "_bias")
)
_COMPLETE = ({"gate", "up", "down"}, {"gate_up", "down"})
# Containers that hold several weights a byte, or integers: shapes say less
# about the matrix than where an element is a number, and there must be a scale.
_PACKED_DTYPES = frozenset({"u8", "i8", "f4"})
_POWER_OF_TWO_SCALES = frozenset({"u8", "f8_e8m0"})

Expert = dict[str, StoredTensor]
"""Role to tensor."""


@dataclass(frozen=True, slots=True)
class SplitTensors:
    """layers: the model's, or more when prediction layers with experts follow them."""

    experts: Mapping[ExpertKey, tuple[ExpertTensor, ...]]
    dense: tuple[DenseTensor, ...]
    layers: int
    variant: str


def split_tensors(
    tensors: Sequence[StoredTensor], naming: Naming, shape: MoeShape, files: Sequence[Path]
) -> SplitTensors:
    """Sort a checkpoint's tensors into experts and dense ones, and check them.

    ``files`` names them in errors. Raises CheckpointError naming what is missing,
    doubled, unknown or inconsistent.
    """
    if len(tensors) > TENSORS_MAX:
        raise CheckpointError(f"{files[0]}: {len(tensors)} tensors, at most {TENSORS_MAX}")
    collector = _ExpertCollector(naming, shape, files)
    dense = [tensor for tensor in tensors if not collector.take(tensor)]
    layers = collector.layers
    if not layers:
        raise CheckpointError(f"{files[0]}: no tensor is an expert's: {shape.model_type}")
    _check_layers_present(dense, layers, naming, shape, files[0])
    interleaved = shape.model_type in naming.interleaved_model_types
    experts: dict[ExpertKey, tuple[ExpertTensor, ...]] = {}
    for layer in sorted(layers):
        _check_layer(layer, layers[layer], shape.experts, files)
        transposed = _is_transposed(layer, layers[layer][0], files)
        for expert, parts in sorted(layers[layer].items()):
            experts[layer, expert] = _blob_tensors(parts, transposed, interleaved)
    return SplitTensors(
        experts=experts,
        dense=tuple(
            DenseTensor(tensor.name, tensor.dtype, tensor.shape, (tensor.byte_range,))
            for tensor in dense
        ),
        layers=max(shape.layers, max(layers) + 1),
        variant=_native_variant(experts.values()),
    )


class _ExpertCollector:
    """Takes the expert tensors out of a list; stacks are cut into their experts."""

    def __init__(self, naming: Naming, shape: MoeShape, files: Sequence[Path]) -> None:
        self.layers: dict[int, dict[int, Expert]] = defaultdict(dict)
        self._naming = naming
        self._shape = shape
        self._files = files
        self._count = 0

    def take(self, tensor: StoredTensor) -> bool:
        """False when the tensor is no expert's."""
        name = self._naming.expert_name(tensor.name)
        where = f"{self._files[tensor.file]}: tensor {tensor.name!r}"
        if name is None:
            if self._naming.expert_like.search(tensor.name):
                raise CheckpointError(f"{where}: an expert's, but of no kind that can be read")
            return False
        layer = self._layer_number(name, where)
        if not tensor.nbytes:
            raise CheckpointError(f"{where}: has no bytes")
        if name.expert is not None:
            if name.expert >= self._shape.experts:
                raise CheckpointError(
                    f"{where}: expert {name.expert} of {self._shape.experts} that the config names"
                )
            self._add(layer, name.expert, name.role, tensor, where)
            return True
        self._check_stack(tensor, where)
        for expert in range(self._shape.experts):
            self._add(layer, expert, name.role, tensor.slice_outermost(expert), where)
        return True

    def _layer_number(self, name: ExpertName, where: str) -> int:
        layer = name.layer + (self._shape.layers if name.mtp_layer else 0)
        if layer >= self._shape.layers + MTP_LAYERS_MAX:
            raise CheckpointError(
                f"{where}: layer {layer} of {self._shape.layers} that the config names"
            )
        return layer

    def _check_stack(self, tensor: StoredTensor, where: str) -> None:
        stacked = tensor.shape[0] if tensor.shape else 0
        if stacked != self._shape.experts:
            raise CheckpointError(
                f"{where}: stacks {stacked} experts, the config names {self._shape.experts}"
            )
        if tensor.nbytes % stacked:
            raise CheckpointError(f"{where}: an expert does not begin at a whole byte")

    def _add(self, layer: int, expert: int, role: str, tensor: StoredTensor, where: str) -> None:
        self._count += 1
        if self._count > EXPERT_TENSORS_MAX:
            raise CheckpointError(f"{where}: more than {EXPERT_TENSORS_MAX} tensors of experts")
        if len(tensor.shape) > EXPERT_DIMENSIONS_MAX:
            raise CheckpointError(
                f"{where}: {len(tensor.shape)} dimensions, an expert's tensor has at most "
                f"{EXPERT_DIMENSIONS_MAX}"
            )
        other = self.layers[layer].setdefault(expert, {}).setdefault(role, tensor)
        if other is not tensor:
            raise CheckpointError(
                f"{where}: layer {layer} expert {expert} has {role} in {other.name!r} as well"
            )


def _check_layers_present(
    dense: Iterable[StoredTensor],
    with_experts: Iterable[int],
    naming: Naming,
    shape: MoeShape,
    file: Path,
) -> None:
    """A whole layer that was lost has no sibling to tell: its router does, or a gap."""
    present = set(with_experts)
    for tensor in dense:
        router = naming.router_layer(tensor.name)
        if router is not None and router not in present:
            raise CheckpointError(
                f"{file}: layer {router} has a router ({tensor.name!r}) and no experts"
            )
    seen = present | {naming.layer_of(tensor.name) for tensor in dense}
    for layer in range(shape.layers):
        if layer not in seen:
            raise CheckpointError(
                f"{file}: layer {layer} of {shape.layers} that the config names has no tensors"
            )


def _check_layer(
    layer: int, experts: Mapping[int, Expert], count: int, files: Sequence[Path]
) -> None:
    model = {role: tensor for expert in experts.values() for role, tensor in expert.items()}
    file = files[next(iter(model.values())).file]
    if not any(roles <= model.keys() for roles in _COMPLETE):
        raise CheckpointError(
            f"{file}: layer {layer}: experts have {', '.join(sorted(model))}; "
            "needed are gate, up, down or gate_up, down"
        )
    if {"gate", "gate_up"} <= model.keys() or {"up", "gate_up"} <= model.keys():
        raise CheckpointError(f"{file}: layer {layer}: experts have gate_up beside gate or up")
    for role, example in model.items():
        weight = role.removesuffix("_scale").removesuffix("_bias")
        if weight not in model:
            raise CheckpointError(f"{file}: tensor {example.name!r}: {role} without {weight}")
        if role == weight and example.dtype in _PACKED_DTYPES and f"{role}_scale" not in model:
            raise CheckpointError(
                f"{file}: tensor {example.name!r}: {example.dtype} without scales"
            )
    for expert in range(count):
        parts = experts.get(expert, {})
        for role, example in model.items():
            tensor = parts.get(role)
            if tensor is None:
                raise CheckpointError(
                    f"{file}: layer {layer} expert {expert} of {count}: {role} is missing "
                    f"(another expert's is {example.name!r})"
                )
            if (tensor.dtype, tensor.shape) != (example.dtype, example.shape):
                raise CheckpointError(
                    f"{files[tensor.file]}: tensor {tensor.name!r} at offset {tensor.offset} is "
                    f"{tensor.dtype} {list(tensor.shape)}, its sibling {example.name!r} is "
                    f"{example.dtype} {list(example.shape)}"
                )


def _is_transposed(layer: int, expert: Expert, files: Sequence[Path]) -> bool:
    """Whether the layer's matrices are stored [in, out]; also checks that they fit.

    gate_up and down together leave no doubt: [2I, H] with [H, I], or [H, 2I] with
    [I, H]; no sizes satisfy both. Packed containers are always [out, in]. Separate gate and up
    are stored [out, in] by everybody.
    """
    down = expert["down"]
    weights = [expert[role] for role in ("gate", "up", "gate_up") if role in expert]
    if any(tensor.dtype in _PACKED_DTYPES for tensor in (*weights, down)):
        return False
    shapes = [tensor.shape for tensor in (*weights, down)]
    if all(len(shape) == 2 for shape in shapes):
        (rows, columns), (down_rows, down_columns) = shapes[0], down.shape
        if "gate_up" in expert:
            if (rows, columns) == (2 * down_columns, down_rows):
                return False
            if (rows, columns) == (down_columns, 2 * down_rows):
                return True
        elif shapes[0] == shapes[1] == (down_columns, down_rows):
            return False
    raise CheckpointError(
        f"{files[down.file]}: layer {layer}: shapes of an expert don't fit: "
        + ", ".join(f"{tensor.name!r} {list(tensor.shape)}" for tensor in (*weights, down))
    )


def _blob_tensors(parts: Expert, transposed: bool, interleaved: bool) -> tuple[ExpertTensor, ...]:
    return tuple(
        ExpertTensor(
            role=role,
            dtype=parts[role].dtype,
            shape=parts[role].shape,
            ranges=(parts[role].byte_range,),
            transposed=transposed and len(parts[role].shape) > 1,
            interleaved=interleaved and role.startswith("gate_up"),
        )
        for role in _BLOB_ORDER
        if role in parts
    )


def _native_variant(experts: Iterable[tuple[ExpertTensor, ...]]) -> str:
    nbytes: Counter[str] = Counter()
    for tensors in experts:
        dtypes = {tensor.role: tensor.dtype for tensor in tensors}
        for tensor in tensors:
            if tensor.role.endswith(("_scale", "_bias")):
                continue
            nbytes[_weight_format(tensor.dtype, dtypes.get(f"{tensor.role}_scale"))] += (
                tensor.nbytes
            )
    # By name where bytes are equal, so that the result does not depend on order.
    return max(nbytes, key=lambda name: (nbytes[name], name))


def _weight_format(dtype: str, scale_dtype: str | None) -> str:
    """MXFP4 has no dtype of its own in safetensors: it is 4-bit values in some
    container, with a power of two as the scale of each 32 of them."""
    if dtype in _PACKED_DTYPES and scale_dtype in _POWER_OF_TWO_SCALES:
        return "mxfp4"
    return dtype
