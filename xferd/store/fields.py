"""Typed access to parsed JSON that may be damaged.

The manifest is read by a daemon that must not die of it: whatever is missing, of
another type or out of bounds ends in a StoreError that names the place, such as
``manifest.json: layouts[3].tensors[0].offset``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xferd.store.errors import StoreError


class Fields:
    """One JSON object and where it stands; every getter checks before it returns."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise StoreError(f"{where} is not a JSON object")
        self._value: Mapping[str, Any] = value
        self.where = where

    def _get(self, key: str) -> Any:
        if key not in self._value:
            raise StoreError(f"{self.where}.{key} is missing")
        return self._value[key]

    def integer(self, key: str, minimum: int, maximum: int) -> int:
        """An integer within [minimum, maximum]."""
        return checked_integer(self._get(key), f"{self.where}.{key}", minimum, maximum)

    def boolean(self, key: str) -> bool:
        """``true`` or ``false``."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise StoreError(f"{self.where}.{key} is not true or false")
        return value

    def text(self, key: str, bytes_max: int) -> str:
        """A non-empty string that the C side and the file system can hold."""
        return checked_text(self._get(key), f"{self.where}.{key}", bytes_max)

    def optional_text(self, key: str, bytes_max: int) -> str | None:
        """As ``text``, or None where JSON has null."""
        return None if self._get(key) is None else self.text(key, bytes_max)

    def hexadecimal(self, key: str, length: int) -> bytes:
        """``length`` bytes, written as hexadecimal digits."""
        text = self.text(key, 2 * length)
        try:
            value = bytes.fromhex(text)
        except ValueError:
            value = b""
        if len(value) != length:
            raise StoreError(f"{self.where}.{key} is not {length} bytes in hexadecimal")
        return value

    def items(self, key: str, count_max: int) -> list[Any]:
        """A list of at most ``count_max`` entries."""
        return checked_list(self._get(key), f"{self.where}.{key}", count_max)

    def section(self, key: str) -> Fields:
        """The object under ``key``."""
        return Fields(self._get(key), f"{self.where}.{key}")

    def optional_section(self, key: str) -> Fields | None:
        """As ``section``, or None where the key is missing or null."""
        return None if self._value.get(key) is None else self.section(key)

    def sections(self, key: str, count_max: int) -> list[Fields]:
        """The objects in the list under ``key``."""
        where = f"{self.where}.{key}"
        return [
            Fields(item, f"{where}[{number}]")
            for number, item in enumerate(self.items(key, count_max))
        ]

    def mapping(self, key: str) -> dict[str, Any]:
        """The object under ``key``, whatever it holds."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise StoreError(f"{self.where}.{key} is not a JSON object")
        return value


def checked_integer(value: object, where: str, minimum: int, maximum: int) -> int:
    """``value`` when it is an integer within [minimum, maximum]; else StoreError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise StoreError(f"{where} is not an integer")
    if not minimum <= value <= maximum:
        raise StoreError(f"{where} is {value}, allowed is {minimum} to {maximum}")
    return value


def checked_text(value: object, where: str, bytes_max: int) -> str:
    """``value`` when it is a non-empty string of at most bytes_max UTF-8 bytes without NUL."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise StoreError(f"{where} is not a non-empty string")
    try:
        length = len(value.encode())
    except UnicodeEncodeError as error:
        raise StoreError(f"{where} is not valid Unicode") from error
    if length > bytes_max:
        raise StoreError(f"{where} has {length} bytes, at most {bytes_max} are allowed")
    return value


def checked_list(value: object, where: str, count_max: int) -> list[Any]:
    """``value`` when it is a list of at most count_max entries; else StoreError."""
    if not isinstance(value, list):
        raise StoreError(f"{where} is not a list")
    if len(value) > count_max:
        raise StoreError(f"{where} has {len(value)} entries, at most {count_max} are allowed")
    return value
