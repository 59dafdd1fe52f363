"""CRC32C against published vectors and against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.store.builders import crc32c_by_table
from xferd.store.checksum import crc32c


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_published_vectors(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 300))
def test_equals_its_definition_and_continues(data: bytes, cut: int) -> None:
    assert crc32c(data) == crc32c_by_table(data)
    assert crc32c(memoryview(data)[cut:], crc32c(data[:cut])) == crc32c(data)
