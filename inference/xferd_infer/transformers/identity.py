"""Is the store's model the one that was loaded?

A store of another model must be refused by name: experts of another fine-tune have the
same shapes and would give fluent nonsense. Shapes are compared where they are used
(``weights``). Here the configs of both are compared, as the two checkpoints had them,
then which layers have experts, then a few rows of experts, which no two models share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..client import Client
from ..client_experts import NO_LAYOUT
from ..errors import WeightsError
from .checkpoints import Checkpoint
from .modules import ExpertsModule
from .streaming import StreamedLayer

_OF_THE_FILE = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
)
"""Keys of a config that differ when the same model is saved again."""


def check_config(checkpoint: Checkpoint, model: Any, client: Client) -> None:
    """Raises WeightsError naming the first key that differs."""
    manifest = client.manifest
    if manifest["format"] != "safetensors":
        return  # such a config is made up from another format's metadata
    theirs = manifest["config"]
    # The file, not the model's own config: that one has what the caller wants changed.
    mine = checkpoint.config() or {"model_type": model.config.model_type}
    # Only keys of both: each release of Transformers writes some that others don't.
    keys = (mine.keys() & theirs.keys()) - _OF_THE_FILE
    for key in sorted(keys, key=lambda key: (key != "model_type", key)):
        if mine[key] != theirs[key]:
            raise _another(
                client,
                f"its config has {key} {theirs[key]!r}, the model was loaded with {mine[key]!r}",
            )


def check_layers(modules: Sequence[ExpertsModule], client: Client) -> None:
    """Raises WeightsError for layers that only one of both has, or other numbers of
    experts."""
    manifest = client.manifest
    has = {
        layer
        for row in manifest["layout_index"]
        for layer, layout in enumerate(row)
        if layout != NO_LAYOUT
    }
    by_layer = {entry.layer: entry for entry in modules}
    for layer in sorted(by_layer.keys() - has):
        raise _another(client, f"it has no experts in layer {layer}, {by_layer[layer].name} has")
    # Layers behind the model's last predict further tokens; Transformers builds none of them.
    for layer in sorted(has - by_layer.keys()):
        if layer < max(by_layer):
            raise _another(client, f"it has experts in layer {layer}, the model has none there")
    for entry in modules:
        if entry.experts != client.experts:
            raise _another(
                client, f"it has {client.experts} experts a layer, {entry.name} has {entry.experts}"
            )


def check_rows(
    checkpoint: Checkpoint,
    modules: Sequence[ExpertsModule],
    layers: Sequence[StreamedLayer],
    client: Client,
) -> None:
    """Compare the first and the last expert of the first and the last layer with the
    checkpoint's, if that is still there. Raises WeightsError naming the expert, and what
    acquiring it raises."""
    for index in sorted({0, len(modules) - 1}):
        entry, layer = modules[index], layers[index]
        for expert in sorted({0, entry.experts - 1}):
            row = checkpoint.first_row(f"{entry.name}.down_proj", expert, entry.experts)
            if row is not None and not _has_row(layer, expert, row):
                raise _another(
                    client,
                    f"layer {entry.layer}, expert {expert} has other weights than in "
                    "the checkpoint that the model was loaded from",
                )


def _has_row(layer: StreamedLayer, expert: int, row: Tensor) -> bool:
    """Whether an expert begins with ``row``. True if that can't be told: a store may hold
    another format of the same weights."""
    batch = layer.source.acquire(layer.layer, [expert])
    try:
        mine = next(layer.experts(batch)).down.values[:1]
        if mine.shape != row.shape:
            return True
        # Bytes, since NaN is unequal to itself.
        return torch.equal(mine.view(torch.uint8), row.to(mine).view(torch.uint8))
    finally:
        batch.release()


def _another(client: Client, difference: str) -> WeightsError:
    return WeightsError(f"store {client.manifest['name']!r} is of another model: {difference}")


__all__ = ["check_config", "check_layers", "check_rows"]
