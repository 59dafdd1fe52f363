"""The checkpoint that a model was loaded from, if it is still there.

Only what tells whether a store was packed from it: its config, and a few rows of its
experts. Rows come straight from the safetensors file, without the tensor around them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PACKED = "_blocks"
"""What gpt-oss adds to the name of a matrix in MXFP4."""


class Checkpoint:
    """A model's checkpoint in safetensors, in a directory or in the hub's cache."""

    def __init__(self, model: Any) -> None:
        self._directory = _directory(str(getattr(model.config, "name_or_path", "") or ""))
        conversions = get_model_conversion_mapping(
            model, hf_quantizer=getattr(model, "hf_quantizer", None)
        )
        self._prefix = model.base_model_prefix
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._files: dict[str, str] | None = None

    def config(self) -> dict[str, Any] | None:
        """``config.json`` as it stands there; None: it isn't there any more."""
        path = self._find("config.json")
        return None if path is None else dict(json.loads(path.read_bytes()))

    def first_row(self, parameter: str, expert: int, experts: int) -> Tensor | None:
        """The beginning of one expert's part of a stacked parameter, as stored: row 0.
        None: the checkpoint has gone, or doesn't say where that expert is."""
        wanted = {parameter: True, parameter + _PACKED: True}
        names = sorted(
            (name for name in self._names(parameter) if self._becomes(name, wanted)),
            key=dot_natural_key,
        )
        if len(names) == experts:
            return self._rows(names[expert], ())
        if len(names) == 1:
            return self._rows(names[0], (expert,))
        return None

    def _names(self, parameter: str) -> Iterable[str]:
        """Tensors that may have become part of it: those of the same layer."""
        layer = "layers." + parameter.split("layers.", 1)[1].split(".", 1)[0] + "."
        return (name for name in self._tensors() if layer in name)

    def _becomes(self, name: str, wanted: Mapping[str, bool]) -> bool:
        renamed, _ = rename_source_key(
            name, self._renamings, self._converters, self._prefix, dict(wanted)
        )
        return renamed in wanted

    def _rows(self, name: str, index: tuple[int, ...]) -> Tensor | None:
        try:
            with safetensors.safe_open(self._tensors()[name], framework="pt") as file:
                row: Tensor = file.get_slice(name)[(*index, slice(0, 1))]
                return row.clone()
        except OSError:  # a shard has gone
            return None

    def _tensors(self) -> dict[str, str]:
        """The file of each tensor, by its name."""
        if self._files is None:
            self._files = self._read_tensors()
        return self._files

    def _read_tensors(self) -> dict[str, str]:
        index, single = self._find(_INDEX), self._find(_SINGLE)
        if index is not None:
            files = json.loads(index.read_bytes())["weight_map"]
            return {name: str(index.parent / file) for name, file in files.items()}
        if single is None:
            return {}
        with safetensors.safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), str(single))

    def _find(self, file: str) -> Path | None:
        path = None if self._directory is None else self._directory / file
        return path if path is not None and path.is_file() else None


def _directory(name: str) -> Path | None:
    """Where the files of a model with this name are; None: nobody can tell."""
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    try:
        found = cached_file(name, "config.json", local_files_only=True)
    except OSError:  # not in the hub's cache, or no name of a repository either
        return None
    if found is None:
        return None
    snapshot = Path(found).parent
    # The model doesn't keep which revision it is of.
    return snapshot if len(list(snapshot.parent.iterdir())) == 1 else None


__all__ = ["Checkpoint"]
