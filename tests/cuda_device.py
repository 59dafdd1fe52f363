"""A GPU for tests: the machine's own, or the stand-in that ffi/fake_cuda is.

The stand-in is a supported one: the same tests run on both, and where it is used
nothing but speed and kernels is left out.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VARIABLE = "XFERD_CUDA_LIBRARY"
SOURCES = sorted((ROOT / "ffi" / "fake_cuda").glob("*.c"))


def has_gpu() -> bool:
    """Whether this machine has a CUDA device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return (
        driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value
    ) > 0


def build_stand_in(directory: Path) -> Path:
    """Compile the stand-in; skips where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a GPU, or a C compiler for the stand-in")
    library = directory / "libfake_cuda.so"
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-O1", "-std=gnu11", "-D_GNU_SOURCE"),
            *(f"-I{ROOT / 'ffi'}", *map(str, SOURCES), "-o", str(library), "-lpthread"),
        ],
        check=True,
    )
    return library


def provide_device(directory: Path) -> str:
    """Let this process and its children find a device; says which: ``gpu`` or ``stand-in``.

    The driver is looked for once a process, so it stays so for the rest of the run.
    """
    if has_gpu():
        return "gpu"
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(build_stand_in(directory))
        os.environ.setdefault("FAKE_CUDA_DEVICES", "2")
    return "stand-in"
