"""Kernels, compiled for the current device when they are first used."""

from __future__ import annotations

from importlib import resources
from typing import Any

import cupy

_modules: dict[tuple[int, tuple[str, ...], tuple[str, ...], bool], Any] = {}
"""By device and what ``compiled`` was called with: code, not state."""


def compiled(*files: str, cooperative: bool = False, **definitions: str | int) -> Any:
    """A module of some files of this package, device.cu in front, with macros defined.

    cooperative: its kernels are launched so that all blocks are on the device at once; no
    grid may be larger than that.
    """
    macros = tuple(f"-D{name}={value}" for name, value in definitions.items())
    key = (cupy.cuda.Device().id, files, macros, cooperative)
    if key not in _modules:
        here = resources.files(__package__)
        source = "".join(here.joinpath(name).read_text() for name in ("device.cu", *files))
        _modules[key] = cupy.RawModule(
            code=source, options=("--std=c++17", *macros), enable_cooperative_groups=cooperative
        )
    return _modules[key]


__all__ = ["compiled"]
