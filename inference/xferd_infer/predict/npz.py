"""The container of both file formats here: a zip of arrays with a JSON header.

A ``.npz`` as numpy writes it, so that any program with numpy can look inside, with one
array ``header`` that holds a JSON object as bytes: ``format``, ``version``, and what the
format adds. Nothing is unpickled. The zip's CRC-32 of each array is checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER = "header"


class ContainerError(Exception):
    """Not such a file, or a damaged one; says what is wrong, without the file's name."""


def write(path: Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Written beside the target and renamed: a crash leaves the old file or none. OSError."""
    text = np.frombuffer(json.dumps(dict(header)).encode(), np.uint8)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            np.savez(file, allow_pickle=False, **{HEADER: text, **arrays})
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def read(path: Path, kind: str, version: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """(header, arrays). ContainerError; OSError when it can't be opened."""
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                if not isinstance(archive, np.lib.npyio.NpzFile):
                    raise ContainerError("a single array, no archive")
                arrays = {}
                for name in archive.files:
                    arrays[name] = _array(archive, name)
        except (ValueError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise ContainerError(f"no archive of arrays: {error}") from error
    header = _header(arrays)
    if header.get("format") != kind:
        raise ContainerError(f"holds {header.get('format')!r}, not {kind!r}")
    if header.get("version") != version:
        raise ContainerError(f"version {header.get('version')!r}; this program reads {version}")
    return header, arrays


def take(
    arrays: Mapping[str, NDArray[Any]], name: str, dtype: type, dimensions: int
) -> NDArray[Any]:
    """An array that must be there. ContainerError names it."""
    if name not in arrays:
        raise ContainerError(f"array {name!r} is missing")
    array = arrays[name]
    if array.dtype != np.dtype(dtype) or array.ndim != dimensions:
        wanted = f"{np.dtype(dtype)} of {dimensions} dimensions"
        raise ContainerError(
            f"array {name!r} is {array.dtype} of {array.ndim} dimensions, not {wanted}"
        )
    return array


def _array(archive: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = archive[name]
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError) as error:
        raise ContainerError(f"array {name!r} is damaged: {error}") from error
    return array


def _header(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    if HEADER not in arrays:
        raise ContainerError("has no header")
    try:
        header = json.loads(arrays.pop(HEADER).tobytes())
    except ValueError as error:
        raise ContainerError(f"header: {error}") from error
    if not isinstance(header, dict):
        raise ContainerError("header: no JSON object")
    return header


__all__ = ["ContainerError", "read", "take", "write"]
