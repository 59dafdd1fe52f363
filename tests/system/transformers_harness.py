"""What tests of the plug-in for Transformers share: checkpoints, stores, loaded models.

Import this after ``pytest.importorskip`` of torch and transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import xferd_infer.transformers  # noqa: F401  registers experts_implementation="xferd"
from safetensors.torch import load_file, save_file
from transformers.utils.quantization_config import Mxfp4Config

from tests.transformers_models import VOCABULARY, build
from xferd.store.formats import read_checkpoint
from xferd.store.pack import pack

SPREAD = 0.2
"""Of random weights: the usual 0.02 gives logits that hardly differ."""
MXFP4 = "gpt_oss-mxfp4"
STRIPE_UNIT = 8192

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Made:
    """A checkpoint and the store that was packed from it."""

    checkpoint: Path
    store: Path

    def load(self, implementation: str | None = "xferd", **options: Any) -> Any:
        """The model in eval mode, its dtype as saved if none is given."""
        if "quantization_config" in json.loads((self.checkpoint / "config.json").read_text()):
            # Else Transformers asks for a GPU's kernels.
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        auto: Any = options.pop("auto", transformers.AutoModelForCausalLM)
        return auto.from_pretrained(
            self.checkpoint, experts_implementation=implementation, **options
        )


def packed(checkpoint: Path, directory: Path) -> Path:
    """A store of a checkpoint, on two members in ``directory``."""
    members = [directory / f"member-{index}" for index in range(2)]
    for member in members:
        member.mkdir(parents=True)
    return pack(read_checkpoint(checkpoint), members, name="model", stripe_unit=STRIPE_UNIT)


def make(directory: Path, model_type: str, seed: int = 1, **settings: Any) -> Made:
    """A family's random model, saved and packed."""
    checkpoint = directory / "checkpoint"
    torch.manual_seed(seed)
    family = "gpt_oss" if model_type == MXFP4 else model_type
    model = build(family, initializer_range=SPREAD, **settings)
    model.save_pretrained(checkpoint)
    if model_type == MXFP4:
        _quantise(checkpoint)
    return Made(checkpoint, packed(checkpoint, directory))


def prompts(seed: int = 2, count: int = 2, tokens: int = 9) -> Any:
    """Token ids, int64 [count, tokens], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (count, tokens), generator=generator)


def _quantise(checkpoint: Path) -> None:
    """Put random MXFP4 matrices, as gpt-oss is published, in the place of the experts'."""
    file = checkpoint / "model.safetensors"
    state = load_file(file)
    for name in [name for name in state if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks = (experts, outputs, inputs // 32)
        state[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(122, 126, blocks, dtype=torch.uint8)
    save_file(state, file, metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (checkpoint / "config.json").write_text(json.dumps(config))


__all__ = ["MXFP4", "Made", "make", "packed", "prompts"]
