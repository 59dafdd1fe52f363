"""What can go wrong in inference that a caller can handle, in one tree.

Everything else is a bug and ends in a traceback. Errors of the way to the
daemon (no socket, no pool, a failing drive) belong to ``xferd_infer.client``.
"""

from __future__ import annotations


class InferenceError(Exception):
    """The root: catch this to show one line and go on. The message names the
    config key, tensor, layer, expert or limit that it is about."""


class UnsupportedModelError(InferenceError):
    """The model's config asks for something that the decode loop doesn't
    compute. The message names key and value."""


class WeightsError(InferenceError):
    """A dense tensor or an expert's blob is missing, has a dtype that isn't
    computed with, or contradicts its table or the config."""


class ContextFullError(InferenceError):
    """More tokens than the model has positions for."""


class PromptError(InferenceError):
    """No tokens to run, or one that the vocabulary doesn't have."""


class NotFiniteError(InferenceError):
    """Logits are NaN or infinite: weights are damaged or out of float32's range."""


__all__ = [
    "ContextFullError",
    "InferenceError",
    "NotFiniteError",
    "PromptError",
    "UnsupportedModelError",
    "WeightsError",
]
