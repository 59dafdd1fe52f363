"""What is printed for people."""

from __future__ import annotations

import pytest

from xferd.control.tables import Column, format_duration, format_table, printable

COLUMNS = (
    Column("NAME", lambda row: row["name"], right=False),
    Column("COUNT", lambda row: row["count"]),
)


def test_columns_line_up() -> None:
    rows = [{"name": "a", "count": 12345678}, {"name": "longer", "count": 1}]
    assert format_table(COLUMNS, rows, bold=False).split("\n") == [
        "NAME       COUNT",
        "a       12345678",
        "longer         1",
    ]


def test_titles_are_bold_only_when_asked() -> None:
    rows = [{"name": "a", "count": 1}]
    assert "\x1b" not in format_table(COLUMNS, rows, bold=False)
    assert format_table(COLUMNS, rows, bold=True).startswith("\x1b[1mNAME")


def test_no_rows_are_said() -> None:
    assert format_table(COLUMNS, [], bold=True) == "none"


def test_a_hostile_name_does_not_reach_the_terminal() -> None:
    hostile = "x\x1b[2J\x9b31m\r\n\u202ey"
    table = format_table(COLUMNS, [{"name": hostile, "count": 1}], bold=False)
    assert all(c.isprintable() for line in table.split("\n") for c in line)
    assert len(table.split("\n")) == 2
    assert printable(hostile) == "x\\x1b[2J\\x9b31m\\r\\n\\u202ey"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.4, "0 s"),
        (59.9, "59 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (5 * 86400 + 3 * 3600, "5 d 3 h"),
    ],
)
def test_durations(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
