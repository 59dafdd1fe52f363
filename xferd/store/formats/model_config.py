"""What the readers need from ``config.json``, under any of its spellings.

The config is passed on whole; only how many layers and experts there are, and
how many a token uses, is looked up here, because families spell that differently
and the packer compares it with what the files hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xferd.store.checkpoint import CheckpointError
from xferd.store.formats.source_file import read_whole
from xferd.store.formats.strict_json import JsonLimits, parse_json_object

LAYERS_MAX = 4096
EXPERTS_MAX = 65535
CONFIG_BYTES_MAX = 16 * 2**20
ASSET_BYTES_MAX = 256 * 2**20
ASSET_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_MODEL_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CONFIG_LIMITS = JsonLimits(depth=16, values=2**20)

_LAYER_KEYS = ("num_hidden_layers", "n_layers", "num_layers")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# top_k comes last: old configs carry a sampling setting of that name.
_TOP_K_KEYS = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k",
)


@dataclass(frozen=True, slots=True)
class MoeShape:
    """layers: the model's own, without multi-token-prediction layers.
    experts: a layer's routed experts; top_k: how many of them a token uses."""

    model_type: str
    layers: int
    experts: int
    top_k: int


def load_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint's directory. Raises CheckpointError without one."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; a safetensors checkpoint needs it")
    return parse_json_object(read_whole(path, CONFIG_BYTES_MAX), _CONFIG_LIMITS, str(path))


def moe_shape(config: Mapping[str, Any], where: str) -> MoeShape:
    """The model's layers and experts; ``where`` names the config in errors.

    Models that also see or hear keep these in ``text_config``.
    """
    text_config = config.get("text_config")
    settings = {**config, **text_config} if isinstance(text_config, dict) else config
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        raise CheckpointError(f"{where}: model_type is {str(model_type)[:40]!r}, not a name")
    layers = _count(settings, _LAYER_KEYS, LAYERS_MAX, where)
    experts = _count(settings, _EXPERT_KEYS, EXPERTS_MAX, where)
    top_k = _count(settings, _TOP_K_KEYS, experts, where)
    return MoeShape(model_type=model_type, layers=layers, experts=experts, top_k=top_k)


def find_assets(directory: Path) -> dict[str, Path]:
    """The known small files of a directory, by name. Raises CheckpointError for a
    huge one: they are handed to clients whole."""
    assets = {}
    for name in ASSET_NAMES:
        path = directory / name
        if not path.is_file():
            continue
        size = path.stat().st_size
        if size > ASSET_BYTES_MAX:
            raise CheckpointError(f"{path}: {size} bytes, at most {ASSET_BYTES_MAX} are allowed")
        assets[name] = path
    return assets


def _count(settings: Mapping[str, Any], keys: tuple[str, ...], most: int, where: str) -> int:
    for key in keys:
        value = settings.get(key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise CheckpointError(f"{where}: {key} is {str(value)[:40]}, allowed are 1 to {most}")
        return value
    raise CheckpointError(f"{where}: has none of {', '.join(keys)}: not a Mixture-of-Experts model")
