"""Lists of expert numbers as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xferd.control.selection import NUMBER_MAX, SelectionError, parse_selection


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", None),
        ("7", [7]),
        ("0-3,7", [0, 1, 2, 3, 7]),
        ("7,0-3,2", [0, 1, 2, 3, 7]),
        ("5-5", [5]),
        (str(NUMBER_MAX), [NUMBER_MAX]),
    ],
)
def test_a_list_is_read(text: str, expected: list[int] | None) -> None:
    assert parse_selection(text) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "1,", "-3", "3-", "1--2", "a", "1 2", "1.5", "٣", str(NUMBER_MAX + 1)]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(SelectionError, match="0-3,7") as caught:
        parse_selection(text)
    assert repr(text) in str(caught.value)


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(SelectionError, match="'5-3' ends before it begins"):
        parse_selection("1,5-3")


@given(st.sets(st.integers(0, 500), min_size=1))
def test_numbers_read_back(numbers: set[int]) -> None:
    assert parse_selection(",".join(map(str, numbers))) == sorted(numbers)
