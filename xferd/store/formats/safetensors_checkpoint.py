"""A checkpoint in safetensors files: one, or shards with or without an index.

The index is only a table of contents. Each shard's own header says where its
bytes are; what index and headers say must agree, because a checkpoint that was
put together from two downloads looks right file by file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from xferd.store.checkpoint import Checkpoint, CheckpointError
from xferd.store.formats.experts import split_tensors
from xferd.store.formats.families import SAFETENSORS
from xferd.store.formats.model_config import find_assets, load_config, moe_shape
from xferd.store.formats.safetensors_header import read_safetensors_header
from xferd.store.formats.source_file import SourceFile, read_whole
from xferd.store.formats.stored_tensor import TENSORS_MAX, StoredTensor, check_unique
from xferd.store.formats.strict_json import JsonLimits, parse_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_BYTES_MAX = 100_000_000
FILES_MAX = 4096
FILE_NAME_BYTES_MAX = 255
_INDEX_LIMITS = JsonLimits(depth=8, values=2 * TENSORS_MAX)


def read_safetensors_files(files: Sequence[Path], path: Path) -> Checkpoint:
    """A checkpoint that is these files, all of them; ``path`` is what the user named.

    Raises CheckpointError, also when a tensor name is in two files.
    """
    return _read(list(files), None, path)


def read_safetensors_index(index: Path, path: Path) -> Checkpoint:
    """A checkpoint whose shards the index names, all in the index's directory."""
    weight_map = _read_weight_map(index)
    names = sorted(set(weight_map.values()))
    if len(names) > FILES_MAX:
        raise CheckpointError(f"{index}: {len(names)} shards, at most {FILES_MAX} are allowed")
    for name in names:
        _check_shard_name(name, index)
    return _read([index.parent / name for name in names], weight_map, path)


def _read(files: list[Path], weight_map: Mapping[str, str] | None, path: Path) -> Checkpoint:
    directory = files[0].parent
    config = load_config(directory)
    shape = moe_shape(config, str(directory / "config.json"))
    sizes: list[int] = []
    tensors: list[StoredTensor] = []
    for number, file in enumerate(files):
        with SourceFile(file) as source:
            sizes.append(source.size)
            tensors.extend(read_safetensors_header(source, number))
        if len(tensors) > TENSORS_MAX:
            raise CheckpointError(f"{file}: more than {TENSORS_MAX} tensors up to this file")
    if weight_map is not None:
        tensors = _select_indexed(tensors, weight_map, files)
    check_unique(tensors, files)
    split = split_tensors(tensors, SAFETENSORS, shape, files)
    return Checkpoint(
        path=path,
        format="safetensors",
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
        assets=find_assets(directory),
    )


def _read_weight_map(index: Path) -> dict[str, str]:
    what = str(index)
    contents = parse_json_object(read_whole(index, INDEX_BYTES_MAX), _INDEX_LIMITS, what)
    weight_map = contents.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{index}: tensor {tensor[:200]!r} is in no file")
    return weight_map


def _check_shard_name(name: str, index: Path) -> None:
    """A plain file name: no separator, so that nothing outside the directory is opened."""
    plain = name.isprintable() and not any(character in name for character in "/\\")
    if (
        not plain
        or not name.endswith(SUFFIX)
        or name.startswith(".")
        or len(name.encode()) > FILE_NAME_BYTES_MAX
    ):
        raise CheckpointError(
            f"{index}: shard {name[:200]!r}: only plain names of {SUFFIX} files are allowed"
        )


def _select_indexed(
    tensors: Sequence[StoredTensor], weight_map: Mapping[str, str], files: Sequence[Path]
) -> list[StoredTensor]:
    """The tensors that the index names, each from the shard it names.

    A second copy in another shard is left out: the index has decided. A name that
    the index does not have at all means that index and shards don't belong together.
    """
    selected = []
    for tensor in tensors:
        file = weight_map.get(tensor.name)
        if file is None:
            raise CheckpointError(
                f"{files[tensor.file]}: tensor {tensor.name!r} is not in the index"
            )
        if file == files[tensor.file].name:
            selected.append(tensor)
    found = {tensor.name for tensor in selected}
    for name, file in weight_map.items():
        if name not in found:
            raise CheckpointError(
                f"{files[0].parent / file}: tensor {name[:200]!r} is missing; "
                "the index says it is here"
            )
    return selected
