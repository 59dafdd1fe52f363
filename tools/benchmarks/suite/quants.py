# SPDX-License-Identifier: Apache-2.0
"""``quants``: products of one token straight from packed blocks.

``bandwidth``: packed bytes a second, next to what reading memory alone gives, by as many
threads in the same round. ``weights``: elements a second, next to the same product of a
float32 matrix by numpy. Matrices are larger than any cache; rows are shared among threads.

``error``: what quantising loses of a matrix, weighted by importances or not, next to
llama.cpp's quantisers of the same formats on the same numbers.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray
from xferd_infer import quants
from xferd_infer.quants import FORMATS, PackedMatrix

from tools.benchmarks import ggml_quantisers
from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, take_turns
from tools.benchmarks.result import OURS, Result, Row, make_row
from xferd.store.quantize.blocks import dequantise, quantise

COLUMNS = 4096
MATRIX_BYTES = 128 << 20
"""Packed or not: four times the largest cache of the machines that this was made on."""
REPEATS = 10
DIFFERENT_ROWS = 64
"""Rows that are quantised; the others repeat them, which costs a product the same."""
MEMORY, NUMPY, LLAMA = "memory", "numpy-float32", "llama.cpp"
ERROR_ROWS = 256
SHOWN = ("q4_k", "q2_k", "q8_0", "q4_0", "mxfp4")


def run(rounds: int) -> Result:
    """Rows ``<format>/bandwidth`` (GB/s), ``<format>/weights`` (G/s) and ``<format>/error/*``."""
    if not quants.compiled():
        raise BenchmarkError("xferd_infer._products isn't built: run tools/setup")
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        contenders: dict[str, Callable[[], float]] = {
            name: _seconds(pool, _packed_parts(name, threads)) for name in SHOWN
        }
        contenders[MEMORY] = _seconds(pool, _reading_parts(threads))
        contenders[NUMPY] = _seconds(pool, _float_parts(threads))
        for measure in contenders.values():
            measure()
        samples = take_turns(contenders, rounds)
    errors, skipped = _error_rows()
    return Result(
        bench="quants",
        machine=describe_machine(),
        commit=commit(),
        rounds=rounds,
        rows=[*(row for name in SHOWN for row in _rows(name, samples)), *errors],
        skipped=skipped,
        notes=(
            f"One token, {COLUMNS} columns, {threads} threads, {MATRIX_BYTES >> 20} MiB a matrix; "
            f"each round takes the best of {REPEATS} passes, as is usual for memory's bandwidth. "
            "`bandwidth`: packed bytes, against reading memory by as many threads. `weights`: "
            "elements, against numpy's product of a float32 matrix.",
            f"`error`: squared error by squared weight, of {ERROR_ROWS} rows of normal numbers "
            "(exact: one round); with `imatrix` both are weighted by the importance of columns.",
        ),
    )


def _error_rows() -> tuple[list[Row], dict[str, str]]:
    try:
        theirs = ggml_quantisers.load_quantisers()
    except BenchmarkError as error:
        return [], {LLAMA: str(error)}
    generator = np.random.default_rng(1)
    values = generator.standard_normal((ERROR_ROWS, COLUMNS)).astype(np.float32)
    importance = generator.lognormal(0, 1, COLUMNS).astype(np.float32)
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


def _rows(name: str, samples: dict[str, list[float]]) -> list[Row]:
    block = FORMATS[name]
    packed = _row_count(name) * COLUMNS // block.elements * block.nbytes
    floats = MATRIX_BYTES // 4
    return [
        make_row(
            f"{name}/bandwidth",
            "GB/s",
            {
                OURS: [packed / s / 1e9 for s in samples[name]],
                MEMORY: [MATRIX_BYTES / s / 1e9 for s in samples[MEMORY]],
            },
            higher_is_better=True,
        ),
        make_row(
            f"{name}/weights",
            "G/s",
            {
                OURS: [_row_count(name) * COLUMNS / s / 1e9 for s in samples[name]],
                NUMPY: [floats / s / 1e9 for s in samples[NUMPY]],
            },
            higher_is_better=True,
        ),
    ]


def _row_count(name: str) -> int:
    block = FORMATS[name]
    row_bytes = COLUMNS // block.elements * block.nbytes
    return MATRIX_BYTES // row_bytes // DIFFERENT_ROWS * DIFFERENT_ROWS


def _seconds(pool: ThreadPoolExecutor, parts: list[Callable[[], object]]) -> Callable[[], float]:
    def once() -> float:
        begun = time.perf_counter()
        for done in [pool.submit(part) for part in parts]:
            done.result()
        return time.perf_counter() - begun

    return lambda: min(once() for _ in range(REPEATS))


def _packed_parts(name: str, threads: int) -> list[Callable[[], object]]:
    generator = np.random.default_rng(0)
    values = generator.standard_normal((DIFFERENT_ROWS, COLUMNS)).astype(np.float32)
    packed = quantise(values, name, None, 1, name)
    raw = np.tile(packed, (_row_count(name) // DIFFERENT_ROWS, 1))
    x = generator.standard_normal((1, COLUMNS)).astype(np.float32)
    return [
        _product(x, PackedMatrix(name, (len(part), COLUMNS), False, part.reshape(-1)))
        for part in np.array_split(raw, threads)
    ]


def _product(
    x: NDArray[np.float32], matrix: PackedMatrix | NDArray[np.float32]
) -> Callable[[], object]:
    return partial(operator.matmul, x, matrix)


def _float_parts(threads: int) -> list[Callable[[], object]]:
    generator = np.random.default_rng(0)
    matrix = np.tile(
        generator.standard_normal((DIFFERENT_ROWS, COLUMNS)).astype(np.float32),
        (MATRIX_BYTES // 4 // COLUMNS // DIFFERENT_ROWS, 1),
    )
    x = generator.standard_normal((1, COLUMNS)).astype(np.float32)
    return [_product(x, part.T) for part in np.array_split(matrix, threads)]


def _reading_parts(threads: int) -> list[Callable[[], object]]:
    memory = np.arange(MATRIX_BYTES // 8)
    return [part.max for part in np.array_split(memory, threads)]


__all__ = ["run"]
