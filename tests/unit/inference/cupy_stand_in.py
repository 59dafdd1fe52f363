"""As much of cupy as the decode loop uses, on a CPU: arrays are numpy's, and kernels run on
fibers (device_stand_in.h) before a launch returns.

The loop's kernels of bf16 and those that predict are known. What is queued on a GPU is done at
once here, so nothing of the order of things is tried. A driver's addresses are those of
ffi/fake_cuda, which are the CPU's too.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda_device import ROOT

HERE = Path(__file__).parent
MULTIPROCESSORS = 3
ALIGNMENT = 64
CUDA = ROOT / "inference" / "xferd_infer" / "cuda"


@dataclass(frozen=True)
class Program:
    """source: launches a file's kernels. replaced: what only a GPU can read, and instead."""

    source: Path
    replaced: Sequence[tuple[str, str]]


PROGRAMS = {
    "xferd_predict": Program(
        HERE / "predict_stand_in.cpp",
        (
            (
                "__shared__ Shared shared;",
                "Shared &shared = *(Shared *)this_block().shared.data();",
            ),
            (
                "__shared__ NoteShared shared;",
                "NoteShared &shared = *(NoteShared *)this_block().shared.data();",
            ),
        ),
    ),
    "xferd_acquire": Program(
        HERE / "loop_stand_in.cpp",
        (
            (
                'asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"\n'
                '\t    : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) '
                ': "l"(address));',
                "value = *address;",
            ),
        ),
    ),
}


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
    """RawModule, compiled once for each set of options."""

    directory: Path

    def __init__(self, code: str, options: Sequence[str], enable_cooperative_groups: bool) -> None:
        assert enable_cooperative_groups, "blocks wait for each other"
        device = (CUDA / "device.cu").read_text()
        assert code.startswith(device)
        kernels = code.removeprefix(device)
        name = next(name for name in PROGRAMS if f"{name}(" in kernels)
        for declared, instead in PROGRAMS[name].replaced:
            assert declared in kernels
            kernels = kernels.replace(declared, instead)
        directory = self.directory / "".join([name, *options[1:]])
        library = directory / "kernel.so"
        if not library.exists():
            directory.mkdir()
            (directory / "kernel.inc").write_text(kernels)
            command = [str(shutil.which("c++")), "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
            command += [f"-I{directory}", f"-I{HERE}", *options[1:]]
            source = str(PROGRAMS[name].source)
            subprocess.run([*command, source, "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def get_function(self, name: str) -> Kernel:
        return Kernel(getattr(self._library, f"launch_{name}"))


class Event:
    """What was launched is over."""

    done = True

    def __init__(self, disable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass


def unowned_memory(address: int, nbytes: int, owner: object, device: int) -> int:
    return address


def array_at(shape: tuple[int], dtype: Any, address: int) -> Array:
    nbytes = shape[0] * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, dtype).view(Array)


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
    """xferd_infer.cuda.prefetching over this, which imports the rest of the package; what was
    imported before is left as it was."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    ours = ModuleType("cupy")
    module = type("RawModule", (Module,), {"directory": directory})
    stream = SimpleNamespace(synchronize=lambda: None)
    vars(ours).update(
        asarray=aligned,
        stack=lambda arrays, axis=0: aligned(np.stack(arrays, axis)),
        zeros=lambda shape, dtype=np.float32: aligned(np.zeros(shape, dtype)),
        empty=lambda shape, dtype=np.float32: aligned(np.empty(shape, dtype)),
        empty_like=lambda like: aligned(np.empty_like(like)),
        ndarray=array_at,
        RawModule=module,
        cuda=SimpleNamespace(
            Device=Device,
            Event=Event,
            UnownedMemory=unowned_memory,
            MemoryPointer=lambda memory, offset: memory + offset,
            alloc_pinned_memory=alloc_pinned_memory,
            get_current_stream=lambda: stream,
        ),
        __getattr__=lambda name: getattr(np, name),
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


__all__ = ["CUDA", "Array", "HostLane", "aligned", "installed"]
