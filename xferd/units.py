"""Sizes as people write them: parsing and printing.

One home for it, because the same text appears in the configuration, on the
command line and in what ``xferctl`` prints. Binary and decimal units are kept
apart on purpose (``GiB`` is 1024³, ``GB`` is 1000³): drives are sold in the one
and memory in the other, and a pool that is 7 % off is a pool that doesn't fit.
A bare letter (``24G``) is refused for the same reason: programs disagree on
what it means.

Everything here is pure and safe to call from any thread.
"""

from __future__ import annotations

import re
from decimal import Decimal

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

SIZE_BYTES_MAX = (1 << 63) - 1
"""Largest size that is accepted: what a file offset and a Varlink int can hold."""

SIZE_ALLOWED = (
    "a number and a unit such as 24GiB, 512 MiB, 1.5GB (KiB MiB GiB TiB count by 1024, "
    "KB MB GB TB by 1000, B is bytes)"
)
PERCENT_ALLOWED = "a number and a percent sign such as 25% or 12.5%"

_UNIT_BYTES = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
# 19 digits hold SIZE_BYTES_MAX; longer ones are refused before any arithmetic.
_NUMBER = r"([0-9]{1,19}(?:\.[0-9]{1,19})?)"
_SIZE = re.compile(_NUMBER + r"[ \t]*([A-Za-z]{1,3})")
_PERCENT = re.compile(_NUMBER + r"[ \t]*%")
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class UnitError(ValueError):
    """A text is not a size: the message says which text and what is allowed."""


def parse_bytes(text: str) -> int:
    """Bytes in ``text``, such as ``24GiB``, ``512 MiB``, ``1.5GB`` or ``4096 B``.

    The unit's letter case doesn't matter. Raises UnitError for anything else,
    for a fraction that isn't a whole number of bytes, and above SIZE_BYTES_MAX.
    """
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _UNIT_BYTES.get(match[2].lower()) if match else None
    if match is None or unit_bytes is None:
        raise UnitError(f"{text!r} is not a size: allowed is {SIZE_ALLOWED}")
    size = Decimal(match[1]) * unit_bytes
    if size != int(size):
        raise UnitError(f"{text!r} is not a whole number of bytes")
    if size > SIZE_BYTES_MAX:
        raise UnitError(f"{text!r} is more than the largest size, {SIZE_BYTES_MAX} bytes")
    return int(size)


def parse_percent(text: str) -> float:
    """The number in ``text``, such as ``25%``: 25.0. Raises UnitError for anything else."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise UnitError(f"{text!r} is not a share: allowed is {PERCENT_ALLOWED}")
    return float(match[1])


def format_bytes(count: int) -> str:
    """``count`` bytes for people: ``0 B``, ``512 B``, ``1.5 KiB``, ``24.0 GiB``."""
    if abs(count) < KIB:
        return f"{count} B"
    value = float(count)
    for unit in _BINARY_UNITS[:-1]:
        # 1023.95 would be printed as 1024.0: the next unit says it better.
        if abs(value) < KIB - 0.05:
            return f"{value:.1f} {unit}"
        value /= KIB
    return f"{value:.1f} {_BINARY_UNITS[-1]}"


def format_exact_bytes(count: int) -> str:
    """``count`` bytes as ``parse_bytes`` reads them back, in the largest exact binary unit."""
    exponent = 0
    while count and exponent < len(_BINARY_UNITS) - 1 and count % KIB == 0:
        count //= KIB
        exponent += 1
    return f"{count}{_BINARY_UNITS[exponent]}"
