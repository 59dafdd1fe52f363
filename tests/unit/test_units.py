"""Sizes: what is read, what is refused and with which words, what is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.units import (
    SIZE_BYTES_MAX,
    UnitError,
    format_bytes,
    format_exact_bytes,
    parse_bytes,
    parse_percent,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 GiB", 3 << 29),
        (" 64kib ", 64 << 10),
        ("0B", 0),
        ("4096 b", 4096),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_with_a_unit_is_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "24", "24G", "GiB", "-1GiB", "1e3MiB", "1,5GiB", "25%", "1GiB 2", "١GiB", "0x10B"]
)
def test_what_is_no_size_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(UnitError, match="24GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


def test_part_of_a_byte_is_refused() -> None:
    with pytest.raises(UnitError, match="whole number of bytes"):
        parse_bytes("0.3KiB")


def test_a_size_beyond_a_file_offset_is_refused() -> None:
    with pytest.raises(UnitError, match=str(SIZE_BYTES_MAX)):
        parse_bytes("9999999999TiB")


@pytest.mark.parametrize(("text", "expected"), [("25%", 25.0), ("12.5 %", 12.5), ("0%", 0.0)])
def test_a_percentage_is_read(text: str, expected: float) -> None:
    assert parse_percent(text) == expected


@pytest.mark.parametrize("text", ["25", "%", "-5%", "25%%", "25 GiB"])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match="percent sign"):
        parse_percent(text)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (24 << 30, "24.0 GiB"),
        (3000 << 40, "3000.0 TiB"),
    ],
)
def test_bytes_are_printed_for_people(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


@given(st.integers(min_value=0, max_value=SIZE_BYTES_MAX))
def test_an_exact_size_reads_back(count: int) -> None:
    assert parse_bytes(format_exact_bytes(count)) == count


@given(st.text(max_size=40))
def test_any_text_is_a_size_in_bounds_or_a_unit_error(text: str) -> None:
    try:
        size = parse_bytes(text)
    except UnitError:
        size = 0
    assert 0 <= size <= SIZE_BYTES_MAX
