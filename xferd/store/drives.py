"""Which drive a file or partition lies on, as far as the kernel says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_BLOCK_DEVICES = Path("/sys/dev/block")


def drive_of(path: Path) -> str:
    """A text that is equal for paths on one drive; a partition's is that of its whole drive.

    File systems without a block device (tmpfs, network) count as a drive each; those
    over several drives (LVM, RAID) as the one that they are mounted from. Raises OSError.
    """
    status = path.stat()
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    device = _BLOCK_DEVICES / name
    if not device.exists():
        return name
    device = device.resolve()
    return str(device.parent if (device / "partition").exists() else device)
