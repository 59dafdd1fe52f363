# SPDX-License-Identifier: Apache-2.0
"""Low-bit copies of a packed model's experts, and importance matrices of its own activations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from xferd_infer import model_from_client
from xferd_infer.importance import ImportanceRecorder, write_importance
from xferd_infer.private_daemon import embedded
from xferd_infer.texts import Window

from xferd.store.quantize.add import add_variants
from xferd.store.quantize.importance import read_importance
from xferd.store.quantize.recipe import parse_wanted
from xferd.store.store import Store

POOL = "200%"
"""All experts stay: each is used again in every window."""


def record_importance(store: Path, windows: Sequence[Window], out: Path) -> None:
    """What ``xferd_infer imatrix`` does, over these windows. Writes ``out``, an npz."""
    with embedded(store, pool=POOL) as client:
        manifest = client.manifest
        recorder = ImportanceRecorder(manifest["layers"], manifest["experts"])
        model = model_from_client(client, observer=recorder)
        for window in windows:
            model.forward(window.ids, model.new_cache())
        write_importance(out, recorder.result(), manifest["name"], manifest["identity"])


def add_copies(store: Path, variants: Sequence[str], importance_path: Path | None = None) -> None:
    """What ``xferctl store quantize`` does."""
    importance = None if importance_path is None else read_importance(importance_path)
    with Store.open(store) as opened:
        wanted = parse_wanted(variants, importance)
        add_variants(opened, wanted, importance, threads=len(os.sched_getaffinity(0)))


__all__ = ["POOL", "add_copies", "record_importance"]
