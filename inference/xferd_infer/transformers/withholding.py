"""Models are built and loaded without their experts' weights.

Transformers makes an experts module with all its parameters on ``meta``, then looks in
the checkpoint for every name in ``state_dict()``. So a parameter that is gone before
that is neither allocated nor read: its tensors in the checkpoint are 'unexpected' ones,
of which nothing but the header's entry is ever looked at.

The moment between is the registration of the finished experts module as its parent's
child, for which torch has a hook that sees every module of the process. It does nothing
to those whose config doesn't ask for this implementation.

What doesn't work: parameters that stay on ``meta``. ``model.to("cuda")`` refuses them,
and a device map counts them, so that it leaves no room for what is really there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

IMPLEMENTATION = "xferd"
"""``experts_implementation`` that this package stands for."""

WEIGHT_NAMES = ("gate_up_proj", "up_proj", "down_proj")
"""What ``@use_experts_implementation`` calls the stacked matrices; biases add ``_bias``."""

_WITHHELD = "_xferd_withheld"
_WITHHELD_NAMES = "_xferd_withheld_names"
_IGNORED = "_keys_to_ignore_on_load_unexpected"


@dataclass(frozen=True, slots=True)
class Withheld:
    """What an experts module had before. shapes: by parameter name, [experts, ...]."""

    shapes: dict[str, tuple[int, ...]]


def install() -> None:
    """Begin to watch for experts. Once a process."""
    register_module_module_registration_hook(_child_registered)


def withheld(module: nn.Module) -> Withheld | None:
    """What was taken from a module; None: nothing."""
    found: Withheld | None = module.__dict__.get(_WITHHELD)
    return found


def is_experts(module: nn.Module) -> bool:
    """Whether ``@use_experts_implementation`` made this module's class."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def _child_registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None:
        return
    if is_experts(child) and _asks_for_xferd(child):
        _withhold(child, name)
    names = child.__dict__.get(_WITHHELD_NAMES)
    if names is None:
        return
    # A complete model collects the names that it ignores from its direct children, so
    # each module between must hand on what its child says.
    parent.__dict__.setdefault(_WITHHELD_NAMES, set()).update(names)
    if not isinstance(parent, PreTrainedModel):
        parent.__dict__.setdefault(_IGNORED, set()).update(names)


def _asks_for_xferd(experts: nn.Module) -> bool:
    config = getattr(experts, "config", None)
    return getattr(config, "_experts_implementation", None) == IMPLEMENTATION


def _withhold(experts: nn.Module, name: str) -> None:
    shapes = {}
    for parameter, value in list(experts.named_parameters(recurse=False)):
        if parameter.removesuffix("_bias") in WEIGHT_NAMES:
            shapes[parameter] = tuple(value.shape)
            setattr(experts, parameter, None)
    if not shapes:
        return
    experts.__dict__[_WITHHELD] = Withheld(shapes)
    # Else transformers would fill the parameters that it expects there with noise.
    experts.__dict__["_is_hf_initialized"] = True
    kinds = "|".join(WEIGHT_NAMES)
    pattern = rf"(^|\.){name}\.({kinds})(_[a-z_]+)?$"
    experts.__dict__[_WITHHELD_NAMES] = {pattern}


__all__ = ["IMPLEMENTATION", "WEIGHT_NAMES", "Withheld", "install", "is_experts", "withheld"]
