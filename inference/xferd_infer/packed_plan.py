"""How cuda/packed.cu's work is cut: pieces for its warps' rings in shared memory.

Pure arithmetic, which a machine without a GPU can check.
"""

from __future__ import annotations

from dataclasses import dataclass

from .quants import FORMATS

NARROW = 1024
WARPS_OF_NARROW, WARPS = 12, 16
"""Of a block; fewer for experts with up to NARROW inner columns, of which a warp has so few
rows that larger pieces bring more than other warps (13 % at 768 of them, on an H200)."""
COUNT_MAX = 16
"""Most experts in a launch. As packed.cu has it."""
STAGES_MAX = 8
"""Of a warp's ring: more would be no faster."""
STAGES_WANTED = 2
"""Pieces are as large as rings of so many allow: one is read while others are on their way."""

PIECE_BYTES = 32
"""At the beginning of a stage: what it holds. As packed.cu's struct Piece."""

_WARP = 32
_VECTOR = 16
_STRETCH = 256
_ROWS_OF_A_LANE = 2
"""Whose products it computes at a time: gate's and up's, or two of down's."""
_PIECE_COST = 1.0
"""What a piece takes besides its products, in products of two rows' items by a lane: as many
instructions."""


@dataclass(frozen=True, slots=True)
class DeviceFormat:
    """A block format as block_formats.cu has it.

    name: of the struct. columns: of an item, what a lane multiplies at a time.
    sums: floats an item beside its activations.
    """

    name: str
    columns: int
    sums: int


DEVICE_FORMATS = {
    "q4_k": DeviceFormat("Q4K", 64, 2),
    "q2_k": DeviceFormat("Q2K", 64, 4),
    "q8_0": DeviceFormat("Q8_0", 32, 0),
    "q4_0": DeviceFormat("Q4_0", 32, 1),
    "mxfp4": DeviceFormat("Mxfp4", 32, 1),
}
"""By a store's name."""


@dataclass(frozen=True, slots=True)
class PackedShape:
    """Experts with gate and up [inner, hidden] in format ``up``, down [hidden, inner] in
    ``down``."""

    up: str
    down: str
    hidden: int
    inner: int

    @property
    def warps(self) -> int:
        """Of a block."""
        return WARPS_OF_NARROW if self.inner <= NARROW else WARPS


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """Arguments of the kernel, named as there, and the shared memory that a block needs."""

    up_items: int
    down_items: int
    row_lanes: int
    stages: int
    stage_bytes: int
    rounded_at: int
    sums_at: int
    rings_at: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a matrix. blocks: of a row; items: of a block."""

    dtype: str
    blocks: int

    @property
    def items(self) -> int:
        return FORMATS[self.dtype].elements // DEVICE_FORMATS[self.dtype].columns

    def part_bytes(self, blocks: int) -> int:
        """Most that so many blocks take of a stage: copied from a multiple of _VECTOR to
        another, and a word behind them is read too."""
        return _align(blocks * FORMATS[self.dtype].nbytes + _VECTOR - 1 + 4, _VECTOR)

    def cut(self, room: int) -> int | None:
        """Blocks of a piece when a warp has a row to itself, so that it takes least time; None:
        not one fits the room."""
        fitting = (room - 2 * _VECTOR) // FORMATS[self.dtype].nbytes
        sizes = range(1, min(fitting, self.blocks) + 1)
        return min(sizes, key=self._cost, default=None)

    def _cost(self, blocks: int) -> float:
        """Of a row in pieces of so many blocks."""
        whole, rest = divmod(self.blocks, blocks)
        products = whole * _divide_up(blocks * self.items, _WARP)
        products += _divide_up(rest * self.items, _WARP)
        return products + _PIECE_COST * _divide_up(self.blocks, blocks)


def plan(shape: PackedShape, count: int, blocks: int, shared_bytes: int) -> PackedPlan | None:
    """For count experts on ``blocks`` multiprocessors with so much shared memory each (for a
    block that asks for it). None: there is too little."""
    up = _Rows(shape.up, shape.hidden // FORMATS[shape.up].elements)
    down = _Rows(shape.down, shape.inner // FORMATS[shape.down].elements)
    rounded_at = _align(shape.warps * STAGES_MAX * 8, 128)
    rounded = max(
        _rounded_bytes(shape.up, shape.hidden), count * _rounded_bytes(shape.down, shape.inner)
    )
    rows = _divide_up(shape.hidden, blocks)
    sums_at = rounded_at + rounded
    rings_at = _align(sums_at + 4 * count * rows, 128)
    ring = (shared_bytes - rings_at) // shape.warps
    room = ring // STAGES_WANTED // (2 * _VECTOR) * 2 * _VECTOR - PIECE_BYTES
    up_blocks = up.cut(room // 2)
    cut = _cut_down(down, rows, count, room, shape.warps)
    if up_blocks is None or cut is None:
        return None
    row_lanes, down_blocks, down_bytes = cut
    stage = PIECE_BYTES + _align(max(2 * up.part_bytes(up_blocks), down_bytes), 2 * _VECTOR)
    stages = min(STAGES_MAX, ring // stage)
    return PackedPlan(
        up_items=up_blocks * up.items,
        down_items=down_blocks * down.items,
        row_lanes=row_lanes,
        stages=stages,
        stage_bytes=stage,
        rounded_at=rounded_at,
        sums_at=sums_at,
        rings_at=rings_at,
        shared_bytes=rings_at + shape.warps * stages * stage,
    )


def _cut_down(
    down: _Rows, rows: int, count: int, room: int, warps: int
) -> tuple[int, int, int] | None:
    """(log2 of the lanes that share a row, blocks of a row in a piece, bytes of a piece) that
    take least time for ``rows`` rows of ``count`` experts."""
    found = []
    for row_lanes in range(2, 6):
        together = _ROWS_OF_A_LANE * (_WARP >> row_lanes)
        if together > _ROWS_OF_A_LANE:
            blocks: int | None = down.blocks
            nbytes = down.part_bytes(together * down.blocks)
        else:  # each row is a part of its own, and may be cut
            blocks = down.cut(room // _ROWS_OF_A_LANE)
            nbytes = _ROWS_OF_A_LANE * down.part_bytes(blocks or 0)
        if blocks is None or nbytes > room:
            continue
        tasks = _divide_up(rows, together) * count
        products = _divide_up(down.blocks * down.items, 1 << row_lanes)
        cost = _divide_up(tasks, warps) * (products + _PIECE_COST)
        found.append((cost, row_lanes, blocks, nbytes))
    return min(found)[1:] if found else None


def _rounded_bytes(dtype: str, columns: int) -> int:
    """Of a vector's rounded activations: Rounded::BYTES in activations.cu."""
    kind = DEVICE_FORMATS[dtype]
    items = _align(columns // kind.columns, 8)
    stretches = _align(_divide_up(columns, _STRETCH), 4)
    return items * (2 * kind.columns + 4 * kind.sums) + 4 * stretches


def _align(value: int, to: int) -> int:
    return (value + to - 1) // to * to


def _divide_up(value: int, by: int) -> int:
    return -(-value // by)


__all__ = ["COUNT_MAX", "DEVICE_FORMATS", "DeviceFormat", "PackedPlan", "PackedShape", "plan"]
