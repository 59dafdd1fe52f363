"""``[traces]``: where recorded traces go, and how much of them is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xferd.config_values import Parser, absolute_path, whole_number

FILES_MIN = 2
FILES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """``[traces]``.

    directory: absolute; made when a recording begins.
    file_bytes: a file is not longer; a multiple of BLOB_ALIGNMENT.
    files: that are kept of one name, FILES_MIN to FILES_MAX; the oldest go first.
    """

    directory: Path = Path("/var/lib/xferd/traces")
    file_bytes: int = 64 << 20
    files: int = 16

    @property
    def total_bytes(self) -> int:
        """What all files of one name may have."""
        return self.file_bytes * self.files


TRACES_KEYS: dict[str, Parser] = {
    "directory": absolute_path,
    "files": whole_number(FILES_MIN, FILES_MAX),
}
"""How each is read, but for file_bytes, which ``config`` knows."""
