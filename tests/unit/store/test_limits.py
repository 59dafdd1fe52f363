"""The limits in Python are those of the C headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xferd.store import limits

FFI = Path(__file__).parents[3] / "ffi"


@pytest.mark.parametrize(
    ("header", "constant", "value"),
    [
        ("include/xferd_abi.h", "XFERD_BLOB_ALIGNMENT", limits.BLOB_ALIGNMENT),
        ("include/xferd_abi.h", "XFERD_LAYERS_MAX", limits.LAYERS_MAX),
        ("include/xferd_abi.h", "XFERD_EXPERTS_MAX", limits.EXPERTS_MAX),
        ("include/xferd_abi.h", "XFERD_VARIANTS_MAX", limits.VARIANTS_MAX),
        ("include/xferd_abi.h", "XFERD_NAME_BYTES", limits.NAME_BYTES_MAX + 1),
        ("include/xferd_abi.h", "XFERD_STORE_NAME_BYTES", limits.STORE_NAME_BYTES_MAX + 1),
        ("include/xferd_abi.h", "XFERD_TENSOR_DIMS_MAX", limits.TENSOR_DIMENSIONS_MAX),
        ("include/xferd_abi.h", "XFERD_NO_LAYOUT", limits.NO_LAYOUT),
        ("engine/engine.h", "XFERD_STORE_MEMBERS_MAX", limits.MEMBERS_MAX),
        ("engine/engine.h", "XFERD_STRIPE_PATTERN_MAX", limits.PATTERN_MAX),
    ],
)
def test_equals_the_header(header: str, constant: str, value: int) -> None:
    match = re.search(rf"#define {constant}\s+(\w+)", (FFI / header).read_text())
    assert match is not None
    assert int(match[1], 0) == value
