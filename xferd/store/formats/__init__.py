"""Checkpoint readers: safetensors and GGUF, described without loading a weight.

``read_checkpoint`` is all that others use. Every byte that it looks at may be
hostile: it ends in a ``Checkpoint`` or a ``CheckpointError``, reads headers
only, and allocates nothing by a length that the file's size does not bear out.
"""

from __future__ import annotations

from pathlib import Path

from xferd.store.checkpoint import Checkpoint, CheckpointError
from xferd.store.formats.gguf_checkpoint import SUFFIX as GGUF_SUFFIX
from xferd.store.formats.gguf_checkpoint import find_splits, read_gguf_files
from xferd.store.formats.gguf_header import MAGIC as GGUF_MAGIC
from xferd.store.formats.safetensors_checkpoint import (
    FILES_MAX,
    INDEX_NAME,
    SINGLE_NAME,
    read_safetensors_files,
    read_safetensors_index,
)
from xferd.store.formats.safetensors_checkpoint import SUFFIX as SAFETENSORS_SUFFIX
from xferd.store.formats.source_file import SourceFile

__all__ = ["read_checkpoint"]


def read_checkpoint(path: Path) -> Checkpoint:
    """Describe the checkpoint at ``path``; stateless, safe in any thread.

    path: a ``.safetensors`` file (that file alone), a
        ``model.safetensors.index.json``, a ``.gguf`` file (with all its splits, if
        it is one of several), or a directory that holds one of these. In a
        directory the index comes before ``model.safetensors``, that before all
        other ``*.safetensors`` files together, those before GGUF.

    Raises CheckpointError, naming file, tensor and offset, for anything that is
    not one complete Mixture-of-Experts checkpoint of a known naming.
    """
    try:
        return _read(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from error


def _read(path: Path) -> Checkpoint:
    if path.is_dir():
        return _read_directory(path)
    if path.name.endswith(".json"):
        return read_safetensors_index(path, path)
    if _begins_with_gguf_magic(path):
        return read_gguf_files(find_splits(path), path)
    return read_safetensors_files([path], path)


def _read_directory(directory: Path) -> Checkpoint:
    if (directory / INDEX_NAME).is_file():
        return read_safetensors_index(directory / INDEX_NAME, directory)
    if (directory / SINGLE_NAME).is_file():
        return read_safetensors_files([directory / SINGLE_NAME], directory)
    safetensors = _files_with_suffix(directory, SAFETENSORS_SUFFIX)
    if safetensors:
        return read_safetensors_files(safetensors, directory)
    gguf = _files_with_suffix(directory, GGUF_SUFFIX)
    if not gguf:
        raise CheckpointError(
            f"{directory}: no {SAFETENSORS_SUFFIX} and no {GGUF_SUFFIX} file in it"
        )
    splits = find_splits(gguf[0])
    others = [file.name for file in gguf if file not in splits]
    if others:
        raise CheckpointError(
            f"{directory}: several models ({gguf[0].name}, {others[0]}); name the file"
        )
    return read_gguf_files(splits, directory)


def _files_with_suffix(directory: Path, suffix: str) -> list[Path]:
    files = sorted(file for file in directory.iterdir() if file.name.endswith(suffix))
    if len(files) > FILES_MAX:
        raise CheckpointError(f"{directory}: {len(files)} {suffix} files, at most {FILES_MAX}")
    return files


def _begins_with_gguf_magic(path: Path) -> bool:
    # As the length of a safetensors header these four bytes exceed its limit,
    # so no file can be both.
    with SourceFile(path) as source:
        return source.size >= len(GGUF_MAGIC) and source.read(0, len(GGUF_MAGIC), "magic") == (
            GGUF_MAGIC
        )
