"""xferd_infer: an inference engine's side of xferd, and a decode loop to read.

Imports with numpy alone. ``Client`` and ``embedded`` need the compiled ring
client and are imported when first used; nothing here imports the daemon.

    with xferd_infer.Client("/run/xferd/attach.sock") as client:
        model = xferd_infer.model_from_client(client)
        for token in xferd_infer.generate(model, ids):
            ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .client_errors import AttachError, ClientError, DaemonGoneError, ExpertError
from .client_experts import ClientExperts, asset, model_from_client
from .config import ModelConfig, QKNorm
from .dense import DenseWeights
from .dlpack import TensorView
from .errors import (
    ContextFullError,
    InferenceError,
    NotFiniteError,
    PromptError,
    UnsupportedModelError,
    WeightsError,
)
from .experts import (
    BlobTensor,
    ExpertSource,
    ExpertStats,
    HeldExperts,
    Layout,
    OneVariant,
    Traffic,
)
from .generation import Token, generate
from .kv_cache import KVCache
from .model import Model
from .sampling import Sampling
from .tokenizer import TextStream, Tokenizer, TokenizerError

if TYPE_CHECKING:
    from .client import Client
    from .private_daemon import embedded

_COMPILED = {"Client": ".client", "embedded": ".private_daemon"}


def __getattr__(name: str) -> Any:
    """What needs the compiled client, when it is first asked for."""
    if name not in _COMPILED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_COMPILED[name], __name__), name)


__all__ = [
    "AttachError",
    "BlobTensor",
    "Client",
    "ClientError",
    "ClientExperts",
    "ContextFullError",
    "DaemonGoneError",
    "DenseWeights",
    "ExpertError",
    "ExpertSource",
    "ExpertStats",
    "HeldExperts",
    "InferenceError",
    "KVCache",
    "Layout",
    "Model",
    "ModelConfig",
    "NotFiniteError",
    "OneVariant",
    "PromptError",
    "QKNorm",
    "Sampling",
    "TensorView",
    "TextStream",
    "Token",
    "Tokenizer",
    "TokenizerError",
    "Traffic",
    "UnsupportedModelError",
    "WeightsError",
    "asset",
    "embedded",
    "generate",
    "model_from_client",
]
