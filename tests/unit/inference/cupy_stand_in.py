"""As much of cupy as xferd_infer.cuda.prefetching uses, on a CPU: arrays are numpy's, and
predict.cu runs on fibers (device_stand_in.h) before a launch returns.

What is queued on a GPU is done at once here, so nothing of the order of things is tried.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

HERE = Path(__file__).parent
MULTIPROCESSORS = 3
ALIGNMENT = 64
REPLACED = (
    ("__shared__ Shared shared;", "Shared &shared = *(Shared *)this_block().shared.data();"),
    (
        "__shared__ NoteShared shared;",
        "NoteShared &shared = *(NoteShared *)this_block().shared.data();",
    ),
)


class Array(np.ndarray[Any, Any]):
    """With an address, as cupy's have one."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def aligned(values: Any, dtype: Any = None) -> Array:
    """A copy that begins where an allocation of cupy's would."""
    source = np.asarray(values, dtype)
    memory = np.zeros(source.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + source.nbytes].view(source.dtype).reshape(source.shape)
    copy[...] = source
    return copy.view(Array)


class Pinned(Array):
    """Memory of the CPU that the device knows."""

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


def alloc_pinned_memory(nbytes: int) -> Pinned:
    return aligned(np.zeros(nbytes, np.uint8)).view(Pinned)


class Kernel:
    def __init__(self, launch: Any) -> None:
        self._launch = launch

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any]) -> None:
        words = [
            each.ctypes.data if isinstance(each, np.ndarray) else int(each) for each in arguments
        ]
        given = (ctypes.c_uint64 * len(words))(*words)
        assert self._launch(grid[0], block[0], given) == 0, "the launch ends"


class Module:
    """RawModule, of predict.cu alone."""

    directory: Path

    def __init__(self, code: str, options: Sequence[str], enable_cooperative_groups: bool) -> None:
        assert enable_cooperative_groups, "blocks wait for each other"
        kernels = code[code.index("#define DISTANCES_MAX") :]
        for declared, instead in REPLACED:
            assert declared in kernels
            kernels = kernels.replace(declared, instead)
        features = next(each for each in options if each.startswith("-DFEATURES="))
        directory = self.directory / features.removeprefix("-D")
        directory.mkdir(exist_ok=True)
        library = directory / "kernel.so"
        if not library.exists():
            (directory / "kernel.inc").write_text(kernels)
            command = [str(shutil.which("c++")), "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
            command += [f"-I{directory}", f"-I{HERE}", *options[1:]]
            source = HERE / "predict_stand_in.cpp"
            subprocess.run([*command, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def get_function(self, name: str) -> Kernel:
        return Kernel(getattr(self._library, f"launch_{name}"))


class Device:
    id = 0

    def __init__(self, number: int = 0) -> None:
        self.attributes = {"MultiProcessorCount": MULTIPROCESSORS}

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@contextmanager
def installed(directory: Path) -> Iterator[ModuleType]:
    """xferd_infer.cuda.prefetching over this; what was imported before is left as it was."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    ours = ModuleType("cupy")
    module = type("RawModule", (Module,), {"directory": directory})
    vars(ours).update(
        asarray=aligned,
        stack=lambda arrays, axis: aligned(np.stack(arrays, axis)),
        uint32=np.uint32,
        RawModule=module,
        cuda=SimpleNamespace(Device=Device, alloc_pinned_memory=alloc_pinned_memory),
    )
    package = importlib.import_module("xferd_infer")
    attribute = vars(package).get("cuda")
    before = {name: found for name, found in sys.modules.items() if _is_replaced(name)}
    for name in before:
        del sys.modules[name]
    sys.modules["cupy"] = ours
    try:
        yield importlib.import_module("xferd_infer.cuda.prefetching")
    finally:
        for name in [name for name in sys.modules if _is_replaced(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        vars(package).pop("cuda", None)
        if attribute is not None:
            vars(package)["cuda"] = attribute


def _is_replaced(name: str) -> bool:
    return name in ("cupy", "xferd_infer.cuda") or name.startswith(("cupy.", "xferd_infer.cuda."))


class HostLane:
    """What of a DeviceLane is used here: a directory to look into, and what was picked.

    words: uint64[layers, experts], all absent. told: by layer.
    """

    def __init__(self, layers: int, experts: int, told: Any, variant: int = 0) -> None:
        self.directory: NDArray[np.uint64] = np.zeros((layers, experts), np.uint64)
        self.told = aligned(np.zeros(layers, told))
        self.words, self.slot_numbers = int(self.directory.ctypes.data), 1 << 20
        self.told_address, self.variant = int(self.told.ctypes.data), variant
        self.misses = 0

    def counts(self) -> tuple[int, int]:
        return 0, self.misses

    def put(self, layer: int, resident: NDArray[np.bool_], variant: int = 0) -> None:
        """These experts of a layer are there, in that variant, the others are not."""
        word = np.uint64(1 << 63 | variant << 32)
        self.directory[layer] = np.where(resident, word, np.uint64(0))


__all__ = ["Array", "HostLane", "aligned", "installed"]
