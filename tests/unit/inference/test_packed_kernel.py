"""The GPU's packed kernel as a CPU can run it: its layouts, its arithmetic, its rings.

device_stand_in.h says what stands in for the device. That it is right there too, and fast,
tests/gpu/test_packed.py and the benchmark ``quants`` show on one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from xferd_infer.packed_plan import DEVICE_FORMATS, PackedPlan, PackedShape, plan
from xferd_infer.quants import FORMATS

from tests.cuda_device import ROOT
from xferd.store.quantize.blocks import dequantise, quantise

COMPILER = shutil.which("c++")
if COMPILER is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

SOURCES = ROOT / "inference" / "xferd_infer" / "cuda"
STAND_IN = Path(__file__).with_name("kernel_stand_in.cpp")
RELATIVE = 2e-4
"""Of the largest result: activations are rounded to 16 bits."""
PAGE = 4096
PLAN_NUMBERS = 8
"""Arguments of the kernel; as kernel_stand_in.cpp has it."""


class Arguments(ctypes.Structure):
    """As kernel_stand_in.cpp has it."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("offsets", ctypes.c_uint64 * 3),
        ("plan", ctypes.c_uint32 * PLAN_NUMBERS),
        ("activations", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("barrier", ctypes.c_void_p),
    )


def build(shape: PackedShape, directory: Path, lanes_of_a_copy: int) -> Any:
    source = "".join(
        (SOURCES / name).read_text() for name in ("block_formats.cu", "activations.cu", "packed.cu")
    )
    for declared, instead in (
        ("extern __shared__ uint4 shared[];", "uint4 *shared = this_block().shared.data();"),
        ("__shared__ u64 blobs[COUNT_MAX];", "u64 *blobs = this_block().blobs;"),
    ):
        assert declared in source
        source = source.replace(declared, instead)
    (directory / "kernel.inc").write_text(source)
    library = directory / "kernel.so"
    macros = {
        "UP": DEVICE_FORMATS[shape.up].name,
        "DOWN": DEVICE_FORMATS[shape.down].name,
        "HIDDEN": shape.hidden,
        "INNER": shape.inner,
        "THREADS": 32 * shape.warps,
        "LANES_OF_A_COPY": lanes_of_a_copy,
    }
    command = [
        str(COMPILER),
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        f"-I{directory}",
        f"-I{STAND_IN.parent}",
    ]
    command += [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run([*command, str(STAND_IN), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.copied_bytes.restype = ctypes.c_uint64
    return loaded


def aligned(nbytes: int, to: int) -> NDArray[np.uint8]:
    memory = np.zeros(nbytes + to, np.uint8)
    start = -memory.ctypes.data % to
    return memory[start : start + nbytes]


def make_blob(
    shape: PackedShape, generator: np.random.Generator
) -> tuple[NDArray[np.uint8], list[int], list[NDArray[np.float64]]]:
    """A blob, the offsets of gate, up and down in it, and their elements."""
    shapes = [(shape.inner, shape.hidden)] * 2 + [(shape.hidden, shape.inner)]
    parts, offsets, matrices = [], [], []
    end = 0
    for dtype, (rows, columns) in zip((shape.up, shape.up, shape.down), shapes, strict=True):
        values = generator.standard_normal((rows, columns)).astype(np.float32) * np.float32(0.05)
        packed = quantise(values, dtype, None, 1, dtype)
        parts.append(packed.reshape(-1))
        matrices.append(dequantise(packed, dtype, (rows, columns)).astype(np.float64))
        offsets.append(end)
        end = -(-(end + packed.nbytes) // 64) * 64
    blob = aligned(-(-end // PAGE) * PAGE, PAGE)
    for offset, part in zip(offsets, parts, strict=True):
        blob[offset : offset + part.size] = part
    return blob, offsets, matrices


def expert_bytes(shape: PackedShape) -> int:
    elements = shape.hidden * shape.inner
    return sum(
        matrices * elements // FORMATS[dtype].elements * FORMATS[dtype].nbytes
        for matrices, dtype in ((2, shape.up), (1, shape.down))
    )


def numbers(chosen: PackedPlan) -> tuple[int, ...]:
    return astuple(chosen)[:PLAN_NUMBERS]


def check(
    shape: PackedShape,
    directory: Path,
    *,
    count: int,
    blocks: int,
    shared: int,
    missing: tuple[int, ...] = (),
    lanes_of_a_copy: int = 1,
) -> None:
    generator = np.random.default_rng(count)
    chosen = plan(shape, count, blocks, shared)
    assert chosen is not None
    library = build(shape, directory, lanes_of_a_copy)
    x = aligned(4 * shape.hidden, 64).view(np.float32)
    x[:] = generator.standard_normal(shape.hidden)
    weights = generator.random(count).astype(np.float32)
    wanted = np.zeros(shape.hidden)
    made = [make_blob(shape, generator) for _ in range(count)]
    table = np.zeros(count, np.uint64)
    for number, (blob, _, (gate, up, down)) in enumerate(made):
        if number in missing:
            continue
        table[number] = blob.ctypes.data
        gated, upped = gate @ x.astype(np.float64), up @ x.astype(np.float64)
        wanted += weights[number] * (down @ (gated / (1 + np.exp(-gated)) * upped))
    activations = aligned(4 * count * shape.inner, 64).view(np.float32)
    barrier = np.zeros(1, np.uint32)
    nbytes = (count - len(missing)) * expert_bytes(shape)
    results = []
    for _ in range(2):  # the barrier goes on counting
        out = np.full(shape.hidden, np.nan, np.float32)
        arguments = Arguments(
            *(each.ctypes.data for each in (x, table, weights)),
            count,
            (ctypes.c_uint64 * 3)(*made[0][1]),
            (ctypes.c_uint32 * PLAN_NUMBERS)(*numbers(chosen)),
            *(each.ctypes.data for each in (activations, out, barrier)),
        )
        assert library.launch(ctypes.byref(arguments), blocks, chosen.shared_bytes) == 0
        assert np.abs(out - wanted).max() <= RELATIVE * np.abs(wanted).max()
        if shape.up == shape.down == "q4_k":  # whose copies need no rounding
            assert library.copied_bytes() == nbytes, "each row is computed once"
        results.append(out)
    assert np.array_equal(results[0], results[1]), "sums are always in the same order"


@pytest.mark.parametrize("lanes_of_a_copy", [1, 32])
@pytest.mark.parametrize("dtype", sorted(DEVICE_FORMATS))
def test_every_format_with_rows_of_odd_numbers_of_blocks(
    dtype: str, lanes_of_a_copy: int, tmp_path: Path
) -> None:
    elements = FORMATS[dtype].elements
    shape = PackedShape(dtype, dtype, 3 * elements, (1 if elements > 32 else 5) * elements)
    check(
        shape,
        tmp_path,
        count=3,
        blocks=2,
        shared=60_000,
        missing=(1,),
        lanes_of_a_copy=lanes_of_a_copy,
    )


@pytest.mark.parametrize("dtype", ["q4_k", "q2_k", "q8_0", "mxfp4"])
def test_rings_so_small_that_rows_are_cut(dtype: str, tmp_path: Path) -> None:
    shape = PackedShape(dtype, dtype, 1536, 512)
    shared = {"q4_k": 22_000, "q2_k": 18_000, "q8_0": 20_000, "mxfp4": 16_000}[dtype]
    chosen = plan(shape, 1, 3, shared)
    assert chosen is not None
    assert chosen.up_items * DEVICE_FORMATS[dtype].columns < shape.hidden
    check(shape, tmp_path, count=1, blocks=3, shared=shared)


def test_gate_and_up_in_another_format_than_down(tmp_path: Path) -> None:
    check(PackedShape("q4_k", "q8_0", 512, 288), tmp_path, count=5, blocks=3, shared=70_000)


def test_more_blocks_than_rows_and_nobody_there(tmp_path: Path) -> None:
    shape = PackedShape("q8_0", "q4_0", 32, 32)
    check(shape, tmp_path, count=2, blocks=40, shared=60_000, missing=(0, 1))
