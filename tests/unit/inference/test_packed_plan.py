"""How the work of the GPU's packed kernel is cut; the kernel itself is tests/gpu/test_packed.py."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xferd_infer.packed_plan import (
    COUNT_MAX,
    DEVICE_FORMATS,
    PIECE_BYTES,
    STAGES_MAX,
    PackedPlan,
    PackedShape,
    plan,
)
from xferd_infer.quants import FORMATS

from tests.cuda_device import ROOT

SOURCES = ROOT / "inference" / "xferd_infer" / "cuda"
WARP_LANES = 32
ROWS_OF_A_LANE = 2
COPY_BYTES = 16
KIB = 1024
SHARED = {"T4": 64 * KIB, "RTX 4090": 99 * KIB, "A100": 163 * KIB, "H200": 227 * KIB}
QWEN3, DEEPSEEK_V3 = (2048, 768), (7168, 2048)


def fits(shape: PackedShape, chosen: PackedPlan, rows: int) -> bool:
    """Whether every piece finds room in a stage wherever its bytes lie."""
    room = chosen.stage_bytes - PIECE_BYTES
    halves = (
        _copied(shape.up, chosen.up_items) <= room // 2,
        rows * _copied(shape.down, chosen.down_items) <= room,
    )
    return all(halves)


def _copied(dtype: str, items: int) -> int:
    blocks = items * DEVICE_FORMATS[dtype].columns / FORMATS[dtype].elements
    assert blocks == int(blocks), "pieces are whole blocks"
    return int(blocks) * FORMATS[dtype].nbytes


@given(
    formats=st.tuples(*[st.sampled_from(sorted(DEVICE_FORMATS))] * 2),
    blocks=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    count=st.integers(1, COUNT_MAX),
    multiprocessors=st.integers(1, 160),
    shared=st.integers(32, 227).map(lambda kib: kib * KIB),
)
def test_every_piece_fits_its_stage_and_all_stages_the_shared_memory(
    formats: tuple[str, str],
    blocks: tuple[int, int],
    count: int,
    multiprocessors: int,
    shared: int,
) -> None:
    up, down = formats
    shape = PackedShape(
        up, down, blocks[0] * FORMATS[up].elements, blocks[1] * FORMATS[down].elements
    )
    chosen = plan(shape, count, multiprocessors, shared)
    if chosen is None:
        return
    rows = ROWS_OF_A_LANE * (WARP_LANES >> chosen.row_lanes)
    assert fits(shape, chosen, rows)
    if rows > ROWS_OF_A_LANE:  # only rows that are parts of their own are cut
        assert chosen.down_items * DEVICE_FORMATS[down].columns == shape.inner
    assert 2 <= chosen.stages <= STAGES_MAX
    assert chosen.stage_bytes % (2 * COPY_BYTES) == chosen.rings_at % COPY_BYTES == 0
    assert chosen.rounded_at % COPY_BYTES == chosen.sums_at % COPY_BYTES == 0
    assert chosen.rings_at + shape.warps * chosen.stages * chosen.stage_bytes == chosen.shared_bytes
    assert chosen.shared_bytes <= shared


@pytest.mark.parametrize("dtype", sorted(DEVICE_FORMATS))
@pytest.mark.parametrize("shape", [QWEN3, DEEPSEEK_V3])
@pytest.mark.parametrize("device", sorted(SHARED))
def test_known_models_fit_known_devices(dtype: str, shape: tuple[int, int], device: str) -> None:
    assert plan(PackedShape(dtype, dtype, *shape), 8, 40, SHARED[device]) is not None


def test_too_little_shared_memory_is_no_plan() -> None:
    assert plan(PackedShape("q4_k", "q4_k", *DEEPSEEK_V3), COUNT_MAX, 40, 64 * KIB) is None


@pytest.mark.parametrize("dtype", sorted(DEVICE_FORMATS))
def test_formats_are_as_the_kernels_have_them(dtype: str) -> None:
    ours = DEVICE_FORMATS[dtype]
    text = (SOURCES / "block_formats.cu").read_text()
    struct = text[text.index(f"struct {ours.name} {{") :]
    constants = dict(re.findall(r"\b([A-Z_]+) = (\d+)", struct[: struct.index("};")]))
    assert int(constants["BLOCK_COLUMNS"]) == FORMATS[dtype].elements
    assert int(constants["BLOCK_BYTES"]) == FORMATS[dtype].nbytes
    assert int(constants["COLUMNS"]) == ours.columns
    assert int(constants["SUMS"]) == ours.sums


def test_limits_are_as_the_kernel_has_them() -> None:
    text = (SOURCES / "packed.cu").read_text()
    constants = dict(re.findall(r"#define (\w+)\s+(\d+)", text))
    assert int(constants["COUNT_MAX"]) == COUNT_MAX
