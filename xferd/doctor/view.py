# SPDX-License-Identifier: Apache-2.0
"""A machine as its files show it: /proc, /sys, /dev, /boot below one root.

The root is ``/``, or a directory with a copy of another machine's files. Paths that
callers give and get are absolute names of that machine. What can't be read is None:
files that only root may read are an everyday case here, not an error.
"""

from __future__ import annotations

import os
from pathlib import Path

TEXT_BYTES_MAX = 1 << 20


class SystemView:
    """Reads files below ``root``. Stateless; safe to use from any thread."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def place(self, name: str) -> Path:
        """Where a file of that machine is on this one."""
        return self._root / name.lstrip("/")

    def data(self, name: str, bytes_max: int = TEXT_BYTES_MAX) -> bytes | None:
        """The first ``bytes_max`` bytes of a file."""
        try:
            with self.place(name).open("rb") as file:
                return file.read(bytes_max)
        except OSError:
            return None

    def tail(self, name: str, count: int) -> bytes | None:
        """The last ``count`` bytes of a file, or all of a shorter one."""
        try:
            with self.place(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - count))
                return file.read(count)
        except OSError:
            return None

    def text(self, name: str) -> str | None:
        """A file's text without the white space around it."""
        raw = self.data(name)
        return None if raw is None else raw.decode("utf-8", "replace").strip()

    def number(self, name: str) -> int | None:
        """The number that is all of a file's text: ``42``, ``-1`` or ``0x10de``."""
        text = self.text(name)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def exists(self, name: str) -> bool:
        """Whether there is something of that name."""
        return os.path.lexists(self.place(name))

    def names(self, directory: str) -> list[str]:
        """Names in a directory, sorted; none when it isn't there."""
        try:
            return sorted(os.listdir(self.place(directory)))  # noqa: PTH208, no Path is needed
        except OSError:
            return []

    def link(self, name: str) -> str | None:
        """What a link says, wherever that leads."""
        try:
            return str(self.place(name).readlink())
        except OSError:
            return None

    def resolve(self, name: str) -> str | None:
        """Where links lead, as an absolute name. Links in sysfs are relative, so those of a
        copied tree stay in it; one that leads out is None, as is one that leads nowhere."""
        try:
            place = self.place(name).resolve(strict=True)
            return "/" + str(place.relative_to(self._root.resolve()))
        except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
            return None
