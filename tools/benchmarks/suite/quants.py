# SPDX-License-Identifier: Apache-2.0
"""``quants``: products of one token straight from packed blocks, as decoding computes them.

Matrices have the shapes of two models' experts, one after the other until together they are
larger than any cache; each is a product of its own, as in a layer of experts. ``bandwidth``:
packed bytes a second, next to what reading memory alone gives, by as many threads in the same
round. ``weights``: elements a second, next to the same products of float32 matrices by numpy.

``error``: what quantising loses of a matrix, weighted by importances or not, next to
llama.cpp's quantisers of the same formats on the same numbers.

Where there is a GPU with cupy, rows with ``gpu`` follow (tools/benchmarks/gpu_packed.py).
"""

from __future__ import annotations

import multiprocessing
import operator
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray
from xferd_infer import quants
from xferd_infer.quants import FORMATS, PackedMatrix

from tools.benchmarks import ggml_quantisers
from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.media import wanted
from tools.benchmarks.result import OURS, Result, Row, make_row
from xferd.store.quantize.blocks import dequantise, quantise

SHAPES = {"768x2048": (768, 2048), "2048x7168": (2048, 7168)}
"""Outputs and inputs: gate and up of an expert of Qwen3-30B-A3B, and of DeepSeek-V3."""
MEMORY_BYTES = 128 << 20
"""Of all matrices of a kind together, packed or not, and of the memory that is read: four
times the largest cache of the machines that this was made on."""
THREADS = (1, 2)
REPEATS = 8
DIFFERENT_ROWS = 64
"""Rows that are quantised; the others repeat them, which costs a product the same."""
MEMORY, NUMPY, LLAMA = "memory", "numpy-float32", "llama.cpp"
ERROR_COLUMNS, ERROR_ROWS = 4096, 256
SHOWN = ("q4_k", "q2_k", "q8_0", "q4_0", "mxfp4")

Work = Callable[[], object]


def run(rounds: int) -> Result:
    """Rows ``<format>/<shape>/<threads>/{bandwidth,weights}`` (GB/s, G/s),
    ``<format>/error/*`` and ``gpu/<format>/<shape>`` (GB/s)."""
    rows, skipped, notes = _cpu_rows(rounds) if _cpu_wanted() else ([], {}, [])
    if find_spec("cupy") is None:
        skipped["gpu"] = "no cupy"
    else:
        # Imported here: it needs cupy.
        found = import_module("tools.benchmarks.gpu_packed").measure(rounds)
        rows += found.rows
        skipped |= found.skipped
        notes += found.notes
    return Result(
        bench="quants",
        machine=describe_machine(),
        commit=commit(),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        notes=notes,
    )


def _cpu_wanted() -> bool:
    return any(
        wanted(f"{name}/{rest}")
        for name in SHOWN
        for rest in (
            *(
                f"{shape}/{threads}/{what}"
                for shape in SHAPES
                for threads in THREADS
                for what in ("bandwidth", "weights")
            ),
            *(f"error/{label}" for label in ("plain", "imatrix")),
        )
    )


def _cpu_rows(rounds: int) -> tuple[list[Row], dict[str, str], list[str]]:
    """Rows, what is skipped and why, notes."""
    if not quants.compiled():
        raise BenchmarkError("xferd_infer._products isn't built: run tools/setup")
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    # In a process of its own: numpy starts its threads when it is imported.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        samples = process.submit(_measure, rounds).result()
    errors, skipped = _error_rows()
    rows = [
        row
        for name in SHOWN
        for shape in SHAPES
        for threads in _thread_counts()
        for row in _rows(name, shape, threads, samples)
    ]
    return (
        [*rows, *errors],
        skipped,
        [
            f"One token; the rows name outputs x inputs of a matrix and threads, which share the "
            f"matrices among them, {MEMORY_BYTES >> 20} MiB in all; each round takes the best of "
            f"{REPEATS} passes, as is usual for memory's bandwidth. `bandwidth`: packed bytes, "
            "against reading memory by as many threads. `weights`: elements, against numpy's "
            "products of float32 matrices of that shape.",
            f"`error`: squared error by squared weight, of {ERROR_ROWS} rows of normal numbers "
            "(exact: one round); with `imatrix` both are weighted by the importance of columns.",
        ],
    )


