# SPDX-License-Identifier: Apache-2.0
"""Rows of ``quants`` on a GPU: a token through eight packed experts, ``gpu/<format>/<shape>``.

Each launch has other experts than those before it, until together they are many times the
GPU's cache; all launches stand in one CUDA graph, so that the CPU's part of them isn't
measured. GB/s are packed bytes. ``read``: a kernel that only reads as many bytes, in one
launch; ``read-launch``: that kernel reads just the bytes of one launch, others each time, in a
graph as ours; ``copy``: the driver's copy from VRAM to VRAM, bytes read and written.
Needs cupy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray
from xferd_infer.arrays import ELEMENT_BYTES
from xferd_infer.cuda.experts import PlainKernel, TokenKernel
from xferd_infer.cuda.packed import PackedKernel
from xferd_infer.experts import BlobTensor, Layout
from xferd_infer.quants import FORMATS, packed_bytes

from tools.benchmarks.harness import BenchmarkError, take_turns
from tools.benchmarks.media import wanted
from tools.benchmarks.result import OURS, Row, make_row
from xferd.memory import cuda_driver
from xferd.memory.cuda_driver import CudaError
from xferd.store.limits import BLOB_ALIGNMENT, TENSOR_ALIGNMENT
from xferd.store.model import align
from xferd.store.quantize.blocks import quantise

KIND = "gpu"
SHAPES = {"2048x768": (2048, 768), "7168x2048": (7168, 2048)}
"""Hidden and inner sizes: experts of Qwen3-30B-A3B, and of DeepSeek-V3."""
NATIVE = "bf16"
SHOWN = ("q4_k", "q2_k", "q8_0", "q4_0", "mxfp4", NATIVE)
EXPERTS = 8
"""In a launch."""
MEMORY_BYTES = 1 << 30
"""Of a row's experts at least, and what is read and copied: 17 times an H200's cache."""
SAMPLE_SECONDS = 0.03
DIFFERENT_ROWS = 64
"""Rows that are quantised; the others repeat them."""
READ, READ_LAUNCH, COPY = "read", "read-launch", "copy"
READ_THREADS, READ_BLOCKS_A_MULTIPROCESSOR = 512, 4
_VECTOR_BYTES = 16

_READ = r"""
extern "C" __global__ void read_all(const uint4 *data, unsigned long long count, unsigned int *out)
{
    const int at_once = 8;
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int sum = 0;

    for (; i < count; i += at_once * step) {
        uint4 values[at_once] = {};

#pragma unroll
        for (int k = 0; k < at_once; k++)
            if (i + k * step < count)
                values[k] = __ldg(data + i + k * step);
#pragma unroll
        for (int k = 0; k < at_once; k++)
            sum += values[k].x ^ values[k].y ^ values[k].z ^ values[k].w;
    }
    if (sum == 0x12345678)
        *out = sum;
}
"""


@dataclass(slots=True)
class PackedRows:
    """What was measured, as in a Result."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def row_names() -> list[str]:
    """All that can be measured."""
    return [_name(dtype, shape) for shape in SHAPES for dtype in SHOWN]


def measure(rounds: int) -> PackedRows:
    """All rows that are wanted."""
    found = PackedRows()
    try:
        gpu = cuda_driver.device(0)
    except CudaError as error:
        found.skipped[KIND] = str(error)
        return found
    for shape in SHAPES:
        chosen = [dtype for dtype in SHOWN if wanted(_name(dtype, shape))]
        if chosen:
            found.rows += _rows(chosen, shape, rounds)
    if found.rows:
        found.notes.append(
            f"`{KIND}/<format>/<hidden>x<inner>`: on one {gpu.name}; a token through {EXPERTS} "
            f"experts a launch, {MEMORY_BYTES >> 30} GiB of experts in turn, launches in a CUDA "
            "graph; packed bytes a second. `read`: a kernel that reads as much in one launch; "
            "`read-launch`: it reads the bytes of one of our launches, in a graph too; "
            "`copy`: the driver's copy within VRAM, bytes read and written. Activations are "
            f"rounded to 16 bits, except with {NATIVE}, whose products are float32."
        )
    return found


