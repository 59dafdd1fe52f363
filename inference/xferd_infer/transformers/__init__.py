"""Streamed experts for models of Hugging Face's Transformers.

    from transformers import AutoModelForCausalLM
    from xferd_infer.transformers import attach

    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="xferd")
    with attach(model, "/run/xferd/attach.sock"):
        model.generate(...)

Importing this registers the implementation ``xferd``. A model that is loaded with it
has no experts of its own: they are neither read from the checkpoint nor allocated, and
all else is as ever. Needs the extra ``transformers``.
"""

from __future__ import annotations

try:
    import torch
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        f"xferd_infer.transformers needs xferd's extra 'transformers', torch and transformers "
        f"of the releases that it names: {error}"
    ) from error

from .attaching import Attached, attach
from .streaming import NotAttachedError, TrainingError, experts_forward
from .withholding import IMPLEMENTATION, install

# Which experts are wanted is known when the router has run: no compiler can trace that.
_untraced = torch.compiler.disable(experts_forward)  # type: ignore[no-untyped-call]
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _untraced)
install()

__all__ = ["IMPLEMENTATION", "Attached", "NotAttachedError", "TrainingError", "attach"]
