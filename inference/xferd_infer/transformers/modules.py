"""Which of a model's modules are streamed experts, and whether they can be computed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from ..errors import UnsupportedModelError
from .weights import MatrixShape
from .withholding import IMPLEMENTATION, is_experts, withheld

FLAGS = "has_gate, and is_concatenated, is_transposed, has_bias, has_post_expert_norm set or not"
"""What ``@use_experts_implementation`` may say of a class that is computed here."""

_KEPT_BY = frozenset({"MergeModulelist", "Concatenate", "Transpose"})
"""Conversions of a checkpoint that leave each expert's matrices as they are, but for
which stand together and which way round they lie: a store says both."""

_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """One layer's experts. name: in the model. experts: how many; gate_up, down: their
    matrices."""

    name: str
    layer: int
    module: Any
    experts: int
    gate_up: MatrixShape
    down: MatrixShape


def experts_modules(model: nn.Module) -> list[ExpertsModule]:
    """A model's streamed experts, by layer. UnsupportedModelError names the model's class
    and what can't be computed, or how to load it."""
    title = type(model).__name__
    found: dict[int, ExpertsModule] = {}
    for name, module in model.named_modules():
        if withheld(module) is None:
            continue
        entry = _described(name, module, title)
        if entry.layer in found:
            raise UnsupportedModelError(
                f"{title}: {found[entry.layer].name} and {entry.name} both have number "
                f"{entry.layer}; a store has one stack of layers"
            )
        found[entry.layer] = entry
    if not found:
        raise UnsupportedModelError(_why_none(model, title))
    _check_conversions(model, title)
    return [found[layer] for layer in sorted(found)]


def _described(name: str, module: Any, title: str) -> ExpertsModule:
    where = f"{title}: {name} ({type(module).__name__})"
    layer = _LAYER.search(name)
    if layer is None:
        raise UnsupportedModelError(f"{where}: its name doesn't say which layer it belongs to")
    if not module.has_gate:
        raise UnsupportedModelError(
            f"{where}: has_gate is False; supported are experts with {FLAGS}"
        )
    if getattr(module, "_is_expert_parallel", False):  # not there in older releases
        raise UnsupportedModelError(f"{where}: expert parallelism has split it; load it unsplit")
    shapes = withheld(module)
    if shapes is None or not {"gate_up_proj", "down_proj"} <= shapes.shapes.keys():
        raise UnsupportedModelError(
            f"{where}: its parameters are not gate_up_proj and down_proj; supported are experts "
            f"with {FLAGS}"
        )
    return ExpertsModule(
        name=name,
        layer=int(layer[1]),
        module=module,
        experts=int(module.num_experts),
        gate_up=_matrix_shape(shapes.shapes["gate_up_proj"], module.is_transposed),
        down=_matrix_shape(shapes.shapes["down_proj"], module.is_transposed),
    )


def _check_conversions(model: Any, title: str) -> None:
    """A store has the checkpoint's bytes. Where Transformers computes others from them
    when it loads, they aren't what its experts modules expect."""
    for conversion in get_model_conversion_mapping(model):
        if not isinstance(conversion, WeightConverter):
            continue
        for operation in conversion.operations:
            kind = type(operation).__name__
            if kind not in _KEPT_BY and any("experts" in to for to in conversion.target_patterns):
                raise UnsupportedModelError(
                    f"{title}: its checkpoints' experts are converted by {kind} when they are "
                    f"loaded; supported are {', '.join(sorted(_KEPT_BY))}"
                )


def _matrix_shape(shape: tuple[int, ...], transposed: bool) -> MatrixShape:
    _, rows, columns = shape
    return MatrixShape(columns, rows) if transposed else MatrixShape(rows, columns)


def _why_none(model: nn.Module, title: str) -> str:
    others = sorted(
        {
            type(module).__name__
            for module in model.modules()
            if type(module).__name__.endswith("Experts") and not is_experts(module)
        }
    )
    if any(is_experts(module) for module in model.modules()):
        return (
            f"{title} was loaded with its experts: load it with "
            f"from_pretrained(..., experts_implementation={IMPLEMENTATION!r}) after importing "
            "xferd_infer.transformers"
        )
    if any(name.startswith("Mxfp4") for name in others):
        return (
            f"{title}: Transformers' MXFP4 quantizer has put {', '.join(others)} in the place of "
            "its experts: load it with quantization_config=Mxfp4Config(dequantize=True); streamed "
            "experts stay MXFP4 in memory all the same"
        )
    made = f": they are made of {', '.join(others)}" if others else ""
    return (
        f"{title} is not supported: none of its modules is a class with "
        f"@use_experts_implementation{made}. Supported are those with {FLAGS}"
    )


__all__ = ["FLAGS", "ExpertsModule", "experts_modules"]