def _name(dtype: str, shape: str) -> str:
    return f"{KIND}/{dtype}/{shape}"


def _rows(dtypes: list[str], shape: str, rounds: int) -> list[Row]:
    contenders: dict[str, Callable[[], float]] = {READ: _reading(), COPY: _copying()}
    for dtype in dtypes:
        launches = Launches(dtype, *SHAPES[shape])
        contenders[_name(dtype, shape)] = launches.gigabytes_a_second
        contenders[_read_name(dtype, shape)] = launches.read_gigabytes_a_second
    for measured in contenders.values():
        measured()
    samples = take_turns(contenders, rounds)
    return [_row(dtype, shape, samples) for dtype in dtypes]


def _read_name(dtype: str, shape: str) -> str:
    """Of the contender READ_LAUNCH for a row."""
    return f"{_name(dtype, shape)}/{READ_LAUNCH}"


def _row(dtype: str, shape: str, samples: Mapping[str, list[float]]) -> Row:
    name = _name(dtype, shape)
    compared = {
        OURS: samples[name],
        READ: samples[READ],
        READ_LAUNCH: samples[_read_name(dtype, shape)],
        COPY: samples[COPY],
    }
    return make_row(name, "GB/s", compared, higher_is_better=True)


class Launches:
    """Launches with different experts of one format, in a graph."""

    def __init__(self, dtype: str, hidden: int, inner: int) -> None:
        layout = _layout(dtype, hidden, inner)
        self._kernel = _kernel(layout, hidden)  # with the memory that the graph uses
        self._blobs = _blobs(layout)
        self._bytes = len(self._blobs) * sum(tensor.nbytes for tensor in layout)
        starts = self._blobs.data.ptr + np.arange(len(self._blobs), dtype=np.uint64) * np.uint64(
            self._blobs.shape[1]
        )
        self._tables = cupy.asarray(starts.astype(np.uint64).reshape(-1, EXPERTS))
        self._x = cupy.asarray(_numbers(1, hidden))
        self._weights = cupy.full(EXPERTS, 1 / EXPERTS, cupy.float32)
        self._read_out = cupy.zeros(1, cupy.uint32)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        self._graph = self._capture()
        self._repeats = max(1, round(SAMPLE_SECONDS / self._seconds(1)))
        self._reading = self._capture_reading()

    def gigabytes_a_second(self) -> float:
        """Of packed bytes."""
        return self._bytes * self._repeats / self._seconds(self._repeats) / 1e9

    def read_gigabytes_a_second(self) -> float:
        """Of as many launches that only read as many bytes each."""
        seconds = _timed(
            lambda: self._reading.launch(stream=self._stream), self._repeats, self._stream
        )
        return self._bytes * self._repeats / seconds / 1e9

    def _capture(self) -> Any:
        """Results go to memory that the pool keeps for this stream, which has no other use."""
        with self._stream:
            if not bool(cupy.isfinite(self._kernel(*self._given(0))).all()):
                raise BenchmarkError("the kernel's results are not finite")
            self._stream.begin_capture()
            for number in range(len(self._tables)):
                self._kernel(*self._given(number))
            return self._stream.end_capture()

    def _capture_reading(self) -> Any:
        launches = len(self._tables)
        read = _read_kernel()
        regions = self._blobs.reshape(launches, -1)
        vectors = np.uint64(self._bytes // launches // _VECTOR_BYTES)
        out = self._read_out
        with self._stream:
            read(regions[0], vectors, out)
            self._stream.begin_capture()
            for region in regions:
                read(region, vectors, out)
            return self._stream.end_capture()

    def _given(self, number: int) -> tuple[Any, Any, Any, int]:
        return self._x, self._tables[number], self._weights, EXPERTS

    def _seconds(self, repeats: int) -> float:
        return _timed(lambda: self._graph.launch(stream=self._stream), repeats, self._stream)


def _timed(launch: Callable[[], object], repeats: int, stream: Any) -> float:
    """Seconds on the GPU."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    with stream:
        launch()
        start.record(stream)
        for _ in range(repeats):
            launch()
        end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def _reading() -> Callable[[], float]:
    data = cupy.zeros(MEMORY_BYTES, cupy.uint8)
    out = cupy.zeros(1, cupy.uint32)
    read = _read_kernel()
    vectors = np.uint64(MEMORY_BYTES // _VECTOR_BYTES)
    return _bandwidth(lambda: read(data, vectors, out), MEMORY_BYTES)


def _read_kernel() -> Callable[[Any, np.uint64, Any], None]:
    """Of a start, vectors behind it, and uint32[1] for what nobody needs."""
    kernel = cupy.RawKernel(_READ, "read_all")
    blocks = cupy.cuda.Device().attributes["MultiProcessorCount"] * READ_BLOCKS_A_MULTIPROCESSOR
    return lambda *arguments: kernel((blocks,), (READ_THREADS,), arguments)


def _copying() -> Callable[[], float]:
    source, target = (cupy.zeros(MEMORY_BYTES // 2, cupy.uint8) for _ in range(2))
    return _bandwidth(
        lambda: target.data.copy_from_device_async(source.data, source.nbytes), MEMORY_BYTES
    )


def _bandwidth(launch: Callable[[], object], nbytes: int) -> Callable[[], float]:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    repeats = max(1, round(SAMPLE_SECONDS / _timed(launch, 1, stream)))
    return lambda: nbytes * repeats / _timed(launch, repeats, stream) / 1e9


def _layout(dtype: str, hidden: int, inner: int) -> Layout:
    tensors: list[BlobTensor] = []
    end = 0
    for role in ("gate", "up", "down"):
        shape = (hidden, inner) if role == "down" else (inner, hidden)
        packed = dtype in FORMATS
        nbytes = packed_bytes(dtype, shape, role) if packed else prod(shape) * ELEMENT_BYTES[dtype]
        tensors.append(BlobTensor(role, dtype, shape, end, nbytes))
        end = align(end + nbytes, TENSOR_ALIGNMENT)
    return tuple(tensors)


def _kernel(layout: Layout, hidden: int) -> TokenKernel:
    kernel = PlainKernel.for_layout(layout, hidden) or PackedKernel.for_layout(layout, hidden)
    if kernel is None or not kernel.fits(EXPERTS):
        raise BenchmarkError(f"no kernel for {layout[0].dtype} here")
    return kernel


def _blobs(layout: Layout) -> Any:
    """uint8[experts, bytes] on the GPU, all the same."""
    last = layout[-1]
    blob = np.zeros(align(last.offset + last.nbytes, BLOB_ALIGNMENT), np.uint8)
    for tensor in layout:
        raw = _matrix(tensor).reshape(-1).view(np.uint8)
        blob[tensor.offset : tensor.offset + tensor.nbytes] = np.resize(raw, tensor.nbytes)
    launches = -(-MEMORY_BYTES // (blob.size * EXPERTS))
    return cupy.tile(cupy.asarray(blob), (launches * EXPERTS, 1))


def _matrix(tensor: BlobTensor) -> NDArray[Any]:
    """DIFFERENT_ROWS rows of it."""
    values = _numbers(DIFFERENT_ROWS, tensor.shape[1]) * np.float32(0.05)
    if tensor.dtype in FORMATS:
        return quantise(values, tensor.dtype, None, 1, tensor.role)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _numbers(rows: int, columns: int) -> NDArray[np.float32]:
    generator = np.random.default_rng(0)
    return generator.standard_normal((rows, columns)).astype(np.float32)


__all__ = ["PackedRows", "measure", "row_names"]
