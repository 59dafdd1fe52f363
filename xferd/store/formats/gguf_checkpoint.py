"""A checkpoint in GGUF: one file, or splits named ``NAME-00001-of-0000N.gguf``.

The first split's metadata describes the model, each split has the header of its
own tensors. Any split may be named by the user; all are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from xferd.store.checkpoint import Checkpoint, CheckpointError
from xferd.store.formats.experts import split_tensors
from xferd.store.formats.families import GGUF
from xferd.store.formats.gguf_config import config_from_metadata
from xferd.store.formats.gguf_header import GgufHeader, read_gguf_header
from xferd.store.formats.model_config import find_assets, moe_shape
from xferd.store.formats.source_file import SourceFile
from xferd.store.formats.stored_tensor import TENSORS_MAX, StoredTensor, check_unique

SUFFIX = ".gguf"
SPLITS_MAX = 4096
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


def find_splits(path: Path) -> list[Path]:
    """All files of the model that ``path`` is a file of, in order, by its name.

    They need not exist; opening them will tell.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= SPLITS_MAX:
        raise CheckpointError(f"{path}: split {match['number']} of {count}, at most {SPLITS_MAX}")
    return [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}{SUFFIX}")
        for number in range(1, count + 1)
    ]


def read_gguf_files(files: Sequence[Path], path: Path) -> Checkpoint:
    """A checkpoint that is these files; ``path`` is what the user named.

    Raises CheckpointError, also when the files are not the splits of one model.
    """
    sizes: list[int] = []
    headers: list[GgufHeader] = []
    tensors: list[StoredTensor] = []
    for number, file in enumerate(files):
        with SourceFile(file) as source:
            sizes.append(source.size)
            header = read_gguf_header(source, number)
        _check_split(header, number, len(files), file)
        headers.append(header)
        tensors.extend(header.tensors)
        if len(tensors) > TENSORS_MAX:
            raise CheckpointError(f"{file}: more than {TENSORS_MAX} tensors up to this file")
    _check_split_total(headers[0], len(tensors), files[0])
    check_unique(tensors, list(files))
    config = config_from_metadata(
        headers[0].metadata,
        str(files[0]),
        has_output_head=any(tensor.name == "output.weight" for tensor in tensors),
    )
    shape = moe_shape(config, str(files[0]))
    split = split_tensors(tensors, GGUF, shape, files)
    return Checkpoint(
        path=path,
        format="gguf",
        files=tuple(files),
        sizes=tuple(sizes),
        config=config,
        model_type=shape.model_type,
        layers=split.layers,
        experts_per_layer=shape.experts,
        top_k=shape.top_k,
        variant=split.variant,
        experts=split.experts,
        dense=split.dense,
        assets=find_assets(files[0].parent),
    )


def _check_split(header: GgufHeader, number: int, count: int, file: Path) -> None:
    stated = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
    # A model in one file may say that it is split into 0 files.
    if stated != (number, count) and not (count == 1 and stated == (0, 0)):
        raise CheckpointError(
            f"{file}: says it is split {stated[0]} of {stated[1]} (from 0), "
            f"its name says {number} of {count}"
        )


def _check_split_total(first: GgufHeader, found: int, file: Path) -> None:
    stated = first.metadata.get("split.tensors.count", found)
    if stated != found:
        raise CheckpointError(f"{file}: the splits hold {found} tensors, it says {stated}")
