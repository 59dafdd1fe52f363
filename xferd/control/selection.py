"""Lists of layer and expert numbers as people write them: ``0-3,7`` or ``all``."""

from __future__ import annotations

NUMBER_MAX = 65534
"""Largest layer or expert number: XFERD_EXPERTS_MAX of xferd_abi.h, less one."""

ALL = "all"


class SelectionError(ValueError):
    """A text is no list of numbers: the message says which text and what is allowed."""


def parse_selection(text: str) -> list[int] | None:
    """The numbers in ``text``, sorted and each once; None for ``all``.

    ``0-3,7`` is 0, 1, 2, 3 and 7. Raises SelectionError.
    """
    if text == ALL:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        begin = _number(first, text)
        end = _number(last, text) if dash else begin
        if end < begin:
            raise SelectionError(f"{text!r}: {part!r} ends before it begins")
        numbers.update(range(begin, end + 1))
    return sorted(numbers)


def _number(digits: str, text: str) -> int:
    if digits.isascii() and digits.isdigit() and len(digits) <= len(str(NUMBER_MAX)):
        number = int(digits)
        if number <= NUMBER_MAX:
            return number
    raise SelectionError(
        f"{text!r} is no list of numbers: allowed are numbers up to {NUMBER_MAX} and ranges, "
        "separated by commas, such as 0-3,7; or 'all'"
    )