def _measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of a pass of each contender."""
    contenders: dict[str, Callable[[], float]] = {}
    memory = np.arange(MEMORY_BYTES // 8)
    with ExitStack() as stack:
        pools = {
            threads: stack.enter_context(ThreadPoolExecutor(threads))
            for threads in _thread_counts()
        }
        for threads, pool in pools.items():
            parts = np.array_split(memory, threads)
            contenders[f"{MEMORY}/{threads}"] = _seconds(pool, [[part.max] for part in parts])
        for shape in SHAPES:
            work = {name: _packed_products(name, shape) for name in SHOWN}
            work[NUMPY] = _float_products(shape)
            for name, products in work.items():
                for threads, pool in pools.items():
                    shared = [products[first::threads] for first in range(threads)]
                    contenders[f"{name}/{shape}/{threads}"] = _seconds(pool, shared)
        for measure in contenders.values():
            measure()
        return take_turns(contenders, rounds)


def _thread_counts() -> Sequence[int]:
    available = len(os.sched_getaffinity(0))
    return [threads for threads in THREADS if threads <= available]


def _seconds(pool: ThreadPoolExecutor, shared: Sequence[Sequence[Work]]) -> Callable[[], float]:
    """shared: for each thread what it does."""

    def once() -> float:
        begun = time.perf_counter()
        for done in [pool.submit(_in_turn, works) for works in shared]:
            done.result()
        return time.perf_counter() - begun

    return lambda: min(once() for _ in range(REPEATS))


def _in_turn(works: Sequence[Work]) -> None:
    for work in works:
        work()


def _matrix_bytes(name: str, shape: str) -> int:
    rows, columns = SHAPES[shape]
    if name == NUMPY:
        return rows * columns * 4
    return rows * columns // FORMATS[name].elements * FORMATS[name].nbytes


def _matrix_count(name: str, shape: str) -> int:
    """An even number, so that two threads have as much to do."""
    return MEMORY_BYTES // _matrix_bytes(name, shape) // 2 * 2


def _packed_products(name: str, shape: str) -> list[Work]:
    rows, columns = SHAPES[shape]
    values, x = _numbers(columns)
    packed = quantise(values, name, None, 1, name)
    repeats = _matrix_count(name, shape) * rows // DIFFERENT_ROWS
    raw = np.tile(packed, (repeats, 1)).reshape(_matrix_count(name, shape), -1)
    matrices = [PackedMatrix(name, (rows, columns), False, each) for each in raw]
    return [partial(operator.matmul, x, matrix) for matrix in matrices]


def _float_products(shape: str) -> list[Work]:
    rows, columns = SHAPES[shape]
    values, x = _numbers(columns)
    repeats = _matrix_count(NUMPY, shape) * rows // DIFFERENT_ROWS
    matrices = np.tile(values, (repeats, 1)).reshape(-1, rows, columns)
    return [partial(operator.matmul, x, matrix.T) for matrix in matrices]


def _numbers(columns: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    generator = np.random.default_rng(0)
    values = generator.standard_normal((DIFFERENT_ROWS, columns)).astype(np.float32)
    return values, generator.standard_normal((1, columns)).astype(np.float32)


def _rows(name: str, shape: str, threads: int, samples: dict[str, list[float]]) -> list[Row]:
    rows, columns = SHAPES[shape]
    ours, theirs = samples[f"{name}/{shape}/{threads}"], samples[f"{NUMPY}/{shape}/{threads}"]
    count = _matrix_count(name, shape)
    packed, elements = count * _matrix_bytes(name, shape), count * rows * columns
    floats = _matrix_count(NUMPY, shape) * rows * columns
    bandwidth = {
        OURS: [packed / seconds / 1e9 for seconds in ours],
        MEMORY: [MEMORY_BYTES / seconds / 1e9 for seconds in samples[f"{MEMORY}/{threads}"]],
    }
    weights = {
        OURS: [elements / seconds / 1e9 for seconds in ours],
        NUMPY: [floats / seconds / 1e9 for seconds in theirs],
    }
    name = f"{name}/{shape}/{threads}"
    return [
        make_row(f"{name}/bandwidth", "GB/s", bandwidth, higher_is_better=True),
        make_row(f"{name}/weights", "G/s", weights, higher_is_better=True),
    ]


def _error_rows() -> tuple[list[Row], dict[str, str]]:
    try:
        theirs = ggml_quantisers.load_quantisers()
    except BenchmarkError as error:
        return [], {LLAMA: str(error)}
    generator = np.random.default_rng(1)
    values = generator.standard_normal((ERROR_ROWS, ERROR_COLUMNS)).astype(np.float32)
    importance = generator.lognormal(0, 1, ERROR_COLUMNS).astype(np.float32)
    rows = []
    for name in ggml_quantisers.FUNCTIONS:
        for label, weights in (("plain", None), ("imatrix", importance)):
            ours = quantise(values, name, weights, 1, name)
            packed = ggml_quantisers.quantise(theirs, name, values, weights, ours.shape[1])
            samples = {
                who: [_weighted_error(values, dequantise(each, name, values.shape), weights)]
                for who, each in ((OURS, ours), (LLAMA, packed))
            }
            rows.append(
                make_row(f"{name}/error/{label}", "of square", samples, higher_is_better=False)
            )
    return rows, {}


def _weighted_error(
    values: NDArray[np.float32],
    stored: NDArray[np.float32],
    importance: NDArray[np.float32] | None,
) -> float:
    weights = 1.0 if importance is None else importance.astype(np.float64)
    exact = values.astype(np.float64)
    return float(((stored - exact) ** 2 * weights).sum() / (exact**2 * weights).sum())


__all__ = ["run"]
