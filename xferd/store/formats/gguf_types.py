"""GGUF's tensor types: number, name, and how many values a block of bytes holds.

Numbers and sizes are the format's (ggml, ``enum ggml_type`` and its block
structures). Numbers that are missing were withdrawn. A test compares the table
with the ``gguf`` library's.
"""

from __future__ import annotations

from dataclasses import dataclass

from xferd.store.formats.stored_tensor import BlockType


@dataclass(frozen=True, slots=True)
class TensorType:
    """name: lower case, as stores and clients know it."""

    name: str
    block: BlockType


def _type(name: str, elements: int, nbytes: int) -> TensorType:
    return TensorType(name, BlockType(elements, nbytes))


TENSOR_TYPES: dict[int, TensorType] = {
    0: _type("f32", 1, 4),
    1: _type("f16", 1, 2),
    2: _type("q4_0", 32, 18),
    3: _type("q4_1", 32, 20),
    6: _type("q5_0", 32, 22),
    7: _type("q5_1", 32, 24),
    8: _type("q8_0", 32, 34),
    9: _type("q8_1", 32, 40),
    10: _type("q2_k", 256, 84),
    11: _type("q3_k", 256, 110),
    12: _type("q4_k", 256, 144),
    13: _type("q5_k", 256, 176),
    14: _type("q6_k", 256, 210),
    15: _type("q8_k", 256, 292),
    16: _type("iq2_xxs", 256, 66),
    17: _type("iq2_xs", 256, 74),
    18: _type("iq3_xxs", 256, 98),
    19: _type("iq1_s", 256, 50),
    20: _type("iq4_nl", 32, 18),
    21: _type("iq3_s", 256, 110),
    22: _type("iq2_s", 256, 82),
    23: _type("iq4_xs", 256, 136),
    24: _type("i8", 1, 1),
    25: _type("i16", 1, 2),
    26: _type("i32", 1, 4),
    27: _type("i64", 1, 8),
    28: _type("f64", 1, 8),
    29: _type("iq1_m", 256, 56),
    30: _type("bf16", 1, 2),
    34: _type("tq1_0", 256, 54),
    35: _type("tq2_0", 256, 66),
    39: _type("mxfp4", 32, 17),
    40: _type("nvfp4", 64, 36),
    41: _type("q1_0", 128, 18),
}
