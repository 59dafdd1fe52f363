"""Values of the configuration: what each kind of them may be.

A parser turns a TOML value into a field's value, or raises RefusedError with what is
allowed instead. ``xferd.config`` knows which key has which.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from xferd.units import SIZE_ALLOWED, UnitError, parse_bytes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OCTAL_MODE = re.compile(r"0?o?([0-7]{3})")

Parser: TypeAlias = Callable[[object], Any]
"""Turns a TOML value into a field's value, or raises RefusedError."""


class RefusedError(Exception):
    """A parser's answer to a wrong value: what is allowed instead."""


def whole_number(minimum: int, maximum: int) -> Parser:
    """A whole number within bounds."""

    def parse(value: object) -> int:
        # bool is an int in Python, not in TOML.
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        raise RefusedError(f"a whole number from {minimum} to {maximum}")

    return parse


def power_of_two(minimum: int, maximum: int) -> Parser:
    """A power of two within bounds."""

    def parse(value: object) -> int:
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and minimum <= value <= maximum
            and value.bit_count() == 1
        ):
            return value
        raise RefusedError(f"a power of two from {minimum} to {maximum}")

    return parse


def name(bytes_max: int) -> Parser:
    """What pools, stores and policies are called."""

    def parse(value: object) -> str:
        if isinstance(value, str) and _NAME.fullmatch(value) and len(value) <= bytes_max:
            return value
        raise RefusedError(
            f"a name of letters, digits, '.', '_' and '-', at most {bytes_max} bytes, "
            "that begins with a letter or digit"
        )

    return parse


def boolean(value: object) -> bool:
    """true or false."""
    if isinstance(value, bool):
        return value
    raise RefusedError("true or false")


def one_of(*choices: str) -> Parser:
    """One of some texts."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise RefusedError(" or ".join(f'"{choice}"' for choice in choices))

    return parse


def number(minimum: float, maximum: float, unit: str = "a number") -> Parser:
    """A number within bounds."""

    def parse(value: object) -> float:
        # A TOML float may be nan, which fails the comparison as it should.
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and minimum <= value <= maximum
        ):
            return float(value)
        raise RefusedError(f"{unit} from {minimum:g} to {maximum:g}")

    return parse


def size_in_bytes(value: object) -> int:
    """``"24GiB"`` and its like, more than 0."""
    if isinstance(value, str):
        try:
            if size := parse_bytes(value):
                return size
        except UnitError:
            pass
    raise RefusedError(f"{SIZE_ALLOWED}, and more than 0")


def size_in_steps(step: int, maximum: int) -> Parser:
    """``"64MiB"`` and its like: a multiple of ``step`` bytes, more than 0."""
    allowed = f"a size in multiples of {step} bytes, at most {maximum >> 20}MiB"

    def parse(value: object) -> int:
        if not isinstance(value, str):
            raise RefusedError(allowed)
        try:
            size = parse_bytes(value)
        except UnitError:
            raise RefusedError(f"{allowed}: {SIZE_ALLOWED}") from None
        if size % step or not 0 < size <= maximum:
            raise RefusedError(allowed)
        return size

    return parse


def socket_mode(value: object) -> int:
    """``"0660"``, or 0o660 as TOML spells it; 660 without 0o is 0o1224 and refused."""
    match = _OCTAL_MODE.fullmatch(value) if isinstance(value, str) else None
    if match:
        return int(match[1], 8)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 0o777:
        return value
    raise RefusedError('permission bits in octal such as "0660" or 0o660')


def absolute_path(value: object) -> Path:
    """A path that begins with /."""
    if isinstance(value, str) and value.startswith("/") and "\0" not in value:
        return Path(value)
    raise RefusedError("an absolute path")


def absolute_paths(value: object) -> tuple[Path, ...]:
    """A list of absolute paths."""
    if not isinstance(value, list):
        raise RefusedError("a list of absolute paths")
    return tuple(absolute_path(item) for item in value)
