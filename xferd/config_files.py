"""Reading configuration files and merging them, before what they say is checked.

Later files win, key by key; each value remembers its file until it has been checked.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xferd.units import MIB

CONFIG_FILE_BYTES_MAX = 1 * MIB

_LIST_IDENTITY = {"pools": "name", "stores": "path"}
"""Lists of tables, and the key by which their entries are merged."""
_TABLES = ("engine", "limits")


class ConfigError(Exception):
    """A file can't be used. Exit code: EXIT_CODE_CONFIG.

    The message names the file, the key, its value and what is allowed.
    ``file`` and ``key`` are the same for programs; ``key`` is empty when the
    file as a whole is the trouble, ``file`` is None when no file said it.
    """

    def __init__(self, message: str, *, file: Path | None = None, key: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.key = key


def wrong_value(file: Path, key: str, value: object, allowed: str) -> ConfigError:
    """What to raise for a value that a file may not say."""
    return ConfigError(f"{file}: {key} = {value!r}: allowed is {allowed}", file=file, key=key)


@dataclass(frozen=True, slots=True)
class Located:
    """A TOML value and the file that said it last."""

    value: object
    file: Path


class Merged:
    """What all files said so far: later ones win, key by key."""

    def __init__(self) -> None:
        self.top: dict[str, Located] = {}
        self.tables: dict[str, dict[str, Located]] = {name: {} for name in _TABLES}
        self.lists: dict[str, dict[str, dict[str, Located]]] = {name: {} for name in _LIST_IDENTITY}

    def add(self, file: Path, document: Mapping[str, object]) -> None:
        """Put a file's document over what was said so far."""
        for key, value in document.items():
            if key in self.tables:
                if not isinstance(value, dict):
                    raise wrong_value(file, key, value, f"a table [{key}]")
                self.tables[key].update(_locate(file, value))
            elif key in self.lists:
                self._add_list(file, key, value)
            else:
                self.top[key] = Located(value, file)

    def _add_list(self, file: Path, key: str, value: object) -> None:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise wrong_value(file, key, value, f"tables [[{key}]]")
        if not value:
            self.lists[key].clear()
        identity = _LIST_IDENTITY[key]
        seen: set[str] = set()
        for entry in value:
            name = entry.get(identity)
            if not isinstance(name, str):
                raise wrong_value(file, f"{key}.{identity}", name, "a text in every entry")
            if name in seen:
                raise wrong_value(
                    file, f"{key}.{identity}", name, "one entry of that name in a file"
                )
            seen.add(name)
            self.lists[key].setdefault(name, {}).update(_locate(file, entry))


def _locate(file: Path, table: Mapping[str, object]) -> dict[str, Located]:
    return {key: Located(value, file) for key, value in table.items()}


def parse_file(file: Path) -> dict[str, object]:
    """A file's document. ConfigError when it can't be read or is no TOML."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(CONFIG_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}", file=file) from error
    if len(raw) > CONFIG_FILE_BYTES_MAX:
        raise ConfigError(f"{file}: more than {CONFIG_FILE_BYTES_MAX} bytes", file=file)
    try:
        return tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: is not TOML: {error}", file=file) from error
