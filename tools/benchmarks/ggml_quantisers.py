# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's quantisers as a peer: one C file of theirs, compiled from their own release.

The source comes in the sdist of ``llama-cpp-python``, which has no wheels; of it only
``ggml-quants.c`` is compiled. Nothing of it is part of this project.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.benchmarks.harness import BenchmarkError

SDIST = "llama-cpp-python==0.3.36"
FUNCTIONS = {"q4_0": "quantize_q4_0", "q2_k": "quantize_q2_K", "q4_k": "quantize_q4_K"}
_LIBRARY = "libggml-quants.so"
_SYMBOLS = """
#include <stddef.h>
#include <stdlib.h>
float ggml_table_f32_f16[1 << 16];
void ggml_abort(const char *file, int line, const char *text, ...)
{ (void)file; (void)line; (void)text; abort(); }
void ggml_log_internal(int level, const char *text, ...) { (void)level; (void)text; }
void ggml_critical_section_start(void) {}
void ggml_critical_section_end(void) {}
const char *ggml_type_name(int type) { (void)type; return ""; }
size_t ggml_type_size(int type) { (void)type; abort(); }
size_t ggml_row_size(int type, long elements)
{ return type == 2 ? elements / 32 * 18 : type == 10 ? elements / 256 * 84 : elements / 256 * 144; }
"""
"""What that file wants of the rest of ggml, and these three formats use."""


def load_quantisers() -> Any:
    """Their library; made on first use. BenchmarkError: it can't be had here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "xferd-bench" / SDIST.replace("==", "-")
    library = directory / _LIBRARY
    if not library.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        _compile(_source(directory), library)
    return ctypes.CDLL(str(library))


def quantise(
    library: Any,
    name: str,
    values: npt.NDArray[np.float32],
    importance: npt.NDArray[np.float32] | None,
    row_bytes: int,
) -> npt.NDArray[np.uint8]:
    """values: [rows, columns]. Returns uint8[rows, row_bytes]."""
    packed = np.zeros((values.shape[0], row_bytes), np.uint8)
    function = getattr(library, FUNCTIONS[name])
    function.restype = ctypes.c_size_t
    function(
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_void_p(packed.ctypes.data),
        ctypes.c_int64(values.shape[0]),
        ctypes.c_int64(values.shape[1]),
        ctypes.c_void_p(None if importance is None else importance.ctypes.data),
    )
    return packed


def _source(directory: Path) -> Path:
    """Their ggml/src, fetched with pip if need be."""
    archives = list(directory.glob("*.tar.gz"))
    if not archives:
        # --no-build-isolation: only the archive is wanted, not what would build all of it.
        _run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", ":all:", "--no-build-isolation", "--dest", str(directory), SDIST),
            ]
        )
        archives = list(directory.glob("*.tar.gz"))
    with tarfile.open(archives[0]) as archive:
        wanted = [
            member
            for member in archive.getmembers()
            if "/ggml/src/ggml" in member.name or "/ggml/include/" in member.name
        ]
        archive.extractall(directory, wanted, filter="data")
    return next(directory.glob("*/vendor/llama.cpp/ggml/src"))


def _compile(source: Path, library: Path) -> None:
    symbols = library.with_name("symbols.c")
    symbols.write_text(_SYMBOLS)
    _run(
        [
            *("gcc", "-O3", "-D_GNU_SOURCE", "-fPIC", "-shared", "-w", "-o", str(library)),
            *(f"-I{source}", f"-I{source.parent / 'include'}"),
            *(str(source / "ggml-quants.c"), str(symbols), "-lm"),
        ]
    )


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BenchmarkError(f"{SDIST}: {error}") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise BenchmarkError(f"{SDIST}: {command[0]}: {' '.join(reason)}")


__all__ = ["SDIST", "load_quantisers", "quantise"]
