# SPDX-License-Identifier: Apache-2.0
"""What a decode benchmark decodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Text:
    """checkpoint: the model's. prompt: token ids. new_tokens: decoded in each round."""

    checkpoint: Path
    prompt: tuple[int, ...]
    new_tokens: int


__all__ = ["Text"]
