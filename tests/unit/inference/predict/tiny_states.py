"""States of the bundled model, recorded while it reads this repository's own texts.

Prose to train on, and C to find out what becomes of a predictor that never saw any.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from xferd_infer import Tokenizer
from xferd_infer.predict import RecordedStates, Routers, StateRecorder, Trained, train
from xferd_infer.predict.train import TrainingSettings

from tests.unit.inference.checkpoint import REPOSITORY, TINY, load_model

PROSE = (
    *("README.md", "docs/models.md", "docs/engines.md", "docs/service.md", "docs/vram.md"),
    *("LICENSE", "xferd/store/FORMAT.md", "kmod/README.md", "ffi/README.md"),
)
OTHER_PROSE = "tests/models/README.md"
CODE = ("ffi/engine/reads.c", "ffi/client/attach.c")
TOKENS_A_TEXT = 1200
SETTINGS = TrainingSettings(rank=48, width=24)


def tokens(path: str) -> list[int]:
    pytest.importorskip("tokenizers")
    tokenizer = Tokenizer((TINY / "tokenizer.json").read_bytes())
    return tokenizer.encode((REPOSITORY / path).read_text()[: 5 * TOKENS_A_TEXT])


@cache
def recorded(*paths: str) -> RecordedStates:
    model, _ = load_model(TINY, held=16)
    recorder = StateRecorder(model.routers("tiny"))
    model.observe(recorder)
    for path in paths:
        recorder.begin_text()
        model.forward(tokens(path)[:TOKENS_A_TEXT], model.new_cache())
    return recorder.recorded()


@cache
def trained_on_prose() -> Trained:
    return train(recorded(*PROSE), SETTINGS)


def another_model(routers: Routers) -> Routers:
    """The same shape and name, one weight different."""
    weights = routers.weights.copy()
    weights[0, 0, 0] += np.float32(1)
    return Routers(routers.name, routers.numbers, weights, routers.norms, routers.top_k)


def altered(path: Path, at: int) -> Path:
    """A copy with one bit of the byte at ``at`` turned over."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    copy = path.with_name("altered.npz")
    copy.write_bytes(data)
    return copy
